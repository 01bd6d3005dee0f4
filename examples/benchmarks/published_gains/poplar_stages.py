"""Poplar's allocation beside equal shares under the same stage of ZeRO, as its paper compares."""

from collections.abc import Iterator

from cost_model.errors import InfeasibleError
from cost_model.sharding import Sharding
from hetpipe.simulation.prediction import evaluator
from partition.baselines.catalogue import BASELINES
from partition.baselines.data_parallel import ddp
from partition.baselines.poplar_steps import sharded_replicas
from partition.baselines.strategy import least_of, shortfall
from partition.baselines.whole_models import sharded
from partition.explanation.gains import with_ample_memory
from partition.plan import Plan
from partition.problem import Evaluate, Problem


def stage_rows(problem: Problem) -> Iterator[str]:
    """Yield a row of markdown for each ZeRO stage: both steps, the gain, and what of it is computation."""
    ample = with_ample_memory(problem)
    for zero in range(4):
        even_s, own_s = step_s(problem, zero, even=True), step_s(problem, zero, even=False)
        balance = ratio(step_s(ample, zero, even=True), step_s(ample, zero, even=False))
        gain = ratio(even_s, own_s)
        memory = gain / balance if gain is not None and balance is not None else None
        cells = [str(zero), _seconds(even_s), _seconds(own_s), _text(gain), _text(balance), _text(memory)]
        yield f"| {' | '.join(cells)} |"


def step_s(problem: Problem, zero: int, *, even: bool) -> float | None:
    """Return the predicted step under a ZeRO stage; None where no plan fits."""
    evaluate = evaluator(problem.profile, problem.cluster)
    try:
        plan = (
            equal_shares(problem, zero, evaluate) if even else BASELINES[f"poplar-{zero}"](problem, evaluate)
        )
    except InfeasibleError:
        return None
    return evaluate(plan).step_s


def equal_shares(problem: Problem, zero: int, evaluate: Evaluate) -> Plan:
    """Return equal shares and microbatches on all devices, of the microbatch size that is fastest.

    Raises: InfeasibleError if none fits.
    """
    if zero == 0:
        return ddp(problem)
    if zero == 1:
        return sharded(problem, ddp)
    fitting, errors = [], []
    for size in problem.microbatch_sizes:
        sizes = {device.name: size for device in problem.cluster.devices}
        plan = sharded_replicas(f"even-{zero}", problem, Sharding(zero), sizes)
        lacking = shortfall(problem, plan)
        if lacking is None:
            fitting.append(plan)
        else:
            errors.append(lacking)
    if not fitting:
        raise least_of(f"even-{zero}", errors)
    return min(fitting, key=lambda plan: evaluate(plan).step_s)


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below is not None else None


def _seconds(step: float | None) -> str:
    return "does not fit" if step is None else f"{step:.2f}"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
