"""A run that loses ranks goes on by itself, and comes to the losses that it would have had."""

import json
import multiprocessing
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cost_model.errors import InfeasibleError, InputError
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.runtime.processes import WorkerLostError
from hetpipe.simulation.prediction import Prediction
from hetpipe.training.recovery import Recovery
from hetpipe.training.run import train_predicted, verified_prediction
from runs import chain_plan, cluster_file, made_up_profile

MODEL = "bert-tiny"
STEPS = 6
THREE = [0, 3, 6, 8]


@dataclass
class Killer:
    """Sends a signal to a rank when it hears of a step, as often as it is told to."""

    when: list[tuple[int, int, int]]  # step, rank, signal
    told: list[str] = field(default_factory=list)

    def __call__(self, event: dict[str, Any]) -> None:
        time.sleep(0.2)  # time to write the checkpoint of the step before, on a machine that is not busy
        if event["event"] == "step" and self.when and event["step"] == self.when[0][0]:
            _, rank, number = self.when.pop(0)
            name = f"hetpipe rank {rank}"
            (child,) = (found for found in multiprocessing.active_children() if found.name == name)
            assert child.pid is not None
            os.kill(child.pid, number)


def found_from(folder: Path) -> list[int]:
    """Return the steps from which a run went on."""
    lines = RunFolder(folder / "run").recoveries.read_text().splitlines()
    return [json.loads(line)["from_step"] for line in lines]


def predicted(folder: Path, cuts: list[int]) -> Prediction:
    settings = Settings(steps=STEPS, every=2)
    profile = made_up_profile(MODEL)
    return verified_prediction(settings, cluster_file(folder), profile, chain_plan(MODEL, cuts, 4))


def losses_of(folder: Path, killer: Killer, **options: Any) -> list[float]:
    folder.mkdir(exist_ok=True)
    settings, run = Settings(steps=STEPS, every=2), RunFolder(folder / "run")
    train_predicted(
        settings, cluster_file(folder), made_up_profile(MODEL), predicted(folder, THREE), run,
        on_event=killer, tell=killer.told.append, **options,
    )  # fmt: skip
    metrics = run.read_metrics()
    assert [entry["step"] for entry in metrics] == list(range(1, STEPS + 1))
    assert [entry["samples_seen"] for entry in metrics] == [16 * step for step in range(1, STEPS + 1)]
    assert multiprocessing.active_children() == []
    return [entry["loss"] for entry in metrics]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of(tmp_path_factory.mktemp("undisturbed"), Killer([]))


@pytest.mark.slow
def test_lost_ranks_cost_the_steps_since_the_checkpoint_and_nothing_else(tmp_path, undisturbed):
    killer = Killer([(1, 0, signal.SIGKILL), (4, 2, signal.SIGSTOP)])
    assert losses_of(tmp_path, killer, max_restarts=1) == undisturbed
    where = "on the same devices (restart 1 of 1 that come no further)"
    assert [told.replace("from the beginning", "from step 0") for told in killer.told] == [
        f"rank 0 (here/0) was killed by signal 9, after step 1; going on from step 0 {where}",
        "rank 2 (here/2) was stopped for 5 s (SIGSTOP, or a debugger), after step 4; going on from "
        f"step {found_from(tmp_path)[1]} {where}",
    ]
    lines = RunFolder(tmp_path / "run").recoveries.read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [row["after_step"] for row in found] == [1, 4]
    assert found_from(tmp_path) in ([0, 2], [0, 0])  # a busy machine writes while the next steps pass
    assert all(0 < row["again_s"] < 60 for row in found)


@pytest.mark.slow
def test_a_device_that_is_lost_again_at_once_is_planned_without(tmp_path, undisturbed):
    killer = Killer([(4, 1, signal.SIGKILL)] * 2)
    asked: list[frozenset[str]] = []

    def replan(lost: frozenset[str]) -> Prediction:
        asked.append(lost)
        return predicted(tmp_path, [0, 4, 8])

    found = losses_of(tmp_path, killer, max_restarts=3, replan=replan)
    assert asked == [{"here/1"}]
    assert found == pytest.approx(undisturbed, rel=1e-6)
    expected = r"going on from (step 2|the beginning) without here/1 \(restart 2 of 3"
    assert re.search(expected, killer.told[1])


def recovery(tmp_path: Path, replan=None) -> Recovery:
    return Recovery(RunFolder(tmp_path / "run"), predicted(tmp_path, THREE), 3, replan, lambda told: None)


def lost(kind: str = "", rank: int = 1) -> WorkerLostError:
    error = WorkerLostError("rank 1 (here/1) was lost")
    error.report = {"rank": rank, "type": kind, "text": str(error)}  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize("kind", ["ZeroDivisionError", "MemoryError", "OutOfMemoryError", "RuntimeError"])
def test_an_error_of_what_is_computed_is_not_tried_again(tmp_path, kind):
    with pytest.raises(WorkerLostError, match=r"was lost$"):
        recovery(tmp_path).restart(lost(kind), None)


class Planner:
    """Plans for any devices that are left, as long as there is one; remembers what was asked."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[frozenset[str]] = []
        self.plans = {3: predicted(folder, THREE), 2: predicted(folder, [0, 4, 8])}

    def __call__(self, devices: frozenset[str]) -> Prediction:
        self.asked.append(devices)
        if len(devices) > 1:
            raise InputError("leave out fewer")
        return self.plans[3 - len(devices)]


def test_a_device_that_was_left_out_is_tried_again_after_progress_but_only_once(tmp_path):
    planner = Planner(tmp_path)
    found = recovery(tmp_path, planner)
    found.folder.path.mkdir()
    told: list[str] = []
    found.tell = told.append
    found.restart(lost(), None)
    found.restart(lost(), None)
    assert found.lost == {"here/1"}
    found.saw({"event": "step", "step": 9})
    found.restart(lost(rank=0), None)
    assert found.lost == frozenset()
    assert "going on from the beginning with here/1 again (restart 1 of 3" in told[-1]
    found.restart(lost(), None)
    assert found.lost == {"here/1"}
    assert planner.asked == [{"here/1"}, frozenset(), {"here/1"}]


def test_where_nothing_is_left_devices_that_were_lost_before_are_tried_again(tmp_path):
    planner = Planner(tmp_path)
    found = recovery(tmp_path, planner)
    found.restart(lost(), None)
    found.restart(lost(), None)
    assert found.lost == {"here/1"}
    found.restart(lost(rank=0), None)  # no progress: the first loss of this one
    found.most = 9
    found.restart(lost(rank=0), None)
    assert planner.asked == [{"here/1"}, {"here/1", "here/0"}, {"here/0"}]
    assert found.lost == {"here/0"}


def test_a_host_that_is_gone_is_not_tried_again(tmp_path):
    planner = Planner(tmp_path)
    found = recovery(tmp_path, planner)
    found.folder.path.mkdir()
    found.missing = lambda devices: frozenset({"here/2"} & {device.name for device in devices})
    found.restart(lost(rank=-1), None)
    assert found.lost == {"here/2"}
    found.saw({"event": "step", "step": 9})
    found.restart(lost(rank=-1), None)
    assert found.lost == {"here/2"}
    assert planner.asked == [{"here/2"}]


def without_a_host(tmp_path: Path) -> tuple[Recovery, list[str], list[frozenset[str]]]:
    """A run that goes on without here/2; what it tells, and what it plans without."""
    planner, told = Planner(tmp_path), []
    found = recovery(tmp_path, planner)
    found.folder.path.mkdir()
    found.tell = told.append
    found.missing = lambda devices: frozenset({"here/2"})
    found.restart(lost(rank=-1), None)
    assert found.lost == {"here/2"}
    return found, told, planner.asked


def test_a_host_that_is_back_is_planned_with_again(tmp_path):
    found, told, asked = without_a_host(tmp_path)
    found.saw({"event": "step", "step": 7})
    found.returned = lambda: frozenset({"here"})
    assert found.join(None).prediction.program.device_names == ("here/0", "here/1", "here/2")
    assert (asked[-1], found.lost) == (frozenset(), frozenset())
    assert told[-1] == "here/2 is back, after step 7; going on from the beginning with here/2 again"
    found.saw({"event": "step", "step": 1})
    rows = [json.loads(line) for line in found.folder.recoveries.read_text().splitlines()]
    assert [(row["kind"], row["after_step"]) for row in rows] == [("lost", 0), ("joined", 7)]


def test_a_host_that_is_back_in_a_moment_of_loss_is_planned_with_too(tmp_path):
    found, told, _ = without_a_host(tmp_path)
    found.missing, found.returned = lambda devices: frozenset(), lambda: frozenset({"here"})
    assert len(found.restart(lost(rank=0), None).prediction.program.device_names) == 3
    assert "going on from the beginning with here/2 again (restart 2 of 3" in told[-1]


def test_a_host_that_was_let_in_and_is_gone_again_changes_nothing(tmp_path):
    found, told, asked = without_a_host(tmp_path)
    assert len(found.join(None).prediction.program.device_names) == 2
    assert (len(told), len(asked)) == (1, 1)


def test_a_host_on_which_nothing_ran_is_missed_by_plans_to_come_alone(tmp_path):
    planner = Planner(tmp_path)
    found = recovery(tmp_path, planner)
    found.missing = lambda devices: frozenset({"here/3"})
    found.restart(lost(rank=-1), None)
    assert planner.asked == []
    with pytest.raises(WorkerLostError, match="leave out fewer"):
        for _ in range(2):
            found.restart(lost(rank=1), None)
    assert planner.asked[0] == {"here/1", "here/3"}


def test_where_nothing_fits_that_is_said_with_what_was_kept(tmp_path):
    def replan(devices: frozenset[str]) -> Prediction:
        raise InfeasibleError("no pipeline fits: 3 GiB are missing")

    found = recovery(tmp_path, replan)
    found.restart(lost(), None)
    with pytest.raises(InfeasibleError, match=r"without here/1: no pipeline fits.*; nothing was kept yet"):
        found.restart(lost(), None)


def test_a_wish_that_needs_the_lost_device_is_named(tmp_path):
    def replan(devices: frozenset[str]) -> Prediction:
        raise InputError("--pin names here/1")

    found = recovery(tmp_path, replan)
    found.restart(lost(), None)
    with pytest.raises(WorkerLostError, match="without here/1: --pin names here/1"):
        found.restart(lost(), None)


def test_waits_grow_while_nothing_is_gained_and_begin_anew_after_progress(tmp_path):
    found = recovery(tmp_path)
    found.folder.path.mkdir()
    assert [found.restart(lost(rank=-1), None).wait_s for _ in range(3)] == [0.0, 1.0, 2.0]
    found.saw({"event": "step", "step": 9})
    assert found.restart(lost(rank=-1), None).wait_s == 0.0


def test_restarts_without_progress_end(tmp_path):
    found = recovery(tmp_path)
    for _ in range(3):
        found.restart(lost(rank=-1), None)
    with pytest.raises(WorkerLostError, match=r"was lost; 3 restarts brought it no further \(--max-restarts"):
        found.restart(lost(rank=-1), None)
