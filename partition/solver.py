"""From a problem to a plan with its predicted figures and a bound, for every strategy."""

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cost_model.errors import InfeasibleError, InputError
from cost_model.strict_files import did_you_mean
from partition.auto import STRATEGIES, auto
from partition.baselines.catalogue import WELL_KNOWN
from partition.baselines.strategy import TooManyDevicesError
from partition.bounds.best_bound import Bound, best_bound, offloaded_bound
from partition.bounds.sharded_bound import sharded_bound, sharded_pipeline_bound
from partition.exact.chain_search import AUTO
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Figures, Plan
from partition.problem import Evaluate, Problem

Progress = Callable[[str], None]
Choose = Callable[[Plan, Mapping[Plan, float]], Plan]
"""What takes a plan: given that of a search, and the seconds of a step of it and all others looked at."""
COMPARED = (*WELL_KNOWN, AUTO)
"""What is compared where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A strategy's plan with its figures, or the reason why it has none.

    device, missing_bytes: as of `InfeasibleError`, where memory is the reason.
    """

    strategy: str
    plan: Plan | None
    reason: str | None = None
    device: str | None = None
    missing_bytes: float = 0.0

    @classmethod
    def without_plan(cls, strategy: str, error: Exception) -> "Outcome":
        """Return the outcome of a strategy that has no plan."""
        if isinstance(error, InfeasibleError):
            return cls(strategy, None, str(error), error.device, error.missing_bytes)
        return cls(strategy, None, str(error))


def solve(
    problem: Problem,
    evaluate: Evaluate,
    strategy: str = AUTO,
    *,
    progress: Progress | None = None,
    proof_s: float | None = None,
    choose: Choose | None = None,
) -> Plan:
    """Return the plan of a strategy, with predicted figures, bounds, and the hashes of profile and cluster.

    evaluate: the simulator, which chooses among candidates. progress is told what is being done.
    proof_s: seconds for the pipeline bound, 0 for the fractional one alone; None for what suits the devices.
    choose: what takes another plan of those that `auto` has looked at.

    Raises: InputError for an unknown strategy; InfeasibleError, with the missing bytes, if nothing fits.
    """
    check_strategy(strategy)
    tell = progress or _silent
    tell(f"planning {strategy}")
    search = PipelineSearch(problem)
    plan = _plan(strategy, problem, evaluate, search, choose=choose)
    tell("proving a bound")
    figures = evaluate(plan)
    return with_figures(plan, problem, figures, bound_of(plan, search, figures.step_s, proof_s))


def compare(
    problem: Problem,
    evaluate: Evaluate,
    strategies: Iterable[str] = COMPARED,
    *,
    progress: Progress | None = None,
    proof_s: float | None = None,
    choose: Choose | None = None,
) -> tuple[Outcome, ...]:
    """Return the outcomes of strategies, in their order; those that most know, and `auto`.

    choose: as for `solve`.

    Raises: InputError for an unknown strategy.
    """
    tell = progress or _silent
    search = PipelineSearch(problem)
    plans: dict[str, Plan | Exception] = {}
    for name in strategies:
        check_strategy(name)
        tell(f"planning {name}")
        try:
            plans[name] = _plan(name, problem, evaluate, search, choose=choose)
        except (InfeasibleError, TooManyDevicesError) as error:
            plans[name] = error.with_traceback(None)
    if not any(isinstance(plan, Plan) for plan in plans.values()):
        return tuple(
            Outcome.without_plan(name, error) for name, error in plans.items() if isinstance(error, Exception)
        )
    tell("proving a bound")
    figures = {name: evaluate(plan) for name, plan in plans.items() if isinstance(plan, Plan)}
    alike: dict[tuple[int, bool], dict[str, Plan]] = {}
    for name, plan in plans.items():
        if isinstance(plan, Plan):
            alike.setdefault((plan.zero, plan.offloads), {})[name] = plan
    found = dict[str, Plan]()
    for same in alike.values():
        allowed = [name for name, plan in same.items() if problem.forced.allows(plan)]
        best = min(allowed or same, key=lambda name: figures[name].step_s)  # of which the bounds speak
        bound = bound_of(same[best], search, figures[best].step_s, proof_s)
        found |= {name: with_figures(plan, problem, figures[name], bound) for name, plan in same.items()}
    return tuple(
        Outcome.without_plan(name, plan) if isinstance(plan, Exception) else Outcome(name, found[name])
        for name, plan in plans.items()
    )


def bound_of(plan: Plan, search: PipelineSearch, step_s: float, proof_s: float | None) -> Bound:
    """Return the bound that speaks about a plan, which ends at its step.

    A proof is made where the search has been made: of a strategy that does not search none is.
    """
    if not plan.zero and not plan.offloads:
        return best_bound(search, proof_s=proof_s, step_s=step_s)
    if plan.offloads or plan.sharding.by_layer or search.columns is None:
        return _bound_beside(plan, search.problem)
    return sharded_pipeline_bound(search.problem, step_s, proof_s=proof_s)


def _bound_beside(plan: Plan, problem: Problem) -> Bound:
    """Return the bound of shares of layers that speaks about a plan that offloads or shards."""
    if plan.offloads:
        return offloaded_bound(problem, sharded=plan.zero > 0)
    return sharded_bound(problem, plan.sharding)


def check_strategy(name: str) -> None:
    """Check that there is a strategy of a name.

    Raises: InputError if there is none.
    """
    if name not in STRATEGIES:
        raise InputError(f"unknown strategy {name!r}; {did_you_mean(name, STRATEGIES)}")


def _plan(
    strategy: str,
    problem: Problem,
    evaluate: Evaluate,
    search: PipelineSearch,
    *,
    choose: Choose | None,
) -> Plan:
    with _collector_paused():
        if strategy != AUTO:
            return STRATEGIES[strategy](problem, evaluate)
        if choose is None:
            return auto(problem, evaluate, search=search)
        seen: dict[Plan, float] = {}

        def noting(plan: Plan) -> Figures:
            figures = evaluate(plan)
            seen[plan] = figures.step_s
            return figures

        plan = auto(problem, noting, search=search)
    alike = {
        other: step_s
        for other, step_s in seen.items()
        if (other.zero, other.offloads) == (plan.zero, plan.offloads) and problem.forced.allows(other)
    }
    alike.setdefault(plan, evaluate(plan).step_s)
    return dataclasses.replace(choose(plan, alike), strategy=plan.strategy)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Search for no cycles of references while planning.

    Millions of objects are kept until the end and have none; to look at them again and again took a sixth of
    the time for 10,000 devices, and not to look took 2 % more memory. Nor are they looked at as soon as it is
    over, while the search still has them: they are old then, unless a caller has frozen objects of its own.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()


def _silent(_: str) -> None:
    return


def with_figures(plan: Plan, problem: Problem, figures: Figures, bound: Bound) -> Plan:
    """Return the plan with its predicted figures beside a bound, and the hashes of what they rest on."""
    if plan.offloads or plan.zero != bound.zero:
        bound = _bound_beside(plan, problem)
    if bound.fractional_s > 0:  # all times may be zero, and then there is no gap to speak of
        bound_s, space = bound.of(plan)
        figures = dataclasses.replace(
            figures, bound_s=bound_s, bound_space=space, fractional_bound_s=bound.fractional_s
        )
    return dataclasses.replace(
        plan,
        predicted=figures,
        profile_sha256=problem.profile.sha256,
        cluster_sha256=problem.cluster.sha256,
    )
