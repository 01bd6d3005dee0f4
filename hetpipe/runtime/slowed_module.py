"""A module that takes the time of an emulated device, so that other runtimes run on the very same ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hetpipe.program.instructions import Pass
from hetpipe.runtime.pace import Pace

Seconds = Callable[[Pass, int], float]
"""(forward or backward, number of the forward since `restart`) -> seconds."""


class VirtualPace(Pace):
    """A pace that nobody waits for, of devices that one process runs in turn; owns its time."""

    def start_step(self, start_s: float) -> None:
        self.now_s, self.busy_s, self.over_budget_s = start_s, 0.0, 0.0

    def begin(self, ready_s: float) -> float:
        self.now_s = max(self.now_s, ready_s)
        return self.now_s

    def end(self, start_s: float, nominal_s: float) -> float:
        self.now_s = start_s + nominal_s
        self.busy_s += nominal_s
        return self.now_s

    def wait(self, due_s: float) -> float:
        return self.begin(due_s)


class SlowedModule(nn.Module):
    """A module whose forwards and backwards begin and end on the clock of an emulated device.

    Each really computes and then ends nominal_s after its start, as in the executor. The backward begins when
    the gradient of its first output is there. It ends when that of its first input is complete or, where no
    input has one, with the whole run of autograd, which then must not hold a second backward of this module.
    On a `VirtualPace` it is charged as it begins.

    ready_s: when what came over a link is due, which an operation waits for. ended: called after each
    operation with its end. `active` False: as if the module were not wrapped.
    """

    def __init__(
        self,
        module: nn.Module,
        pace: Pace,
        nominal_s: Seconds,
        *,
        ready_s: Seconds = lambda op, call: 0.0,
        ended: Callable[[Pass, int, float], None] = lambda op, call, end_s: None,
    ) -> None:
        super().__init__()
        self.module = module
        self.active = True
        self._pace = pace
        self._nominal_s = nominal_s
        self._ready_s = ready_s
        self._ended = ended
        self._calls = 0

    def restart(self) -> None:
        """Count forwards from 0 again: a new step begins."""
        self._calls = 0

    def forward(self, *inputs: Any) -> Any:
        if not self.active:
            return self.module(*inputs)
        call, self._calls = self._calls, self._calls + 1
        # NOTE: hooks of a tensor run in the order in which they were set, and the module that made this one
        # set its own first; a view's run before those of what it views
        inputs = tuple(value.view_as(value) if _has_gradient(value) else value for value in inputs)
        start_s = self._begin(Pass.FORWARD, call)
        outputs = self.module(*inputs)
        self._end(Pass.FORWARD, call, start_s)
        self._watch(call, inputs, outputs)
        return outputs

    def _watch(self, call: int, inputs: tuple[Any, ...], outputs: Any) -> None:
        last = next((value for value in tree_leaves(outputs) if _has_gradient(value)), None)
        if last is None:  # no gradients here, or none enabled
            return
        first = next((value for value in inputs if _has_gradient(value)), None)
        at_once, at_the_end = isinstance(self._pace, VirtualPace), first is None
        starts: list[float] = []

        def end(_: Tensor | None = None) -> None:
            self._end(Pass.BACKWARD, call, starts.pop())

        def begin(_: Tensor) -> None:
            starts.append(self._begin(Pass.BACKWARD, call))
            if at_once:
                end()
            elif at_the_end:
                torch.autograd.Variable._execution_engine.queue_callback(end)

        last.register_hook(begin)
        if first is not None and not at_once:
            first.register_hook(end)

    def _begin(self, op: Pass, call: int) -> float:
        return self._pace.begin(self._ready_s(op, call))

    def _end(self, op: Pass, call: int, start_s: float) -> None:
        self._ended(op, call, self._pace.end(start_s, self._nominal_s(op, call)))


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
