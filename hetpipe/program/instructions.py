"""The instructions, and the program that the simulator and the executor both read."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from cost_model.collectives import Collective
from cost_model.profile import ModelProfile
from cost_model.sharding import Sharding
from partition.plan import Pipeline, Plan, Stage

FORMAT = "hetpipe.program/1"


class Pass(StrEnum):
    """The kind of work that a stage does with a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    __hash__ = (
        str.__hash__
    )  # that of an enumeration is Python, and keys of instructions are hashed very often


class Direction(StrEnum):
    """The two ends of a message."""

    SEND = "SEND"
    RECV = "RECV"
    __hash__ = str.__hash__


class Schedule(StrEnum):
    """The order of the computations of a program.

    1f1b: 1F1B at every stage; a device that serves several takes them as `list_scheduling` says. gpipe: all
    forwards of a device before its backwards. interleaved: `interleaved_one_f_one_b`. list: `list_scheduling`
    on every device. auto: the fastest of these by simulation (`hetpipe.simulation.schedule_selection`).
    """

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    INTERLEAVED = "interleaved"
    LIST = "list"
    AUTO = "auto"


# a program has a million instructions, and a member is looked up more slowly than a name
_FORWARD = Pass.FORWARD
_SEND = Direction.SEND


@dataclass(frozen=True, slots=True)
class Compute:
    """A forward or backward of one microbatch at one stage; it waits for its inputs.

    layer: the only one of the stage that it goes through, where a step goes layer by layer; None for all.
    """

    op: Pass
    pipeline: int
    stage: int
    microbatch: int
    layer: int | None = None

    def __str__(self) -> str:
        text = f"{_route(self.pipeline)}{self.stage}{self.op}{self.microbatch}"
        return text if self.layer is None else f"{text}@{self.layer}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a message: post a send or a receive at this stage and go on.

    op: F for outputs, which go to the next stage; B for gradients, which go to the one before.
    """

    direction: Direction
    op: Pass
    pipeline: int
    stage: int
    microbatch: int

    @property
    def _downstream(self) -> bool:
        return (self.direction is _SEND) == (self.op is _FORWARD)

    @property
    def peer_stage(self) -> int:
        return self.stage + 1 if self._downstream else self.stage - 1

    @property
    def boundary(self) -> int:
        """Return the stage whose input crosses, or whose input's gradient does."""
        return self.stage + 1 if self._downstream else self.stage

    @property
    def message(self) -> "Message":
        """Return the key that both ends share, with no other message of the step."""
        downstream = (self.direction is _SEND) == (self.op is _FORWARD)
        return (self.op, self.pipeline, self.stage + 1 if downstream else self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{_route(self.pipeline)}{self.stage}{self.direction}_{self.op}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Sync:
    """A start of the sum of a bucket's gradients over its owners; the rank goes on meanwhile."""

    bucket: int

    def __str__(self) -> str:
        return f"SYNC{self.bucket}"


@dataclass(frozen=True, slots=True)
class Norm:
    """A wait for all SYNCs, then the sum of squared gradients over all ranks; ends when all have it."""

    def __str__(self) -> str:
        return "NORM"


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer's update."""

    def __str__(self) -> str:
        return "STEP"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A start of spreading a bucket's new parameters from the owner of its states; over when the step is."""

    bucket: int

    def __str__(self) -> str:
        return f"BCAST{self.bucket}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """A start of the sum of one round of a bucket's gradients at the owner, who adds it to those before.

    It waits until the REDUCE before it on the rank is over; then the rank goes on. round: one for each
    backward through the bucket of the rank that has most; one that has fewer gives nothing in the last ones.
    """

    bucket: int
    round: int

    def __str__(self) -> str:
        return f"REDUCE{self.bucket}.{self.round}"


@dataclass(frozen=True, slots=True)
class Gather:
    """A start of fetching a bucket's weights from the owner, for the next computations that use them.

    It waits until all GATHERs but one before it on the rank are over; then the rank goes on. All ranks of the
    bucket fetch together, in the same rounds; under `Plan.fetches_apart` each one for itself, as often as it
    needs them, and the owner has none.
    """

    bucket: int
    round: int

    def __str__(self) -> str:
        return f"GATHER{self.bucket}.{self.round}"


Round = Reduce | Gather
"""What moves a bucket several times in a step."""

Exchange = Sync | Norm | Broadcast | Reduce | Gather
"""An instruction in which several ranks take part at once."""

Instruction = Compute | Transfer | Step | Exchange
Message = tuple[Pass, int, int, int]
"""(op, pipeline, boundary, microbatch) of what crosses between two stages."""


def _route(pipeline: int) -> str:
    return f"{pipeline}:" if pipeline else ""


WHOLE = (0.0, 1.0)
"""The part of a bucket that is no range."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are summed over the same ranks.

    tied: only the parameters that layers[0] shares with the later ones of layers; otherwise all parameters
    of the layers but tied ones. ranks: of a ring in its order, else rising. collective: the tree reduces to
    the first of ranks, which broadcasts.
    nodes: where the collective is hierarchical the ranks by node, the first of each the one that sums.
    state_owner: the one of ranks that has the optimizer states, where they are sharded: gradients are only
    reduced to it, and it broadcasts the new parameters.
    part: the range [start, stop) of the parameters, in [0, 1], where several devices own one each
    (`cost_model.sharding.OwnerRange`).
    """

    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    tied: bool = False
    collective: Collective = Collective.RING
    state_owner: int | None = None
    nodes: tuple[tuple[int, ...], ...] = ()
    part: tuple[float, float] = WHOLE

    @property
    def is_part(self) -> bool:
        """Whether it is a range of a layer's parameters, or of tied ones."""
        return self.part != WHOLE

    @property
    def root(self) -> int:
        """Return the rank to which a tree reduces."""
        return self.ranks[0] if self.state_owner is None else self.state_owner

    def __str__(self) -> str:
        ranks, layers = ",".join(map(str, self.ranks)), ",".join(map(str, self.layers))
        marks = (" tied" if self.tied else "") + (" tree" if self.collective is Collective.TREE else "")
        if self.collective is Collective.HIERARCHICAL:
            marks += " nodes=" + "/".join(",".join(map(str, node)) for node in self.nodes)
        if self.state_owner is not None:
            marks += f" owner={self.state_owner}"
        if self.is_part:
            marks += " part={!r}:{!r}".format(*self.part)
        return f"ranks={ranks} layers={layers}{marks}"

    def num_bytes(self, profile: ModelProfile) -> float:
        """Return the bytes of gradients that each rank gives to the sum, as they are made.

        Those that travel are `Plan.gradient_share` of them.
        """
        share = self.part[1] - self.part[0]
        if self.tied:
            return share * max(profile.tied_bytes(layer) for layer in self.layers[1:])
        return share * sum(map(profile.untied_bytes.__getitem__, self.layers))


@dataclass(frozen=True)  # no slots: ranks are looked up once, programs have thousands
class Program:
    """The instruction list of every rank; rank r drives plan.device_names[r].

    Between neighbouring stages on one rank no message is sent: the tensors stay where they are, and the order
    of the two computations in the list is all that shows it.

    first_trained: the layer of the model below which a stage has no backward, and gets no gradient.
    """

    plan: Plan
    buckets: tuple[Bucket, ...]
    ranks: tuple[tuple[Instruction, ...], ...]
    schedule: Schedule = Schedule.ONE_F_ONE_B  # never AUTO
    first_trained: int = 0

    @property
    def device_names(self) -> tuple[str, ...]:
        return self.plan.device_names

    def pipeline(self, instruction: Compute | Transfer) -> Pipeline:
        return self.plan.pipelines[instruction.pipeline]

    def stage(self, instruction: Compute | Transfer) -> Stage:
        return self.pipeline(instruction).stages[instruction.stage]

    def sharding_of(self, bucket: int) -> Sharding:
        """Return what of a bucket only its owner keeps."""
        return self.plan.sharding_of(self.buckets[bucket].layers[0])

    def ranks_in(self, entry: Round, rank: int) -> tuple[int, ...]:
        """Return the ranks that take part in a round of a rank: it alone in a GATHER of its own."""
        apart = isinstance(entry, Gather) and self.plan.fetches_apart
        return (rank,) if apart else self.buckets[entry.bucket].ranks

    def samples(self, instruction: Compute | Transfer) -> int:
        """Return how many samples the instruction's microbatch has."""
        return self.pipeline(instruction).microbatch_samples(instruction.microbatch)

    @cached_property
    def first_backward(self) -> tuple[int, ...]:
        """Return the first stage of each pipeline that has a backward: it and all after it have one."""
        return tuple(pipeline.first_backward(self.first_trained) for pipeline in self.plan.pipelines)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {name: rank for rank, name in enumerate(self.device_names)}

    def rank_of(self, pipeline: int, stage: int) -> int:
        return self._ranks[self.plan.pipelines[pipeline].stages[stage].device]

    @cached_property
    def local_boundaries(self) -> frozenset[tuple[int, int]]:
        """Return the boundaries (pipeline, stage whose input crosses) with one device at both sides."""
        return frozenset(
            (index, stage)
            for index, pipeline in enumerate(self.plan.pipelines)
            for stage in range(1, len(pipeline.stages))
            if pipeline.stages[stage - 1].device == pipeline.stages[stage].device
        )

    @property
    def text(self) -> str:
        """Return the content of program.txt: readable, and with the plan all that `parse_program` needs."""
        lines = [program_head(self.plan, self.schedule) + self._first_trained_text]
        lines += [f"bucket {index}: {bucket}" for index, bucket in enumerate(self.buckets)]
        for rank, (name, instructions) in enumerate(zip(self.device_names, self.ranks, strict=True)):
            lines.append(f"rank {rank} {name}: {' '.join(map(str, instructions))}")
        return "\n".join(lines) + "\n"

    @property
    def _first_trained_text(self) -> str:
        return f" first_trained={self.first_trained}" if self.first_trained else ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def program_head(plan: Plan, schedule: Schedule) -> str:
    """Return the first line of program.txt; it names the schedule where that is not 1F1B."""
    head = f"{FORMAT} plan={plan.sha256[:16]}"
    return head if schedule is Schedule.ONE_F_ONE_B else f"{head} schedule={schedule}"


def incoming(compute: Compute, stages: Sequence[Stage]) -> Message | None:
    """Return the message, or its own rank's tensors, that a computation waits for; None at the ends.

    stages: of its pipeline.
    """
    layer = compute.layer
    if compute.op is Pass.FORWARD:
        boundary = compute.stage
        if boundary == 0 or (layer is not None and layer != stages[boundary].start):
            return None
        return (compute.op, compute.pipeline, boundary, compute.microbatch)
    boundary = compute.stage + 1
    if boundary == len(stages) or (layer is not None and layer != stages[compute.stage].stop - 1):
        return None
    return (compute.op, compute.pipeline, boundary, compute.microbatch)


def outgoing(compute: Compute, stages: Sequence[Stage], first_backward: int) -> Message | None:
    """Return the message that a computation makes for its microbatch's next one; None at the ends.

    stages: of its pipeline. first_backward: the first of them that has a backward; none before it takes a
    gradient.
    """
    forward = compute.op is Pass.FORWARD
    boundary = compute.stage + 1 if forward else compute.stage
    if not (0 if forward else first_backward) < boundary < len(stages):
        return None
    layer, own = compute.layer, stages[compute.stage]
    if layer is not None and layer != (own.stop - 1 if forward else own.start):
        return None
    return (compute.op, compute.pipeline, boundary, compute.microbatch)
