"""Proves before launch that a program can run: messages have both ends, nothing deadlocks or leaks.

What must hold is derived from the plan here, not asked of the lowering, whose faults it is to find.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from cost_model.cluster import Cluster
from cost_model.collectives import Collective
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from cost_model.sharding import Sharding
from hetpipe.program.collective_parts import check_meetings, meetings
from hetpipe.program.compute_orders import most_in_flight, with_in_flight
from hetpipe.program.costs import check_memory
from hetpipe.program.instructions import (
    WHOLE,
    Broadcast,
    Bucket,
    Compute,
    Direction,
    Gather,
    Norm,
    Pass,
    Program,
    Reduce,
    Round,
    Step,
    Sync,
    Transfer,
    incoming,
    outgoing,
)
from hetpipe.program.layer_rounds import awaited_rounds
from hetpipe.program.lowering import on_gpus
from hetpipe.program.round_verification import verify_rounds
from partition.plan import Plan, Stage
from partition.problem import check_plan

MOST_STREAMS = 31
"""Torch has 32 streams of a priority on a GPU, and gives them out in turn; receives are handed in on one."""


def verify(program: Program, profile: ModelProfile, cluster: Cluster) -> None:
    """Check the program against its plan, the model and the devices.

    Raises: InputError naming the instruction that is wrong; InfeasibleError if a device lacks memory.
    """
    check_plan(program.plan, profile, cluster)
    if program.first_trained != profile.first_trained:
        raise InputError(
            f"the program goes back to layer {program.first_trained}, the first that the profile trains is "
            f"{profile.first_trained}; lower the plan again"
        )
    verify_messages(program)
    verify_computations(program)
    verify_buckets(program, profile)
    verify_rounds(program)
    _verify_nodes(program, cluster)
    gpus = on_gpus(program, cluster)
    verify_order(program, gpus)
    _verify_streams(program, gpus)
    verify_meetings(program)
    check_memory(with_in_flight(program.plan, observed_in_flight(program)), profile, cluster)


def verify_messages(program: Program) -> None:
    """Check that every send has its receive, and both ends of each directed edge have one order.

    Each is on the right rank; nothing is sent between stages of one rank, and no gradient below the first
    trained layer.
    """
    edges: dict[tuple[Direction, int, int], list[object]] = defaultdict(list)
    for rank, instructions in enumerate(program.ranks):
        for entry in instructions:
            if isinstance(entry, Transfer):
                if program.rank_of(entry.pipeline, entry.stage) != rank:
                    raise InputError(f"rank {rank} has {entry}, which belongs to another rank")
                peer = program.rank_of(entry.pipeline, entry.peer_stage)
                if peer == rank:
                    raise InputError(f"rank {rank} has {entry}, whose tensors stay on this rank")
                if entry.op is Pass.BACKWARD and _ends(program, entry.pipeline, entry.boundary):
                    raise InputError(f"rank {rank} has {entry}, a gradient that no layer before it needs")
                edge = (rank, peer) if entry.direction is Direction.SEND else (peer, rank)
                edges[entry.direction, *edge].append(entry.message)
    for source, destination in sorted({(source, destination) for _, source, destination in edges}):
        sent, received = (edges.get((way, source, destination), []) for way in Direction)
        if sent != received:
            pairs = zip([*sent, None], [*received, None], strict=False)
            wrong = next((a, b) for a, b in pairs if a != b)
            raise InputError(
                f"rank {source} sends {wrong[0]} to rank {destination}, which receives {wrong[1]} then"
            )


def _ends(program: Program, pipeline: int, stage: int) -> bool:
    """Return whether no layer before a stage is trained."""
    return program.plan.pipelines[pipeline].stages[stage].start <= program.first_trained


def verify_computations(program: Program) -> None:
    """Check that each stage runs the forward and then the backward of each microbatch once, on its rank.

    The backward is left out of stages that train nothing, nor any stage before them.
    """
    done: set[Compute] = set()
    for rank, instructions in enumerate(program.ranks):
        for entry in instructions:
            if not isinstance(entry, Compute):
                continue
            forward = replace(entry, op=Pass.FORWARD)
            before = None if entry.layer is None else _layer_before(program, entry)
            if before is not None and before != entry and before not in done:
                raise InputError(f"rank {rank} has {entry} before {before}")
            if entry in done or program.rank_of(entry.pipeline, entry.stage) != rank:
                raise InputError(f"rank {rank} has {entry}, which runs elsewhere or before already")
            if entry.op is Pass.BACKWARD and forward not in done:
                raise InputError(f"rank {rank} has {entry} before {forward}")
            if entry.op is Pass.BACKWARD and program.stage(entry).stop <= program.first_trained:
                raise InputError(f"rank {rank} has {entry}, where nothing is trained; lower the plan again")
            done.add(entry)
    by_layer = program.plan.sharding.by_layer
    expected = sum(
        p.num_microbatches * len(_passes(stage, program.first_trained, by_layer=by_layer))
        for p in program.plan.pipelines
        for stage in p.stages
    )
    if len(done) != expected:
        raise InputError(f"the program has {len(done)} computations, the plan needs {expected}")


def _passes(stage: Stage, first_trained: int, *, by_layer: bool) -> list[tuple[Pass, int | None]]:
    """Return the computations of a microbatch at a stage, in order, each with the layer it goes through."""
    if not by_layer:
        return [(op, None) for op in Pass if op is Pass.FORWARD or stage.stop > first_trained]
    back = reversed(range(max(stage.start, first_trained), stage.stop))
    return [
        *((Pass.FORWARD, layer) for layer in range(*stage.layers)),
        *((Pass.BACKWARD, layer) for layer in back),
    ]


def _layer_before(program: Program, entry: Compute) -> Compute:
    """Return what a computation of a layer comes after at its stage; itself if it is the first."""
    passes = _passes(program.stage(entry), program.first_trained, by_layer=True)
    if (entry.op, entry.layer) not in passes:
        raise InputError(f"{entry} goes through a layer that its stage does not have")
    place = passes.index((entry.op, entry.layer))
    op, layer = passes[max(0, place - 1)]
    return replace(entry, op=op, layer=layer)


def verify_buckets(program: Program, profile: ModelProfile) -> None:
    """Check that every gradient of several devices is summed once, over all of them.

    A layer that several devices hold is in one bucket, of these; one that a single device holds is in none.
    So is each group of tied layers, whose owners are those of any of them. Where states are sharded, the sum
    goes to the device that has them; of a layer that several own to each that of its range.
    """
    plan = program.plan
    owners: dict[tuple[int, bool], set[int]] = {}  # by layer, and by the home of tied layers
    for rank, name in enumerate(program.device_names):
        for layer in plan.layers_of(name):
            owners.setdefault((layer, False), set()).add(rank)
    for layer in range(profile.num_layers):
        home = profile.tied_home(layer)
        if home != layer:
            owners.setdefault((home, True), set(owners[home, False])).update(owners[layer, False])
    summed: dict[tuple[int, bool], list[Bucket]] = {}
    for bucket in program.buckets:
        for layer in bucket.layers[:1] if bucket.tied else bucket.layers:
            summed.setdefault((layer, bucket.tied), []).append(bucket)
    for (layer, tied), ranks in owners.items():
        if layer < profile.first_trained:
            ranks = set()  # it has no gradient
        buckets = summed.get((layer, tied), [])
        wanted = owners_of(plan, layer)
        if [set(bucket.ranks) for bucket in buckets] != ([ranks] * len(wanted) if len(ranks) > 1 else []):
            found = " and ".join(str(list(bucket.ranks)) for bucket in buckets) or "none"
            raise InputError(
                f"gradients of {'tied ' if tied else ''}layer {layer} are of ranks {sorted(ranks)}, the "
                f"program sums them over {found}; lower the plan again"
            )
        for bucket, (state_owner, part) in zip(buckets, wanted, strict=False):
            receiver = None if bucket.state_owner is None else program.device_names[bucket.state_owner]
            if receiver != state_owner:
                raise InputError(
                    f"optimizer states of layer {layer} are on {state_owner or 'all its devices'}, the "
                    f"program sums its gradients for {receiver or 'all'}; lower the plan again"
                )
            if bucket.part != part:
                raise InputError(
                    f"{receiver!r} owns {list(part)} of layer {layer}, the program sums {list(bucket.part)} "
                    "of its gradients for it; lower the plan again"
                )


def owners_of(plan: Plan, layer: int) -> list[tuple[str | None, tuple[float, float]]]:
    """Return who has the states of a layer, each with the part of it; None where all its devices have."""
    ranges = [(each.device, (each.start, each.stop)) for each in plan.owner_ranges if each.layer == layer]
    return [*ranges] or [(None if plan.state_owners is None else plan.state_owners[layer], WHOLE)]


def _verify_nodes(program: Program, cluster: Cluster) -> None:
    """Check that hierarchical sums go over the nodes of their owners in the cluster, others over none."""
    for index, bucket in enumerate(program.buckets):
        on_node: dict[str, list[int]] = {}
        if bucket.collective is Collective.HIERARCHICAL:
            for rank in bucket.ranks:
                on_node.setdefault(cluster.device(program.device_names[rank]).node, []).append(rank)
        expected = tuple(map(tuple, on_node.values()))
        if bucket.nodes != expected or (expected and bucket.state_owner is not None):
            raise InputError(
                f"bucket {index} is summed over the nodes {list(bucket.nodes)}, in the cluster its owners "
                f"are on {list(expected)}; lower the plan again"
            )


def verify_meetings(program: Program) -> None:
    """Check that any two collectives of one group are handed in in the same order by all its members.

    On the host as well as between GPUs, since a program is for both.
    """
    for on_host in (True, False):
        check_meetings(meetings(program, on_host=on_host))


def verify_order(program: Program, gpus: Sequence[bool] = ()) -> None:
    """Check that nothing deadlocks: run all lists, a computation only after its message was sent.

    Between two GPUs nothing after a receive is done before its message was sent: see `lowering.on_gpus`.
    Then come SYNC, NORM, STEP and the broadcasts. gpus: by rank; () if none is.
    """
    for rank, instructions in enumerate(program.ranks):
        syncs = [index for index, bucket in enumerate(program.buckets) if rank in bucket.ranks]
        tail = [entry for entry in instructions if isinstance(entry, Sync | Norm | Step | Broadcast)]
        broadcasts = [
            Broadcast(index)
            for index in syncs
            if program.sharding_of(index) in (Sharding.STATES, Sharding.GRADIENTS)
        ]
        if program.plan.sharding.by_layer:
            syncs = []
        if tail != [*map(Sync, syncs), Norm(), Step(), *broadcasts]:
            raise InputError(
                f"rank {rank} ends in {' '.join(map(str, tail))}; SYNCs in order, NORM, STEP, and broadcasts "
                "in order of what is sharded belong there"
            )
        if not isinstance(instructions[-2 - len(broadcasts)], Norm):
            raise InputError(f"rank {rank} goes on after its NORM")
    _verify_syncs(program)
    sent: set[object] = set()
    received: set[object] = set()
    position = [0] * len(program.ranks)
    by_layer = program.plan.sharding.by_layer
    awaited = [awaited_rounds(program, rank) if by_layer else {} for rank in range(len(program.ranks))]
    joined: dict[Round, set[int]] = defaultdict(set)
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(program.ranks):
            while position[rank] < len(instructions):
                entry = instructions[position[rank]]
                rounds = awaited[rank].get(position[rank], ())
                if any(not joined[each].issuperset(program.ranks_in(each, rank)) for each in rounds):
                    break
                if isinstance(entry, Reduce | Gather):
                    joined[entry].add(rank)
                elif isinstance(entry, Compute):
                    stages = program.pipeline(entry).stages
                    first_backward = program.first_backward[entry.pipeline]
                    message = incoming(entry, stages)
                    if message is not None and (message not in sent or (rank, message) not in received):
                        break
                    made = outgoing(entry, stages, first_backward)
                    if made is not None and made[1:3] in program.local_boundaries:
                        sent.add(made)
                        received.add((rank, made))
                elif isinstance(entry, Transfer):
                    if entry.direction is Direction.SEND:
                        sent.add(entry.message)
                    else:
                        peer = program.rank_of(entry.pipeline, entry.peer_stage)
                        if gpus and gpus[rank] and gpus[peer] and entry.message not in sent:
                            break
                        received.add((rank, entry.message))
                position[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {instructions[position[rank]]}"
        for rank, instructions in enumerate(program.ranks)
        if position[rank] < len(instructions)
    ]
    if stuck:
        raise InputError(f"the program deadlocks: {'; '.join(stuck)}")


def _verify_streams(program: Program, gpus: Sequence[bool]) -> None:
    """Check that no message between GPUs shares its stream with another way that messages take."""
    for rank, instructions in enumerate(program.ranks):
        transfers = [entry for entry in instructions if isinstance(entry, Transfer)]
        peers = {(entry.direction, program.rank_of(entry.pipeline, entry.peer_stage)) for entry in transfers}
        between = sum(gpus[rank] and gpus[peer] for _, peer in peers)
        if between > MOST_STREAMS:
            raise InputError(
                f"{program.device_names[rank]!r} has {between} ways to and from other GPUs, of which torch "
                f"keeps {MOST_STREAMS} apart; let it serve fewer pipelines"
            )


def _verify_syncs(program: Program) -> None:
    """Check that no backward adds to the gradients of a layer whose SYNC came before it on its rank."""
    for rank, instructions in enumerate(program.ranks):
        summed: dict[int, Sync] = {}  # by layer
        for instruction in instructions:
            if isinstance(instruction, Sync):
                layers = program.buckets[instruction.bucket].layers
                summed.update(dict.fromkeys(layers, instruction))
            elif summed and isinstance(instruction, Compute) and instruction.op is Pass.BACKWARD:
                early = [
                    summed[layer] for layer in range(*program.stage(instruction).layers) if layer in summed
                ]
                if early:
                    raise InputError(f"rank {rank} has {early[0]} before {instruction}, which it needs")


def observed_in_flight(program: Program) -> dict[tuple[int, int], int]:
    """Return the most microbatches that a stage (pipeline, stage) holds between forward and backward."""
    return most_in_flight(program.ranks)
