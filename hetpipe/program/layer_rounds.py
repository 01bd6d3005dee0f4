"""A step that goes layer by layer: where REDUCE and GATHER stand in the lists, and what waits for them.

All devices of a layer take part in each of its rounds, those with fewer microbatches too: they give nothing,
or fetch what they do not use. So every rank has the list of the pipeline with most microbatches, of which it
computes its own, and the rounds of a bucket have one order on all of its ranks.

Forwards and backwards of a pipeline with stages come in an order of its own, for which no peer may have to
wait: there each device but the owner fetches for itself (`Plan.fetches_apart`), when it needs the weights.

Weights are fetched one computation ahead; those of the layer that comes next anyway are kept:

    GATHER0.0 GATHER1.0 0F0@0 GATHER2.0 0F0@1 0F0@2 GATHER1.1 0B0@2 REDUCE2.0 GATHER0.1 0B0@1 ...

Where the model is in one stage, the microbatches in flight pass each layer together, in one round of it:

    GATHER0.0 GATHER1.0 0F0@0 0F1@0 GATHER2.0 0F0@1 0F1@1 0F0@2 0F1@2 GATHER1.1 0B0@2 0B1@2 REDUCE2.0 ...
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from cost_model.sharding import GATHERS_AHEAD, Sharding
from hetpipe.program.instructions import (
    Compute,
    Direction,
    Gather,
    Instruction,
    Pass,
    Program,
    Reduce,
    Round,
    Transfer,
)
from partition.plan import Plan


def with_rounds(
    program: Program, lists: Sequence[Iterable[Instruction]]
) -> tuple[tuple[Instruction, ...], ...]:
    """Return lists of computations and messages, layer by layer, with the rounds between.

    program: of the lists, with its buckets. Its devices serve a stage each.
    """
    most = max(_num_turns(program.plan, index) for index in range(len(program.plan.pipelines)))
    rounds = num_reduced(program)
    return tuple(
        tuple(_Rounds(program, rank, most, rounds).of(instructions))
        for rank, instructions in enumerate(lists)
    )


def _num_turns(plan: Plan, pipeline: int) -> int:
    """Return how often a layer goes back: once for each microbatch, or all that pass it together."""
    together = plan.pipelines[pipeline].in_flight(0) if plan.breadth_first else 1
    return -(-plan.pipelines[pipeline].num_microbatches // together)


def num_reduced(program: Program) -> list[int]:
    """Return the rounds in which each bucket's gradients are summed: as many as a rank's backwards take.

    One for those that are `is_summed_once`: of weights that are tied between stages a later one would wait
    for an earlier one's backward.
    """
    found = [0] * len(program.buckets)
    for place in program.plan.places.values():
        ((index, stage),) = place
        of_layer = buckets_by_layer(program, program.rank_of(index, stage))
        uses = Counter(bucket for layer in _trained(program, index, stage) for bucket in of_layer[layer])
        for bucket, times in uses.items():
            count = 1 if is_summed_once(program, bucket) else times * _num_turns(program.plan, index)
            found[bucket] = max(found[bucket], count)
    return found


def is_summed_once(program: Program, bucket: int) -> bool:
    """Return whether a bucket (its index) is summed at the end of the step alone.

    Those of which only states are sharded, and weights that are tied between different stages.
    """
    held = program.buckets[bucket]
    if program.sharding_of(bucket) is Sharding.STATES:
        return True
    names = (program.device_names[rank] for rank in held.ranks)
    return held.tied and any(not set(held.layers) <= set(program.plan.layers_of(name)) for name in names)


def is_fetched(program: Program, bucket: int, rank: int) -> bool:
    """Return whether a rank has GATHERs of a bucket (its index)."""
    if program.sharding_of(bucket) is not Sharding.WEIGHTS:
        return False
    return not program.plan.fetches_apart or rank != program.buckets[bucket].state_owner


def _trained(program: Program, index: int, stage: int) -> range:
    """Return the layers of a stage that have a backward."""
    held = program.plan.pipelines[index].stages[stage]
    return range(max(held.start, program.first_trained), held.stop)


def buckets_by_layer(program: Program, rank: int) -> dict[int, list[int]]:
    """Return, by layer of a rank, the buckets that hold weights of it and that other ranks have, too."""
    found: dict[int, list[int]] = {layer: [] for layer in program.plan.layers_of(program.device_names[rank])}
    for index, bucket in enumerate(program.buckets):
        if rank in bucket.ranks:
            for layer in found.keys() & set(bucket.layers):
                found[layer].append(index)
    return found


def visit_fetches(program: Program, times: Callable[[int, int], int]) -> dict[int, list[int]]:
    """Return the buckets that each rank fetches for visits of its layers outside of a step.

    times: (pipeline, layer) -> how often it is visited.
    """
    found: dict[int, list[int]] = {}
    for rank, ((index, stage),) in enumerate(program.plan.places.values()):
        of_layer = buckets_by_layer(program, rank)
        found[rank] = [
            bucket
            for layer in range(*program.plan.pipelines[index].stages[stage].layers)
            for bucket in of_layer[layer] * times(index, layer)
            if is_fetched(program, bucket, rank)
        ]
    return found


class _Rounds:
    """The making of one rank's list; owns how many rounds of each bucket it has."""

    def __init__(self, program: Program, rank: int, most: int, rounds: Sequence[int]) -> None:
        self._program, self._rank, self._most, self._left = program, rank, most, list(rounds)
        ((self._pipeline, self._stage),) = program.plan.places[program.device_names[rank]]
        self._held = program.plan.pipelines[self._pipeline].stages[self._stage]
        self._of_layer = buckets_by_layer(program, rank)
        self._mine = sorted({bucket for buckets in self._of_layer.values() for bucket in buckets})
        self._once = {bucket for bucket in self._mine if is_summed_once(program, bucket)}
        self._fetched = {bucket for bucket in self._mine if is_fetched(program, bucket, rank)}
        self._reduced: Counter[int] = Counter()
        self._gathered: Counter[int] = Counter()

    def of(self, instructions: Iterable[Instruction]) -> Iterator[Instruction]:
        turns = list(self._turns((*instructions, *self._without_samples())))
        own = self._program.plan.pipelines[self._pipeline].num_microbatches
        firsts = [turn[0] for turn in turns if not isinstance(turn, Transfer)]
        uses = [self._of_layer[entry.layer] for entry in firsts if entry.layer is not None]
        wanted = [[bucket for bucket in used if bucket in self._fetched] for used in uses]
        if self._program.plan.fetches_apart:  # for what it computes alone
            wanted = wanted[: sum(entry.microbatch < own for entry in firsts)]
        slot, due = 0, list[Reduce]()
        for turn in turns:
            if due and not (isinstance(turn, Transfer) and turn.direction is Direction.SEND):
                yield from due
                due = []
            if isinstance(turn, Transfer):
                yield turn
                continue
            yield from self._gathers([], wanted[0]) if slot == 0 and wanted else ()
            yield from self._gathers(wanted[slot], wanted[slot + 1]) if slot + 1 < len(wanted) else ()
            yield from (entry for entry in turn if entry.microbatch < own)
            if turn[0].op is Pass.BACKWARD:
                due = list(self._summed(bucket for bucket in uses[slot] if bucket not in self._once))
            slot += 1
        yield from due
        yield from self._summed(bucket for bucket in self._mine if self._left[bucket])

    def _without_samples(self) -> Iterator[Compute]:
        """Yield the computations in whose rounds the rank takes part without a microbatch for them."""
        own = self._program.plan.pipelines[self._pipeline].num_microbatches
        for more in range(self._most - _num_turns(self._program.plan, self._pipeline)):
            for op in Pass:
                yield Compute(op, self._pipeline, self._stage, own + more)

    def _turns(self, instructions: Iterable[Instruction]) -> Iterator[list[Compute] | Transfer]:
        """Yield the messages, and the computations layer by layer, those that pass one together as one."""
        together = self._program.plan.breadth_first
        trained = _trained(self._program, self._pipeline, self._stage)
        for key, group in groupby(
            instructions, lambda entry: entry.op if together and isinstance(entry, Compute) else entry
        ):
            if isinstance(key, Transfer):
                yield key
                continue
            computations = [entry for entry in group if isinstance(entry, Compute)]
            is_forward = computations[0].op is Pass.FORWARD
            for layer in range(*self._held.layers) if is_forward else reversed(trained):
                yield [replace(entry, layer=layer) for entry in computations]

    def _gathers(self, held: Sequence[int], wanted: Sequence[int]) -> Iterator[Gather]:
        for bucket in wanted:
            if bucket not in held:
                yield Gather(bucket, self._gathered[bucket])
                self._gathered[bucket] += 1

    def _summed(self, buckets: Iterable[int]) -> Iterator[Reduce]:
        for bucket in buckets:
            if self._left[bucket]:
                self._left[bucket] -= 1
                yield Reduce(bucket, self._reduced[bucket])
                self._reduced[bucket] += 1


def awaited_rounds(program: Program, rank: int) -> dict[int, tuple[Round, ...]]:
    """Return the rounds that must be over before an instruction of a rank goes on, by its place.

    A computation waits for the weights that it uses, and a backward for the sums of the gradients to which it
    adds; a REDUCE for the one before it, a GATHER for all before it but some, and NORM for all. Those of
    ranges of one layer go together, like one.
    """
    found: dict[int, tuple[Round, ...]] = {}
    gathers: list[list[Round]] = []
    reduces: list[list[Round]] = []
    latest: dict[int, Gather] = {}
    of_layer = buckets_by_layer(program, rank)
    for place, entry in enumerate(program.ranks[rank]):
        if isinstance(entry, Reduce | Gather):
            before, ahead = (reduces, 0) if isinstance(entry, Reduce) else (gathers, GATHERS_AHEAD)
            if before and _are_ranges(program, before[-1], entry):
                before[-1].append(entry)
            else:
                found[place] = tuple(before[-1 - ahead]) if len(before) > ahead else ()
                before.append([entry])
            if isinstance(entry, Gather):
                latest[entry.bucket] = entry
        elif isinstance(entry, Compute) and entry.layer is not None:
            used = of_layer[entry.layer]
            found[place] = tuple(latest[bucket] for bucket in used if bucket in latest)
            if entry.op is Pass.BACKWARD:  # the one that may not be over
                found[place] += tuple(last for each in reduces[-1:] for last in each if last.bucket in used)
        elif not isinstance(entry, Compute | Transfer) and (reduces or gathers):
            last_ones = [*reduces[-1:], *gathers[-1 - GATHERS_AHEAD :]]
            found.setdefault(place, tuple(last for each in last_ones for last in each))
            break  # NORM: what is before the last ones is over
    return {place: rounds for place, rounds in found.items() if rounds}


def _are_ranges(program: Program, rounds: Sequence[Round], entry: Round) -> bool:
    """Return whether a round is of another range of the layer than rounds are, right behind them."""
    bucket = program.buckets[entry.bucket]
    if not bucket.is_part:
        return False
    known = [program.buckets[each.bucket] for each in rounds]
    return (bucket.layers, bucket.tied) == (known[0].layers, known[0].tied) and bucket not in known


def dropped_weights(program: Program, rank: int) -> Mapping[int, tuple[int, ...]]:
    """Return the buckets whose weights are dropped after an instruction of a rank, by its place.

    After the last computation that uses what a GATHER has fetched; after the GATHER itself, once it is over,
    where none does.
    """
    last: dict[int, int] = {}  # by bucket
    found: dict[int, list[int]] = {}
    of_layer = buckets_by_layer(program, rank)
    for place, entry in enumerate(program.ranks[rank]):
        if isinstance(entry, Gather):
            if entry.bucket in last:
                found.setdefault(last[entry.bucket], []).append(entry.bucket)
            last[entry.bucket] = place
        elif isinstance(entry, Compute) and entry.layer is not None:
            for bucket in of_layer[entry.layer]:
                if bucket in last:
                    last[bucket] = place
    for bucket, place in last.items():
        found.setdefault(place, []).append(bucket)
    return {place: tuple(buckets) for place, buckets in found.items()}
