from dataclasses import replace
from pathlib import Path

import pytest

import user_tasks
from cost_model.cluster_file import read_cluster
from cost_model.profile import ModelProfile
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.training.run import train
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, cluster_file

SETTINGS = Settings("mine", 4, learning_rate=1e-2, sequence_length=1, dtype="float64", save=False)


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> ModelProfile:
    cluster = read_cluster(cluster_file(tmp_path_factory.mktemp("cluster")))
    return profile_model(
        "mine", cluster, 1, dtype="float64", budget_s=0.1, microbatch_sizes=(1, 2), task=user_tasks.mixed_task
    )


def losses(folder: Path, plan: Plan, profile: ModelProfile, settings: Settings = SETTINGS) -> list[float]:
    folder.mkdir()
    run_folder = RunFolder(folder / "run")
    train(settings, cluster_file(folder), profile, plan, run_folder, make_task=user_tasks.mixed_task)
    return [entry["loss"] for entry in run_folder.read_metrics()]


@pytest.mark.slow
def test_a_sequential_of_ones_own_trains_the_same_under_any_plan(tmp_path, profile):
    expected = losses(tmp_path / "one", chain_plan("mine", [0, 6], 16), profile)
    assert expected[-1] < expected[0]
    # a pipeline that begins with a stage of no parameters, and one whose cuts leave layers 0, 2 and 4 apart
    plans = {
        "three": chain_plan("mine", [0, 1, 3, 6], 4),
        "two pipelines": Plan(
            "manual",
            "mine",
            16,
            (
                Pipeline(2, 10, (Stage(("here/0",), (0, 1), 2), Stage(("here/1",), (1, 6), 1))),
                Pipeline(4, 6, (Stage(("here/2",), (0, 2), 2), Stage(("here/3",), (2, 6), 1))),
            ),
        ),
    }
    for name, plan in plans.items():
        assert losses(tmp_path / name, plan, profile) == pytest.approx(expected, rel=1e-12), name


@pytest.mark.slow
def test_a_run_whose_first_stage_has_no_parameters_resumes(tmp_path, profile):
    plan = chain_plan("mine", [0, 1, 3, 6], 4)
    expected = losses(tmp_path / "straight", plan, profile)
    first = replace(SETTINGS, steps=2, total_steps=4, save=True)
    folder = tmp_path / "two"
    losses(folder, plan, profile, first)
    source = folder / "run" / "checkpoints" / "step-000002"
    second = replace(SETTINGS, resume_from=str(source))
    run_folder = RunFolder(folder / "run")
    train(second, folder / "cluster.toml", profile, plan, run_folder, make_task=user_tasks.mixed_task)
    assert [e["loss"] for e in run_folder.read_metrics()] == pytest.approx(expected, rel=1e-12)
