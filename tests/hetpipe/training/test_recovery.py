"""A run that loses ranks goes on by itself, and comes to the losses that it would have had."""

import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import user_tasks
from cost_model.errors import InfeasibleError, InputError
from cost_model.profile import profile_text
from hetpipe import cli
from hetpipe.models.chain import ChainModel
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import read_recoveries, read_report
from hetpipe.runs.settings import Settings
from hetpipe.runtime.processes import WorkerLostError
from hetpipe.simulation.prediction import Prediction
from hetpipe.training import run as run_module
from hetpipe.training.recovery import Recovery
from hetpipe.training.run import train_predicted, verified_prediction
from runs import chain_plan, cluster_file, made_up_profile, made_up_profile_of

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
    """One that is lost at once again is planned without, and with again after the next loss."""
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    killer = Killer([(1, 0, kill), (4, 1, kill), (4, 1, kill), (5, 0, stop)])
    asked: list[frozenset[str]] = []

    def replan(lost: frozenset[str], room_bytes: Mapping[str, float]) -> Prediction:
        asked.append(lost)
        return predicted(tmp_path, [0, 4, 8] if lost else THREE)

    found = losses_of(tmp_path, killer, max_restarts=2, replan=replan)
    assert found == pytest.approx(undisturbed, rel=1e-6)
    assert asked == [{"here/1"}, frozenset()]
    lines = RunFolder(tmp_path / "run").recoveries.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["after_step"] for row in rows] == [1, 4, 4, 5]
    assert rows[0]["from_step"] == 0
    assert all(row["from_step"] in (0, 2, 4) for row in rows)  # a busy machine writes while steps pass
    assert [row["where"] for row in rows] == [
        "on the same devices", "on the same devices", "without here/1", "with here/1 again"
    ]  # fmt: skip
    assert all(0 < row["again_s"] < 60 for row in rows)
    begin, _, again, stopped = killer.told
    assert begin == (
        "rank 0 (here/0) was killed by signal 9, after step 1; going on from the beginning on the same "
        "devices (restart 1 of 2 that come no further)"
    )
    assert "without here/1 (restart 2 of 2" in again
    expected = "rank 0 (here/0, layers 0 to 3) was stopped for 5 s (SIGSTOP, or a debugger), after step 5;"
    assert stopped.startswith(expected)
    reported = read_report(RunFolder(tmp_path / "run").report).recoveries
    assert [found.steps_repeated for found in reported] == [
        row["after_step"] - row["from_step"] for row in rows
    ]
    assert all(found.noticed_after_s < 5 for found in reported[:3])
    assert reported[3].noticed_after_s > 5


@pytest.mark.slow
def test_a_rank_that_is_lost_after_the_last_checkpoint_leaves_the_model(tmp_path, monkeypatch):
    """There is nothing to go on with, so that a restart would be refused."""
    trained, run = run_module._Preparation.train, RunFolder(tmp_path / "run")

    def lost_at_the_end(*arguments: Any) -> None:
        trained(*arguments)
        raise lost()

    monkeypatch.setattr(run_module._Preparation, "train", lost_at_the_end)
    with pytest.raises(WorkerLostError) as caught:
        train_predicted(
            Settings(steps=2), cluster_file(tmp_path), made_up_profile(MODEL), predicted(tmp_path, [0, 8]),
            run, max_restarts=1,
        )  # fmt: skip
    assert str(caught.value) == (
        f"rank 1 (here/1) was lost, after the last step; {run.checkpoints / 'step-000002'} is whole, only "
        f"the report was not written: hetpipe export {run.path} -o my-model"
    )


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--data", "--eval-data"])
def test_a_restart_on_other_texts_is_refused(tmp_path, option):
    texts = {name: tmp_path / f"{name}.txt" for name in ("--data", "--eval-data")}
    for text in texts.values():
        text.write_text("The ship sails far away. " * 2000)
    run = RunFolder(tmp_path / "run")
    settings = Settings(steps=STEPS, data=(str(texts["--data"]),), eval_data=(str(texts["--eval-data"]),))
    killer = Killer([(1, 0, signal.SIGKILL)])

    def changed(event: dict[str, Any]) -> None:
        texts[option].write_text("The ship comes home again. " * 2000)
        killer(event)

    with pytest.raises(InputError, match=f"texts of {option} were changed since training began; put them "):
        train_predicted(
            settings, cluster_file(tmp_path), made_up_profile(MODEL), predicted(tmp_path, [0, 8]), run,
            on_event=changed, tell=killer.told.append, max_restarts=1,
        )  # fmt: skip
    assert len(killer.told) == 1 and "killed by signal 9, after step 1" in killer.told[0]


def recovery(tmp_path: Path, replan=None) -> Recovery:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir(exist_ok=True)
    return Recovery(folder, predicted(tmp_path, THREE), 3, replan, lambda told: None)


def lost(kind: str = "", rank: int = 1, *, full: bool = False) -> WorkerLostError:
    error = WorkerLostError("rank 1 (here/1) was lost")
    report = {"rank": rank, "type": kind, "text": str(error), "full": full}
    error.report = report  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize("kind", ["ZeroDivisionError", "RuntimeError"])
def test_an_error_of_what_is_computed_is_not_tried_again(tmp_path, kind):
    with pytest.raises(WorkerLostError, match=r"was lost$"):
        recovery(tmp_path).restart(lost(kind), None)


class Planner:
    """Plans for any devices that are left, as long as there is one; remembers what was asked."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[frozenset[str]] = []
        self.plans = {3: predicted(folder, THREE), 2: predicted(folder, [0, 4, 8])}

    def __call__(self, devices: frozenset[str], room_bytes: Mapping[str, float]) -> Prediction:
        self.asked.append(devices)
        if len(devices) > 1:
            raise InputError("leave out fewer")
        return self.plans[3 - len(devices)]


def test_a_device_that_was_left_out_is_tried_again_after_progress_but_only_once(tmp_path):
    planner = Planner(tmp_path)
    found = recovery(tmp_path, planner)
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


@pytest.mark.parametrize("kind", ["", "OutOfMemoryError", "MemoryError", "RuntimeError"])
def test_a_device_that_was_full_is_planned_with_less_each_time(tmp_path, kind):
    """Also where the kernel has killed the rank of a CPU for want of memory, of which it left no type."""
    rooms: list[dict[str, float]] = []

    def replan(devices: frozenset[str], room_bytes: Mapping[str, float]) -> Prediction:
        rooms.append(dict(room_bytes))
        return predicted(tmp_path, [0, 4, 6, 8] if len(rooms) == 1 else [0, 5, 6, 8])

    found, told = recovery(tmp_path, replan), []
    found.tell = told.append
    for _ in range(2):
        needs = found.prediction.costs.memory_bytes(1)
        found.restart(lost(kind, full=True), None)
        assert rooms[-1] == {"here/1": pytest.approx(0.8 * needs)}
    assert rooms[1]["here/1"] < rooms[0]["here/1"]
    assert re.fullmatch(
        r"rank 1 \(here/1\) was lost; stage 1, layers 3 to 5, on here/1 was planned with [\d,]+ bytes of its "
        r"[\d,]+ bytes, of which a plan may fill [\d,]+ bytes, after step 0; going on from the beginning "
        r"with [\d,]+ bytes planned on here/1 \(restart 1 of 3 that come no further\)",
        told[0],
    )


def test_a_device_that_is_full_ends_a_run_that_may_not_be_planned_anew_with_what_to_do(tmp_path):
    found = recovery(tmp_path)
    expected = (
        r"here/1 was planned with .*; give here/1 less in the cluster file \(memory = .* --exclude here/1; no"
    )
    with pytest.raises(InfeasibleError, match=expected):
        found.restart(lost("OutOfMemoryError", full=True), None)


def test_a_device_that_is_full_whatever_is_planned_ends_the_run(tmp_path):
    found = recovery(tmp_path, lambda devices, room_bytes: predicted(tmp_path, THREE))
    for _ in range(3):
        found.restart(lost("OutOfMemoryError", full=True), None)
    with pytest.raises(InfeasibleError, match="give here/1 less"):
        found.restart(lost("OutOfMemoryError", full=True), None)

    def nothing_fits(devices: frozenset[str], room_bytes: Mapping[str, float]) -> Prediction:
        raise InfeasibleError("no pipeline fits: 9 bytes are missing", missing_bytes=9.0)

    with pytest.raises(
        InfeasibleError, match=r"with [\d,]+ bytes there: no pipeline fits: 9 bytes"
    ) as caught:
        recovery(tmp_path, nothing_fits).restart(lost("OutOfMemoryError", full=True), None)
    assert caught.value.missing_bytes == 9.0


TWO_EMULATED = """
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [{ kind = "emulated", memory = "7 MB" }, { kind = "emulated", memory = "1 GiB" }]
"""


@pytest.mark.parametrize("restarts", [3, 0])
def test_a_run_whose_device_is_full_goes_on_under_a_plan_that_fits(tmp_path, monkeypatch, capsys, restarts):
    """The profile says of activations that they need nothing. Without restarts it ends with exit code 3."""
    profile = made_up_profile(MODEL, "emulated", 2e-4)
    layers = (replace(layer, saved_bytes_per_sample=1e3) for layer in profile.layers)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.json").write_text(profile_text(replace(profile, layers=tuple(layers))))
    line = f"run --model {MODEL} --cluster {cluster_file(tmp_path, TWO_EMULATED)} --profile profile.json"
    line += f" --pipelines 1 --steps 2 --no-save --run-folder run --max-restarts {restarts}"
    code, said = cli.main(line.split()), capsys.readouterr()
    planned, memory = (r"[\d.]+ MiB", r"6\.68 MiB") if restarts == 0 else (r"[\d,]+ bytes", "7,000,000 bytes")
    full = (
        rf"rank 0 \(here/0\) failed: OutOfMemoryError: here/0: {planned} are needed, the device has "
        rf"{memory.removesuffix(' bytes')}; stage 0(?:, stage \d)*, layers 0 to \d, on "
        rf"here/0 was planned with {planned} of "
        rf"its {memory}, of which "
    )
    assert re.search(full, said.err)
    if restarts == 0:
        assert (code, "--exclude here/0" in said.err) == (3, True)
        return
    assert code == 0
    assert [entry["step"] for entry in RunFolder(tmp_path / "run").read_metrics()] == [1, 2]
    found = read_report(RunFolder(tmp_path / "run").report).recoveries
    assert re.fullmatch(r"with [\d,]+ bytes planned on here/0", found[0].where)
    assert found[0].noticed_after_s < 60
    assert f"losses: {len(found)}, noticed after " in said.out


@pytest.mark.parametrize("error", ["ValueError", "KeyError"])
def test_an_error_of_the_users_own_ends_the_run_at_once_with_its_line(tmp_path, error):
    """Of the data in the third step, and of the model in the second."""
    told: list[str] = []
    run, factory = RunFolder(tmp_path / "run"), user_tasks.failing_tasks[error]
    settings = Settings(steps=5, every=1)
    chain = ChainModel.from_module(user_tasks.build_failing, torch.zeros(1, 8), name="user")
    profile = made_up_profile_of(chain, "user")
    plan = chain_plan("user", [0, 2, 3], 4)
    prediction = verified_prediction(settings, cluster_file(tmp_path), profile, plan)
    with pytest.raises(WorkerLostError, match=rf"^rank \d \(here/\d\) failed: {error}: .*torn"):
        train_predicted(
            settings, cluster_file(tmp_path), profile, prediction, run, make_task=factory,
            tell=told.append, max_restarts=3, replan=Planner(tmp_path),
        )  # fmt: skip
    assert told == []
    assert not run.recoveries.exists()


def test_where_nothing_fits_that_is_said_with_what_was_kept(tmp_path):
    def replan(devices: frozenset[str], room_bytes: Mapping[str, float]) -> Prediction:
        raise InfeasibleError("no pipeline fits: 3 GiB are missing")

    found = recovery(tmp_path, replan)
    found.restart(lost(), None)
    with pytest.raises(InfeasibleError, match=r"without here/1: no pipeline fits.*; nothing was kept yet"):
        found.restart(lost(), None)


def test_a_wish_that_needs_the_lost_device_is_named(tmp_path):
    def replan(devices: frozenset[str], room_bytes: Mapping[str, float]) -> Prediction:
        raise InputError("--pin names here/1")

    found = recovery(tmp_path, replan)
    found.restart(lost(), None)
    with pytest.raises(WorkerLostError, match="without here/1: --pin names here/1"):
        found.restart(lost(), None)


def test_waits_grow_while_nothing_is_gained_and_begin_anew_after_progress(tmp_path):
    found = recovery(tmp_path)
    assert [found.restart(lost(rank=-1), None).wait_s for _ in range(3)] == [0.0, 1.0, 2.0]
    found.saw({"event": "step", "step": 9})
    assert found.restart(lost(rank=-1), None).wait_s == 0.0


def test_each_restart_is_noted_and_no_step_is_counted_as_repeated_twice(tmp_path):
    found = recovery(tmp_path)
    found.saw({"event": "step", "step": 4})
    found.restart(lost(rank=-1), None)
    found.restart(lost(rank=-1), None)
    found.finish()
    rows = read_recoveries(found.folder.recoveries)
    assert [row.steps_repeated for row in rows] == [4, 0]
    assert [row.again_s for row in rows] == [None, None]
    found.folder.recoveries.write_text("torn")
    assert read_recoveries(found.folder.recoveries) == ()


def test_restarts_without_progress_end(tmp_path):
    found = recovery(tmp_path)
    for _ in range(3):
        found.restart(lost(rank=-1), None)
    with pytest.raises(WorkerLostError, match=r"was lost; 3 restarts brought it no further \(--max-restarts"):
        found.restart(lost(rank=-1), None)
