"""Sums of gradients that begin inside a backward, as the last gradients of their buckets are made."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Compute
from hetpipe.program.sync_starts import inner_syncs
from hetpipe.runtime.gradient_sync import GradientSync
from hetpipe.runtime.pace import Pace, sleep_until

BeginSum = Callable[[int, float], None]
"""How to begin the sum of a bucket that is ready at a time of the device's clock."""


@dataclass(frozen=True, slots=True)
class _Inner:
    """A bucket whose sum begins inside a backward, part_s after its start if it takes its nominal seconds.

    given: the parameters whose gradients that backward adds to, and in how many runs of autograd.
    """

    bucket: int
    part_s: float
    given: list[tuple[nn.Parameter, int]]


class InnerSums:
    """The sums of a rank that begin inside a backward; owns the hooks on parameters while that runs.

    They begin in the order of the program. What is not complete then, or goes over the host's memory, begins
    with its SYNC behind the backward, and so does all that comes after it.
    """

    def __init__(
        self, costs: ProgramCosts, rank: int, sync: GradientSync, pace: Pace, begin: BeginSum
    ) -> None:
        self._pace, self._begin = pace, begin
        self._inside: dict[int, list[_Inner]] = {}  # by the place of the backward in the rank's list
        program = costs.program
        for place, syncs in inner_syncs(program, rank).items():
            compute = program.ranks[rank][place]
            assert isinstance(compute, Compute)
            stage, whole_s = program.stage(compute), costs.compute_s(rank, compute)
            found = self._inside[place] = []
            for entry in syncs:
                if not sync.may_begin_inside(entry.bucket):
                    break
                part_s = whole_s - costs.after_layer_s(rank, compute, entry.layer)
                found.append(_Inner(entry.bucket, part_s, sync.given(entry.bucket, stage)))

    @contextmanager
    def during(self, place: int, start_s: float) -> Iterator[None]:
        """Begin the sums inside the backward at a place of the list: it starts at start_s, and runs here."""
        inside = self._inside.get(place)
        if not inside:
            yield
            return
        watch = _Watch(inside, start_s, self._pace, self._begin)
        hooks = [
            value.register_post_accumulate_grad_hook(partial(watch.made, index))  # type: ignore[no-untyped-call]
            for index, entry in enumerate(inside)
            for value, _ in entry.given
        ]
        try:
            watch.begin_due()
            yield
            watch.begin_due(wait=True)
        finally:
            for hook in hooks:
                hook.remove()


class _Watch:
    """What is still to come of each bucket in one backward, and which sums have begun."""

    def __init__(self, inside: list[_Inner], start_s: float, pace: Pace, begin: BeginSum) -> None:
        self._inside, self._start_s, self._pace, self._begin = inside, start_s, pace, begin
        self._left = [sum(times for _, times in entry.given) for entry in inside]
        self._ready_s: dict[int, float] = {}  # of those complete
        self._begun = 0

    def made(self, index: int, value: Tensor) -> None:
        """Take note that the gradient of a parameter of a bucket (its index) was added to."""
        self._left[index] -= 1
        if self._left[index] < 0:
            raise InputError(
                f"a parameter of shape {list(value.shape)} gets its gradient in more runs of autograd than "
                "its layers, so that its sum began too soon; if a layer checkpoints its own parts with "
                "use_reentrant=True, take use_reentrant=False"
            )
        if self._left[index] == 0:
            self._ready_at(index)
            self.begin_due()

    def _ready_at(self, index: int) -> float:
        """Return since when a complete bucket is ready; one without gradients once it is looked at."""
        if index not in self._ready_s:
            self._ready_s[index] = self._pace.part(self._start_s, self._inside[index].part_s)
        return self._ready_s[index]

    def begin_due(self, *, wait: bool = False) -> None:
        """Begin the sums that are complete and due, up to the first that is not; wait for those to be due."""
        while self._begun < len(self._inside) and self._left[self._begun] == 0:
            ready_s = self._ready_at(self._begun)
            if wait:
                sleep_until(ready_s)
            elif ready_s > time.monotonic():
                return
            entry = self._inside[self._begun]
            self._begun += 1
            spent_s = time.thread_time()
            self._begin(entry.bucket, ready_s)
            self._pace.leave_out(time.thread_time() - spent_s)
