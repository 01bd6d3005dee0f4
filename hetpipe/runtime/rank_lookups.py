"""What each computation and message of a rank's list needs, looked up once for all steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetpipe.models.mixed_precision import travels_in
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import (
    Compute,
    Direction,
    Message,
    Pass,
    Program,
    Transfer,
    incoming,
    outgoing,
)
from hetpipe.runtime.transport import release_points

Shaped = tuple[int, int, Pass, torch.dtype | None]
"""Layer, samples, direction and dtype of a received message: what its shapes depend on within a step."""


@dataclass(frozen=True, slots=True)
class Computation:
    """The neighbours of a computation in its program, looked up once for all steps.

    message: what it waits for; receive: the end of it here, None where this rank made it. made: what is sent
    of its result; kept: this rank's next stage takes it. releases: sends that are proven to have arrived.
    """

    compute: Compute
    message: Message | None
    receive: Transfer | None
    made: Message | None
    kept: bool
    releases: tuple[Transfer, ...]
    nominal_s: float


def computations_of(costs: ProgramCosts, rank: int) -> dict[int, Computation]:
    """Return the computations of a rank by their place in its list."""
    program = costs.program
    releases, local = release_points(program, rank), program.local_boundaries
    found: dict[int, Computation] = {}
    for index, compute in enumerate(program.ranks[rank]):
        if isinstance(compute, Compute):
            stages = costs.stages[compute.pipeline]
            first_backward = program.first_backward[compute.pipeline]
            message, made = incoming(compute, stages), outgoing(compute, stages, first_backward)
            receive = None
            if message is not None and message[1:3] not in local:
                receive = Transfer(
                    Direction.RECV, compute.op, compute.pipeline, compute.stage, compute.microbatch
                )
            found[index] = Computation(
                compute,
                message,
                receive,
                made,
                made is not None and made[1:3] in local,
                releases.get(index, ()),
                costs.compute_s(rank, compute),
            )
    return found


def crossing(
    program: Program, rank: int, wires: Sequence[torch.dtype]
) -> tuple[dict[int, Message], dict[int, Shaped]]:
    """Return, by place in a rank's list, the messages of sends and the `Shaped` of receives.

    wires: as for `Executor`.
    """
    sent: dict[int, Message] = {}
    received: dict[int, Shaped] = {}
    for index, transfer in enumerate(program.ranks[rank]):
        if isinstance(transfer, Transfer) and transfer.direction is Direction.SEND:
            sent[index] = transfer.message
        elif isinstance(transfer, Transfer):
            layer = program.pipeline(transfer).stages[transfer.boundary].start
            giver, taker = (program.rank_of(transfer.pipeline, transfer.boundary + side) for side in (-1, 0))
            wire = travels_in(wires[giver], wires[taker]) if wires else None
            received[index] = (layer, program.samples(transfer), transfer.op, wire)
    return sent, received
