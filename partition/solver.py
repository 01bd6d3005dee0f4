"""From a problem to a plan with its predicted figures and a bound, for every strategy."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from cost_model.errors import InfeasibleError, InputError
from cost_model.reading import did_you_mean
from partition.bounds import bound_space, fractional_bound_s
from partition.plan import Plan
from partition.problem import Evaluate, Problem
from partition.search import AUTO
from partition.strategies import STRATEGIES, TooManyStagesError

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A strategy's plan with its figures, or the reason why it has none."""

    strategy: str
    plan: Plan | None
    reason: str | None = None


def solve(
    problem: Problem, evaluate: Evaluate, strategy: str = AUTO, *, progress: Progress | None = None
) -> Plan:
    """The plan of a strategy, with predicted figures, bound, and the hashes of profile and cluster.

    evaluate: the simulator, which has the verdict among candidates. progress is told what is being done.

    Raises: InputError for an unknown strategy; InfeasibleError, with the missing bytes, if nothing fits.
    """
    if strategy not in STRATEGIES:
        raise InputError(f"unknown strategy {strategy!r}; {did_you_mean(strategy, STRATEGIES)}")
    tell = progress or _silent
    tell(f"planning {strategy}")
    plan = STRATEGIES[strategy](problem, evaluate)
    tell("proving a bound")
    return with_figures(plan, problem, evaluate, fractional_bound_s(problem))


def compare(problem: Problem, evaluate: Evaluate, *, progress: Progress | None = None) -> tuple[Outcome, ...]:
    """The outcome of every strategy, `auto` last."""
    tell = progress or _silent
    outcomes = []
    bound_s: float | None = None
    for name, strategy in STRATEGIES.items():
        tell(f"planning {name}")
        try:
            plan = strategy(problem, evaluate)
        except (InfeasibleError, TooManyStagesError) as error:
            outcomes.append(Outcome(name, None, str(error)))
            continue
        if bound_s is None:
            bound_s = fractional_bound_s(problem)
        outcomes.append(Outcome(name, with_figures(plan, problem, evaluate, bound_s)))
    return tuple(outcomes)


def _silent(_: str) -> None:
    return


def with_figures(plan: Plan, problem: Problem, evaluate: Evaluate, bound_s: float) -> Plan:
    """The plan with its predicted figures beside a bound, and the hashes of what they rest on."""
    predicted = evaluate(plan)
    if bound_s > 0:  # all times may be zero, and then there is no gap to speak of
        predicted = dataclasses.replace(
            predicted, bound_s=bound_s, bound_space=bound_space(problem), fractional_bound_s=bound_s
        )
    return dataclasses.replace(
        plan,
        predicted=predicted,
        profile_sha256=problem.profile.sha256,
        cluster_sha256=problem.cluster.sha256,
    )
