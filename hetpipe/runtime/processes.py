"""The launcher: a process per rank on this host, whose reports it relays, and ends all when one fails."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_model.errors import InfeasibleError, InputError
from hetpipe.runtime import heartbeats
from hetpipe.runtime.gpus import before_cuda
from hetpipe.runtime.rank_server import (
    die_with_parent,
    environment_at_start,
    is_read_by_a_rank,
    main_as_ranks_see_it,
    rank_context,
)
from hetpipe.runtime.rank_watch import Watch
from hetpipe.runtime.scratch import scratch_folder
from hetpipe.runtime.stopping import leave_signals_to_launcher

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Emit = Callable[[dict[str, Any]], object]
"""Takes an event. What a rank emits is taken in the launcher's process, and the rank gets back whether the
answer there was True."""
RankMain = Callable[..., None]
"""What a rank runs: main(*arguments, rank=..., emit=...); importable, since it is pickled by name."""

LOOPBACK = "lo"
SLOWDOWN_VARIABLE = "HETPIPE_EMULATED_SLOWDOWN"
"""The name of what makes emulated devices slower, for trials (`hetpipe.runtime.pace`)."""
GATHER_ERRORS_S = 0.5
END_S = 3.0
NOTICED_AFTER_S = 0.05  # peers of a rank that disappears may report before its end is noticed
UNGUARDED = 76
"""Exit code of a process that, about to be a rank, reads a script which starts ranks as it is read."""
_UNGUARDED = (
    "the script starts training whenever it is read, and each rank reads it; put what it does behind "
    "if __name__ == '__main__':"
)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_KNOWN = {"InputError": InputError, "InfeasibleError": InfeasibleError}


class WorkerLostError(RuntimeError):
    """A failure or loss of a rank, the first with its message. The command line exits with 5."""


OpenStore = Callable[[int], "Store"]
"""Opens, in a rank, the store over which so many ranks meet; picklable, since ranks are processes."""


def under_torchrun() -> bool:
    """Return whether torchrun, or what sets the same variables, started this; InputError if one is wrong."""
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return False
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not (value := os.environ[name]).isdecimal():
            raise InputError(f"{name} is {value!r} in the environment, and no number; unset it")
    return True


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The start of the ranks: a name and CPU threads for each, modules to load before they fork.

    parts: what each rank runs, such as "layers 3 to 5", for messages; () where there is nothing to say.
    local: those that this host starts; None for all. first: the one that reports, on the leader's host.
    interface: the network interface over which ranks reach one another; what GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME name goes before.
    store: where the ranks of all hosts meet; None for a file that only this host sees.
    """

    names: tuple[str, ...]
    threads: tuple[int, ...]
    backend: str = "gloo"
    preload: tuple[str, ...] = ()
    timeout_s: float = 600.0
    parts: tuple[str, ...] = ()
    local: tuple[int, ...] | None = None
    first: int = 0
    interface: str = LOOPBACK
    store: OpenStore | None = field(default=None, repr=False)

    @property
    def here(self) -> tuple[int, ...]:
        """Return the ranks that this host starts, in order."""
        return tuple(range(len(self.names))) if self.local is None else self.local


def leave_if_read_by_a_rank() -> None:
    """End this process if it is about to be a rank, and reads a script that trains whenever it is read."""
    if is_read_by_a_rank():
        os._exit(UNGUARDED)


def run_ranks(
    main: RankMain,
    arguments: Sequence[Any],
    group: RankGroup,
    on_event: Emit = lambda event: None,
    *,
    alarm: Connection | None = None,
) -> None:
    """Run main on every rank of this host until all have ended.

    Ranks are processes of a forkserver that has torch loaded (0.2 s to start four, 60 MiB each). However
    this ends, no rank is left over: they are ended here, and end themselves if this process is killed.

    on_event: called with what the ranks emit; the rank goes on when it returns. alarm: gives errors of ranks
    on other hosts, as events {"event": "error", "rank", "type", "text", "when_s"}, which end those here;
    told: True if the text names the rank.

    Raises: WorkerLostError with the first error of a rank; InputError and InfeasibleError as raised there.
    Each has the event of the error as its attribute `report`.
    """
    leave_if_read_by_a_rank()
    context = rank_context((main.__module__, *group.preload))
    with scratch_folder("store") as folder, environment_at_start():
        processes: list[BaseProcess] = []
        connections: list[Connection] = []
        try:
            beats = folder / "beats"
            seen = Watch(
                beats, group.here, lambda rank: _is_stopped(processes[group.here.index(rank)]),
                group.names, group.parts,
            )  # fmt: skip
            for row, rank in enumerate(group.here):
                launcher_end, rank_end = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(
                        rank_end,
                        rank,
                        group,
                        folder / "store",
                        (beats, row),
                        main,
                        tuple(arguments),
                        os.environ.get(SLOWDOWN_VARIABLE, ""),
                    ),
                    name=f"hetpipe rank {rank}",
                )
                try:
                    with main_as_ranks_see_it():
                        process.start()
                except BrokenPipeError:  # it ended while it was given its arguments
                    raise InputError(_UNGUARDED) from None
                rank_end.close()
                processes.append(process)
                connections.append(launcher_end)
            _watch(processes, connections, group, on_event, seen, alarm)
        finally:
            _end(processes)
            for connection in connections:
                connection.close()


def _watch(
    processes: list[BaseProcess],
    connections: list[Connection],
    group: RankGroup,
    on_event: Emit,
    seen: Watch,
    alarm: Connection | None = None,
) -> None:
    errors: list[dict[str, Any]] = []
    open_ends = dict(zip(connections, group.here, strict=True))
    alarms = [] if alarm is None else [alarm]
    done: set[int] = set()
    deadline = float("inf")
    while open_ends and time.monotonic() < deadline:
        left_s = min(heartbeats.LOOK_S, max(0.0, deadline - time.monotonic()))
        for connection in wait([*alarms, *open_ends], left_s):
            assert isinstance(connection, Connection)
            if connection is alarm:
                errors += _alarms_of(alarms)
                continue
            rank = open_ends[connection]
            try:
                event = connection.recv()
            except (EOFError, OSError):
                del open_ends[connection]
                if rank not in done and not any(error["rank"] == rank for error in errors):
                    errors.append(_vanished(processes[group.here.index(rank)], rank, group, seen))
            else:
                if event["event"] == "error":
                    errors.append({**event, "rank": rank})
                elif event["event"] == "done":
                    done.add(rank)
                else:
                    answer = on_event(event) is True
                    with contextlib.suppress(OSError):  # that a rank is gone is noticed above
                        connection.send(answer)
        if not errors and (found := seen.look(done)) is not None:
            errors.append(_error(found.rank, found.text, time.monotonic(), found.silent_s))
        if not errors and (told := seen.silence(done)) is not None:
            on_event({"event": "told", "text": told})
        if errors and deadline == float("inf"):
            # others fail because of the first; wait a moment to see which that was
            deadline = time.monotonic() + GATHER_ERRORS_S
    if errors:
        stopped = tuple(group.here[index] for index, process in enumerate(processes) if _is_stopped(process))
        _raise_first(errors, group, stopped)


def _alarms_of(alarms: list[Connection]) -> list[dict[str, Any]]:
    """Take an error of another host; none, and no more to wait for, where nobody can raise one."""
    try:
        return [alarms[0].recv()]
    except (EOFError, OSError):
        alarms.clear()
        return []


def _error(rank: int, text: str, when_s: float, silent_s: float) -> dict[str, Any]:
    """Return the event of a loss from outside; silent_s: since the last sign of life."""
    return {
        "event": "error", "rank": rank, "type": "", "text": text, "when_s": when_s, "silent_s": silent_s
    }  # fmt: skip


def _vanished(process: BaseProcess, rank: int, group: RankGroup, seen: Watch) -> dict[str, Any]:
    noticed_s, silent_s = time.monotonic() - NOTICED_AFTER_S, seen.silent_s(rank)
    process.join(END_S)
    code = process.exitcode
    if code == UNGUARDED:
        return _error(rank, _UNGUARDED, noticed_s, silent_s) | {"type": InputError.__name__}
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    if code is not None and -code in _CRASHES:
        how += f" ({signal.strsignal(-code)} in compiled code; PYTHONFAULTHANDLER=1 shows where)"
    if full := code == -signal.SIGKILL and seen.out_of_memory:
        how += " when this host was out of memory"
    return _error(rank, f"rank {rank} ({group.names[rank]}) {how}", noticed_s, silent_s) | {"full": full}


def _is_stopped(process: BaseProcess) -> bool:
    """Return whether a signal has stopped the process, so that others wait for it in vain (Linux)."""
    try:
        state = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] in ("T", "t")  # after the name, which may hold anything


def _raise_first(errors: list[dict[str, Any]], group: RankGroup, stopped: Sequence[int]) -> None:
    if any(not error["type"] for error in errors):  # who lost a peer may say so before the loss is seen
        errors = [error for error in errors if error["type"] != "PeerError"]
    first = min(errors, key=lambda error: error["when_s"])
    known: type[Exception] | None = _KNOWN.get(first["type"])
    text = first["text"]
    if known is None and not first.get("told"):
        if first["type"]:
            text = f"rank {first['rank']} ({group.names[first['rank']]}) failed: {text}"
        for rank in stopped if first["type"] else ():
            text += f"; rank {rank} ({group.names[rank]}) is stopped (SIGSTOP, or a debugger)"
    error = (known or WorkerLostError)(text)
    error.report = {**first, "text": text, "told": True}  # type: ignore[attr-defined]
    raise error


def _end(processes: list[BaseProcess]) -> None:
    """End what still runs; ranks hold nothing that they would have to give back."""
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _rank_main(
    connection: Connection,
    rank: int,
    group: RankGroup,
    store: Path,
    beats: tuple[Path, int],
    main: RankMain,
    arguments: tuple[Any, ...],
    slowdown: str,
) -> None:
    """Live the life of a rank: process group, main, and a last word about how it ended.

    beats: the table of `heartbeats`, and the row of this rank there. slowdown: what the launcher's
    environment says of it now; the server that forks has that of when it was started.
    """
    os.environ[SLOWDOWN_VARIABLE] = slowdown

    def emit(event: dict[str, Any]) -> bool:
        connection.send(event)
        return bool(connection.recv())

    die_with_parent()
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    leave_signals_to_launcher()
    try:
        heartbeats.begin(*beats)  # fails where the launcher has ended meanwhile, with its folder
        join_group(rank, group, str(store))
        main(*arguments, rank=rank, emit=emit)
        leave_group()
        connection.send({"event": "done"})
    except BaseException as error:
        from hetpipe.runtime.peer_errors import is_full

        text = str(error) or type(error).__name__
        if type(error).__name__ not in _KNOWN and not isinstance(error, MemoryError):
            text = f"{type(error).__name__}: {text}"
        event = {"event": "error", "type": type(error).__name__, "text": text, "when_s": time.monotonic()}
        event["full"] = is_full(error)
        if os.environ.get("HETPIPE_DEBUG"):
            import traceback

            traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send(event)
        sys.stdout.flush()
        os._exit(1)  # not through destructors that wait for lost peers


def _die_with_launcher() -> None:
    """End this process when the launcher has ended, be it by SIGKILL.

    NOTE: the server that forked it would not end then: it watches a pipe of which every rank inherits the
    launcher's end.
    """
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os._exit(1)


def join_group(rank: int, group: RankGroup, store: str) -> None:
    """Join torch's process group over the group's store, else a file in a folder that only this host sees."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(group.threads[rank])
    world = len(group.names)
    if world > 1:
        meeting = FileStore(store, world) if group.store is None else group.store(world)
        use_interface(group.interface, group.backend)
        open_default_group(group.backend, meeting, rank, world, group.timeout_s)
        # nobody leaves before all have come: gloo's ranks fail to connect where one has gone already
        dist.all_reduce(torch.zeros(1))


def use_interface(interface: str, backend: str) -> None:
    """Have gloo and NCCL listen on one network interface alone, unless the environment names theirs."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if "nccl" in backend:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # = for just that name


def open_default_group(backend: str, store: "Store", rank: int, world: int, timeout_s: float) -> None:
    """Join the process group of all ranks, on loopback unless the environment names an interface."""
    import torch.distributed as dist

    use_interface(LOOPBACK, backend)
    if ":" in backend:
        before_cuda(world)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def leave_group() -> None:
    """Leave the process group, if this process is in one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
