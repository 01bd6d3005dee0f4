import pytest
import torch
from torch import Tensor, nn

from hetpipe.program.instructions import Pass
from hetpipe.runtime.pace import Pace
from hetpipe.runtime.slowed_module import SlowedModule, VirtualPace


class CountingPace(Pace):
    """Counts begins and ends in place of seconds, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def begin(self, ready_s: float) -> float:
        self.log.append("begin")
        return ready_s

    def end(self, start_s: float, nominal_s: float) -> float:
        self.log.append("end")
        return start_s + nominal_s


def seconds(op: Pass, call: int) -> float:
    return (1.0 if op is Pass.FORWARD else 2.0) + 10 * call


def chain(pace: Pace, log: list[str] | None = None) -> list[SlowedModule]:
    """Embedding, linear, linear; each notes its ends as L0.F0=end."""
    torch.manual_seed(0)
    layers = [nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 1)]

    def note(layer: int) -> object:
        def ended(op: Pass, call: int, end_s: float) -> None:
            if log is not None:
                log.append(f"{layer}{op}{call}={end_s:g}")

        return ended

    return [SlowedModule(m, pace, seconds, ended=note(index)) for index, m in enumerate(layers)]


def run(layers: list[SlowedModule]) -> Tensor:
    value = torch.tensor([0, 3])
    for layer in layers:
        value = layer(value)
    return value


def test_an_operation_ends_before_the_next_begins():
    pace = CountingPace()
    run(chain(pace)).sum().backward()
    assert pace.log == ["begin", "end"] * 6  # three forwards, three backwards


def test_ends_come_in_the_order_of_the_graph_and_with_the_number_of_the_forward():
    log: list[str] = []
    layers = chain(CountingPace(), log)
    outputs = [run(layers), run(layers)]
    for output in outputs[::-1]:
        output.sum().backward()
    forwards = "0F0=1 1F0=1 2F0=1 0F1=11 1F1=11 2F1=11"
    assert " ".join(log) == f"{forwards} 2B1=12 1B1=12 0B1=12 2B0=2 1B0=2 0B0=2"
    log.clear()
    for layer in layers:
        layer.restart()
    run(layers)
    assert log[0] == "0F0=1"


@pytest.mark.parametrize("pace", [CountingPace(), VirtualPace()], ids=["waits", "virtual"])
def test_gradients_are_those_of_the_modules_themselves(pace: Pace):
    slowed, plain = chain(pace), chain(Pace())
    for layer in plain:
        layer.active = False
    for layers in (slowed, plain):
        run(layers).square().sum().backward()
    for mine, theirs in zip(slowed, plain, strict=True):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            assert torch.equal(a.grad, b.grad)


def test_a_virtual_clock_adds_up_and_waits_for_what_is_due():
    log: list[str] = []
    pace = VirtualPace()
    pace.start_step(100.0)
    module = SlowedModule(
        nn.Linear(2, 2),
        pace,
        seconds,
        ready_s=lambda op, call: 150.0 if op is Pass.BACKWARD else 0.0,
        ended=lambda op, call, end_s: log.append(f"{op}{call}={end_s:g}"),
    )
    # F0 100 to 101, F1 101 to 112; B1 waits until 150 and takes 12, B0 takes 2
    outputs = [module(torch.ones(1, 2)) for _ in range(2)]
    for output in outputs[::-1]:
        output.sum().backward()
    assert " ".join(log) == "F0=101 F1=112 B1=162 B0=164"
    assert pace.busy_s == 1 + 11 + 12 + 2


def test_without_gradients_there_is_no_backward_to_slow():
    pace = CountingPace()
    with torch.no_grad():
        run(chain(pace))
    assert pace.log == ["begin", "end"] * 3
