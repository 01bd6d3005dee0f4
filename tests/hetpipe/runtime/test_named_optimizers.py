"""The optimizers of --optimizer: steps of torch under any plan, their bytes planned, resumed or refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from cost_model.dtypes import GRADIENT_BF16
from cost_model.errors import InputError
from cost_model.memory import checkpoint_bytes
from cost_model.profile import profile_text
from hetpipe.data.task import prepare_data, registered_task
from hetpipe.data.user_task import own_task
from hetpipe.profiling.layer_profiler import profile_task
from hetpipe.runs.optimizers import OptimizerKind, num_states
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runtime.named_optimizers import factory_of
from partition.plan_file import plan_text
from runs import CPU_CLUSTER, chain_plan, made_up_profile, replica_plan, run
from shell import Shell

STEPS = 4
OTHERS = {
    "adam": ({}, torch.optim.Adam, {"eps": 1e-8}),
    "sgd": ({}, torch.optim.SGD, {}),
    "sgd-momentum": ({"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    "adadelta": (
        {"rho": 0.8, "epsilon": 1e-6, "learning_rate": 5.0},
        torch.optim.Adadelta,
        {"rho": 0.8, "eps": 1e-6},
    ),
    "adagrad": ({"epsilon": 1e-10}, torch.optim.Adagrad, {"eps": 1e-10}),
    "rmsprop": ({"momentum": 0.5}, torch.optim.RMSprop, {"alpha": 0.9, "momentum": 0.5, "eps": 1e-8}),
}
STATES = {"adam": 2, "sgd": 0, "sgd-momentum": 1, "adadelta": 2, "adagrad": 1, "rmsprop": 2}


def settings_of(name: str, **others) -> Settings:
    options, _, _ = OTHERS[name]
    return Settings(
        steps=STEPS, weight_decay=0.1, optimizer=OptimizerKind(name.partition("-")[0]),
        **{"learning_rate": 0.05, **options, **others},
    )  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_the_states_that_are_planned_are_those_that_torch_keeps(name):
    settings, value = settings_of(name), torch.nn.Parameter(torch.ones(3, 4))
    made = factory_of(settings)([value])
    value.grad = torch.ones_like(value)
    made.step()
    kept = [s for s in made.state[value].values() if isinstance(s, torch.Tensor) and s.shape == value.shape]
    assert len(kept) == settings.states_per_parameter == STATES[name]


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adagrad"])
def test_a_measured_profile_has_the_states_of_its_optimizer(tmp_path, name):
    settings = TaskSettings("gpt2-tiny", 16, run=settings_of(name))
    prepare_data(RunFolder(tmp_path), settings, trains=False)
    task = registered_task(RunFolder(tmp_path), settings)
    profile = profile_task(task, settings, "cpu", (1,), 0.0, device=torch.device("cpu"))
    assert profile.optimizer_bytes_per_parameter_byte == STATES[name]
    assert profile.kinds["cpu"].optimizer_s_per_byte > 0


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (partial(torch.optim.SGD, lr=0.1), 0.0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1.0),
        (partial(torch.optim.Adamax, lr=0.1), 2.0),
        (None, 2.0),
    ],
)
def test_what_a_trainer_is_given_is_seen_when_it_is_measured(tmp_path, make, states):
    data = [(torch.full((8,), float(index)), torch.tensor(index % 4)) for index in range(8)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    task = own_task(model, data, torch.nn.CrossEntropyLoss(reduction="sum"), make_optimizer=make)
    settings = TaskSettings("mine", 1)
    task.write_weights(RunFolder(tmp_path))
    made = task(RunFolder(tmp_path), settings)
    profile = profile_task(made, settings, "cpu", (1,), 0.0, device=torch.device("cpu"))
    assert profile.optimizer_bytes_per_parameter_byte == states


def of_torch(name: str, parameters: Sequence[nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    """Return torch's own optimizer of that name, whose vectors do not decay."""
    _, kind, options = OTHERS[name]
    groups = [
        {"params": [value for value in parameters if value.dim() > 1], "weight_decay": 0.1},
        {"params": [value for value in parameters if value.dim() == 1], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer = kind(groups, lr=settings.learning_rate, **options)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_run_is_one_of_torch_on_one_device(tmp_path, name):
    """Whole, and gone on with by stages from the checkpoint; without dropout by llama-tiny.

    In stages from the beginning, too, with the one that keeps most.
    """
    settings, profile = settings_of(name, every=2), made_up_profile("llama-tiny")
    cut = chain_plan("llama-tiny", [0, 2, 6], 2)
    plans = {"whole": chain_plan("llama-tiny", [0, 6], 4)} | ({"cut": cut} if name == "adadelta" else {})
    losses = {key: run(tmp_path / key, plan, settings, profile)[1] for key, plan in plans.items()}
    done = RunFolder(tmp_path / "whole" / "run")

    task = registered_task(done, TaskSettings("llama-tiny", 64, run=settings))
    layers = task.chain.materialise(range(task.chain.num_layers), settings.seed)
    parameters = list(layers.owned_parameters().values())
    optimizer, expected = of_torch(name, parameters, settings), []
    for step in range(STEPS):
        inputs, labels = task.batch(16 * step, 16)
        (logits,) = layers.run(0, task.chain.num_layers, inputs)
        loss = task.loss(logits, labels) / task.num_loss_tokens(16)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        optimizer.step()
        expected.append(loss.item())
    for found in losses.values():
        assert found == pytest.approx(expected, rel=1e-5)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-4)
    gone_on = replace(settings, resume_from=str(done.checkpoints / "step-000002"))
    assert run(tmp_path / "on", cut, gone_on, profile)[1] == pytest.approx(losses["whole"][2:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == "adagrad" else pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS],
)
def test_gradients_that_travel_in_16_bits_are_those_of_one_device_that_rounds_them(tmp_path, name):
    """Two replicas: each rounds its own, and what both sum to is rounded again."""
    settings, profile = settings_of(name, clip_norm=1e30), made_up_profile("llama-tiny")
    plan = replace(replica_plan("llama-tiny", 6, (4, 8), (4, 8), zero=0), gradient_dtype=GRADIENT_BF16)
    report, losses = run(tmp_path, plan, settings, profile)
    assert report.owners_agree
    task = registered_task(RunFolder(tmp_path / "run"), TaskSettings("llama-tiny", 64, run=settings))
    layers = task.chain.materialise(range(6), settings.seed)
    parameters = list(layers.owned_parameters().values())
    optimizer, expected = of_torch(name, parameters, settings), []
    for step in range(STEPS):
        sums, total = [], 0.0
        for first in (0, 8):
            inputs, labels = task.batch(16 * step + first, 8)
            loss = task.loss(layers.run(0, 6, inputs)[0], labels) / task.num_loss_tokens(16)
            optimizer.zero_grad()
            loss.backward()
            sums.append([value.grad.bfloat16() for value in parameters])
            total += loss.item()
        for value, mine, other in zip(parameters, *sums, strict=True):
            value.grad = (mine.float() + other.float()).bfloat16().float()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        optimizer.step()
        expected.append(total)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no step is over")
def test_memory_and_checkpoints_are_as_small_as_planned(tmp_path):
    """SGD beside AdamW: 8 bytes a parameter less on the device that holds all, and on the disk."""
    found = {}
    for kind in (OptimizerKind.ADAMW, OptimizerKind.SGD):
        settings = Settings(steps=2, optimizer=kind)
        profile = replace(
            made_up_profile("llama-tiny"), optimizer_bytes_per_parameter_byte=settings.states_per_parameter
        )
        report, _ = run(tmp_path / kind, chain_plan("llama-tiny", [0, 6], 4), settings, profile)
        folder = RunFolder(tmp_path / kind / "run")
        on_disk = sum(path.stat().st_size for path in folder.checkpoints.glob("*/layer-*"))
        peak = report.devices["here/0"].peak_bytes
        assert on_disk == pytest.approx(checkpoint_bytes(profile), rel=0.02)
        found[kind] = on_disk, peak
    parameters = sum(layer.parameter_bytes for layer in profile.layers) / 4
    for adamw, sgd in zip(*found.values(), strict=True):
        assert adamw - sgd == pytest.approx(8 * parameters, rel=0.05)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"momentum": 0.9}, "--momentum is of sgd and rmsprop, and --optimizer is adamw; leave it out"),
        ({"optimizer": OptimizerKind.SGD, "momentum": 1.0}, r"momentum is 1.0; give a number in \[0, 1\)"),
        ({"optimizer": OptimizerKind.ADADELTA, "rho": -0.1}, r"rho is -0.1; give a number in \[0, 1\)"),
        ({"optimizer": OptimizerKind.SGD, "learning_rate": 0.0}, "sgd needs one above zero"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(options, reason):
    with pytest.raises(InputError, match=reason):
        Settings(steps=1, **options)


def test_each_kind_has_a_number_of_states():
    assert [num_states(kind, 0.0) for kind in OptimizerKind] == [2, 2, 0, 2, 1, 1]


@pytest.mark.slow
def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    """Planned by its states, remembered on resume, and refused as another's; the run file says it."""
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    shell.write("cluster.toml", CPU_CLUSTER)
    profile = made_up_profile("gpt2-tiny")
    shell.write("profile.json", profile_text(profile))
    shell.write("plan.json", plan_text(chain_plan("gpt2-tiny", [0, 6], 4)))
    line = "run --model gpt2-tiny --cluster cluster.toml --profile profile.json --json"
    result = shell(f"{line} --plan plan.json --optimizer sgd --momentum 0.9 --steps 2 --run-folder sgd")
    assert result.code == 0, result.err
    written = json.loads((tmp_path / "sgd" / "profile.json").read_text())
    assert written["optimizer_bytes_per_parameter_byte"] == 1.0
    job = (tmp_path / "sgd" / "job.toml").read_text()
    assert 'optimizer = "sgd"' in job and "momentum = 0.9" in job and "betas" not in job
    result = shell(f"{line} --plan plan.json --steps 3 --resume sgd")
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "sgd" / "config.json").read_text())["optimizer"] == "sgd"
    for options, reason in (
        ("--optimizer adam", "has the states of sgd, and --optimizer is adam; leave it out to go on"),
        ("--momentum 0.5", "momentum is 0.5, before the checkpoint it was 0.9"),
        ("--betas 0.9,0.95", "--betas is of adamw and adam, and --optimizer is sgd"),
        ("--override optimizer", "--override 'optimizer' is nothing that can be"),
    ):
        result = shell(f"{line} --plan plan.json --steps 4 --resume sgd {options}")
        assert result.code == 2 and reason in result.err, result.err
        assert len(result.err.strip().splitlines()) == 1
    result = shell("run job.toml --run-folder again --json".replace("job.toml", "sgd/job.toml"))
    assert result.code == 0, result.err


@pytest.mark.slow
def test_a_plan_for_sgd_needs_less(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    shell.write("cluster.toml", CPU_CLUSTER)
    shell.write("profile.json", profile_text(made_up_profile("gpt2-tiny")))
    line = "plan --profile profile.json --cluster cluster.toml --no-proof --strategy single --json"
    bytes_of = {
        name: shell(f"{line} --optimizer {name}").json["predicted"]["devices"]["here/0"]["memory_bytes"]
        for name in ("adamw", "sgd")
    }
    trained = sum(layer.trained_bytes for layer in made_up_profile("gpt2-tiny").layers)
    tied = sum(layer.tied_bytes for layer in made_up_profile("gpt2-tiny").layers)
    assert bytes_of["adamw"] - bytes_of["sgd"] == pytest.approx(2 * (trained - tied), rel=1e-6)
