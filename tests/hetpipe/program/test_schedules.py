import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.program.instructions import Pass
from hetpipe.program.schedules import interleaved_one_f_one_b, one_f_one_b


def show(order: Iterable[tuple[Pass, int]]) -> str:
    return " ".join(f"{op}{microbatch}" for op, microbatch in order)


def test_fewer_in_flight_means_earlier_backwards():
    assert show(one_f_one_b(range(4), in_flight=3)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert show(one_f_one_b(range(4), in_flight=2)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert show(one_f_one_b(range(4), in_flight=1)) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_as_many_in_flight_as_microbatches_is_gpipe():
    assert show(one_f_one_b(range(3), in_flight=3)) == "F0 F1 F2 B0 B1 B2"
    assert show(one_f_one_b(range(3), in_flight=9)) == "F0 F1 F2 B0 B1 B2"


@given(st.integers(0, 40), st.integers(1, 12))
def test_never_more_than_in_flight_and_each_pass_once(num_microbatches: int, in_flight: int):
    order = list(one_f_one_b(range(num_microbatches), in_flight))
    held: list[int] = []
    most = 0
    for op, microbatch in order:
        if op is Pass.FORWARD:
            held.append(microbatch)
        else:
            assert held.pop(0) == microbatch  # after its forward, in order
        most = max(most, len(held))
    assert held == []
    assert most == min(in_flight, num_microbatches)
    assert len(set(order)) == len(order) == 2 * num_microbatches


def torch_orders(schedule: str, num_devices: int, num_microbatches: int, *num_chunks: int) -> list[list[str]]:
    """The computations of each rank, as torch's own schedule orders them."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    ranks = visualizer.get_schedule_ops(schedule, num_devices, num_microbatches, *num_chunks)
    words = [[str(action) for action in actions if action is not None] for actions in ranks]
    return [[word for word in entries if re.fullmatch(r"\d+[FB]\d+", word)] for entries in words]


def test_gpipe_is_that_of_torch():
    ours = [f"{op}{microbatch}" for op, microbatch in one_f_one_b(range(5), in_flight=5)]
    for stage, theirs in enumerate(torch_orders("GPipe", 3, 5)):
        assert [f"{stage}{word}" for word in ours] == theirs


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize("num_chunks", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("more", [0, 1])
def test_interleaved_is_that_of_torch(num_devices: int, num_chunks: int, rounds: int, more: int):
    # torch asks that the groups are equal; they may be larger than the number of devices
    num_microbatches = rounds * num_devices if not more else num_devices + num_devices // 2
    theirs = torch_orders("Interleaved1F1B", num_devices, num_microbatches, num_chunks)
    for place in range(num_devices):
        order = interleaved_one_f_one_b(place, num_devices, num_chunks, num_microbatches)
        ours = [f"{chunk * num_devices + place}{op}{microbatch}" for op, chunk, microbatch in order]
        assert ours == theirs[place]
