"""How much effort the search for families of pipelines spends: its part of the table in `effort`.

All figures are counts of work or ratios, never seconds, as there.
"""

from dataclasses import dataclass, replace


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
    simulated: int = 24
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
    """Relative: where families are ahead by more and there is much sync, the simulator changes no others."""
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
    uncharged: bool = False
    """Whether families are also cut as if sums took no time."""
    more_in_flight: tuple[int, ...] = (2, 8)
    """With which families near the best are simulated, too, but for those that come first near the relaxed
    step."""
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
    cut_anew: int = 0
    """Unlike ones of all that are known by then, best first, of which several cuts are moved at once."""
    far: float = 0.0
    """Times the relaxed step: nothing is looked for where as good a step is known, as on fast networks."""
    where_near: "FamilyEffort | None" = None
    """Before all that where the step that is known is within `NEAR` of the relaxed one; in place of it where
    the best families then are within `NEARER`."""
    then: tuple["FamilyEffort", ...] = ()
    """Of all that again, one after the other, from what is known by then."""


FAMILY_WALKS = (
    FamilyWalk(threshold=0.03, tries=1500),
    FamilyWalk(threshold=0.06, tries=1500, starts=8, more_moves=True),
)
FAR = 1.05
"""Times the relaxed step, which knows neither sums nor queues: from there on the network decides."""
NEAR = 1.06
"""Times the relaxed step: families as good as the best are one change away from a few of the likely ones."""
NEARER = 1.015
"""Times the relaxed step: where those few are above it, families are looked for with all effort after all."""


def fewer_pairs(families: FamilyEffort) -> FamilyEffort:
    """Return an effort that looks at fewer families side by side, which gain little near the relaxed step."""
    return replace(families, second=6, second_options=6, pairs=8, filled=2, aligned=False)


LARGE_FAMILIES = fewer_pairs(
    FamilyEffort(
        kept=14,
        kept_with_rest=6,
        more_in_flight=(),
        always_simulated=4,
        most_start_ticks=250_000,
        smoothed=2,
        climbed=1,
        most_climb_ticks=400_000,
    )
)


def more_starts(families: FamilyEffort, times: int) -> FamilyEffort:
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


def wider(families: FamilyEffort, times: int) -> FamilyEffort:
    """Return an effort with more starts, other numbers of copies too, and more changes of more of them."""
    return replace(
        more_starts(families, times),
        smoothed=3 * families.smoothed,
        climbed=2 * families.climbed,
        climb_tries=4 * families.climb_tries,
        most_in_vain=4 * families.most_in_vain,
        most_changes=4 * families.most_changes,
        most_climb_ticks=24 * families.most_climb_ticks,
        rounds=10,
        parts_of_room=(0.75, 0.5, 1 / 3, 0.25),
    )
