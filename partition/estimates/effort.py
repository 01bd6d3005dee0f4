"""How much effort the planner spends at which size of cluster: the one table of its tuning numbers.

All figures are counts of work or ratios, never seconds, so that plans do not depend on how fast a machine is.
Numbers that belong to a formula stay beside it.
"""

import math
from dataclasses import dataclass, replace

from partition.estimates.family_effort import (
    FAMILY_WALKS,
    FAR,
    LARGE_FAMILIES,
    FamilyEffort,
    fewer_pairs,
    more_starts,
    wider,
)

SEVERAL_ORDERS, FEW, SMALL, LARGE, VERY_LARGE = 4, 8, 16, 128, 1024
"""Devices up to which effort changes most: every order of devices is cut; the simulator always judges small
changes; walks near the relaxed step are short; anything walks, devices are shared by shifted cuts, and whole
programmes are rounded, not only what a floor leaves; families are looked for again where they are far from
the relaxed step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnEffort:
    """Pipelines that are changed for more samples at the prices of their devices, before a recombination."""

    changed: int
    """Pipelines of a round, those worth most for their price."""
    most_in_vain: int
    """New ones that a pipeline is changed into in a row, none of them better."""
    rounds: int = 8
    """Each with new prices."""
    most_stale: int = 1
    """Rounds in a row that may make the relaxed step hardly shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEffort:
    """The sets of pipelines that a search begins with."""

    every_order: bool
    """Whether every order of every subset of the devices is cut as one pipeline, not only likely ones."""
    columns: ColumnEffort | None
    """Of which a start is made, once there are others, where nothing walks."""
    chain_lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 64)
    """Devices of a single pipeline that are tried, those with most memory or speed."""
    timed_chains: int = 4
    """Single pipelines, best closed forms first, that are timed by their clock."""
    dealt: int = 6
    """Sets of devices dealt out to pipelines, best closed forms first, where something is forced."""
    most_count_vectors: int = 300
    """Vectors of devices per class up to which the exact programme over counts is a start too."""
    count_slack: tuple[float, ...] = (1.003, 1.04, 1.1, 1.2)
    """Steps, over the least one of that programme, at which it gives a set of pipelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """One walk by threshold accepting."""

    tries: int
    """Random changes of a sweep."""
    sweeps: int = 1
    most_failed: int = 2
    """Sweeps in a row that may find nothing; after them no other begins."""
    most_late: float = 150
    """Sets that pass by their clocks and fail the evaluation, after which a walk ends: they take longest."""
    threshold: float = 0.01
    """Relative to the best set: how much slower a set a sweep goes on from at its beginning."""
    perturbations: tuple[int, ...] = (2, 3, 5, 8)
    """Random changes, one of these numbers, between two sweeps where two found nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
    """Walks and recombinations in turn, while they pay."""

    walk: Sweeps
    most_failed: int
    """Turns in a row that may gain less than least_gain."""
    least_gain: float
    """Relative."""
    most: int = 30
    columns_first: ColumnEffort | None = None
    """In place of the first walk."""
    columns: ColumnEffort | None = None
    """After each other walk."""
    columns_last: ColumnEffort | None = None
    """Where turns do not pay any more."""


SHARDED_SHARE = 0.125  # of optimizer states; see `optimizer_sharding.SHARES`
FEW_COLUMNS = ColumnEffort(changed=8, most_in_vain=6)
LONG_WALKS = Walks(walk=Sweeps(tries=400), most_failed=3, least_gain=1e-3, columns_last=FEW_COLUMNS)
LONGEST_WALKS = replace(LONG_WALKS, walk=Sweeps(tries=1200, most_failed=4), most_failed=6)
FAR_WALKS = replace(
    LONGEST_WALKS,
    walk=replace(LONGEST_WALKS.walk, threshold=0.03),
    columns_first=ColumnEffort(changed=16, most_in_vain=40, most_stale=2),
    columns=ColumnEffort(changed=8, most_in_vain=20, rounds=2),
)
SHORT_WALKS = Walks(walk=Sweeps(tries=120), most_failed=1, least_gain=2e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEffort:
    """The search by the clocks of pipelines."""

    climb_tries: int
    """Random changes of a start, of which each takes longer on a large cluster."""
    walks: Walks | None
    """Of sets that are not near the relaxed step, or that sync much; None: nothing walks."""
    walks_near: Walks | None
    """Of sets near the relaxed step."""
    walks_far: Walks | None
    """Of sets whose clock is far from it: there memory decides, and walks end far apart."""
    climbed_starts: int = 3
    hopeless: float = 2.0
    """Times the best set's step: a start as slow is left, local search seldom makes up for that."""
    other_numbers: int = 2
    """Numbers of pipelines, best estimates first, whose dealt devices are climbed from."""
    dealt_over_least: float = 1.05
    """Times what equal stages would take without messages: dealt devices are seldom faster."""
    near: float = 1.015
    """Times the step that the relaxed programme promises: sets below it are near."""
    far: float = 1.03
    """Times that step: sets whose clock is above it are far."""
    much_sync: float = 0.1
    """Share of a step in gradient sync from which on fewer pipelines are tried too, and walks are long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorEffort:
    """Small changes of the best sets, evaluated by the simulator."""

    always: bool
    """Whether it is done even where the simulator says what the clocks of pipelines say."""
    walk: Sweeps
    """From the best set; its sweeps end with most_ticks at the latest."""
    probed: int = 3
    """Sets, best clocks first, that show whether the simulator says more than the clocks."""
    queues: float = 1.01
    """Simulated over estimated seconds of the best of them, from which on it does."""
    evaluated: int = 5
    """Sets that are simulated then, beside the best of each start."""
    climbed: int = 3
    """Sets that are climbed from, best first."""
    climb_tries: int = 400
    hopeless: float = 1.2
    """Times the best set's step: none as slow is climbed from."""
    most_ticks: int = 800_000
    """Microbatches x stages that are simulated in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEffort:
    """The choice between plans of all sources, by the simulator."""

    simulated_baselines: bool
    """Whether baselines choose by the simulator, else by their estimates."""
    published_rules: bool
    """Whether the rules of published systems are asked, too, not the well-known baselines alone."""
    exact_chains: int
    """Single pipelines over all orders of the devices, by the exact programme, each with other in_flight."""
    sharded_for_speed: bool
    """Whether sharded optimizer states are searched for where memory does not ask for them."""
    far_from_columns: float
    """Ratio to the relaxed step, either way, beyond which as many pipelines as the best plan has, and one
    less, are searched for."""
    undecided: float
    """Ratio to the relaxed step, either way, beyond which sets walk though families lead."""
    rules_lead: float = 0.07
    """Share of the relaxed step by which a baseline must be below it for nothing to walk: it shards what
    walks do not, and these seldom end as far below."""
    sharded_share: float | None
    """Of optimizer states, with which one search looks for sharded ones for speed; None: none does."""
    sharded_promised: float = 1.03
    """Times the best step: within it the relaxed step of that search must be; it knows one label alone."""
    sharded_near: float = 1.1
    """Times the best step: within it what that search begins with must be for walks."""
    least_sharding_gain: float = 0.02
    """Relative, that the fractional bound must promise then."""
    most_owners: int
    """Searches in turn in the memory that owners of states leave, while each gains as much as below. There
    each device may have memory of its own, and thousands of classes take too long."""
    least_owners_gain: float = 1e-3
    owners_promised: float = 1.006
    """Times the best step: within it the least clock of the search before must be. Seldom is there more to
    gain where sharded plans are below all clocks that were found."""
    always_simulated: int = 3
    """Plans of a source, best estimates first, that are simulated whatever they take."""
    most_instructions: int = 60_000
    """That may be simulated of a source beyond those."""
    heavy_instructions: int = 60_000
    """Of a plan: as heavy ones are not always simulated, but for the first of a source."""
    most_lost: int = 3
    """Plans that share devices, in a row, clearly worse than the best, after which the rest is left."""
    clearly: float = 1.05
    """Times the best step: clearly worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningEffort:
    """Small changes of whole plans, in the end, by the simulator: in_flight, and samples of pipelines."""

    least_gap: float = 0.002
    """Share by which a step must be above the clocks of its pipelines."""
    near: float = 1.04
    """Times the best step: the best few plans of each number of pipelines within it are changed, too."""
    most_changed: int = 8
    """Of these, best first, in what is in flight; the best alone where that is near the relaxed step."""
    near_relaxed: float = 1.03
    """Times the relaxed step, either way: near it."""
    changed_further: int = 3
    """Of these, by then best first, in samples and cuts, too."""
    most_in_vain: int = 60
    """Samples moved at random in a row that make no step shorter."""
    most_plans: int = 300
    """That are simulated for one."""
    most_ticks: int = 1_200_000
    """Microbatches x stages of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What the planner does for a cluster of one size."""

    starts: StartEffort
    search: SearchEffort
    simulator: SimulatorEffort | None
    """None: nothing is changed with the simulator."""
    families: FamilyEffort
    choice: ChoiceEffort
    tuning: TuningEffort


def effort_for(num_devices: int, *, forced: bool = False, thorough: bool = False) -> Effort:
    """Return the effort for a cluster of so many devices. thorough: some five times as much.

    forced: for what the user has decided in part. Sums and messages often take long there, so that the
    simulator would be asked all the time, for nothing; a little it is asked always.

    >>> effort_for(8).simulator.always, effort_for(9).simulator.always, effort_for(129).simulator
    (True, False, None)
    """
    few, large = num_devices <= FEW, num_devices > LARGE
    near = SHORT_WALKS if FEW < num_devices <= SMALL else LONG_WALKS
    families = FamilyEffort(clear_lead=0.03) if num_devices <= 2 * SMALL else FamilyEffort()
    if num_devices >= SMALL:
        near_families = replace(fewer_pairs(families), kept=10, kept_with_rest=4, more_in_flight=())
        if num_devices <= 2 * SMALL:
            near_families = replace(near_families, smoothed=4, climbed=3)
        families = replace(families, where_near=near_families)
    if not few:
        more = more_starts(families, 4) if num_devices > SMALL else families
        wide = replace(more, walks=FAMILY_WALKS, cut_anew=8, far=FAR)
        families = replace(families, then=(wide, replace(wide, uncharged=True)))
    if large:
        again = replace(LARGE_FAMILIES, uncharged=True, far=FAR)
        families = replace(LARGE_FAMILIES, then=(again,) if num_devices <= VERY_LARGE else ())
    simulator = SimulatorEffort(
        always=few or forced,
        walk=Sweeps(tries=400, sweeps=40, most_failed=12 if few else 2, most_late=math.inf),
    )
    if forced:
        tries = 120 if num_devices <= SMALL else 30
        simulator = replace(simulator, climb_tries=tries, most_ticks=simulator.most_ticks // 4)
    effort = Effort(
        starts=StartEffort(
            every_order=num_devices <= SEVERAL_ORDERS,
            columns=ColumnEffort(changed=16, most_in_vain=6) if large else None,
        ),
        search=SearchEffort(
            climb_tries=max(20, 30 * SMALL // max(SMALL, num_devices)),
            walks=None if large else LONG_WALKS,
            walks_near=None if large else near,
            walks_far=None if large else LONG_WALKS if few else FAR_WALKS,
        ),
        simulator=None if large else simulator,
        families=families,
        choice=ChoiceEffort(
            simulated_baselines=few,
            published_rules=not large,
            exact_chains=16 if num_devices <= 5 else 0,
            sharded_for_speed=num_devices <= 12,
            sharded_share=None if num_devices <= 12 or large else SHARDED_SHARE,
            most_owners=0 if large else 4,
            far_from_columns=1.0 if few else 1.1 if num_devices <= SMALL else math.inf,
            undecided=1.0 if few else FAR if num_devices <= SMALL else math.inf,
        ),
        tuning=TuningEffort(most_changed=1, most_ticks=400_000) if large else TuningEffort(),
    )
    return _thorough(effort) if thorough else effort


def _thorough(effort: Effort) -> Effort:
    """Return more of an effort: families are looked for as before, and then twice among more of them."""
    families, simulator, search = effort.families, effort.simulator, effort.search
    if search.walks is not None:
        search = replace(search, walks=LONGEST_WALKS, walks_near=LONGEST_WALKS, walks_far=FAR_WALKS)
    longer = tuple(replace(walk, tries=4 * walk.tries) for walk in FAMILY_WALKS)
    then = wider(families, 4), replace(wider(families, 12), walks=longer, cut_anew=8)
    families = replace(families, where_near=None, then=then)
    if simulator is not None:
        simulator = replace(
            simulator,
            evaluated=2 * simulator.evaluated,
            climbed=2 * simulator.climbed,
            climb_tries=4 * simulator.climb_tries,
            most_ticks=8 * simulator.most_ticks,
        )
    choice = replace(effort.choice, rules_lead=1.0, owners_promised=math.inf)
    if not choice.sharded_for_speed:
        choice = replace(choice, sharded_share=SHARDED_SHARE)
    return replace(effort, families=families, simulator=simulator, search=search, choice=choice)
