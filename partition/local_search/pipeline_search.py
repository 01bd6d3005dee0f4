"""Plans of any number of pipelines, each device serving one stage of one of them, best clocks first."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partition.column_generation.column_generation import Columns
from partition.column_generation.pipeline_pool import PipelinePool
from partition.constraints.dealt_devices import NUMBERS
from partition.estimates.batch_split import share_out
from partition.estimates.effort import ColumnEffort, Walks
from partition.estimates.network_cards import CardLoad
from partition.estimates.step_estimate import shares_devices
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage
from partition.local_search.alike_sets import AlikeSets
from partition.local_search.column_search import ColumnSearch
from partition.local_search.moves import EvaluateSet, LocalSearch, PipelineSet
from partition.local_search.starts import (
    SearchSpace,
    chain,
    dealt_sets,
    from_columns,
    from_counts,
    least_dealt_s,
    realise,
    relaxed,
    singles,
    wished,
)
from partition.local_search.threshold_accepting import improve_with_simulator, threshold_accepting
from partition.plan import Plan
from partition.problem import Forced, Problem

DEALT = "dealt"  # what starts of dealt devices are called: all are simulated


@dataclass(frozen=True, slots=True)
class Begun:
    """Sets from which a search walks on: climbed starts, those of other numbers, and starts as they were."""

    climbed: list[PipelineSet]
    others: list[PipelineSet]
    starts: list[PipelineSet]

    @property
    def sets(self) -> list[PipelineSet]:
        """Return all, least step first."""
        return sorted([*self.climbed, *self.others, *self.starts], key=_order)

    def of_several(self) -> "Begun":
        """Return it without sets of a single pipeline."""
        climbed, others, starts = (
            [entry for entry in sets if len(entry.timed) > 1]
            for sets in (self.climbed, self.others, self.starts)
        )
        return Begun(climbed, others, starts) if climbed else Begun(others, [], starts)


class PipelineSearch(SearchSpace):
    """A search and what it knows so far, for its own later steps and for a bound.

    columns: the relaxed programme; best: seconds of the best set, without gradient sync. None before it has
    searched. relaxed_s: the relaxed step over all pipelines seen, as far as it is known. like: see
    `SearchSpace`.
    """

    def __init__(self, problem: Problem, like: SearchSpace | None = None) -> None:
        super().__init__(problem, like)
        self.columns: Columns | None = None
        self.relaxed_s = math.inf
        self.best: float | None = None
        limits = self.wishes.limits(self.classes.merged())
        self._pool = PipelinePool(self.timings, self.classes.merged(), problem.global_batch_size, limits)
        self._column_search = ColumnSearch(self.cut_optimizer, self._pool)
        self._cards, self._alike = CardLoad(self.costs), AlikeSets(self.classes)

    def search(self, evaluate: EvaluateSet, known: Sequence[list[TimedPipeline]] = ()) -> list[PipelineSet]:
        """Return the best starts, improved; least step first. Empty where none of them fits.

        known: see `starts`.
        """
        return self.walked(self.begun(evaluate, known), evaluate)

    def begun(self, evaluate: EvaluateSet, known: Sequence[list[TimedPipeline]] = ()) -> "Begun":
        """Return the best starts after a short local search each. known: see `starts`."""
        evaluate = self._with_cards(evaluate)
        starts = [replace(start, step_s=evaluate(start.timed, start.step_s)) for start in self.starts(known)]
        starts.sort(key=_order)
        sets = self._climbed(starts, evaluate)
        if sets:
            sets += self._of_fewer_pipelines(_best(sets), evaluate)
        others = list(self._of_other_numbers(_best(sets), evaluate)) if sets else []
        dealt = [start for start in starts if start.start.startswith(DEALT)]
        best = [start for start in starts[: self.effort.search.climbed_starts] if start not in dealt]
        return Begun(sets, others, [*best, *dealt])

    def walked(self, begun: "Begun", evaluate: EvaluateSet) -> list[PipelineSet]:
        """Return what was begun with, and sets that walks from there lead to, while they pay."""
        evaluate = self._with_cards(evaluate)
        sets, others = list(begun.climbed), list(begun.others)
        if sets:
            sets += self._walked_and_recombined(_best(sets), evaluate)
            # apart, so that where they are no better the walks begin where they would without them
            if others and _best(others).step_s < _best(sets).step_s:
                others += self._walked_and_recombined(_best(others), evaluate)
        return sorted([*sets, *others, *begun.starts], key=_order)

    def starts(self, known: Sequence[list[TimedPipeline]] = ()) -> list[PipelineSet]:
        """Return sets of pipelines from every source there is, least step by their clocks first.

        known: sets from elsewhere.
        """
        sources = [("singles", singles(self)), ("chain", self._chain)]
        sources += [("known", timed) for timed in known]
        programme = self._relax()
        sources += [("columns", timed) for timed in from_columns(self, programme, self.limits)]
        sources += [(f"{DEALT} {place}", timed) for place, timed in enumerate(wished(self))]
        found = [PipelineSet(self.clock_s(timed), tuple(timed), name) for name, timed in sources if timed]
        found += from_counts(self, min((start.step_s for start in found), default=math.inf))
        found = [start for start in found if math.isfinite(start.step_s)]
        for start in found:
            self._note(start.step_s)
        if found and (columns := self.effort.starts.columns):
            found += self._of_more_columns(min(start.step_s for start in found), columns)
        return sorted(found, key=_order)

    def promised_s(self) -> float:
        """Return the step of the relaxed programme."""
        programme = self._relax() if self.columns is None else self.columns
        return programme.step_s

    def _relax(self) -> Columns:
        """Solve the relaxed programme, or add columns to it."""
        self.columns = relaxed(self, self.columns, self.limits)
        self.relaxed_s = self.columns.step_s
        return self.columns

    def improve_with_simulator(
        self, found: Sequence[PipelineSet], simulate: Callable[[Plan], float]
    ) -> list[PipelineSet]:
        """Return better sets than those that this search found. simulate: seconds of a plan's step.

        Of those that are alike one is simulated.
        """
        known: dict[object, float] = {}

        def simulate_set(timed: Sequence[TimedPipeline], _: float) -> float:
            alike, ordered = self._alike.ordered(timed)
            if alike not in known:
                plan = self.plan("simulated", ordered)
                known[alike] = simulate(plan) if plan is not None else math.inf
            return known[alike]

        if self.effort.simulator is None or not found:
            return []
        sets = improve_with_simulator(self.cut_optimizer, found, simulate_set, self.effort.simulator)
        return [replace(entry, timed=self._alike.ordered(entry.timed)[1]) for entry in sets]

    def recombined(self, best: PipelineSet, evaluate: EvaluateSet) -> list[PipelineSet]:
        """Return the best set of pipelines that were all looked at before, where it promises more."""
        mixed = self._mixed(self.clock_s(best.timed))
        return [replace(entry, step_s=evaluate(entry.timed, entry.step_s)) for entry in mixed]

    def _mixed(self, step_s: float) -> list[PipelineSet]:
        """Return the best set of all pipelines seen, by its clocks, where it promises a shorter step."""
        promised_s, pipelines = self._pool.pipelines(step_s)
        timed = realise(self, pipelines, promised_s, self._pool.classes)
        clock_s = self.clock_s(timed) if timed else math.inf
        if math.isinf(clock_s):
            return []
        self._note(clock_s)
        return [PipelineSet(clock_s, tuple(timed), "mixed")]

    def _of_more_columns(self, step_s: float, effort: ColumnEffort) -> list[PipelineSet]:
        """Return the best set of all pipelines seen, once more were made by the prices of their devices."""
        relaxed_s = self._column_search.search(step_s, effort, seed=0)
        self.relaxed_s = min(self.relaxed_s, relaxed_s)
        return self._mixed(step_s)

    def plan(self, strategy: str, timed: Sequence[TimedPipeline]) -> Plan | None:
        """Return the plan of a set of pipelines, samples shared out; None where they cannot do the batch.

        Or where they do not respect what is forced.
        """
        batch = self.problem.global_batch_size
        seconds, samples = share_out(timed, batch)
        if not math.isfinite(seconds) or not self.wishes.hold(timed):
            return None
        pairs = zip(timed, self.wishes.samples(timed, samples), strict=True)
        pipelines = tuple(pipeline.pipeline(count) for pipeline, count in pairs if count)
        return self.problem.plan(strategy, pipelines)

    def timed(self, plan: Plan) -> list[TimedPipeline]:
        """Return the pipelines of a plan; none where a device has several stages.

        What is in flight, and how often a stage recomputes, is as this search chooses.
        """
        if shares_devices(plan):
            return []
        device = self.problem.cluster.device
        return [
            self.timings.pipeline(
                [TimedStage(device(s.devices[0]), *s.layers, s.recompute) for s in pipeline.stages],
                pipeline.microbatch_size,
            )
            for pipeline in plan.pipelines
        ]

    @cached_property
    def _chain(self) -> list[TimedPipeline]:
        return chain(self)

    def _climbed(self, starts: Sequence[PipelineSet], evaluate: EvaluateSet) -> list[PipelineSet]:
        """Return the best starts after a local search each, but for those that are hopelessly slow."""
        effort, found = self.effort.search, list[PipelineSet]()
        for start in _distinct(starts)[: effort.climbed_starts]:
            if found and start.step_s > effort.hopeless * _best(found).step_s:
                continue
            step_s, timed = self._climb(start.timed, evaluate, effort.climb_tries)
            found.append(PipelineSet(step_s, tuple(timed), start.start))
            self._note(self.clock_s(timed))
        return found

    def _climb(
        self, timed: Sequence[TimedPipeline], evaluate: EvaluateSet, tries: int
    ) -> tuple[float, list[TimedPipeline]]:
        return LocalSearch(self.cut_optimizer, evaluate, tries).improve(timed)

    def _of_fewer_pipelines(self, best: PipelineSet, evaluate: EvaluateSet) -> Iterator[PipelineSet]:
        """Give the best sets of fewer pipelines, where gradient sync takes much of the step.

        A number of pipelines is left out where even without sync they are slower than the best.
        """
        effort, count = self.effort.search, len(best.timed)
        if self.limits.fewest_pipelines or count == 1 or not self._much_sync(best):
            return
        for most in sorted({1, *(part for part in (count // 2, count // 5) if part > 1)}):
            sets = self._of_at_most(most, best.step_s) if most > 1 else [self._chain]
            clocks = [(self.clock_s(timed), timed) for timed in sets if timed]
            steps = [(evaluate(timed, clock_s), timed) for clock_s, timed in clocks if clock_s < math.inf]
            if steps:
                step_s, timed = min(steps, key=lambda pair: pair[0])
                if step_s <= effort.hopeless * best.step_s:
                    step_s, timed = self._climb(timed, evaluate, effort.climb_tries // 3)
                    yield PipelineSet(step_s, tuple(timed), "fewer")

    def _of_other_numbers(self, best: PipelineSet, evaluate: EvaluateSet) -> Iterator[PipelineSet]:
        """Give the best sets of devices dealt out to other numbers of pipelines, in steps.

        Where a step is not near what the relaxed programme promises, so that sums or messages may have made
        the number wrong. Numbers that would be slower even if all stages were equal are not dealt.
        """
        effort = self.effort.search
        if self.problem.forced != Forced() or best.step_s <= effort.near * self.relaxed_s:
            return
        sizes = sorted({pipeline.microbatch_size for pipeline in best.timed})
        found = []
        for number in NUMBERS:
            most_s = best.step_s / effort.dealt_over_least
            short = [size for size in sizes if least_dealt_s(self, number, size) <= most_s]
            if number != len(best.timed) and short:
                sets = [(self.clock_s(timed), timed) for _, timed in dealt_sets(self, number, short)]
                steps = [(evaluate(timed, clock_s), timed) for clock_s, timed in sets if clock_s < math.inf]
                found += sorted(steps, key=lambda pair: pair[0])[:1]
        for step_s, timed in sorted(found, key=lambda pair: pair[0])[: effort.other_numbers]:
            if step_s <= effort.hopeless * best.step_s:
                climbed_s, climbed = self._climb(timed, evaluate, effort.climb_tries // 3)
                yield PipelineSet(climbed_s, tuple(climbed), f"{len(timed)} dealt")

    def _of_at_most(self, most: int, within_s: float) -> list[list[TimedPipeline]]:
        """Return sets of so many pipelines; none where they need longer even relaxed."""
        limits = replace(self.limits, most_pipelines=most)
        columns = relaxed(self, self.columns, limits)
        return list(from_columns(self, columns, limits)) if columns.step_s < within_s else []

    def _walked_and_recombined(self, best: PipelineSet, evaluate: EvaluateSet) -> list[PipelineSet]:
        """Return sets that walks lead to, and new sets made of all pipelines seen, in turn while it pays."""
        walks = self._walks(best)
        if walks is None:
            return []
        found, start, failed, threshold = [best], best, 0, walks.walk.threshold
        for turn in range(walks.most):
            before, last = best, failed == walks.most_failed
            alone = walks.columns_first if turn == 0 else walks.columns_last if last else None
            if alone is None:
                found += threshold_accepting(self.cut_optimizer, start, evaluate, walks.walk, seed=turn)
                best = _best(found)
                self._note(self.clock_s(best.timed))
            if columns := alone or walks.columns:
                self._column_search.search(self.clock_s(best.timed), columns, seed=turn)
            mixed = self.recombined(best, evaluate)
            found += mixed
            # a new set is the place to go on from even where it is slower by what a walk's threshold allows
            start = min([best, *mixed], key=lambda it: it.step_s / (1 + threshold * (it is not best)))
            best = _best([best, *mixed])
            failed = 0 if best.step_s < before.step_s * (1 - walks.least_gain) else failed + 1
            if failed > walks.most_failed or (failed == walks.most_failed and not walks.columns_last):
                break
        return found[1:]

    def _walks(self, best: PipelineSet) -> Walks | None:
        effort = self.effort.search
        if effort.walks is None:
            return None
        if self.clock_s(best.timed) > effort.far * self.relaxed_s:
            return effort.walks_far
        near = self.best is not None and self.best <= effort.near * self.relaxed_s
        return effort.walks_near if near and not self._much_sync(best) else effort.walks

    def _much_sync(self, best: PipelineSet) -> bool:
        """Return whether gradient sync takes much of a set's step."""
        seconds = self._cards.step_s(best.timed, self.clock_s(best.timed))
        return best.step_s - seconds > self.effort.search.much_sync * best.step_s

    def _with_cards(self, evaluate: EvaluateSet) -> EvaluateSet:
        """Return the evaluation, told of a step in which the network cards are done too.

        Sets that do not respect what is forced take forever.
        """

        def step_s(timed: Sequence[TimedPipeline], clock_s: float) -> float:
            wished_s = self.wishes.step_s(timed, clock_s)
            return evaluate(timed, self._cards.step_s(timed, wished_s)) if wished_s < math.inf else math.inf

        return step_s

    def _note(self, clock_s: float) -> None:
        self.best = clock_s if self.best is None else min(self.best, clock_s)


def _best(sets: Sequence[PipelineSet]) -> PipelineSet:
    return min(sets, key=lambda pipelines: pipelines.step_s)


def _order(pipelines: PipelineSet) -> tuple[float, int, str]:
    return pipelines.step_s, len(pipelines.timed), pipelines.start


def _distinct(starts: Sequence[PipelineSet]) -> list[PipelineSet]:
    """Return the starts without those whose pipelines are alike but for the names of devices."""
    seen: dict[object, PipelineSet] = {}
    for start in starts:
        key = (start.step_s, tuple(sorted(id(pipeline.timing) for pipeline in start.timed)))
        seen.setdefault(key, start)
    return list(seen.values())
