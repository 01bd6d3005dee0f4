"""A device made of Python: its tensors say that they are on "sim" and hold one of the CPU each.

Host and device never meet silently, every wait of the host is counted, and nothing may be used before who
uses it has waited for it (`sim_streams`). There are two devices, of two kinds. Registered with torch's hooks
for backends in Python (PrivateUse1, experimental in torch 2.13), for good: import it in a process of its own
(`run_ranks`). Tensors are wrapper subclasses, so views, strides and autograd are torch's.

NOTE: torch's threads for backwards know of one device in Python only, so backwards run in the thread of who
calls them. And an error in an operation of a backward would end the process, since torch leaves its streams
through Python before it takes the error: it is kept until the backward is over (`_Backwards`).
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from sim_memory import Memory
from sim_module import SimModule
from sim_streams import HOST, Stream, TooEarlyError, Uses, current_stream

WAITS, OPERATIONS, TO_HOST, FROM_HOST, MESSAGES = "waits", "operations", "to host", "from host", "messages"
aten = torch.ops.aten


class _Backwards:
    """The backwards under way, of which the first error is kept to their end."""

    def __init__(self) -> None:
        self._depth = 0
        self._error: Exception | None = None
        self._run = torch.autograd._engine_run_backward

    def fail(self, error: Exception) -> None:
        if not self._depth:
            raise error
        self._error = self._error or error

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            found = self._run(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._error is not None and not self._depth:
            error, self._error = self._error, None
            raise error
        return found


BACKWARDS = _Backwards()
torch.autograd._engine_run_backward = BACKWARDS.run


class Sim:
    """What a device did since `restart`, its memory, and who uses which part of it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.counts: Counter[str] = Counter()
        self.memory = Memory(f"sim:{index}")
        self._uses: dict[int, Uses] = {}
        self._blocks: dict[int, int] = {}
        self._held: Counter[int] = Counter()

    @property
    def stream(self) -> Stream:
        return current_stream(self.index)

    def restart(self) -> None:
        self.counts.clear()
        self.memory.restart()

    def wait(self) -> None:
        """Let the host wait for all that was handed in to the current stream."""
        self.counts[WAITS] += 1
        HOST.learn(self.stream.clock)

    def take(self, raw: torch.Tensor) -> None:
        """Note the memory of a tensor, once for all of its views.

        Raises: torch.OutOfMemoryError if the device has less left.
        """
        storage = raw.untyped_storage()
        key = storage.data_ptr()
        if not key:
            return
        if not self._held[key]:
            retries = self.memory.num_retries
            self._blocks[key], self._uses[key] = 0, Uses()
            try:
                self._blocks[key] = self.memory.take(storage.nbytes())
            except torch.OutOfMemoryError as error:
                BACKWARDS.fail(error)
            if self.memory.num_retries > retries:  # what is kept is given back when the device is idle
                self.wait()
        self._held[key] += 1
        weakref.finalize(raw, self._release, key)

    def _release(self, key: int) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            self.memory.let_go(self._blocks.pop(key))
            del self._uses[key]

    def note(self, tensors: Any, place: int, *, writes: bool) -> None:
        """Note a use of tensors by the current stream's work at a place.

        Raises: TooEarlyError if the stream has not waited for others that use them.
        """
        for tensor in tensors:
            if isinstance(tensor, SimTensor):
                uses = self._uses.get(tensor.raw.untyped_storage().data_ptr())
                if uses is not None and (error := uses.note(self.stream, place, writes=writes)):
                    BACKWARDS.fail(error)


SIMS = (Sim(0), Sim(1))
SIM = SIMS[0]
MODULE = SimModule([sim.memory for sim in SIMS], [sim.wait for sim in SIMS])


_setup_privateuseone_for_python_backend("sim", backend_module=MODULE)
torch.__future__.set_overwrite_module_params_on_conversion(True)
torch.autograd.set_multithreading_enabled(False)
DEVICE, SECOND = (torch.device("sim", sim.index) for sim in SIMS)


class SimTensor(torch.Tensor):
    """A tensor of a device; raw: the one of the CPU that it holds."""

    raw: torch.Tensor
    sim: Sim

    @staticmethod
    def __new__(cls, raw: torch.Tensor, sim: Sim) -> "SimTensor":
        made: SimTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=torch.device("sim", sim.index), requires_grad=False,
        )  # fmt: skip
        return made

    def __init__(self, raw: torch.Tensor, sim: Sim) -> None:
        sim.take(raw)
        self.raw, self.sim = raw, sim

    def __repr__(self, **_: Any) -> str:
        return f"SimTensor({self.raw}, sim:{self.sim.index})"

    @property
    def data(self) -> torch.Tensor:
        found: torch.Tensor = torch.Tensor.data.__get__(self)
        return found

    @data.setter
    def data(self, other: "SimTensor") -> None:
        torch.Tensor.data.__set__(self, other)
        self.raw = other.raw  # torch swaps what it knows of, which is not this

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory that a stream still uses is not given out again all the same."""

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        mine = [leaf for leaf in leaves if isinstance(leaf, SimTensor)]
        sim = mine[0].sim
        sim.counts[OPERATIONS] += 1
        if op is aten._to_copy.default:
            return _copied(op, mine[0], kwargs)
        if op is aten.copy_.default:
            return _copied_into(*args, **kwargs)
        if any(_is_of_host(leaf) and leaf.dim() for leaf in leaves):
            BACKWARDS.fail(RuntimeError(f"{op}: tensors of the host and of the device in one operation"))
        if any(leaf.sim is not sim for leaf in mine):
            BACKWARDS.fail(RuntimeError(f"{op}: tensors of two devices in one operation"))
        if op.namespace == "c10d":
            sim.counts[MESSAGES] += 1
            if op is torch.ops.c10d.recv_.default:
                for leaf in mine:
                    _spoil(leaf.raw)  # until it is waited for
        place = sim.stream.hand_in()
        if not op.is_view:
            sim.note(mine, place, writes=False)
            sim.note(_written(op, args, kwargs), place, writes=True)
        if torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags:
            sim.wait()
        known, given = {id(leaf.raw): leaf for leaf in mine}, {id(leaf) for leaf in mine}
        kwargs.pop("pin_memory", None)
        result = op(*tree_map(_here, args), **tree_map(_here, kwargs))
        if torch.device(kwargs.get("device") or "sim").type == "cpu":
            return result  # made there, of the same shape as what is here
        made = tree_map(lambda value: known.get(id(value), _there(value, sim)), result)
        if not op.is_view:
            sim.note([leaf for leaf in tree_leaves(made) if id(leaf) not in given], place, writes=True)
        return made


def _is_of_host(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, SimTensor)


def _here(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return value.raw
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "sim" else value


def _there(value: Any, sim: Sim) -> Any:
    return SimTensor(value, sim) if isinstance(value, torch.Tensor) else value


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what an operation changes of what it is given."""
    found = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(kwargs.get(argument.name, args[index] if index < len(args) else None))
    return found


def _sim_of(device: torch.device | None) -> Sim:
    index = None if device is None else device.index
    return SIMS[MODULE.current_device() if index is None else index]


def _copied(op: Any, source: SimTensor, options: dict[str, Any]) -> torch.Tensor:
    to = torch.device(options.pop("device", None) or source.device)
    blocks = not options.pop("non_blocking", False)
    raw: torch.Tensor = op(source.raw, **options)
    place = source.sim.stream.hand_in()
    source.sim.note([source], place, writes=False)
    if to.type == "cpu":
        return _brought(raw, source.sim, place, blocks=blocks)
    sim = _sim_of(to)
    if sim is not source.sim:  # the streams of both wait for each other
        sim.stream.wait_stream(source.sim.stream)
    made = SimTensor(raw, sim)
    sim.note([made], sim.stream.hand_in(), writes=True)
    return made


def _copied_into(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    sims = [value.sim for value in (target, source) if isinstance(value, SimTensor)]
    sim = sims[0]
    if sims[-1] is not sim:
        sim.stream.wait_stream(sims[-1].stream)
    place = sim.stream.hand_in()
    sim.note([source], place, writes=False)
    sim.note([target], place, writes=True)
    _here(target).copy_(_here(source))
    if _is_of_host(target):
        _brought(target, sim, place, blocks=not non_blocking)
    elif _is_of_host(source):
        _taken(source, sim, place, blocks=not non_blocking)
    return target


def _brought(raw: torch.Tensor, sim: Sim, place: int, *, blocks: bool) -> torch.Tensor:
    """Return a copy on the host: it is spoilt until the host knows of it, unless it waits."""
    sim.counts[TO_HOST] += 1
    if blocks:
        sim.wait()
        return raw
    held, late = raw.detach().clone(), raw.data  # whose version is its own
    _spoil(late)
    HOST.expect(sim.stream, place, lambda: late.copy_(held))
    return raw


def _taken(source: torch.Tensor, sim: Sim, place: int, *, blocks: bool) -> None:
    """Note a copy from the host, whose memory must not change until the host knows of it, unless it waits."""
    sim.counts[FROM_HOST] += 1
    if blocks:
        sim.wait()
        return
    held = source.detach().clone()

    def check() -> None:
        if not bool(((source == held) | (source != source)).all()):
            raise TooEarlyError("memory of the host was changed while it was copied to the device")

    HOST.expect(sim.stream, place, check)


def _spoil(raw: torch.Tensor) -> None:
    if raw.dtype.is_floating_point or raw.dtype.is_complex:
        raw.fill_(float("nan"))
    else:
        raw.fill_(torch.iinfo(raw.dtype).min if raw.dtype is not torch.bool else True)


def _made(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a tensor where no argument is of the device: by a factory, or as a copy from the host."""
    sim = _sim_of(kwargs.pop("device", None))
    kwargs.pop("pin_memory", None)
    sim.counts[OPERATIONS] += 1
    place = sim.stream.hand_in()
    blocks = not kwargs.pop("non_blocking", False)
    where = {"device": "cpu"} if any(each.name == "device" for each in op._schema.arguments) else {}
    if op is aten._to_copy.default:
        _taken(args[0], sim, place, blocks=blocks)
    made = _there(op(*args, **where, **kwargs), sim)
    sim.note(tree_leaves(made), place, writes=True)
    return made


def waits_in(work: Callable[[], object]) -> int:
    """Return how often the host waits for the first device in a piece of work."""
    SIM.restart()
    work()
    return SIM.counts[WAITS]


_FALLBACK = torch.library.Library("_", "IMPL")
_FALLBACK.fallback(_made, "PrivateUse1")
