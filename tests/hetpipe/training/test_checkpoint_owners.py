import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from cost_model.errors import InputError
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.reporting.pages import page_data
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runtime.optimizer import OPTIMIZER_STATES, Optimizer
from hetpipe.training import checkpoint
from hetpipe.training.checkpoint_owners import check_checkpoint, home_layers, load_checkpoint
from hetpipe.training.run import prepare, train, verified_prediction
from runs import chain_plan, cluster_file, made_up_profile, run

MODEL = "bert-tiny"
PROFILE = replace(made_up_profile(MODEL), dtype="float64")
PLAN = chain_plan(MODEL, [0, 2, 5, 8], 4)
SETTINGS = Settings(MODEL, 3, every=1, dtype="float64", seed=5)

TASK = TaskSettings.of(PROFILE, SETTINGS)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunFolder:
    """A run on three ranks with a checkpoint after each of its steps."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder, PLAN, SETTINGS, PROFILE)
    return RunFolder(folder / "run")


@pytest.fixture(scope="module")
def chain() -> ChainModel:
    return ChainModel.from_spec(model_spec(MODEL))


def test_a_checkpoint_is_written_after_every_so_many_steps(finished):
    assert sorted(path.name for path in finished.checkpoints.iterdir()) == [
        "step-000001",
        "step-000002",
        "step-000003",
    ]
    assert checkpoint.latest(finished.checkpoints) == finished.checkpoints / "step-000003"


def test_a_checkpoint_has_a_file_for_each_layer_whoever_held_it(finished, chain):
    source = finished.checkpoints / "step-000002"
    files = sorted(path.name for path in source.iterdir())
    assert files == [
        *(f"layer-{layer:03d}.safetensors" for layer in range(8)),
        "manifest.json",
        "vocabulary.json",
    ]
    found: dict[str, torch.Tensor] = {}
    for layer in range(8):
        tensors = load_file(source / f"layer-{layer:03d}.safetensors")
        assert not tensors.keys() & found.keys()  # tied weights are stored once
        found |= tensors
    expected = set(home_layers(chain))
    reached = {info.name for layer in range(8) for info in chain.parameters(layer) if info.reached}
    states = {f"{name}.{state}" for name in reached for state in OPTIMIZER_STATES}
    assert found.keys() == expected | states
    assert {tensor.dtype for tensor in found.values()} == {torch.float64}


def test_the_manifest_says_where_the_run_was(finished):
    manifest = checkpoint.read_manifest(finished.checkpoints / "step-000002")
    assert (manifest.model, manifest.step, manifest.samples_seen) == (MODEL, 2, 32)
    assert (manifest.seed, manifest.sequence_length) == (5, 64)
    assert manifest.optimizer == {"name": "AdamW", "steps": 2, "options": []}
    plan = {key: value for key, value in manifest.plan.items() if key != "predicted"}
    assert plan == json.loads(json.dumps(PLAN.to_json()))


def test_a_rank_takes_back_its_layers_and_their_states(finished, chain):
    source = finished.checkpoints / "step-000002"
    manifest = checkpoint.read_manifest(source)
    model = chain.materialise((0, 7), seed=99, dtype=torch.float64)  # another seed: all must be overwritten
    reached = {info.name for layer in (0, 7) for info in chain.parameters(layer) if info.reached}
    trained = {name: value for name, value in model.owned_parameters().items() if name in reached}
    optimizer = Optimizer(trained, trained.keys(), 0.0)
    task = cast(Any, SimpleNamespace(chain=chain, vocabulary_sha256=manifest.vocabulary_sha256))
    assert load_checkpoint(source, TASK, task, model, optimizer) == (2, 32)
    assert optimizer.num_steps == 2
    homes = home_layers(chain)
    for name, value in model.owned_parameters().items():
        stored = load_file(source / f"layer-{homes[name]:03d}.safetensors")
        assert torch.equal(value, stored[name])
        for key, state in optimizer.states(name).items():
            assert torch.equal(state, stored[key])


def test_resuming_with_another_vocabulary_or_model_is_refused(finished, chain):
    source = finished.checkpoints / "step-000002"
    manifest = checkpoint.read_manifest(source)
    model = chain.materialise((1,), seed=0, dtype=torch.float64)
    optimizer = Optimizer(model.owned_parameters(), (), 0.0)
    other = cast(Any, SimpleNamespace(chain=chain, vocabulary_sha256="other"))
    with pytest.raises(InputError, match="was trained with another vocabulary than the run's"):
        load_checkpoint(source, TASK, other, model, optimizer)
    gpt2 = ChainModel.from_spec(model_spec("gpt2-tiny"))
    task = cast(Any, SimpleNamespace(chain=gpt2, vocabulary_sha256=manifest.vocabulary_sha256))
    with pytest.raises(InputError, match="has 8 layers, bert-tiny has 6"):
        load_checkpoint(source, TASK, task, model, optimizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert-base"}, "its model is 'bert-tiny', the run's 'bert-base'; give the same to resume"),
        ({"run": replace(SETTINGS, seed=6)}, "its seed is 5, the run's 6; give the same to resume"),
        ({"sequence_length": 32}, "its sequence_length is 64, the run's 32; give the same to resume"),
        ({"run": replace(SETTINGS, steps=2)}, "is at step 2, the run ends at step 2; raise --steps"),
    ],
    ids=["model", "seed", "length", "steps"],
)
def test_resuming_something_else_is_refused(finished, change, message):
    source = finished.checkpoints / "step-000002"
    manifest = checkpoint.read_manifest(source)
    check_checkpoint(manifest, TASK, source)
    with pytest.raises(InputError, match=re.escape(message)):
        check_checkpoint(manifest, replace(TASK, **change), source)


def test_steps_after_the_checkpoint_are_not_counted_twice(finished, tmp_path):
    """The run was killed in step 3, as its line was being written; it goes on from step 1."""
    source = finished.checkpoints / "step-000001"
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    lines = finished.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text(lines[0] + lines[1] + lines[2][:20])
    resumed, cluster = replace(SETTINGS, resume_from=str(source)), cluster_file(tmp_path)
    prepare(folder, resumed, cluster, PROFILE, verified_prediction(resumed, cluster, PROFILE, PLAN))
    assert folder.metrics.read_text() == lines[0]
    prepare(folder, SETTINGS, cluster, PROFILE, verified_prediction(SETTINGS, cluster, PROFILE, PLAN))
    assert folder.metrics.read_text() == ""


def test_what_is_told_of_a_run_before_does_not_outlive_the_start_of_the_next(finished, tmp_path):
    """Else one that is killed under another plan would show the steps of the plan before as its own."""
    folder = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
    told = (folder.report, folder.trace, folder.page)
    assert all(path.exists() for path in told)
    resumed = replace(SETTINGS, steps=5, resume_from=str(folder.checkpoints / "step-000003"))
    cluster, other = cluster_file(tmp_path), chain_plan(MODEL, [0, 4, 8], 4)
    prediction = verified_prediction(resumed, cluster, PROFILE, other)
    prepare(folder, resumed, cluster, PROFILE, prediction, tell=lambda told: None)
    assert not any(path.exists() for path in told)
    data = page_data(folder)
    assert data["report"] is None and data["steps"] == [1, 2, 3]
    assert [len(each["labels"]) for each in data["timelines"]] == [2]


def test_a_plan_for_another_model_is_refused_before_anything_is_written(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(
        InputError, match="model of the run is 'gpt2-tiny', of its plan and profile 'bert-tiny'"
    ):
        train(replace(SETTINGS, model="gpt2-tiny"), cluster_file(tmp_path), PROFILE, PLAN, folder)
    assert not folder.path.exists()
