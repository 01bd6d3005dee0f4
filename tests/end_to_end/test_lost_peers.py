"""A sum over ranks of which one has stopped: the error says who waited, where, for whom and how long."""

import multiprocessing
import re

import pytest

import rank_mains
import runtime_mains
from cost_model.collectives import Collective
from hetpipe.program.instructions import Norm, Sync
from hetpipe.runtime import rank_watch
from hetpipe.runtime.processes import RankGroup, WorkerLostError, run_ranks
from partition.plan import Pipeline
from runtime_mains import Case, case_of, stages

SUMS_S = 2.0
MEETING_S = 1.0
SOON_S = 120.0
"""For all else: a busy machine is no lost rank."""


def sums_of_two_and_of_three(collective: Collective) -> Case:
    """Two pipelines that end on one rank: the tied matrix has three owners, the first layers have two."""
    return case_of(
        "pairs",
        Pipeline(1, 2, stages((0, 0, 3, 2), (1, 3, 6, 1))),
        Pipeline(1, 2, stages((2, 0, 3, 2), (1, 3, 6, 1))),
        collective=collective,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collective", "where", "peers"),
    [
        (Collective.RING, Sync(1), r"rank 2 \(n/2\)"),
        # whoever waits first, rank 0 or 1
        (Collective.TREE, Sync(0), r"rank \d \(n/\d\), rank 2 \(n/2\)"),
        (Collective.HIERARCHICAL, Sync(0), r"rank \d \(n/\d\), rank 2 \(n/2\)"),
        (Collective.RING, Norm(), r"rank \d \(n/\d\), rank 2 \(n/2\)"),
    ],
)
def test_a_sum_with_a_stopped_rank_names_rank_instruction_and_peers(collective, where, peers):
    case = sums_of_two_and_of_three(collective)
    assert [bucket.ranks for bucket in case.program.buckets] == [(0, 1, 2), (0, 2)]
    group = RankGroup(case.program.device_names, (1, 1, 1), timeout_s=SOON_S)
    expected = (
        rf"rank \d \(n/\d\) waited at {where} for {peers}, begun ([2-9]|\d\d)\.\d s ago: "
        r"(Timed out waiting|Operation timed out|Application timeout)"
    )
    with pytest.raises(WorkerLostError, match=expected):
        run_ranks(runtime_mains.stop_in_a_step, (case, where, SUMS_S), group)


@pytest.mark.slow
@pytest.mark.parametrize(("away", "waited"), [(1, "rank 0 {} all other ranks"), (0, "rank 1 {} rank 0")])
def test_a_rank_that_does_not_come_to_a_meeting_between_steps_is_missed(away, waited):
    group = RankGroup(("n/0", "n/1"), (1, 1), timeout_s=SOON_S)
    expected = waited.format("waited between steps for") + r", begun [1-9]\d*\.\d s ago: .+"
    with pytest.raises(WorkerLostError, match=expected):
        run_ranks(runtime_mains.stay_away, (away, MEETING_S), group)


@pytest.mark.parametrize("stopped", [0, 1])
def test_the_error_names_a_rank_that_a_signal_has_stopped_and_none_is_left(stopped):
    group = RankGroup(("n/0", "n/1"), (1, 1), timeout_s=SOON_S)
    expected = rf"; rank {stopped} \(n/{stopped}\) is stopped \(SIGSTOP, or a debugger\)$"
    with pytest.raises(WorkerLostError, match=expected):
        run_ranks(runtime_mains.stop_before_a_meeting, (stopped, MEETING_S), group)
    assert not any(process.is_alive() for process in multiprocessing.active_children())


def test_a_rank_that_hangs_is_named_while_another_waits_between_steps(monkeypatch: pytest.MonkeyPatch):
    """Before that it is told who waits for whom; the time limit of messages is ten minutes."""
    monkeypatch.setattr(rank_watch, "LEAST_HANG_S", 2.0)
    monkeypatch.setattr(rank_watch, "SILENCE_S", 1.0)
    group = RankGroup(("big/0", "small/0"), (1, 1), parts=("layers 0 to 4", "layer 5"))
    told: list[str] = []
    expected = (
        r"^rank 1 \(small/0, layer 5\) hangs: it has not moved for \d+ s within a step \(until then \d\."
    )
    with pytest.raises(WorkerLostError, match=expected) as caught:
        run_ranks(rank_mains.hang_in_a_step, (), group, lambda event: told.append(event["text"]))
    assert caught.value.report["silent_s"] >= 2.0  # type: ignore[attr-defined]
    assert re.fullmatch(
        r"no step is over for [12] s: small/0 computes \(layer 5\), at one place for [12] s; "
        "big/0 waits for others",
        told[0],
    )
