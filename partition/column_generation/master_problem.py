"""The linear programme over pipelines, and its integer form (HiGHS; passed as one matrix)."""

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from partition.estimates.arrays import Floats

MOST_NODES = 100
"""Of the branch and bound of an integer programme: a limit of work, so that plans do not depend on time.

On 16 to 1,024 devices most programmes took one node and none more than 29, some 12 ms each.
"""


@dataclass(frozen=True, slots=True)
class MasterProblem:
    """The linear programme's answer: samples done, pipelines of each column, price of each class."""

    samples: float
    amounts: Floats
    prices: Floats


def solve_master(
    uses: Sequence[Sequence[int]],
    values: Sequence[float],
    counts: Sequence[float],
    *,
    integer: bool = False,
    most_pipelines: int | None = None,
    enough: float | None = None,
) -> MasterProblem:
    """Maximise the samples with the devices at hand, in whole pipelines if asked for (HiGHS).

    most_pipelines: one more row; its price is the last of `prices`. enough: whole pipelines that do so many
        samples will do.
    """
    matrix = np.array(uses, dtype=np.float64).T
    bounds = list(map(float, counts))
    if most_pipelines is not None:
        matrix = np.vstack([matrix, np.ones(len(values))])
        bounds.append(float(most_pipelines))
    rows, columns = np.nonzero(matrix)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    programme = highspy.HighsLp()
    programme.num_col_, programme.num_row_ = len(values), len(bounds)
    programme.col_cost_ = -np.array(values, dtype=np.float64)  # HiGHS minimises
    programme.col_lower_ = np.zeros(len(values))
    programme.col_upper_ = np.full(len(values), highspy.kHighsInf)
    programme.row_lower_ = np.full(len(bounds), -highspy.kHighsInf)
    programme.row_upper_ = np.array(bounds)
    programme.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(bounds)))])
    programme.a_matrix_.start_ = starts
    programme.a_matrix_.index_ = columns
    programme.a_matrix_.value_ = matrix[rows, columns]
    if integer:
        programme.integrality_ = [highspy.HighsVarType.kInteger] * len(values)
        solver.setOptionValue("mip_max_nodes", MOST_NODES)
        solver.setOptionValue("mip_rel_gap", 1e-3)
        if enough is not None:
            solver.setOptionValue("objective_target", -enough)
    solver.passModel(programme)
    solver.run()
    solution = solver.getSolution()
    amounts = np.maximum(np.array(solution.col_value), 0.0)
    prices = np.zeros(len(bounds)) if integer else np.maximum(0.0, -np.array(solution.row_dual))
    return MasterProblem(float(amounts @ np.array(values)), amounts, prices)
