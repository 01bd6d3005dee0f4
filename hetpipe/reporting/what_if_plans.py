"""The plans of changed clusters, each beside those of the others."""

from collections.abc import Callable, Sequence

from cost_model.errors import InfeasibleError
from cost_model.expenses import expenses
from hetpipe.reporting.expense_tables import WhatIfRow
from hetpipe.simulation.prediction import evaluator
from partition.estimates.optimizer_sharding import fits
from partition.problem import Problem


def what_if_row(
    change: str,
    problem: Problem,
    *,
    proof_s: float | None = 0.0,
    progress: Callable[[str], None] | None = None,
) -> WhatIfRow:
    """Return the plan of `auto` for the devices of a change, or why there is none.

    proof_s, progress: as for `partition.solver.solve`.
    """
    from partition.solver import solve

    evaluate = evaluator(problem.profile, problem.cluster)
    try:
        plan = solve(problem, evaluate, progress=progress, proof_s=proof_s)
    except InfeasibleError as error:
        return WhatIfRow(change, None, reason=str(error))
    return WhatIfRow(change, plan, expenses(problem.cluster, plan.device_names))


def with_best(row: WhatIfRow, problem: Problem, rows: Sequence[WhatIfRow]) -> WhatIfRow:
    """Return a row with the fastest plan of all rows that its devices can run.

    `auto` is no exact search: its plan for a slower network may be the better one on the faster network, too.
    """
    from partition.bounds.best_bound import Bound, bound_space, fractional_bound_s
    from partition.solver import with_figures

    profile, cluster = problem.profile, problem.cluster
    names, evaluate = {device.name for device in cluster.devices}, evaluator(profile, cluster)
    others = [
        each.plan
        for each in rows
        if each.plan is not None
        and not each.plan.zero  # the owners of its states are chosen for its devices
        and set(each.plan.device_names) <= names
        and fits(each.plan, profile, cluster)
    ]
    best = min(others, key=lambda plan: evaluate(plan).step_s, default=None)
    if best is None or (row.step_s is not None and evaluate(best).step_s >= row.step_s):
        return row
    bound = Bound(fractional_bound_s(problem), bound_space(problem))
    plan = with_figures(best, problem, evaluate(best), bound)
    return WhatIfRow(row.change, plan, expenses(cluster, plan.device_names))
