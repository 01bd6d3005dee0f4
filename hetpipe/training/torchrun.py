"""The same program under torchrun: rank 0 plans, all train.

The store of torchrun's agent answers whoever reaches its port. So it is asked for one number alone, the port
at which rank 0 listens on loopback; the rest goes through a store there, at which each process proves a
token. What a process trains it knows itself: nobody names it a module to load.
"""

import json
import os
import sys
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _abort_process_group
from torch.distributed.rendezvous import rendezvous

from cost_model.errors import InputError
from hetpipe.data.task import TaskFactory
from hetpipe.runtime.processes import Emit, RankGroup, WorkerLostError, open_default_group
from hetpipe.runtime.remote_store import STORE, RemoteStore, StoreServer
from hetpipe.runtime.stopping import Stopping, signals_heard
from hetpipe.training.rank import train_rank
from hetpipe.trust.channel import Channel, ChannelError, Listener, listening_socket
from hetpipe.trust.token import token_for

_PORT, _RUN = "port", "run"
_LOOPBACK = "127.0.0.1"
PLANNING_TIMEOUT_S = 7 * 86400.0
"""Long texts may be split for hours before; where rank 0 fails torchrun ends the others anyway."""

MEETING_TIMEOUT_S = 60.0


def lead(
    folder: str,
    make_task: TaskFactory,
    handover: str,
    group: RankGroup,
    on_event: Emit,
    stopping: Stopping,
) -> None:
    """Tell the others, as rank 0, what was planned, and train with them until the end, or a signal to any.

    Raises: InputError if torchrun started another number of processes than the plan has devices, or on
        several hosts.
    """
    world = int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
        raise InputError(
            "torchrun started processes on several hosts, whose devices it does not tell apart; start one "
            "hetpipe on each host instead, with --rendezvous"
        )
    if world != len(group.names):
        raise InputError(
            f"torchrun started {world} processes, the plan uses {len(group.names)} devices "
            f"({', '.join(group.names)}); start it with --nproc-per-node {len(group.names)}"
        )
    what = {
        "folder": os.path.abspath(folder),
        "task": _name_of(make_task),
        "handover": handover,
        "threads": group.threads,
        "backend": group.backend,
        "timeout_s": group.timeout_s,
    }
    listener = Listener(listening_socket((_LOOPBACK, 0)), _token(), partial(_serve, StoreServer()))
    try:
        port = listener.address[1]
        store = _proven_store(port)
        store.set(_RUN, json.dumps(what))
        _agents_store().set(_PORT, str(port))
        _train(store, what, on_event, make_task, stopping)
    finally:
        listener.close()


def follow(make_task: TaskFactory) -> NoReturn:
    """Wait, as any other rank, for the plan of rank 0, train, and end the process.

    make_task: what this process trains.

    Raises: InputError if rank 0 trains something else; WorkerLostError if it does not prove the token.

    NOTE: on a busy host gloo's threads sometimes abort a process whose interpreter is being taken down
    ("terminate called without an active exception"); ranks that the launcher forks skip that too.
    """
    agents = _agents_store()
    agents.wait([_PORT], timedelta(seconds=PLANNING_TIMEOUT_S))
    with signals_heard() as stopping:
        store = _proven_store(_port_in(agents.get(_PORT)))
        what = json.loads(store.get(_RUN))
        if what["task"] != _name_of(make_task):
            raise InputError("rank 0 trains something else than this rank; run the same script on all ranks")
        _train(store, what, lambda event: None, make_task, stopping)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _name_of(make_task: TaskFactory) -> list[str] | None:
    """Return where the function is defined; None for an object that each process has made."""
    name = getattr(make_task, "__qualname__", None)
    return None if name is None else [make_task.__module__, name]


def _train(
    store: Store,
    what: dict[str, Any],
    on_event: Emit,
    make_task: TaskFactory,
    stopping: Stopping,
) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(what["threads"][rank])
    world = int(os.environ["WORLD_SIZE"])
    open_default_group(what["backend"], store, rank, world, what["timeout_s"])
    try:
        train_rank(what["folder"], make_task, what["handover"], rank=rank, emit=on_event, stopping=stopping)
    except BaseException:
        # NOTE: to destroy them would wait, with NCCL, for messages of ranks that are gone
        _abort_process_group()
        raise
    dist.destroy_process_group()


def _serve(server: StoreServer, channel: Channel) -> None:
    """Answer another rank, in a thread of its own, once it has said what it wants."""
    if channel.receive(MEETING_TIMEOUT_S)[0] != {"purpose": STORE}:
        raise ChannelError(f"{channel.peer} asks for something else than the store")
    server.serve(channel)


def _proven_store(port: int) -> RemoteStore:
    """Return the store of rank 0, which has proven the token."""
    try:
        return RemoteStore((_LOOPBACK, port), _token(), MEETING_TIMEOUT_S)
    except ChannelError as error:
        raise WorkerLostError(f"rank {os.environ['RANK']} does not reach rank 0: {error}") from None


def _port_in(said: bytes) -> int:
    """Return the port in what the agent's store says, whoever has put it there.

    >>> _port_in(b"29500")
    29500
    """
    number = int(said) if said.isdigit() and len(said) < 6 else 0
    if not 0 < number < 2**16:
        raise WorkerLostError(
            "the store of torchrun names no port of rank 0; does something else write there?"
        )
    return number


def _token() -> bytes:
    """Return the token of this start of the processes by torchrun: an old port of another is no use."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "WORLD_SIZE")
    return token_for("torchrun", *(os.environ.get(name, "") for name in names))


def _agents_store() -> Store:
    """Return the store of the agent, with a prefix of this attempt.

    NOTE: torch 2.13 hands the store of the first attempt to later ones; a prefix of our own makes restarts
    come up.
    """
    store, _, _ = next(rendezvous("env://"))
    return PrefixStore(f"hetpipe{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
