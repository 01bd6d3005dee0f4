"""The same program under torchrun: rank 0 plans, all train."""

import importlib
import json
import os
import sys
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _abort_process_group
from torch.distributed.rendezvous import rendezvous

from cost_model.errors import InputError
from hetpipe.data.task import TaskFactory
from hetpipe.runtime.processes import Emit, RankGroup, open_default_group
from hetpipe.runtime.stopping import Stopping, signals_heard
from hetpipe.training.rank import train_rank

_KEY = "run"
PLANNING_TIMEOUT_S = 3600.0


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
    store = _store()
    store.set(_KEY, json.dumps(what))
    _train(store, what, on_event, make_task, stopping)


def follow(make_task: TaskFactory | None = None) -> NoReturn:
    """Wait, as any other rank, for the plan of rank 0, train, and end the process.

    make_task: what this process trains; None for what rank 0 named.

    NOTE: on a busy host gloo's threads sometimes abort a process whose interpreter is being taken down
    ("terminate called without an active exception"); ranks that the launcher forks skip that too.
    """
    store = _store()
    store.wait([_KEY], timedelta(seconds=PLANNING_TIMEOUT_S))
    with signals_heard() as stopping:
        _train(store, json.loads(store.get(_KEY)), lambda event: None, make_task, stopping)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _name_of(make_task: TaskFactory) -> list[str] | None:
    """Return where another process finds the function; None for an object that each process has made."""
    name = getattr(make_task, "__qualname__", None)
    return None if name is None else [make_task.__module__, name]


def _train(
    store: Store,
    what: dict[str, Any],
    on_event: Emit,
    make_task: TaskFactory | None,
    stopping: Stopping,
) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(what["threads"][rank])
    world = int(os.environ["WORLD_SIZE"])
    open_default_group(what["backend"], store, rank, world, what["timeout_s"])
    try:
        if make_task is None:
            if what["task"] is None:
                raise InputError("rank 0 trains a model of its own; run the same script on all ranks")
            module, name = what["task"]
            make_task = getattr(importlib.import_module(module), name)
        train_rank(what["folder"], make_task, what["handover"], rank=rank, emit=on_event, stopping=stopping)
    except BaseException:
        # NOTE: to destroy them would wait, with NCCL, for messages of ranks that are gone
        _abort_process_group()
        raise
    dist.destroy_process_group()


def _store() -> Store:
    """Return the store of the agent, with a prefix of this attempt.

    NOTE: torch 2.13 hands the store of the first attempt to later ones, whose ranks then connect to addresses
    of processes that are gone; a prefix of our own makes restarts come up.
    """
    store, _, _ = next(rendezvous("env://"))
    return PrefixStore(f"hetpipe{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
