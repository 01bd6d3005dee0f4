"""`auto`: the best plan of every source there is, by the simulator; never worse than a baseline."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from cost_model.errors import InfeasibleError, InputError
from cost_model.sharding import Sharding
from partition.baselines.catalogue import BASELINES, WELL_KNOWN
from partition.baselines.strategy import Strategy, TooManyDevicesError
from partition.bounds.best_bound import fractional_bound_s
from partition.bounds.sharded_bound import sharded_bound
from partition.constraints.wishes import check_forced
from partition.estimates.effort import Effort
from partition.estimates.group_sharding import roomier_plans, sharded_out_of, sharded_plans
from partition.estimates.offloading import has_host_memory, offloaded_plans
from partition.estimates.optimizer_sharding import owned_elsewhere, unsharded
from partition.estimates.ranking import Contest, Ranking, by_estimate
from partition.estimates.step_estimate import shares_devices
from partition.estimates.timed_pipeline import TimedPipeline
from partition.exact.chain_search import AUTO
from partition.exact.feasibility import least_pipelines
from partition.local_search.family_search import best_families, families_may_win, sync_share
from partition.local_search.moves import PipelineSet
from partition.local_search.pipeline_search import PipelineSearch
from partition.local_search.searched_plans import (
    each_once,
    improved_starts,
    plans_of,
    plans_of_sets,
    with_as_many,
    with_sync,
)
from partition.local_search.tuned_plans import tuned
from partition.plan import Plan
from partition.problem import Evaluate, Problem
from partition.shared_devices.interleaved import interleaved_plans
from partition.shared_devices.shifted_cuts import memory_binds, shared_plans, sharing_may_win

PlansOutOf = Callable[[Problem, Callable[[Problem], Iterable[Plan]]], Iterator[Plan]]
"""Gives plans of a problem, of what a search finds for problems with smaller states."""


def auto(problem: Problem, evaluate: Evaluate | None = None, *, search: PipelineSearch | None = None) -> Plan:
    """Return the best plan of `PipelineSearch`, of shared devices, interleaved, and of the baselines.

    Never worse than a baseline: each that could be faster is a candidate. Ties go to fewer devices. No
    candidate is simulated whose closed forms alone are longer than the best plan's step.

    What the problem forces is respected by every candidate. The plan of a short search is a candidate of
    a thorough one.

    Raises: InfeasibleError with the least that is missing, over all orders and cuts; InputError if what is
        forced contradicts itself.
    """
    check_forced(problem)
    ranking, known = Ranking(problem, evaluate), list[Plan]()
    if problem.thorough:
        known.append(auto(dataclasses.replace(problem, thorough=False), evaluate))
    known.append(_named_auto(_searched(search or PipelineSearch(problem), ranking, evaluate)))
    return min(known, key=ranking)


def _searched(search: PipelineSearch, ranking: Ranking, evaluate: Evaluate | None) -> Plan:
    """Return the best plan of all that is searched for, not yet by the name of `auto`."""
    problem = search.problem
    contest = Contest(ranking, search.costs, search.effort.choice)
    families_lead, number = _enter_pipelines(contest, search, ranking, evaluate)
    contest.enter(by_estimate(search.costs, on_one_node(search, contest.step_s)))
    alone = problem.forced.num_pipelines == 1  # then no layer has states to share
    if not alone and (contest.best is None or memory_binds(problem, search.costs)):
        promised_s = 0.0
        if contest.best is not None and not families_lead:
            promised_s = enter_sharded_for_speed(contest, search)
        contest.enter(by_estimate(search.costs, _with_smaller_states(search, contest.step_s, sharded_plans)))
        contest.enter(by_estimate(search.costs, _with_smaller_states(search, contest.step_s, roomier_plans)))
        enter_by_owners(contest, search, promised_s)
    if has_host_memory(problem.cluster) and (contest.best is None or memory_binds(problem, search.costs)):
        offloaded = _with_smaller_states(search, contest.step_s, offloaded_plans)
        contest.enter(by_estimate(search.costs, offloaded))
    _enter_forced(contest, search, evaluate, number)
    if contest.best is None:
        return min(_from_least(contest, search, ranking, evaluate), key=ranking)
    if search.best is None:  # what others found is no start of the search
        with suppress(InfeasibleError):
            return min(_from_least(contest, search, ranking, evaluate), key=ranking)
    effort = search.effort.tuning
    most = effort.most_changed if _far_from_columns(contest, search, effort.near_relaxed) else 1
    near = ranking.near(effort.near * contest.step_s, most)
    contest.enter_all(tuned(search, near, _step_of(ranking)))
    return contest.best


def _enter_pipelines(
    contest: Contest,
    search: PipelineSearch,
    ranking: Ranking,
    evaluate: Evaluate | None,
    known: Sequence[list[TimedPipeline]] = (),
) -> tuple[bool, int]:
    """Enter the plans of a search, of baselines, shared devices and interleaved pipelines.

    Return whether families lead, and how many pipelines the best set of the search has.

    known: further starts, where what baselines find is entered already. Nothing walks where families lead,
    unless they are far from what the relaxed programme of few devices promises; or where a baseline, by what
    it shards, is far below it. The simulator changes no sets where the best plan is far below all their
    clocks: hardly any step is below its clock.
    """
    problem, costs = search.problem, search.costs
    judge = with_sync(search)
    begun = search.begun(judge, known)
    found = each_once(begun.sets)
    contest.enter(by_estimate(costs, plans_of_sets(search, found)))
    single_s = contest.step_s
    families_tried = _enter_families(contest, search, ranking, single_s)
    lead = search.effort.families.walk_lead
    undecided = _far_from_columns(contest, search, search.effort.choice.undecided)
    decided = contest.step_s < (1 - lead) * single_s and not undecided
    rules = copy.copy(contest)  # apart, so that it is sums alone that families lead by
    if not known:
        rules.enter(_baselines(search, evaluate), always=len(candidate_rules(search.effort)))
    decided |= rules.step_s < (1 - search.effort.choice.rules_lead) * search.relaxed_s < math.inf
    if not decided and search.effort.search.walks:
        found = each_once(search.walked(begun, judge))
        plans = by_estimate(costs, plans_of(search, found))
        contest.enter(plans)
        single_s = min([single_s, *(ranking(plan)[0] for plan in plans[:1])])
        if not families_tried:
            _enter_families(contest, search, ranking, single_s)
    clear = contest.step_s < (1 - search.effort.families.clear_lead) * single_s
    families_lead = contest.step_s < (1 - lead) * single_s
    contest.enter_all([rules.best] if rules.best is not None else [])
    hopeless = (1 - lead) * (search.best or 0.0) > contest.step_s
    if not hopeless and (not clear or sync_share(search, single_s) < search.effort.search.much_sync):
        contest.enter_all(_improved_with_simulator(search, found, ranking))
    if sharing_may_win(problem, costs, contest.best):
        shared = shared_plans(search.tables, costs, contest.best, contest.step_s)
        contest.enter(shared, most_lost=search.effort.choice.most_lost)
    contest.enter(interleaved_plans(problem, costs, contest.step_s))
    return families_lead, len(found[0].timed) if found else 0


def _enter_families(contest: Contest, search: PipelineSearch, ranking: Ranking, single_s: float) -> bool:
    """Enter the best families if they may be better than a step of single pipelines; return whether."""
    if not families_may_win(search, single_s):
        return False
    best = plans_of(search, best_families(search, _step_of(ranking), single_s)[:1])
    contest.enter_all([*best, *ranking.near(contest.step_s, 1)])  # maybe with more in flight
    return True


def _far_from_columns(contest: Contest, search: PipelineSearch, far: float) -> bool:
    """Return whether the best step is so many times that of the relaxed programme, either way."""
    least_s = search.relaxed_s
    return search.columns is not None and not least_s / far <= contest.step_s <= least_s * far


def _enter_forced(contest: Contest, search: PipelineSearch, evaluate: Evaluate | None, other: int) -> None:
    """Enter what is found where as many pipelines are forced as the best plan has by then, and one less.

    On few devices where the best plan is far from the relaxed programme, or that knows no set nearly as good;
    and where memory is tight. There sums, messages or memory decide, walks end far apart, and all starts of
    such a search have as many pipelines, of which others have few. It begins anew, as if the user had asked
    for it: what cuts are made first leads it elsewhere. Where pipelines of the best plan share devices, the
    other number is looked for, too.
    """
    problem, effort = search.problem, search.effort.choice
    if contest.best is None or problem.forced.num_pipelines is not None:
        return
    tight = effort.sharded_for_speed and memory_binds(problem, search.costs)
    if tight or _far_from_columns(contest, search, effort.far_from_columns):
        for number in _near_numbers(contest, other if shares_devices(contest.best) else 0):
            with suppress(InfeasibleError, InputError):  # pins may need more, shared devices have more
                contest.enter_all([auto(with_as_many(problem, number), evaluate)])


def _near_numbers(contest: Contest, other: int) -> Iterator[int]:
    """Give each number of pipelines once: that of the best plan and one less, as it changes; then other."""
    tried: set[int] = set()
    while contest.best is not None:
        count = len(contest.best.pipelines)
        number = next((each for each in (count, count - 1, other) if each and each not in tried), None)
        if number is None:
            return
        tried.add(number)
        yield number


def enter_sharded_for_speed(contest: Contest, search: PipelineSearch) -> float:
    """Enter what one search with smaller states finds, on clusters too large to look for each amount.

    Where its relaxed programme may promise a shorter step than the best plan's; it walks where what it begins
    with is near that, once sharded, or does not fit then. Return the least clock of what it found; 0 where it
    has not searched.
    """
    effort = search.effort.choice
    if effort.sharded_share is None:
        return 0.0
    smaller, step_s = PipelineSearch(unsharded(search.problem, effort.sharded_share)), contest.step_s
    if smaller.promised_s() > effort.sharded_promised * step_s:
        return 0.0
    judge = with_sync(smaller)
    begun = smaller.begun(judge)

    def sharded(sets: Iterable[PipelineSet]) -> list[Plan]:
        plans = plans_of(smaller, each_once(sets))
        return by_estimate(search.costs, sharded_out_of(search.problem, plans, Sharding.STATES))

    plans = sharded(begun.sets)
    contest.enter(plans)
    found_s = min((contest.ranking(plan)[0] for plan in plans[: effort.always_simulated]), default=step_s)
    if smaller.effort.search.walks and found_s < effort.sharded_near * step_s:
        contest.enter(sharded(smaller.walked(begun, judge)))
    return smaller.best or 0.0


def enter_by_owners(contest: Contest, search: PipelineSearch, promised_s: float = 0.0) -> None:
    """Enter what searches find that begin at the best plan, with its states where their owners keep them.

    Only where it shards nothing but optimizer states. Searches with smaller states know what a device keeps
    by its own layers alone, so that what fits in the end is chance; owners of what they find follow, in turn
    while that is better. promised_s: the least clock of the last such search; none follows where the best
    plan is clearly below.
    """
    effort, before_s = search.effort.choice, math.inf
    for _ in range(effort.most_owners):
        best = contest.best
        if contest.step_s > before_s * (1 - effort.least_owners_gain):
            return
        if promised_s > contest.step_s * effort.owners_promised:
            return
        before_s = contest.step_s
        if best is None or best.state_owners is None or best.sharding is not Sharding.STATES or best.offloads:
            return
        smaller = PipelineSearch(owned_elsewhere(search.problem, best))
        if not (known := smaller.timed(best)):
            return
        sets = each_once(smaller.search(with_sync(smaller), [known]))
        plans = sharded_out_of(search.problem, plans_of(smaller, sets))
        contest.enter(by_estimate(search.costs, plans))
        promised_s = smaller.best or 0.0


def _from_least(
    contest: Contest, search: PipelineSearch, ranking: Ranking, evaluate: Evaluate | None
) -> Iterator[Plan]:
    """Give the plan of pipelines that fit, mostly a single one, and the best of a search that begins there.

    Then all that is found where as many pipelines are forced: in so little memory walks end far apart. For
    problems of which the search has found no plan.

    Raises: InfeasibleError if none fits.
    """
    problem = search.problem
    least = least_pipelines(problem)
    plan = least.plan(AUTO, problem)
    yield from [plan] if problem.forced.allows(plan) else []
    whole = [search.timings.pipeline(stages, least.microbatch_size) for stages in least.stages]
    share = -(-problem.global_batch_size // len(whole))
    sets = [
        whole,
        *(
            [search.cut_optimizer.recut(pipeline.devices, size, share) or pipeline for pipeline in whole]
            for size in problem.microbatch_sizes
        ),
    ]
    # a pipeline may fit as a single microbatch alone, which its timing does not speak of
    known = [timed for timed in sets if all(pipeline.timing.fits for pipeline in timed)]
    if known:
        _enter_pipelines(contest, search, ranking, evaluate, known)
    if contest.best is not None:
        yield contest.best
        if problem.forced.num_pipelines is None:
            with suppress(InfeasibleError):
                yield auto(with_as_many(problem, len(contest.best.pipelines)), evaluate)


def _named_auto(plan: Plan) -> Plan:
    return dataclasses.replace(plan, strategy=AUTO)


def _improved_with_simulator(
    search: PipelineSearch, found: Sequence[PipelineSet], ranking: Ranking
) -> Iterator[Plan]:
    """Give the plans of sets that the simulator finds better than those that the clocks found."""
    return plans_of(search, search.improve_with_simulator(found, _step_of(ranking)))


def _step_of(ranking: Ranking) -> Callable[[Plan], float]:
    return lambda plan: ranking(plan)[0]


def candidate_rules(effort: Effort) -> Mapping[str, Strategy]:
    """Return the baselines that are candidates: in a large cluster the well-known ones."""
    return BASELINES if effort.choice.published_rules else WELL_KNOWN


def _baselines(search: PipelineSearch, evaluate: Evaluate | None) -> Iterator[Plan]:
    """Give what each baseline chooses; in a large cluster by its estimate, to be simulated if it may win."""
    chosen_by = evaluate if search.effort.choice.simulated_baselines else None
    for baseline in candidate_rules(search.effort).values():
        try:
            yield baseline(search.problem, chosen_by)
        except (InfeasibleError, TooManyDevicesError):
            continue


def on_one_node(search: PipelineSearch, step_s: float) -> Iterator[Plan]:
    """Give plans of single nodes whose devices could do the batch alone in less than a step that is known.

    Over a slow network each sum or message may cost more than the devices of the other nodes add.
    """
    problem = search.problem
    nodes = [node for node in problem.cluster.nodes if node.devices]
    if len(nodes) == 1 or problem.forced.pins or math.isinf(step_s):
        return
    shapes = {
        (tuple((one.kind, one.speed, one.usable_bytes) for one in node.devices), node.interconnect): node
        for node in reversed(nodes)
    }
    for node in shapes.values():
        alone = dataclasses.replace(
            problem, cluster=dataclasses.replace(problem.cluster, nodes=(node,), links=())
        )
        try:
            if fractional_bound_s(alone) < step_s:
                smaller = PipelineSearch(alone)
                yield from plans_of(smaller, improved_starts(smaller))
        except InfeasibleError:
            continue


def _with_smaller_states(search: PipelineSearch, step_s: float, plans_out_of: PlansOutOf) -> Iterator[Plan]:
    """Give plans of fewer states on each device, where they could be faster than a known step.

    plans_out_of: `sharded_plans`, `roomier_plans` or `offloaded_plans`.
    """
    effort, problem = search.effort.choice, search.problem
    if math.isfinite(step_s):
        least_s = (
            sharded_bound(problem, Sharding.WEIGHTS).fractional_s
            if plans_out_of is roomier_plans
            else fractional_bound_s(unsharded(problem, 0.0))
        )
        if not effort.sharded_for_speed or least_s * (1 + effort.least_sharding_gain) > step_s:
            return

    def found_for(smaller: Problem) -> Iterator[Plan]:
        smaller_search = PipelineSearch(smaller)
        if plans_out_of is offloaded_plans:
            return plans_of_sets(smaller_search, improved_starts(smaller_search))
        # a single pipeline has nothing to shard
        return plans_of(smaller_search, improved_starts(smaller_search, several=True))

    yield from plans_out_of(problem, found_for)


STRATEGIES: Mapping[str, Strategy] = {**BASELINES, AUTO: auto}
