from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from hetpipe.instructions import Pass
from hetpipe.schedules import one_f_one_b


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
