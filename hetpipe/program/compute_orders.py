"""The order of computations on every rank, by schedule."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Compute, Instruction, Pass, Program, Schedule
from hetpipe.program.list_scheduling import last_backward_s, list_schedule
from hetpipe.program.schedules import breadth_first, interleaved_one_f_one_b, one_f_one_b
from partition.plan import Pipeline, Plan, Stage

Order = tuple[Compute, ...]
Places = Mapping[tuple[int, int], int]
"""A number for each stage (pipeline, stage)."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The computations of every rank in order.

    plan: the one asked for, with as many microbatches in flight as the orders have. last_backward_s: when
    each stage (pipeline, stage) ends its last backward, where a clock has made the orders; else empty.
    """

    plan: Plan
    ranks: tuple[Order, ...]
    last_backward_s: Mapping[tuple[int, int], float]


def compute_orders(
    plan: Plan, profile: ModelProfile, cluster: Cluster | None, schedule: Schedule = Schedule.ONE_F_ONE_B
) -> Orders:
    """Return the orders of a plan under a schedule other than `auto`.

    Raises: InputError if the schedule is not for this plan, or needs a cluster and none is given.
    """
    if schedule is Schedule.INTERLEAVED:
        ranks = _interleaved(plan, profile.first_trained)
        return Orders(with_in_flight(plan, most_in_flight(ranks)), ranks, {})
    if schedule is Schedule.GPIPE or profile.first_trained:
        plan = with_in_flight(plan, _in_flight(plan, profile.first_trained, schedule))
    if plan.breadth_first:
        ranks = tuple(_breadth_first(plan, index) for ((index, _),) in plan.places.values())
        return Orders(plan, ranks, {})
    shared = next((name for name, places in plan.places.items() if len(places) > 1), None)
    if shared is None and schedule is not Schedule.LIST:
        orders = (_one_f_one_b(plan, profile.first_trained, *place) for place in _stages(plan))
        return Orders(plan, tuple(orders), {})
    if cluster is None:
        count = len(plan.places[shared]) if shared else 0
        what = f"device {shared!r} serves {count} stages" if shared else f"the schedule is {schedule!s}"
        raise InputError(f"{what}, whose order depends on their seconds; give the cluster")
    program = Program(plan, (), (), first_trained=profile.first_trained)
    scheduled = list_schedule(ProgramCosts(program, profile, cluster), schedule)
    ranks = tuple(tuple(compute for compute, _ in computations) for computations in scheduled)
    return Orders(plan, ranks, last_backward_s(scheduled))


def _stages(plan: Plan) -> list[tuple[int, int]]:
    """Return all stages (pipeline, stage), those of a device together, devices in the order of the ranks."""
    return [place for places in plan.places.values() for place in places]


def _in_flight(plan: Plan, first_trained: int, schedule: Schedule) -> dict[tuple[int, int], int]:
    """Return the in_flight of each stage: as planned, but all in GPipe and where there is no backward."""

    def in_flight(pipeline: Pipeline, stage: Stage) -> int:
        if schedule is Schedule.GPIPE:
            return pipeline.num_microbatches
        return max(stage.in_flight, pipeline.num_microbatches if stage.stop <= first_trained else 1)

    return {
        (index, number): in_flight(pipeline, stage)
        for index, pipeline in enumerate(plan.pipelines)
        for number, stage in enumerate(pipeline.stages)
    }


def _one_f_one_b(plan: Plan, first_trained: int, index: int, stage: int) -> Order:
    pipeline = plan.pipelines[index]
    backward = pipeline.stages[stage].stop > first_trained
    order = one_f_one_b(range(pipeline.num_microbatches), pipeline.in_flight(stage), backward=backward)
    return tuple(Compute(op, index, stage, microbatch) for op, microbatch in order)


def _breadth_first(plan: Plan, index: int) -> Order:
    pipeline = plan.pipelines[index]
    order = breadth_first(range(pipeline.num_microbatches), pipeline.in_flight(0))
    return tuple(Compute(op, index, 0, microbatch) for op, microbatch in order)


def _interleaved(plan: Plan, first_trained: int) -> tuple[Order, ...]:
    num_devices, num_chunks = _rounds(plan)
    (pipeline,) = plan.pipelines
    first_backward = pipeline.first_backward(first_trained)
    return tuple(
        tuple(
            Compute(op, 0, chunk * num_devices + place, microbatch)
            for op, chunk, microbatch in interleaved_one_f_one_b(
                place, num_devices, num_chunks, pipeline.num_microbatches
            )
            if op is Pass.FORWARD or chunk * num_devices + place >= first_backward
        )
        for place in range(num_devices)
    )


def _rounds(plan: Plan) -> tuple[int, int]:
    """Return (devices, chunks of each) of a plan whose one pipeline visits its devices in equal rounds.

    Raises: InputError if it does not, or visits each once only.
    """
    names = [stage.device for stage in plan.pipelines[0].stages]
    if in_rounds(plan):
        return len(plan.device_names), len(names) // len(plan.device_names)
    if len(plan.pipelines) > 1:
        why = f"this plan has {len(plan.pipelines)} pipelines"
    elif len(names) == len(plan.device_names):
        why = "here each device has one stage"
    else:
        why = f"this one visits {', '.join(names)}"
    raise InputError(
        f"the interleaved schedule is for one pipeline that visits its devices several times, in the same "
        f"order each time; {why}: take the schedule 1f1b or list"
    )


def in_rounds(plan: Plan) -> bool:
    """Return whether one pipeline visits its devices several times, in the same order each time."""
    if len(plan.pipelines) > 1 or len(plan.pipelines[0].stages) == len(plan.device_names):
        return False
    names = tuple(stage.device for stage in plan.pipelines[0].stages)
    return names == plan.device_names * (len(names) // len(plan.device_names))


def most_in_flight(ranks: Iterable[Sequence[Instruction]]) -> dict[tuple[int, int], int]:
    """Return the most microbatches that a stage (pipeline, stage) holds between forward and backward."""
    alive: dict[tuple[int, int], set[int]] = {}
    most: dict[tuple[int, int], int] = {}
    for instructions in ranks:
        for instruction in instructions:
            if isinstance(instruction, Compute):
                key = (instruction.pipeline, instruction.stage)
                held = alive.setdefault(key, set())
                if instruction.op is Pass.FORWARD:
                    held.add(instruction.microbatch)
                else:
                    held.discard(instruction.microbatch)
                most[key] = max(most.get(key, 0), len(held))
    return most


def with_in_flight(plan: Plan, most: Places) -> Plan:
    """Return the plan with other in_flight; the same if none differs, else without its predicted figures."""
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(replace(s, in_flight=most[index, k]) for k, s in enumerate(pipeline.stages)),
        )
        for index, pipeline in enumerate(plan.pipelines)
    )
    return plan if pipelines == plan.pipelines else replace(plan, pipelines=pipelines, predicted=None)
