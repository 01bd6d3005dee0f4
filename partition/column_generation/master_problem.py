"""The linear programme over pipelines, and its integer form (HiGHS; passed as one matrix)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import highspy
import numpy as np

from partition.estimates.arrays import Floats

MOST_NODES = 100
"""Of the branch and bound of an integer programme: a limit of work, so that plans do not depend on time.

On 16 to 1,024 devices most programmes took one node and none more than 29, some 12 ms each.
"""
MISSING = 1e3  # what is missing of a demand costs so many times the samples of the best column
MET = 1e-6  # of a demand that may be missing, for rounding


@dataclass(frozen=True, slots=True)
class Limits:
    """What a set of pipelines has to keep, beside that there are only so many devices of a class.

    needed: classes of which every device has to serve.
    """

    most_pipelines: int | None = None
    fewest_pipelines: int = 0
    most_devices: int | None = None
    needed: tuple[int, ...] = ()

    @property
    def demanding(self) -> bool:
        """Whether a set may break them by having too little."""
        return bool(self.fewest_pipelines or self.needed)

    def left(self, num_pipelines: int, num_devices: int, left: Sequence[float]) -> "Limits":
        """Return the limits for what comes beside some pipelines that leave so many devices of each class."""
        pipelines, devices = self.most_pipelines, self.most_devices
        return replace(
            self,
            most_pipelines=None if pipelines is None else pipelines - num_pipelines,
            fewest_pipelines=max(0, self.fewest_pipelines - num_pipelines),
            most_devices=None if devices is None else devices - num_devices,
            needed=tuple(index for index in self.needed if left[index] > 0),
        )


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class MasterProblem:
    """The linear programme's answer: samples done, pipelines of each column, price of each class.

    each: what being one more pipeline costs beside its devices. met: whether the demands of the limits are;
    where they are not prices, negative where a demand asks for more, tell which pipelines would meet them.
    """

    samples: float
    amounts: Floats
    prices: Floats
    each: float = 0.0
    met: bool = True


class MasterProgramme:
    """The linear programme over columns that stay the same, whatever samples they do; owns its solver.

    Each time it is solved as if it were new, so that the answer does not depend on what was asked before.
    """

    def __init__(
        self,
        uses: Sequence[Sequence[int]],
        counts: Sequence[float],
        limits: Limits = NO_LIMITS,
        *,
        integer: bool = False,
    ) -> None:
        """Build it. uses: by [column, class]; counts: devices of each class; integer: whole pipelines."""
        matrix, self._classes = np.array(uses, dtype=np.float64).T, len(counts)
        upper, demand = list(map(float, counts)), np.zeros(len(counts))
        demand[list(limits.needed)] = np.array(upper)[list(limits.needed)]
        if limits.most_pipelines is not None:
            matrix = np.vstack([matrix, np.ones(len(uses))])
            upper.append(float(limits.most_pipelines))
            demand = np.append(demand, limits.fewest_pipelines)
        if limits.most_devices is not None:
            matrix = np.vstack([matrix, matrix[: self._classes].sum(axis=0)])
            upper.append(float(limits.most_devices))
            demand = np.append(demand, 0.0)
        demanded = np.flatnonzero(demand)
        missing = np.zeros((len(upper), len(demanded)))  # [row, what is missing of a demand]
        missing[demanded, np.arange(len(demanded))] = 1.0
        self._limits, self._integer, self._demand, self._missing = limits, integer, demand, demand[demanded]
        self._columns = np.arange(len(uses) + len(demanded), dtype=np.int32)
        programme = _programme(np.hstack([matrix, missing]), upper, demand)
        self._solver = solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        if integer:
            programme.integrality_ = [highspy.HighsVarType.kInteger] * len(self._columns)
            solver.setOptionValue("mip_max_nodes", MOST_NODES)
            solver.setOptionValue("mip_rel_gap", 1e-3)
        solver.passModel(programme)

    def solve(self, values: Sequence[float], enough: float | None = None) -> MasterProblem:
        """Maximise the samples, of which one pipeline of each column does `values`.

        Columns that do nothing meet no demand. enough: whole pipelines that do so many samples will do.
        """
        solver, columns, num_missing = self._solver, self._columns, len(self._missing)
        gains = np.append(values, np.full(num_missing, -MISSING * max(1.0, *values)))
        solver.changeColsCost(len(columns), columns, -gains)  # HiGHS minimises
        if num_missing:
            idle = np.array(values) <= 0
            upper = np.append(np.where(idle, 0.0, highspy.kHighsInf), self._missing)
            solver.changeColsBounds(len(columns), columns, np.zeros(len(columns)), upper)
        if enough is not None:
            solver.setOptionValue("objective_target", -enough)
        solver.clearSolver()
        solver.run()
        solution = solver.getSolution()
        amounts = np.maximum(np.array(solution.col_value), 0.0)
        met = not (amounts[len(values) :] > MET).any()
        amounts = amounts[: len(values)]
        duals = np.zeros(len(self._demand)) if self._integer else -np.array(solution.row_dual)
        duals = np.where(self._demand > 0, duals, np.maximum(0.0, duals))
        prices, others = duals[: self._classes], list(duals[self._classes :])
        each = others.pop(0) if self._limits.most_pipelines is not None else 0.0
        samples = float(amounts @ np.array(values))
        return MasterProblem(samples, amounts, prices + sum(others), float(each), met)


def solve_master(
    uses: Sequence[Sequence[int]],
    values: Sequence[float],
    counts: Sequence[float],
    limits: Limits = NO_LIMITS,
    *,
    integer: bool = False,
    enough: float | None = None,
) -> MasterProblem:
    """Return what `MasterProgramme` says of columns that are asked for once."""
    return MasterProgramme(uses, counts, limits, integer=integer).solve(values, enough)


def _programme(matrix: Floats, upper: Sequence[float], lower: Floats) -> highspy.HighsLp:
    """Return the programme of columns that are worth nothing, with rows of the matrix in bounds."""
    rows, columns = np.nonzero(matrix)
    programme = highspy.HighsLp()
    programme.num_col_, programme.num_row_ = matrix.shape[1], len(upper)
    programme.col_cost_ = np.zeros(matrix.shape[1])
    programme.col_lower_ = np.zeros(matrix.shape[1])
    programme.col_upper_ = np.full(matrix.shape[1], highspy.kHighsInf)
    programme.row_lower_ = np.where(lower > 0, lower, -highspy.kHighsInf)
    programme.row_upper_ = np.array(upper)
    programme.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(upper)))])
    programme.a_matrix_.start_ = starts
    programme.a_matrix_.index_ = columns
    programme.a_matrix_.value_ = matrix[rows, columns]
    return programme
