from collections.abc import Callable
from dataclasses import replace

import pytest

from cost_model.errors import InfeasibleError, InputError
from hetpipe.program.instructions import Instruction, Program, parse_instruction
from hetpipe.program.verification import observed_in_flight, verify
from hetpipe.simulation.schedule_selection import lower
from small_case import plan_of, small_cluster, small_plan, small_profile

Words = list[str]


def program() -> Program:
    return lower(small_plan(num_samples=3), small_profile())


def changed(rank: int, change: Callable[[Words], Words]) -> Program:
    """The good program with the instructions of one rank changed, as words."""
    good = program()
    lists: list[tuple[Instruction, ...]] = list(good.ranks)
    lists[rank] = tuple(map(parse_instruction, change([str(entry) for entry in lists[rank]])))
    return replace(good, ranks=tuple(lists))


def without(word: str) -> Callable[[Words], Words]:
    return lambda words: [entry for entry in words if entry != word]


def moved(word: str, before: str) -> Callable[[Words], Words]:
    def change(words: Words) -> Words:
        rest = without(word)(words)
        at = rest.index(before)
        return [*rest[:at], word, *rest[at:]]

    return change


def replaced(old: str, *new: str) -> Callable[[Words], Words]:
    return lambda words: [entry for word in words for entry in (new if word == old else (word,))]


def check(broken: Program) -> None:
    verify(broken, small_profile(), small_cluster())


def test_a_lowered_program_is_accepted():
    check(program())


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        pytest.param(
            1, without("1RECV_F2"), r"rank 0 sends .* to rank 1, which receives None", id="no receive"
        ),
        pytest.param(0, without("0SEND_F0"), r"rank 0 sends .* to rank 1, which receives", id="no send"),
        pytest.param(0, moved("0SEND_F1", "0SEND_F0"), r"rank 0 sends .* which receives", id="sends swapped"),
        pytest.param(0, replaced("0SEND_F0", "0SEND_F0", "0SEND_F0"), "rank 0 sends", id="sent twice"),
        pytest.param(1, replaced("1F0", "0F0"), "0F0, which runs elsewhere", id="stage of another rank"),
        pytest.param(0, replaced("0SEND_F0", "1SEND_B0"), "belongs to another rank", id="foreign send"),
        pytest.param(0, replaced("0F1", "0F1", "0F1"), "0F1, which runs elsewhere or before", id="run twice"),
        pytest.param(0, without("0B2"), "has 11 computations, the plan needs 12", id="leak"),
        pytest.param(1, moved("1B0", "1F0"), "1B0 before 1F0", id="backward before forward"),
        pytest.param(1, moved("1F0", "1RECV_F0"), "deadlocks: .*rank 1 at 1F0", id="receive posted late"),
        pytest.param(0, without("STEP"), "rank 0 ends in", id="no step"),
        pytest.param(1, without("SYNC0"), "rank 1 ends in NORM STEP", id="no sync"),
        pytest.param(0, moved("NORM", "SYNC0"), "rank 0 ends in NORM SYNC0 STEP", id="norm before sync"),
        pytest.param(0, moved("NORM", "0B2"), "rank 0 ends in", id="works on after its norm"),
    ],
)
def test_a_broken_program_is_refused(rank: int, change: Callable[[Words], Words], message: str):
    with pytest.raises(InputError, match=message):
        check(changed(rank, change))


def test_a_swap_that_deadlocks_across_ranks_is_refused():
    # Both ends agree on the order of messages, and yet rank 0 wants a gradient that it has not made possible.
    broken = changed(0, lambda words: moved("0RECV_B0", "0F0")(moved("0B0", "0SEND_F0")(words)))
    with pytest.raises(InputError, match="deadlocks: rank 0 at 0B0; rank 1 at 1F0"):
        check(broken)


def test_a_program_of_other_layers_or_devices_is_refused():
    with pytest.raises(InputError, match=r"covers layers \[0, 3\)"):
        check(lower(plan_of([("a/0", 0, 3, 1)], 1), small_profile()))
    with pytest.raises(InputError, match="unknown device 'c/0'"):
        check(lower(plan_of([("c/0", 0, 4, 1)], 1), small_profile()))


def test_memory_is_that_of_the_program_not_of_the_plan():
    # All forwards first: 3 in flight where the plan says 2. 3345 bytes suffice for 2, see test_memory.
    words = "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 SYNC0 NORM STEP"
    greedy = changed(0, lambda _: words.split())
    assert observed_in_flight(greedy) == {(0, 0): 3, (0, 1): 1}
    verify(program(), small_profile(), small_cluster(fast_bytes=3345))
    with pytest.raises(InfeasibleError, match="bytes are missing"):
        verify(greedy, small_profile(), small_cluster(fast_bytes=3345))
