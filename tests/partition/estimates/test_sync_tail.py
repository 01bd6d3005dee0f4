"""The sums behind the last backwards by hand, and queues at the cards of nodes."""

import numpy as np
import pytest

from cost_model.collective_choice import BUCKET_BYTES
from partition.estimates.network_cards import queued_s
from partition.estimates.pipeline_clock import Seconds
from partition.estimates.sync_tail import Copies, Tail


def exposed_s(
    nodes: list[list[int]], back_s: list[float], sums_s: list[float], num_bytes: float = 1.0
) -> float:
    """Copies of a chain with four layers a stage and messages that take no time."""
    stages = len(back_s)
    full = Seconds((0.0,) * stages, tuple(back_s), ((0.0,) * 4,) * (stages - 1))
    stops = tuple(4 * (stage + 1) for stage in range(stages))
    copies = Copies(np.array(nodes), stops, full)
    tail = Tail.of([copies], [0, *stops])
    return tail.exposed_s(np.array(sums_s), np.full(stages, num_bytes), [0, *stops], 4)


def test_the_sum_of_a_later_stage_hides_behind_the_backward_of_an_earlier_one() -> None:
    # on nodes of its own it is over 1 s before the last backward
    assert exposed_s([[0, 1], [2, 3]], [4.0, 4.0], [3.0, 3.0]) == pytest.approx(3.0)


def test_sums_that_share_a_card_come_one_after_another() -> None:
    # node 1 has both stages: the later one is summed from -4 to 6 s, then the first one
    assert exposed_s([[0, 1], [1, 2]], [4.0, 4.0], [3.0, 10.0]) == pytest.approx(9.0)


def test_what_a_stage_sends_back_waits_for_sums_on_its_cards() -> None:
    # The last stage is on nodes 2 and 0 and summed from -2 to 3 s. The middle one is done at -1 s; what it
    # sends waits for the cards of nodes 0 and 2, so that the first one is done at 4 s. Meanwhile the middle
    # one is summed, from 3 to 8 s on nodes 1 and 2, and then the first one on nodes 0 and 1.
    assert exposed_s([[0, 1, 2], [1, 2, 0]], [1.0] * 3, [5.0] * 3) == pytest.approx(13.0)
    # without its sum in the way of node 1 the first one is only held up by the message
    assert exposed_s([[0, 1, 2], [1, 2, 0]], [1.0] * 3, [5.0, 0.0, 5.0]) == pytest.approx(9.0)


def test_parts_of_the_first_stage_are_summed_inside_its_backward() -> None:
    # four parts: the first begins 3 s before the end of 4 s of backward, and the last one not before that
    assert exposed_s([[0], [1]], [4.0], [8.0], 4.5 * BUCKET_BYTES) == pytest.approx(5.0)
    assert exposed_s([[0], [1]], [4.0], [2.0], 4.5 * BUCKET_BYTES) == pytest.approx(0.5)


def test_messages_that_hold_two_cards_leave_them_idle_at_times() -> None:
    assert queued_s({}, several=True) == 0.0
    # node b receives and sends 4 s each: no card is busy for longer than those
    assert queued_s({("a", "b"): 4.0, ("b", "c"): 4.0}, several=True) == 4.0
    # there and back over four nodes: the cards in the middle carry 8 s, and 4 s more wait for each other
    chain = {pair: 4.0 for one, other in ("ab", "bc", "cd") for pair in ((one, other), (other, one))}
    assert queued_s(chain, several=False) == 8.0
    assert queued_s(chain, several=True) == 10.0
