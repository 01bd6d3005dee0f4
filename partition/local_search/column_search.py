"""Pipelines worth more than the devices that they take: more columns for the relaxed programme.

Where memory is tight, the labels of `pricing_problem` miss what real cuts reach. So the pipelines that a
search has seen are changed, a device at a time, cut anew, and followed where they do more samples in a step
for the price of their devices. Prices are those of the relaxed programme over all pipelines seen, solved
again each round: column generation with heuristic pricing (Lübbecke, Desrosiers, Selected Topics in Column
Generation, Operations Research 53, 2005).
"""

import math
import random
from collections.abc import Sequence

from partition.column_generation.pipeline_pool import PipelinePool, Relaxed
from partition.estimates.device_classes import ClassOrder, swapped
from partition.estimates.effort import ColumnEffort
from partition.estimates.timed_pipeline import PipelineTiming
from partition.exact.cut_dp import CutOptimizer
from partition.local_search.moves import fitted

MOVES = ("replace", "replace", "insert", "insert", "drop", "order", "size")
"""A device of another class; one more; one less; two that swap places; another microbatch size. As often as
named."""
REPEATED = 10  # times most_in_vain: changes of a pipeline, most of which may lead to what was made before
LEAST_GAIN = 1e-3  # relative, of the relaxed step: a round that gains less is stale
_Chain = tuple[ClassOrder, int]
"""The class of each device, from first to last stage, and the microbatch size."""


class ColumnSearch:
    """A search for pipelines by the prices of their devices; none is made twice.

    What it makes is in the timing cache of the pool afterwards, from which the pool takes it.
    """

    def __init__(self, cut_optimizer: CutOptimizer, pool: PipelinePool) -> None:
        self._cut_optimizer, self._pool, self._problem = cut_optimizer, pool, cut_optimizer.problem
        self._made = set[_Chain]()

    def search(self, step_s: float, effort: ColumnEffort, seed: int) -> float:
        """Make pipelines with which the relaxed step of all that were seen gets shorter than step_s.

        Returns the last one that was solved for; inf where no pipelines do the batch in step_s.
        """
        rng, least_s, stale = random.Random(seed), math.inf, 0
        for _ in range(effort.rounds):
            relaxed = self._pool.least(step_s)
            if relaxed is None:
                break
            stale = stale + 1 if relaxed.step_s > least_s * (1 - LEAST_GAIN) else 0
            least_s = relaxed.step_s
            if stale == effort.most_stale:
                break
            for worth, timing in relaxed.ranked()[: effort.changed]:
                self._follow(relaxed, timing, worth, effort.most_in_vain, rng)
        return least_s

    def _follow(
        self, relaxed: Relaxed, timing: PipelineTiming, worth: float, most_in_vain: int, rng: random.Random
    ) -> None:
        """Change a pipeline at random as long as it gets worth more for its price."""
        chain: _Chain = tuple(self._pool.class_indices(timing)), timing.microbatch_size
        in_vain = 0
        for _ in range(REPEATED * most_in_vain):
            trial = self._changed(chain, rng)
            if trial is None or trial in self._made:
                continue
            self._made.add(trial)
            in_vain += 1
            own = self._worth(relaxed, trial)
            if own > worth:
                chain, worth, in_vain = trial, own, 0
            if in_vain == most_in_vain:
                return

    def _changed(self, chain: _Chain, rng: random.Random) -> _Chain | None:
        """Return a chain after a random change; None where the change leads nowhere."""
        move, (classes, size) = rng.choice(MOVES), chain
        place, c = rng.randrange(len(classes)), rng.randrange(len(self._pool.classes.counts))
        if move == "size":
            return classes, rng.choice(self._problem.microbatch_sizes)
        if move == "replace":
            classes = (*classes[:place], c, *classes[place + 1 :])
        elif move == "insert":
            place = rng.randrange(len(classes) + 1)
            classes = (*classes[:place], c, *classes[place:])
        elif move == "drop":
            classes = classes[:place] + classes[place + 1 :]
        else:
            classes = swapped(classes, place, rng.randrange(len(classes)))
        return (classes, size) if self._possible(classes) else None

    def _possible(self, classes: Sequence[int]) -> bool:
        """Return whether there are such devices, and layers for all of them."""
        counts = self._pool.classes.counts
        few = all(classes.count(c) <= counts[c] for c in set(classes))
        return few and 0 < len(classes) <= self._problem.profile.num_layers

    def _worth(self, relaxed: Relaxed, chain: _Chain) -> float:
        """Return what a chain is worth for its price; 0 where memory takes no cuts."""
        classes, size = chain
        devices = [iter(group) for group in self._pool.classes.members]
        named = [next(devices[c]) for c in classes]
        pipeline = fitted(self._cut_optimizer, named, size, relaxed.step_s)
        if pipeline is None or not pipeline.timing.fits:
            return 0.0
        samples = pipeline.timing.most(relaxed.step_s, self._problem.global_batch_size)
        return relaxed.worth(self._pool.uses(pipeline.timing), samples)
