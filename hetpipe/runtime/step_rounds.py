"""The rounds of a step that goes layer by layer, in the order of a rank's list."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from hetpipe.program.instructions import Compute, Gather, Pass, Program, Round
from hetpipe.program.layer_rounds import awaited_rounds, dropped_weights
from hetpipe.runtime.layer_sync import LayerSync


class StepRounds:
    """What a rank fetches, sums and drops in a step; knows which rounds are not over.

    join: reserve the emulated links of a round that begins, and return the time. wait_for: wait until a round
    that is really over is due on them; return when that was.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        sync: LayerSync,
        join: Callable[[Round], float],
        wait_for: Callable[[Round], float],
    ) -> None:
        self._sync, self._join, self._wait_for = sync, join, wait_for
        self._awaited, self._dropped = awaited_rounds(program, rank), dropped_weights(program, rank)
        entries = program.ranks[rank]
        self._unused = {entries[place] for place in self._dropped if isinstance(entries[place], Gather)}
        self._open: list[Round] = []
        self._fetches = {
            peer: [entry.bucket for entry in instructions if isinstance(entry, Gather)]
            for peer, instructions in enumerate(program.ranks)
            if peer != rank
        }

    def at_hand(self, layer: int) -> AbstractContextManager[None]:
        """Return the context in which a layer can run outside of a step (`LayerSync.at_hand`)."""
        return self._sync.at_hand(layer)

    def begin(self) -> None:
        """Serve what other ranks fetch in the step from this one; before its first instruction."""
        self._sync.serve(self._fetches)

    def start(self, place: int, entry: Round) -> float:
        """Begin a round, once those that it waits for are over; return when that was."""
        self._wait(place)
        began_s = self._join(entry)
        self._sync.start(entry)
        self._open.append(entry)
        return began_s

    def before(self, place: int, compute: Compute) -> float:
        """Have what a computation needs; return when its weights are due, 0.0 where it fetches none."""
        due_s = self._wait(place)
        if compute.op is Pass.BACKWARD and compute.layer is not None:
            self._sync.make_room(compute.layer)
        return due_s

    def after(self, place: int) -> None:
        """Drop the weights that no later computation uses before they are fetched again."""
        for bucket in self._dropped.get(place, ()):
            self._sync.drop(bucket)

    def finish(self) -> None:
        """Wait for all rounds of the step."""
        for entry in tuple(self._open):
            self._end(entry)

    def _wait(self, place: int) -> float:
        return max((self._end(entry) for entry in self._awaited.get(place, ())), default=0.0)

    def _end(self, entry: Round) -> float:
        if entry not in self._open:
            return 0.0
        self._open.remove(entry)
        self._sync.finish(entry)
        if entry in self._unused:
            self._sync.drop(entry.bucket)
        return self._wait_for(entry)
