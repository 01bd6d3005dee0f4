"""Slow devices: named soon after they are, never for noise, and planned around where that gains time."""

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from cost_model.cluster_file import read_cluster
from cost_model.errors import InfeasibleError
from cost_model.other_clusters import slowed
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.runs.settings import Settings
from hetpipe.runtime.processes import SLOWDOWN_VARIABLE
from hetpipe.simulation.prediction import Prediction, predict
from hetpipe.training.adaptation import Adaptation
from hetpipe.training.run import train_predicted
from hetpipe.training.slow_devices import SlowDevices, SlowSpell, SlowWatch
from partition.plan import Plan
from partition.plan_file import read_plan
from runs import EMULATED_CLUSTER, chain_plan, cluster_file, made_up_profile

MODEL, LAYER_S = "bert-tiny", 0.0002


def spells(
    busy: list[list[float]], planned_s: list[float] | None = None, kinds: list[str] | None = None
) -> list[tuple[int, SlowSpell]]:
    """Return what is said of busy seconds by step, and after which; planned_s: of the ranks, or 1 s each."""
    watch = SlowDevices(planned_s or [1.0] * len(busy[0]), kinds or [])
    return [(step, spell) for step, row in enumerate(busy, 1) for spell in watch.see(step, row)]


def noise(seed: int, num_ranks: int, sigma: float, tails: float, level: float) -> list[list[float]]:
    """1,000 steps: each rank's lognormal noise with heavy tails, and load of the host that all ranks feel."""
    draw, load, rows = random.Random(seed), 0, []
    for _ in range(1000):
        load = load - 1 if load else draw.randint(3, 60) * (draw.random() < 0.02)
        row = []
        for _ in range(num_ranks):
            value = level * (1.6 if load else 1.0) * math.exp(draw.gauss(0, sigma))
            row.append(value * (1 + draw.paretovariate(1.5)) if draw.random() < tails else value)
        rows.append(row)
    return rows


@given(
    seed=st.integers(0, 10**6),
    errs=st.lists(st.floats(1, 1.25), min_size=1, max_size=6),
    sigma=st.floats(0, 0.15),
    tails=st.floats(0, 0.1),
    level=st.sampled_from([0.1, 0.3, 1.0, 3.0, 10.0]),
)
@settings(max_examples=15, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
def test_no_alarm_in_1000_steps_of_noise_tails_load_and_a_plan_that_errs(seed, errs, sigma, tails, level):
    """By a factor for all, and by up to a quarter between devices, each of a kind of its own."""
    rows = noise(seed, len(errs), sigma, tails, level)
    kinds = [f"kind {rank}" for rank in range(len(errs))]
    assert spells(rows, [1 / error for error in errs], kinds) == []


@example(seed=461, errs=[1.0] * 4, level=0.1, begin=137)  # load in the first steps, which then ends
@given(
    seed=st.integers(0, 10**6),
    errs=st.lists(st.floats(1, 1.25), min_size=2, max_size=6),
    level=st.sampled_from([0.1, 1.3, 10.0]),
    begin=st.integers(21, 500),
)
@settings(max_examples=15, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
def test_a_device_slowed_twice_is_named_within_25_steps_and_when_it_ends(seed, errs, level, begin):
    rows = noise(seed, len(errs), 0.05, 0.01, level)
    for row in rows[begin - 1 : begin + 99]:
        row[1] *= 2
    kinds = [f"kind {rank}" for rank in range(len(errs))]
    (named, spell), (over, ended) = spells(rows, [1 / error for error in errs], kinds)
    assert spell.rank == ended.rank == 1
    assert named < begin + 25
    assert abs(spell.since - begin) <= 8
    assert spell.ratio / spell.usual_ratio == pytest.approx(2, rel=0.25)
    assert not spell.ended
    assert ended.ended
    assert begin + 100 <= over < begin + 125


@pytest.mark.parametrize("begin", [1, 2, 8, 15, 20])
@pytest.mark.parametrize("seed", range(5))
def test_a_device_slow_in_the_first_steps_is_held_against_the_plan(seed, begin):
    rows = noise(seed, 4, 0.05, 0.01, 1.1)
    for row in rows[begin - 1 :]:
        row[1] *= 2
    ((named, spell),) = spells(rows, kinds=["a", "b", "c", "c"])
    assert spell.rank == 1
    assert named < begin + 25


def test_an_alarm_that_was_none_stays_away():
    """Times of milliseconds, a tenth of what was made up for the plan; one device has always taken longer."""
    quiet, busy = [[3.0e-3, 3.6e-3, 3.0e-3]], [[3.8e-3, 4.8e-3, 3.8e-3]]
    assert spells(quiet * 40 + busy * 200, [48e-3] * 3) == []
    # nor is a rank beside the others slow for less than a host's scheduler does to it
    assert spells([[3e-3] * 3] * 40 + [[3e-3, 4.9e-3, 3e-3]] * 200, [3e-3] * 3) == []


def test_a_plan_that_errs_by_a_quarter_for_a_kind_names_none_of_it_before_it_changes():
    kinds = ["fast", "fast", "slow", "slow"]
    assert spells([[1.0, 1.0, 1.3, 1.3]] * 40, kinds=kinds) == []
    ((_, spell),) = spells([[1.0, 1.0, 1.0, 1.3]] * 40, kinds=kinds)
    assert spell.rank == 3
    ((named, spell),) = spells([[1.0, 1.0, 1.3, 1.3]] * 40 + [[1.0, 1.0, 1.3, 1.95]] * 30, kinds=kinds)
    assert (spell.rank, spell.since) == (3, 41)
    assert named < 66
    ((_, slow),) = spells([[0.1] * 4] * 40 + [[0.1, 0.1, 0.1, 0.13]] * 30, kinds=kinds)
    assert slow.rank == 3


def test_load_that_begins_within_the_window_does_not_change_how_slow_a_device_is():
    loaded = [[1.6, 1.6, 2.0]] * 2 + [[1.6, 1.6, 3.2]] * 30
    rows = [[1.0, 1.0, 1.0]] * 30 + [[1.0, 1.0, 2.0]] * 7 + loaded
    ((_, spell),) = spells(rows)
    assert spell.ratio == 2.0


def test_a_quarter_slower_is_slow_and_less_is_not():
    assert [spell.ratio for _, spell in spells([[1.0, 1.0, 1.25]] * 40)] == [1.25]
    assert spells([[1.0, 1.0, 1.24]] * 40) == []
    # a device that keeps to the plan is not slow, however fast the others are
    assert spells([[0.5, 0.5, 1.0]] * 40) == []
    # nor is one alone, beside which there is nothing
    assert spells([[1.0]] * 20 + [[2.0]] * 40) == []


def test_an_episode_is_told_once_with_its_evidence():
    plan = SimpleNamespace(layers_of=lambda device: (3, 4, 5))
    program: Any = SimpleNamespace(device_names=("big/0", "big/1"), plan=plan)
    watch = SlowWatch.of(program, [0.1, 0.21])
    slow = [[0.1, 0.21]] * 39 + [[0.1, 0.399]] * 60 + [[0.1, 0.21]] * 40
    events = [event for step, row in enumerate(slow, 1) for event in watch.events(step, row)]
    assert [(event["device"], event["since"], event["ended"]) for event in events] == [
        ("big/1", 40, False),
        ("big/1", 40, True),
    ]
    assert events[0]["text"] == watch.told[0]
    assert watch.told[0] == (
        "big/1 takes 1.90 times its planned 210 ms per step since step 40 (median of 15 steps; the others "
        "take 1.00 times theirs); it runs layers 3 to 5"
    )
    assert "big/1 is as fast as planned again" in watch.told[1]
    # where the plan is not what it took before, it is that
    watch = SlowWatch.of(program, [1.0, 2.1])
    events = [event for step, row in enumerate(slow, 1) for event in watch.events(step, row)]
    assert [event["since"] for event in events] == [40, 40]
    assert watch.told[0] == (
        "big/1 takes 1.90 times its usual 210 ms per step since step 40 (median of 15 steps; the others "
        "take 1.00 times theirs); it runs layers 3 to 5"
    )
    assert (
        "big/1 is as fast as usual again beside the others: 1.00 times (median of 20 steps)" in watch.told[1]
    )


SLOW_EVENT = {
    "event": "slow", "device": "a", "ratio": 2.0, "others": 1.0, "ended": False, "more": False,
    "text": "a is slow",
}  # fmt: skip


def predictions(step_s: float) -> Any:
    return SimpleNamespace(
        step_s=step_s, plan=SimpleNamespace(device_names=("a",), layers_of=lambda name: (0, 1))
    )


@pytest.mark.parametrize(("steps_left", "moves"), [(10, False), (1000, True)])
def test_layers_move_when_the_gain_exceeds_what_moving_costs(steps_left, moves):
    told: list[str] = []

    def adapt(lost: frozenset[str], times: Any, room_bytes: Any, plan: Plan | None) -> Prediction:
        assert times == {"a": 2.0}
        return predictions(1.0 if plan is None else 1.5)

    found = Adaptation(40 + steps_left, 500e6, adapt, told.append)  # 10 s for the checkpoint
    event = {**SLOW_EVENT, "step": 40}
    found.begin()
    assert found.saw(event, predictions(0.0).plan, frozenset(), {}) is moves
    assert (found.take() is not None) is moves
    assert found.take() is None
    assert told[0] == "a is slow"
    assert told[1].startswith("planned again" if moves else "the plan stays")


def test_a_plan_after_a_lost_device_has_the_slow_ones_as_slow_once():
    asked: list[tuple[Any, ...]] = []

    def adapt(*given: Any) -> Prediction:
        asked.append(given)
        return predictions(1.0 if given[-1] is None else 1.5)

    found, plan = Adaptation(10_000, 0.0, adapt, lambda text: None), predictions(0.0).plan
    replan = found.replanned(lambda *given: predictions(9.0))
    found.begin()
    assert replan(frozenset("c"), {}).step_s == 9.0  # nothing is slow yet
    assert found.saw({**SLOW_EVENT, "step": 40}, plan, frozenset("c"), {"b": 5.0})
    assert asked[-1] == ({"c"}, {"a": 2.0}, {"b": 5.0}, None)
    assert found.take() is not None
    assert replan(frozenset("cd"), {"b": 4.0}).step_s == 1.0
    assert asked[-1] == ({"c", "d"}, {"a": 2.0}, {"b": 4.0}, None)


@dataclass
class Decisions:
    """A run whose plan stays where a alone is slow; times: what was planned with, told: what was said."""

    times: list[dict[str, float]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def adaptation(self) -> Adaptation:
        found = Adaptation(10_040, 0.0, self.adapt, self.told.append)
        found.begin()
        return found

    def adapt(self, lost: frozenset[str], times: Any, room_bytes: Any, plan: Plan | None) -> Prediction:
        self.times.append(dict(times))
        return predictions(1.0 if plan is None and "b" in times else 1.5)

    def see(self, found: Adaptation, device: str, **others: Any) -> bool:
        event = {**SLOW_EVENT, "step": 40, "device": device, "text": f"{device} is slow", **others}
        return found.saw(event, predictions(0.0).plan, frozenset(), {})


def test_devices_that_become_slow_with_a_step_are_decided_on_together():
    run = Decisions()
    found = run.adaptation()
    assert not run.see(found, "b", more=True)
    assert run.see(found, "a", ratio=3.0)
    assert run.times == [{"b": 2.0, "a": 3.0}] * 2
    assert [text.partition(":")[0] for text in run.told] == ["b is slow", "a is slow", "planned again"]


def test_a_device_for_which_the_plan_stays_is_still_slow_when_another_becomes_so():
    run = Decisions()
    found = run.adaptation()
    assert not run.see(found, "a")
    assert run.see(found, "b", ratio=3.0)
    assert run.times[-1] == {"a": 2.0, "b": 3.0}
    # and no more when that is over
    found = run.adaptation()
    assert not run.see(found, "a")
    assert not run.see(found, "a", ended=True)
    assert run.see(found, "b", ratio=3.0)
    assert run.times[-1] == {"b": 3.0}


def test_a_device_is_as_slow_as_before_where_the_new_plan_was_never_run():
    run = Decisions()
    found = run.adaptation()
    assert run.see(found, "b")
    found.begin()  # a rank was lost in the checkpoint, and the plan is the one before
    assert run.see(found, "b")
    assert run.times[-1] == {"b": 2.0}
    assert found.take() is not None
    found.begin()
    assert run.see(found, "b", ratio=1.5)
    assert run.times[-1] == {"b": 3.0}


def test_a_device_without_which_nothing_fits_stays():
    told: list[str] = []

    def adapt(lost: frozenset[str], times: Any, room_bytes: Any, plan: Plan | None) -> Prediction:
        raise InfeasibleError("too large")

    found = Adaptation(100, 0.0, adapt, told.append)
    event = {**SLOW_EVENT, "step": 40}
    assert not found.saw(event, predictions(0.0).plan, frozenset(), {})
    assert told == ["a is slow", "no other plan for a slowed: too large"]


def slowed_run(folder: Path, *, adapts: bool, last: int) -> tuple[RunFolder, list[str]]:
    """Train on two emulated devices, the second of which is slowed three times from step 8 on."""
    folder.mkdir()
    path, run, told = cluster_file(folder, EMULATED_CLUSTER), RunFolder(folder / "run"), list[str]()
    profile, cluster = made_up_profile(MODEL, "emulated", LAYER_S), read_cluster(path)
    profile = replace(profile, sequence_length=16)  # what is computed takes less than is made up

    def adapt(lost: frozenset[str], times: Mapping[str, float], _: Any, plan: Plan | None) -> Prediction:
        return predict(plan or chain_plan(MODEL, [0, 6, 8], 4), profile, slowed(cluster, times))

    first = predict(chain_plan(MODEL, [0, 4, 8], 4), profile, cluster)
    train_predicted(
        Settings(steps=10_000), path, profile, first, run,
        on_event=lambda event: event.get("step", 0) >= last,
        notice=told.append, adapt=adapt if adapts else None,
    )  # fmt: skip
    return run, told


@pytest.mark.slow
@pytest.mark.alone
def test_layers_of_a_slowed_device_move_and_the_losses_stay(tmp_path, monkeypatch):
    monkeypatch.setenv(SLOWDOWN_VARIABLE, "here/1=3@8")
    stays, told = slowed_run(tmp_path / "stays", adapts=False, last=28)
    assert len(told) == 1
    assert re.match(r"here/1 takes [23]\.\d\d times its planned .* per step since step [6-9] ", told[0])
    assert list(read_report(stays.report).slow_devices) == told
    named = [entry["step"] for entry in stays.read_metrics() if "slow" in entry]
    assert named[0] < 8 + 25
    moves, told = slowed_run(tmp_path / "moves", adapts=True, last=28)
    assert [text.split(":")[0] for text in told[1:]] == ["planned again"]
    assert list(read_report(moves.report).slow_devices) == told[:1]  # though another attempt ended the run
    assert read_plan(moves.plan).layers_of("here/1") == (6, 7)
    pairs = zip(stays.read_metrics(), moves.read_metrics(), strict=True)
    for before, after in pairs:
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)
    # the new plan is measured by its own times: the device is as planned now
    assert not any("slow" in entry for entry in moves.read_metrics()[-2:])
