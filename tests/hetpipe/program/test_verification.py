from collections.abc import Callable
from dataclasses import replace

import pytest

from cost_model.collectives import Collective
from cost_model.errors import InfeasibleError, InputError
from hetpipe.program.instructions import Bucket, Instruction, Norm, Program, Sync
from hetpipe.program.program_text import parse_instruction
from hetpipe.program.verification import observed_in_flight, verify
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Pipeline, Plan, Stage
from small_case import plan_of, small_cluster, small_plan, small_profile, whole_model_on_two_nodes_of_two

Words = list[str]


def program() -> Program:
    return lower(small_plan(num_samples=3), small_profile(), small_cluster())


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
        pytest.param(0, moved("0B2", "STEP"), "rank 0 goes on after its NORM", id="works on before its step"),
        pytest.param(1, moved("SYNC0", "1B2"), "rank 1 has SYNC0 before 1B2", id="sums what is to come"),
    ],
)
def test_a_broken_program_is_refused(rank: int, change: Callable[[Words], Words], message: str):
    with pytest.raises(InputError, match=message):
        check(changed(rank, change))


def with_buckets(program: Program, *buckets: Bucket) -> Program:
    """The program with other buckets, all summed by all ranks before the norm."""
    lists = [
        [entry for entry in instructions if not isinstance(entry, Sync)] for instructions in program.ranks
    ]
    for rank, instructions in enumerate(lists):
        own = [Sync(index) for index, bucket in enumerate(buckets) if rank in bucket.ranks]
        instructions[instructions.index(Norm()) : instructions.index(Norm())] = own
    return replace(program, buckets=buckets, ranks=tuple(map(tuple, lists)))


def test_gradients_that_are_not_summed_once_over_their_owners_are_refused():
    tied = Bucket((0, 3), (0, 1), tied=True)
    check(with_buckets(program(), tied))
    with pytest.raises(InputError, match=r"tied layer 0 are of ranks \[0, 1\].* sums them over none"):
        check(with_buckets(program()))
    with pytest.raises(InputError, match=r"tied layer 0 .* sums them over \[0, 1\] and \[0, 1\]"):
        check(with_buckets(program(), tied, tied))
    with pytest.raises(InputError, match=r"of layer 1 are of ranks \[0\], .* over \[0, 1\]"):
        check(with_buckets(program(), tied, Bucket((1,), (0, 1))))


def test_sums_over_nodes_that_are_not_those_of_the_owners_are_refused():
    plan, profile, cluster = whole_model_on_two_nodes_of_two()
    good = lower(plan, profile, cluster)
    verify(good, profile, cluster)
    assert [bucket.nodes for bucket in good.buckets] == [((0, 2), (1, 3))] * 2
    for changes in (
        {"nodes": ((0, 1), (2, 3))},
        {"nodes": ((0, 2), (1,))},
        {"nodes": ()},
        {"collective": Collective.RING},
    ):
        buckets = (replace(good.buckets[0], **changes), good.buckets[1])
        with pytest.raises(InputError, match=r"bucket 0 is summed over the nodes .*; lower the plan again"):
            verify(replace(good, buckets=buckets), profile, cluster)


def test_sums_of_sharded_states_that_go_elsewhere_are_refused():
    whole = [Pipeline(1, 1, (Stage((name,), (0, 4), 1),)) for name in ("a/0", "b/0")]
    plan = Plan("manual", "made-up", 2, tuple(whole), zero=1, state_owners=("a/0",) * 4)
    good = lower(plan, small_profile(), small_cluster())
    check(good)
    (bucket,) = (entry for entry in good.buckets if not entry.tied)
    assert bucket.state_owner == 0
    for owner, name in ((1, "b/0"), (None, "all")):
        buckets = [replace(entry, state_owner=owner) if entry is bucket else entry for entry in good.buckets]
        with pytest.raises(InputError, match=f"of layer 0 are on a/0, .* its gradients for {name};"):
            check(replace(good, buckets=tuple(buckets)))


def test_a_swap_that_deadlocks_across_ranks_is_refused():
    # Both ends agree on the order of messages, and yet rank 0 wants a gradient that it has not made possible.
    broken = changed(0, lambda words: moved("0RECV_B0", "0F0")(moved("0B0", "0SEND_F0")(words)))
    with pytest.raises(InputError, match="deadlocks: rank 0 at 0RECV_B0; rank 1 at 1RECV_F0"):
        check(broken)


def test_a_program_of_other_layers_or_devices_is_refused():
    with pytest.raises(InputError, match=r"covers layers \[0, 3\)"):
        check(lower(plan_of([("a/0", 0, 3, 1)], 1), small_profile()))
    with pytest.raises(InputError, match="unknown device 'c/0'"):
        check(lower(plan_of([("c/0", 0, 4, 1)], 1), small_profile()))


def test_memory_is_that_of_the_program_not_of_the_plan():
    # All forwards first: 3 in flight where the plan says 2. 3355 bytes suffice for 2, see test_memory.
    words = "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 SYNC0 NORM STEP"
    greedy = changed(0, lambda _: words.split())
    assert observed_in_flight(greedy) == {(0, 0): 3, (0, 1): 1}
    verify(program(), small_profile(), small_cluster(fast_bytes=3355))
    with pytest.raises(InfeasibleError, match="bytes are missing"):
        verify(greedy, small_profile(), small_cluster(fast_bytes=3355))
