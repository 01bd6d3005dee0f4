"""How much effort the planner spends at which size of cluster: the one table of its tuning numbers.

All figures are counts of work or ratios, never seconds, so that plans do not depend on how fast a machine is.
Numbers that belong to a formula stay beside it.
"""

import math
from dataclasses import dataclass, replace

SEVERAL_ORDERS, FEW, SMALL, LARGE = 4, 8, 16, 128
"""Devices up to which effort changes most: every order of devices is cut; the simulator always has the last
word on small changes; walks near the relaxed step are short; anything walks, devices are shared by cuts that
are shifted, and whole programmes are rounded, not only what a floor leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEffort:
    """The sets of pipelines that a search begins with."""

    every_order: bool
    """Whether every order of every subset of the devices is cut as one pipeline, not only likely ones."""
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


LONG_WALKS = Walks(walk=Sweeps(tries=400), most_failed=3, least_gain=1e-3)
LONGEST_WALKS = Walks(walk=Sweeps(tries=1200, most_failed=4), most_failed=6, least_gain=1e-3)
FAR_WALKS = replace(LONGEST_WALKS, walk=replace(LONGEST_WALKS.walk, threshold=0.03))
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
    least_sharding_gain: float = 0.02
    """Relative, that the fractional bound must promise then."""
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
class FamilyWalk:
    """Walks among families by their estimates, of which the best are simulated."""

    threshold: float
    """Relative: a change may be longer by so much at first, by nothing in the end."""
    tries: int
    """Changes at random of each walk."""
    starts: int = 4
    more_moves: bool = False
    """Whether with those of `MORE_MOVES`, among them other numbers of families."""
    simulated: int = 16
    """Unlike ones of all that were seen, least estimates first."""
    settled: int = 4
    """Of these, best first: those of which all that are one change away are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyEffort:
    """Families of pipelines that are all alike, where sync or queues of messages take much of a step."""

    least_gap: float = 0.03
    """Share by which the best simulated step must be above its clock for families to be tried, unless there
    is much sync."""
    least_sync: float = 0.01
    """Share of that step that a card must take at least to sum the whole model."""
    near: float = 1.01
    """Times the relaxed step: the best simulated step must be above, else there is little to gain."""
    walk_lead: float = 0.03
    """Relative: families ahead of the sets from which walks would begin by more than this: nothing walks."""
    clear_lead: float = 0.01
    """Relative: where families are ahead by more and there is much sync, the simulator changes no single
    pipelines, of which each change takes longer on more devices."""
    most_stages: int = 8
    """Of a chain."""
    most_vectors: int = 3000
    """Vectors of devices per class that are ranked; with many classes chains are shorter for it."""
    kept: int = 28
    """Vectors that are cut, least closed forms first."""
    kept_with_rest: int = 9
    """Those that are cut too as best if the devices that they leave over do their part."""
    second: int = 24
    """Families that may get a second one on the devices that they leave over."""
    second_options: int = 20
    """Second families of each of them that a closed form is asked of."""
    pairs: int = 24
    """Of all of these, those that are cut."""
    filled: int = 6
    """Of the families of least estimate, those that get the second one that does most, too."""
    aligned: bool = True
    """Whether cuts of the two are moved to the same layers."""
    simulated: int = 64
    """Starts that are simulated at most."""
    always_simulated: int = 16
    """Starts that are simulated whatever they take."""
    most_starts_in_vain: int = 36
    """Of them in a row that are no better, after which no other is simulated."""
    most_start_ticks: int = 400_000
    """Microbatches x stages of starts, after which no other is simulated."""
    estimated_hopeless: float = 1.2
    """Times the best step that is known: if no estimate is below, none is simulated."""
    hopeless: float = 1.1
    """Times the best step that is known: if no family is below, none is changed."""
    smoothed: int = 8
    """Best starts of which layers are moved while estimates get shorter, before the best are changed."""
    climbed: int = 5
    """Starts that are changed, best first."""
    climb_hopeless: float = 1.15
    """Times the best start's step: none as slow is changed."""
    climb_tries: int = 30
    """Random changes of each start; in the end all that are one change away from the best follow."""
    most_in_vain: int = 16
    """Of them in a row, after which changing at random ends."""
    most_changes: int = 400
    """Random changes of a start, most of which lead nowhere or were tried before."""
    most_climb_ticks: int = 1_600_000
    """Microbatches x stages of all changes, after which changing ends."""
    rounds: int = 1
    """Times that the best are changed, with other random changes each time."""
    parts_of_room: tuple[float, ...] = ()
    """Numbers of copies that are looked at, too: shares of the most there is room for."""
    walks: tuple[FamilyWalk, ...] = ()
    """One after the other, once the best are changed."""
    far: float = 0.0
    """Times the relaxed step: nothing is looked for where as good a step is known. So the network decides how
    long a search takes: where it costs next to nothing, a plan is as good as that soon."""
    where_near: "FamilyEffort | None" = None
    """In place of all that where the step that is known before is within `FAR` of the relaxed one."""
    then: tuple["FamilyEffort", ...] = ()
    """Of all that again, one after the other, from what is known by then."""


FAMILY_WALKS = (
    FamilyWalk(threshold=0.03, tries=1500),
    FamilyWalk(threshold=0.06, tries=1500, starts=8, more_moves=True),
)
FAR = 1.05
"""Times the relaxed step, which knows neither sums nor queues: from there on the network decides."""


def _fewer_pairs(families: FamilyEffort) -> FamilyEffort:
    """Return an effort that looks at fewer families side by side, which gain little near the relaxed step."""
    return replace(families, second=6, second_options=6, pairs=8, filled=2, aligned=False)


LARGE_FAMILIES = _fewer_pairs(
    FamilyEffort(
        kept=14,
        kept_with_rest=6,
        always_simulated=4,
        most_start_ticks=250_000,
        smoothed=2,
        climbed=1,
        most_climb_ticks=400_000,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What the planner does for a cluster of one size."""

    starts: StartEffort
    search: SearchEffort
    simulator: SimulatorEffort | None
    """None: nothing is changed with the simulator."""
    families: FamilyEffort
    choice: ChoiceEffort


def effort_for(num_devices: int, *, forced: bool = False, thorough: bool = False) -> Effort:
    """Return the effort for a cluster of so many devices. thorough: some five times as much.

    forced: for what the user has decided in part. Far from the best plan sums and messages often take long,
    so that the simulator would be asked all the time: of 52 devices in 2 pipelines small changes took 18 of
    25 s and gained nothing. A little it is asked always: on 12 devices in 2 pipelines that gains 0.4 %.

    >>> effort_for(8).simulator.always, effort_for(9).simulator.always, effort_for(129).simulator
    (True, False, None)
    """
    few, large = num_devices <= FEW, num_devices > LARGE
    near = SHORT_WALKS if FEW < num_devices <= SMALL else LONG_WALKS
    families = FamilyEffort(clear_lead=0.03) if num_devices <= 2 * SMALL else FamilyEffort()
    if num_devices >= SMALL:
        near_families = _fewer_pairs(families)
        if num_devices <= 2 * SMALL:
            near_families = replace(near_families, smoothed=4, climbed=3)
        families = replace(families, where_near=near_families)
    if not few:
        more = _more_starts(families, 4) if num_devices > SMALL else families
        families = replace(families, then=(replace(more, walks=FAMILY_WALKS, far=FAR),))
    simulator = SimulatorEffort(
        always=few or forced,
        walk=Sweeps(tries=400, sweeps=40, most_failed=12 if few else 2, most_late=math.inf),
    )
    if forced:
        tries = 120 if num_devices <= SMALL else 30
        simulator = replace(simulator, climb_tries=tries, most_ticks=simulator.most_ticks // 4)
    effort = Effort(
        starts=StartEffort(every_order=num_devices <= SEVERAL_ORDERS),
        search=SearchEffort(
            climb_tries=max(20, 30 * SMALL // max(SMALL, num_devices)),
            walks=None if large else LONG_WALKS,
            walks_near=None if large else near,
            walks_far=None if large else LONG_WALKS if few else FAR_WALKS,
        ),
        simulator=None if large else simulator,
        families=LARGE_FAMILIES if large else families,
        choice=ChoiceEffort(
            simulated_baselines=few,
            published_rules=not large,
            exact_chains=16 if num_devices <= 5 else 0,
            sharded_for_speed=num_devices <= 12,
            far_from_columns=1.0 if few else 1.1 if num_devices <= SMALL else math.inf,
            undecided=1.0 if few else FAR if num_devices <= SMALL else math.inf,
        ),
    )
    return _thorough(effort) if thorough else effort


def _thorough(effort: Effort) -> Effort:
    """Return more of an effort: families are looked for as before, and then twice among more of them."""
    families, simulator, search = effort.families, effort.simulator, effort.search
    if search.walks is not None:
        search = replace(search, walks=LONGEST_WALKS, walks_near=LONGEST_WALKS, walks_far=FAR_WALKS)
    longer = tuple(replace(walk, tries=4 * walk.tries) for walk in FAMILY_WALKS)
    then = _wider(families, 4), replace(_wider(families, 12), walks=longer)
    families = replace(families, where_near=None, then=then)
    if simulator is not None:
        simulator = replace(
            simulator,
            evaluated=2 * simulator.evaluated,
            climbed=2 * simulator.climbed,
            climb_tries=4 * simulator.climb_tries,
            most_ticks=8 * simulator.most_ticks,
        )
    return replace(effort, families=families, simulator=simulator, search=search)


def _more_starts(families: FamilyEffort, times: int) -> FamilyEffort:
    """Return an effort that cuts so many times the vectors, and more pairs, and simulates more of them."""
    return replace(
        families,
        kept=times * families.kept,
        kept_with_rest=times * families.kept_with_rest,
        second=4 * families.second,
        pairs=8 * families.pairs,
        filled=3 * families.filled,
        simulated=6 * families.simulated,
        always_simulated=4 * families.always_simulated,
        most_starts_in_vain=4 * families.most_starts_in_vain,
        most_start_ticks=8 * families.most_start_ticks,
    )


def _wider(families: FamilyEffort, times: int) -> FamilyEffort:
    """Return an effort with more starts, other numbers of copies too, and more changes of more of them."""
    return replace(
        _more_starts(families, times),
        smoothed=3 * families.smoothed,
        climbed=2 * families.climbed,
        climb_tries=4 * families.climb_tries,
        most_in_vain=4 * families.most_in_vain,
        most_changes=4 * families.most_changes,
        most_climb_ticks=24 * families.most_climb_ticks,
        rounds=10,
        parts_of_room=(0.75, 0.5, 1 / 3, 0.25),
    )
