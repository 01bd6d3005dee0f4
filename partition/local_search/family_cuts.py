"""Cuts of families, and estimates of the step of a set of families.

A card carries all messages of its node, so copies that send in step share it: cuts and clocks come in two
kinds, with links as they are, and with links between nodes shared by as many copies as send side by side.
Neither alone ranks families well; callers ask for both.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cost_model.cluster import Cluster, Device, Link
from partition.estimates.batch_split import share_out
from partition.estimates.network_cards import FEW_HOPS, queued_s
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import PipelineTiming, TimedPipeline, TimedStage, TimingCache
from partition.exact.cut_dp import CutOptimizer
from partition.local_search.families import Cut, Family, FamilySet, FamilySpace, Layout, Outline
from partition.local_search.family_sums import FamilySums
from partition.local_search.starts import SearchSpace

TOGETHER = 6  # exponent: messages queue the more, the nearer a card is to being busy all the time
ROUNDING = 1 - 1e-9  # times what an estimate cannot be below
TOLERANCE = 1e-3  # relative: how exactly samples are shared out for an estimate
_Part = tuple[Family, Layout, int, PipelineTiming]
"""A family, its devices, the samples of one copy, and how long these take."""
MessageSeconds = Callable[[Device, Device, int], tuple[float, float]]
"""Seconds for which a message behind a place of a chain occupies a link there, and the one back."""


class EstimatedSet(NamedTuple):
    """Families and the step that is estimated for them. sums_s: what of it sums go on for."""

    step_s: float
    families: FamilySet
    sums_s: float = 0.0


class FamilyCutter:
    """Cuts families for their devices, links and gradient sync; remembers what it did."""

    def __init__(self, search: SearchSpace, space: FamilySpace) -> None:
        self.search, self.space = search, space
        self._class_of = search.classes.class_indices()
        self._merged = {device.name: c for c, group in enumerate(space.members) for device in group}
        self._timings = {1: search.timings}
        self._cutters: dict[tuple[tuple[int, ...], int], CutOptimizer] = {}
        self._sums = FamilySums(space)
        self.known: dict[object, EstimatedSet | None] = {}
        self._estimates: dict[tuple[FamilySet, bool], float] = {}
        self._above: dict[tuple[FamilySet, bool], float] = {}  # steps that estimates are sure to be above
        self._uncharged = False
        self._periods: dict[object, float] = {}  # of the latest cuts of some classes and a microbatch size

    def cut(
        self, outline: Outline, taken: Sequence[int], *, shared: bool, within_s: float = math.inf
    ) -> EstimatedSet | None:
        """Return the family of an outline with the best cuts of a few; None where memory takes none.

        The bytes of a stage are charged as if they were summed alone on a card, by all of a node's stages if
        nested; and, for families whose sums hide behind others, once each. None, too, where the estimate is
        sure to be above within_s.
        """
        layout = self.space.layout(outline, taken)
        at_once = layout.most_at_once if shared else 1
        key = (outline, tuple(taken), at_once)
        if key not in self.known:
            options = [
                self._estimated(family, layout, timing, within_s)
                for family, timing in self._cut(outline, layout, at_once)
            ]
            found = min(
                (option for option in options if option is not None),
                key=lambda option: option.step_s,
                default=None,
            )
            if any(option is None for option in options) and (found is None or found.step_s > within_s):
                return found
            self.known[key] = found
        return self.known[key]

    def also_uncharged(self) -> None:
        """Cut families from now on as if sums took no time, too: they may hide behind those of others."""
        if not self._uncharged:
            self._uncharged = True
            self.known.clear()

    def _cut(self, outline: Outline, layout: Layout, at_once: int) -> Iterator[tuple[Family, PipelineTiming]]:
        charges, known = self._charges(outline, layout), set[tuple[Cut, ...]]()
        alike = (tuple(sorted(outline.chain)), outline.microbatch_size)
        tries = [charges, tuple(min(charge, 1) for charge in charges)]
        tries += [(0,) * len(charges)] * self._uncharged
        for times in dict.fromkeys(tries):
            cutter = self._cutter(times, at_once)
            cut = cutter.recut(
                layout.row,
                outline.microbatch_size,
                self._share(outline),
                period_s=self._periods.get(alike),
            )
            if cut is not None:
                self._periods[alike] = cut.timing.period_s
                cuts = tuple((stage.start, stage.stop, stage.recompute) for stage in cut.stages)
                if cuts not in known:
                    known.add(cuts)
                    yield Family(outline, cuts), cut.timing

    def _share(self, outline: Outline) -> int:
        """Return the samples of a copy."""
        return -(-self.search.problem.global_batch_size // outline.copies)

    def _estimated(
        self, family: Family, layout: Layout, timing: PipelineTiming, within_s: float
    ) -> EstimatedSet | None:
        """Return a family with its estimate; None where Z, sooner known than a clock, is too much."""
        share = self._share(family.outline)
        whole, parts = share // family.outline.microbatch_size, [(family, layout, share, timing)]
        least_s, messages_s = timing.quick_s(whole) if whole else 0.0, self._card_messages_s(parts)
        if with_messages_s(least_s, messages_s) * ROUNDING > within_s:
            return None
        sync_s = self._sync_s(parts)
        if (with_messages_s(least_s, messages_s) + sync_s) * ROUNDING > within_s:
            return None
        return EstimatedSet(with_messages_s(timing.time_s(share), messages_s) + sync_s, (family,), sync_s)

    def estimate_s(self, families: FamilySet, *, shared: bool, within_s: float = math.inf) -> float:
        """Return the estimated step of families that share the batch; inf where they cannot do it.

        Or where the step is sure to be above within_s.
        """
        key = (families, shared)
        if key in self._estimates:
            return self._estimates[key]
        if within_s <= self._above.get(key, 0.0):
            return math.inf
        step_s = self._find_estimate_s(families, shared, within_s)
        if math.isfinite(step_s):
            self._estimates[key] = step_s
        else:
            self._above[key] = within_s
        return step_s

    def _find_estimate_s(self, families: FamilySet, shared: bool, within_s: float) -> float:
        batch = self.search.problem.global_batch_size
        layouts = self.space.layouts(families)
        timed = list[TimedPipeline]()
        parts = list[_Part]()
        for family, layout in zip(families, layouts, strict=True):
            timings = self._timings_of(layout.most_at_once if shared else 1)
            pipeline = _timed(timings, family, layout.row)
            timed += [pipeline] * family.outline.copies
            parts.append((family, layout, self._share(family.outline), pipeline.timing))
        if not _may_do(parts, batch, within_s):
            return math.inf
        sync_s = self._sync_s(parts)
        if not _may_do(parts, batch, within_s - sync_s):
            return math.inf
        seconds, samples = share_out(timed, batch, TOLERANCE)
        if not math.isfinite(seconds):
            return seconds
        place = 0
        for at, (family, layout, _, timing) in enumerate(parts):
            parts[at] = (family, layout, samples[place], timing)
            place += family.outline.copies
        return with_messages_s(seconds, self._card_messages_s(parts)) + sync_s

    def least_share(self, families: FamilySet, at: int, step_s: float) -> float:
        """Return the share of the batch that others leave to one of the families at least in a step.

        As far as is known before their clocks run.
        """
        batch = self.search.problem.global_batch_size
        pairs = zip(families, self.space.layouts(families), strict=True)
        others = [pair for place, pair in enumerate(pairs) if place != at]
        done = sum(
            family.outline.copies
            * _timed(self.search.timings, family, layout.row).timing.no_more(step_s, batch)
            for family, layout in others
        )
        return max(0.0, 1 - done / batch)

    def cards_busy(self, estimated: EstimatedSet) -> float:
        """Return the share of a step for which the busiest card carries messages, as estimated."""
        batch, copies = self.search.problem.global_batch_size, 0
        for family in estimated.families:
            copies += family.outline.copies
        layouts = self.space.layouts(estimated.families)
        parts = [
            (layout, -(-batch // copies // family.outline.microbatch_size), self._messages_of(family))
            for family, layout in zip(estimated.families, layouts, strict=True)
        ]
        return card_messages_s(parts) / estimated.step_s if estimated.step_s else 0.0

    def timed(self, families: FamilySet) -> list[TimedPipeline] | None:
        """Return the pipelines of families on their devices; None where memory does not take one of them."""
        timed = [
            _timed(self.search.timings, family, row)
            for family, layout in zip(families, self.space.layouts(families), strict=True)
            for row in layout.rows
        ]
        return timed if all(pipeline.timing.fits for pipeline in timed) else None

    def _card_messages_s(self, parts: Sequence[_Part]) -> float:
        """Return for how long the busiest cards carry the messages of families."""
        return card_messages_s(
            (layout, -(-samples // family.outline.microbatch_size), self._messages_of(family))
            for family, layout, samples, _ in parts
        )

    def _messages_of(self, family: Family) -> MessageSeconds:
        """Return what gives the seconds of a family's messages."""
        message_s, size = self.search.costs.message_s, family.outline.microbatch_size
        return lambda one, other, place: message_s(one, other, family.cuts[place][1], size)[:2]

    def _sync_s(self, parts: Sequence[_Part]) -> float:
        """Return the seconds for which the sums of layers go on after the last backwards."""
        families, layouts, _, timings = zip(*parts, strict=True)
        return self._sums.exposed_s(families, layouts, [timing.full for timing in timings])

    def _charges(self, outline: Outline, layout: Layout) -> tuple[int, ...]:
        """Return how often the bytes of a stage of each class are charged: stages that share its card."""
        charges = []
        for c, on_node in enumerate(self.space.on_node):
            places = [place for place, other in enumerate(outline.chain) if other == c]
            if outline.copies == 1 or not layout.spread(places):
                charges.append(0)
            else:
                charges.append(min(len(places), on_node, outline.run))
        return tuple(charges)

    def _timings_of(self, at_once: int) -> TimingCache:
        """Return the timings on a cluster whose links between nodes are shared by so many."""
        if at_once not in self._timings:
            problem = self.search.problem
            shared = replace(problem, cluster=_shared_links(problem.cluster, at_once))
            self._timings[at_once] = TimingCache(PipelineCosts(shared, self.search.costs))
        return self._timings[at_once]

    def _cutter(self, times: tuple[int, ...], at_once: int) -> CutOptimizer:
        """Return what cuts chains where bytes are charged so often, by class."""
        key = (times, at_once)
        if key not in self._cutters:
            tables, timings = self.search.tables, self._timings_of(at_once)
            charge, share = np.zeros(len(self.search.classes.members)), tables.problem.gradient_share
            for class_index, (device, *_) in enumerate(self.search.classes.members):
                c = self._merged[device.name]
                charge[class_index] = times[c] * self.space.class_s_per_byte[c]
            charged_s = charge[:, None, None] * np.maximum(tables.bytes.trained, 0.0) * share
            like = next((one for one in self._cutters.values() if one.timings is timings), None)
            self._cutters[key] = CutOptimizer(
                tables, timings, tables.optimizer_s + charged_s, like or self.search.cut_optimizer
            )
        return self._cutters[key]


def card_messages_s(parts: Iterable[tuple[Layout, int, MessageSeconds]]) -> float:
    """Return for how long the busiest cards carry the messages of layouts, each with so many microbatches."""
    between: dict[tuple[str, str], float] = {}
    out: dict[str, int] = {}
    into: dict[str, int] = {}
    for layout, count, message_s in parts:
        for place, one, other, pairs in layout.crossings:
            here, there, (forward_s, backward_s) = one.node, other.node, message_s(one, other, place)
            between[here, there] = between.get((here, there), 0.0) + pairs * count * forward_s
            between[there, here] = between.get((there, here), 0.0) + pairs * count * backward_s
            out[here], into[there] = out.get(here, 0) + pairs, into.get(there, 0) + pairs
    return queued_s(between, max([0, *out.values(), *into.values()]) > FEW_HOPS)


def with_messages_s(clock_s: float, messages_s: float) -> float:
    """Return a step by its clock in which a card carries messages for so long."""
    return float((clock_s**TOGETHER + messages_s**TOGETHER) ** (1 / TOGETHER))


def _may_do(parts: Sequence[_Part], batch: int, step_s: float) -> bool:
    """Return whether families may do a batch in a step, as far as is known before their clocks run."""
    if step_s == math.inf:
        return True
    most = (
        family.outline.copies * timing.no_more(step_s / ROUNDING, batch) for family, _, _, timing in parts
    )
    return step_s > 0 and sum(most) >= batch


def _timed(timings: TimingCache, family: Family, row: Sequence[Device]) -> TimedPipeline:
    stages = tuple(TimedStage(device, *cut) for device, cut in zip(row, family.cuts, strict=True))
    return timings.pipeline(stages, family.outline.microbatch_size)


def _shared_links(cluster: Cluster, at_once: int) -> Cluster:
    """Return the cluster with a part of the bandwidth between its nodes."""

    def part(link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / at_once)

    nodes = tuple(replace(node, interconnect=node.interconnect or cluster.network) for node in cluster.nodes)
    links = tuple(replace(named, link=part(named.link)) for named in cluster.links)
    return replace(cluster, network=part(cluster.network), nodes=nodes, links=links)
