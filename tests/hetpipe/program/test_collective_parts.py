"""What the ranks hand in to the library, group by group."""

from collections import defaultdict
from dataclasses import replace

import pytest

from cost_model.collectives import Collective
from cost_model.errors import InputError
from cost_model.network import Network
from hetpipe.program.collective_parts import Group, Meetings, Part, check_meetings, meetings
from hetpipe.program.gradient_buckets import summed_by
from hetpipe.program.instructions import Broadcast, Norm, Program, Step, Sync
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Pipeline, Plan, Stage
from small_case import small_cluster, small_profile, whole_model_on_two_nodes_of_two


def over_nodes() -> Program:
    """Two buckets over ranks 0 and 2 of one node, 1 and 3 of the other."""
    plan, profile, cluster = whole_model_on_two_nodes_of_two()
    program = lower(plan, profile, cluster)
    buckets = [summed_by(b, Collective.HIERARCHICAL, plan, Network(cluster)) for b in program.buckets]
    assert [bucket.nodes for bucket in buckets] == [((0, 2), (1, 3))] * 2
    return replace(program, buckets=tuple(buckets))


def words(handed_in: Meetings, group: Group) -> dict[int, str]:
    return {
        rank: ", ".join(f"{part.operation} {part.bucket}" for part in parts)
        for rank, parts in handed_in[group].items()
    }


def test_what_follows_a_first_part_has_groups_of_its_own_on_the_host():
    handed_in = meetings(over_nodes(), on_host=True)
    check_meetings(handed_in)
    inside = Group((0, 2), on_host=True)
    assert words(handed_in, inside) == dict.fromkeys((0, 2), "reduce 0, reduce 1")
    for bucket in (0, 1):
        between = Group((0, 1), True, (bucket, 0))
        assert words(handed_in, between) == dict.fromkeys((0, 1), f"all_reduce {bucket}")
        for place, ranks in ((1, (0, 2)), (2, (1, 3))):
            back = Group(ranks, True, (bucket, place))
            assert words(handed_in, back) == dict.fromkeys(ranks, f"broadcast {bucket}")
    assert len(handed_in) == 2 + 2 + 4


def test_between_gpus_a_reduction_does_not_wait_behind_what_goes_back_inside_a_node():
    handed_in = meetings(over_nodes(), on_host=False)
    check_meetings(handed_in)
    groups = {Group(ranks, on_host=False) for ranks in ((0, 2), (1, 3), (0, 1))}
    assert set(handed_in) == groups | {Group(ranks, False, back=True) for ranks in ((0, 2), (1, 3))}
    inside, between = Group((0, 2), on_host=False), Group((0, 1), on_host=False)
    assert words(handed_in, inside) == dict.fromkeys((0, 2), "reduce 0, reduce 1")
    assert words(handed_in, between) == dict.fromkeys((0, 1), "all_reduce 0, all_reduce 1")
    back = Group((0, 2), on_host=False, back=True)
    assert words(handed_in, back) == dict.fromkeys((0, 2), "broadcast 0, broadcast 1")


def test_one_group_for_parts_that_wait_for_others_is_refused():
    # as on GPUs, but with parts that are handed in when another one is over, at any moment on each rank
    handed_in: dict[Group, dict[int, list[Part]]] = defaultdict(dict)
    for group, by_rank in meetings(over_nodes(), on_host=True).items():
        shared = replace(group, part=None)
        for rank, parts in by_rank.items():
            handed_in[shared].setdefault(rank, []).extend(replace(part, group=shared) for part in parts)
    with pytest.raises(InputError, match="of which some wait for others, so that the order is open"):
        check_meetings(handed_in)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("collective", list(Collective))
def test_sums_in_another_order_on_one_rank_are_refused(collective, on_host):
    program = over_nodes()
    plan, cluster = program.plan, whole_model_on_two_nodes_of_two()[2]
    buckets = tuple(summed_by(bucket, collective, plan, Network(cluster)) for bucket in program.buckets)
    turned = [entry for entry in program.ranks[3] if not isinstance(entry, Sync | Norm | Step)]
    swapped = (*turned, Sync(1), Sync(0), Norm(), Step())
    wrong = replace(program, buckets=buckets, ranks=(*program.ranks[:3], swapped))
    with pytest.raises(InputError, match="they would mix up their messages; lower the plan again"):
        check_meetings(meetings(wrong, on_host=on_host))


def test_a_rank_that_leaves_out_a_broadcast_is_refused():
    whole = [Pipeline(1, 1, (Stage((name,), (0, 4), 1),)) for name in ("a/0", "b/0")]
    plan = Plan("manual", "made-up", 2, tuple(whole), zero=1, state_owners=("a/0",) * 4)
    good = lower(plan, small_profile(), small_cluster())
    check_meetings(meetings(good, on_host=True))
    silent = tuple(entry for entry in good.ranks[1] if not isinstance(entry, Broadcast))
    with pytest.raises(InputError, match="and rank 1 reduce of bucket 0"):
        check_meetings(meetings(replace(good, ranks=(good.ranks[0], silent)), on_host=True))
