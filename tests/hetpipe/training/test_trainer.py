"""A model, data, optimizer and loss of one's own, trained under any plan as one process would train them."""

import copy
import math
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import user_tasks
from cost_model.errors import InputError
from cost_model.sharding import OwnerRange
from hetpipe.commands.inputs import with_states
from hetpipe.data.user_task import own_task
from hetpipe.models.chain import ChainModel
from hetpipe.runs.optimizers import OptimizerKind
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, read_settings
from hetpipe.training import checkpoint_weights
from hetpipe.training.trainer import AdamW, Trainer
from partition.plan import OPTIMIZER_STATES
from runs import chain_plan, cluster_file, made_up_profile_of, replica_plan
from trainers import BATCH, STEPS, Recorder, losses, module, plain_losses, trainer, two_pipelines

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def default_rate(step: int) -> float:
    return Settings(steps=STEPS, learning_rate=1.0).learning_rate_at(step)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    values = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [value for value in values if value.dim() > 1], "weight_decay": 0.1},
            {"params": [value for value in values if value.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2, betas=(0.8, 0.99), eps=1e-6,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [pytest.param((0, 5), marks=pytest.mark.exhaustive), (0, 1, 2, 5)])
def test_a_module_trains_from_its_own_weights_as_torch_trains_it(tmp_path, cuts):
    copied = copy.deepcopy(module())
    expected = plain_losses(copied, adamw(copied), default_rate)
    optimizer = AdamW(1e-2, betas=(0.8, 0.99), epsilon=1e-6, weight_decay=0.1)
    found = losses(tmp_path, chain_plan("mine", list(cuts), 3), optimizer=optimizer)
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "zero"),
    [(SGD, 0), (user_tasks.adagrad_by_shape, 1), (user_tasks.adagrad_by_shape, 2), (SGD, 3)],
)
def test_any_optimizer_of_torch_trains_the_same_under_a_plan(tmp_path, factory, zero):
    copied = copy.deepcopy(module())
    made = factory(list(copied.parameters()))
    options = {"optimizer": factory, "rate_schedule": user_tasks.halving, "count_terms": user_tasks.entries}
    expected = plain_losses(copied, made, user_tasks.halving, terms=BATCH * user_tasks.NUM_OUTPUTS)
    plan = (
        replace(two_pipelines(), zero=zero)
        if zero < 3
        else replica_plan("mine", 5, (2, 7), (4, 4), (5, 5), zero=3)
    )
    assert losses(tmp_path, plan, **options) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_a_module_of_transformers_trains_from_its_own_weights(tmp_path):
    torch.manual_seed(11)
    model = user_tasks.build_gpt2().double()
    data = user_tasks.sequences(24)
    copied, expected = copy.deepcopy(model), []
    sgd = torch.optim.SGD(copied.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        ids = torch.stack([data[(8 * step + row) % 24]["input_ids"] for row in range(8)])
        loss = user_tasks.next_token_loss(copied(input_ids=ids, use_cache=False).logits, ids)
        loss = loss / user_tasks.num_next_tokens(ids)
        sgd.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(copied.parameters(), 1.0)
        sgd.step()
        expected.append(loss.item())
    chain = ChainModel.from_module(model, {"input_ids": data[0]["input_ids"][None]})
    recorder = Recorder()
    made = Trainer(
        model, data, SGD, user_tasks.next_token_loss,
        count_terms=user_tasks.num_next_tokens, rate_schedule=user_tasks.constant, shuffle=False,
        plan=chain_plan("mine", [0, 2, 4], 2, batch=8),  # the tied embedding is on both devices
        cluster=cluster_file(tmp_path), folder=tmp_path / "run", callbacks=[recorder],
        dtype="float64", save=True,
        profile=made_up_profile_of(chain, "mine", dtype="float64", sequence_length=user_tasks.LENGTH),
    )  # fmt: skip
    made.fit(3)
    assert [entry["loss"] for entry in recorder.metrics] == pytest.approx(expected, rel=1e-12)
    assert made.checkpoint is not None
    checkpoint_weights.load_weights(made.checkpoint, model)
    torch.testing.assert_close(model.lm_head.weight, copied.lm_head.weight, rtol=1e-12, atol=1e-12)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.slow
@pytest.mark.parametrize(
    "cuts",
    [
        (0, 1, 3, 7),
        (0, 2, 4, 5, 7),
        *(pytest.param(cuts, marks=pytest.mark.exhaustive) for cuts in ((0, 7), (0, 6, 7))),
    ],
)
def test_layers_in_place_or_twice_train_as_torch_trains_them(tmp_path, cuts):
    torch.manual_seed(3)
    model = user_tasks.build_usual().double()
    copied = copy.deepcopy(model)
    expected = plain_losses(copied, SGD(copied.parameters()), default_rate)
    recorder = Recorder()
    plan = chain_plan("mine", list(cuts), 4)
    made = trainer(tmp_path, plan, model, callbacks=[recorder], optimizer=SGD, save=True)
    made.fit(STEPS)
    assert [entry["loss"] for entry in recorder.metrics] == pytest.approx(expected, rel=1e-12)
    assert made.checkpoint is not None
    checkpoint_weights.load_weights(made.checkpoint, model)  # the buffer is not in it, and stays
    for name, value in copied.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-10, atol=1e-12), name


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [user_tasks.sgd, user_tasks.adagrad_by_shape, user_tasks.counting])
def test_a_checkpoint_holds_the_states_of_the_optimizer_for_any_plan(tmp_path, optimizer):
    expected = losses(tmp_path / "straight", optimizer=optimizer)
    recorder = Recorder()
    options = {"optimizer": optimizer, "callbacks": [recorder]}
    trainer(tmp_path / "two", total_steps=STEPS, save=True, **options).fit(3)
    second = trainer(tmp_path / "two", chain_plan("mine", [0, 3, 5], 16), **options)
    second.fit(STEPS, resume_from=second.folder.path)
    assert [entry["loss"] for entry in recorder.metrics] == pytest.approx(expected, rel=1e-12)
    assert recorder.sources == [None, second.folder.checkpoints / "step-000003"]


@pytest.mark.slow
def test_a_resumed_run_has_the_settings_of_its_checkpoint_and_tells_of_other_options(tmp_path):
    trainer(tmp_path, optimizer=SGD, save=True, seed=7, clip_norm=0.5, total_steps=4).fit(1)
    other = trainer(tmp_path, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.5), clip_norm=2.0)
    with pytest.warns(UserWarning) as told:
        other.fit(2, resume_from=tmp_path / "run")
    assert [str(warning.message) for warning in told] == [
        "clip_norm is 2, before the checkpoint it was 0.5",
        "momentum of SGD is 0.5, before the checkpoint it was 0.9",
    ]
    assert {warning.filename for warning in told} == {__file__}, "a line of hetpipe's is shown"
    settings = read_settings(RunFolder(tmp_path / "run").config)
    assert (settings.seed, settings.total_steps, settings.clip_norm) == (7, 4, 2.0)


@pytest.mark.slow
def test_a_resumed_run_tells_of_other_data_order_and_rates(tmp_path):
    trainer(tmp_path, save=True, total_steps=4, rate_schedule=user_tasks.constant).fit(1)
    same = trainer(tmp_path, save=True, rate_schedule=user_tasks.constant)
    same.fit(2, resume_from=tmp_path / "run")
    other = trainer(tmp_path, data=user_tasks.samples(12), shuffle=False)
    with pytest.warns(UserWarning) as told:
        other.fit(3, resume_from=tmp_path / "run")
    assert [str(warning.message) for warning in told] == [
        f"num_samples is 12, before the checkpoint it was {len(user_tasks.samples())}",
        "shuffle is False, before the checkpoint it was True",
        "rate_schedule is not given, before the checkpoint it was",
    ]


@pytest.mark.slow
def test_states_of_another_optimizer_are_refused(tmp_path):
    trainer(tmp_path, save=True).fit(1)
    other = trainer(tmp_path, optimizer=user_tasks.sgd)
    with pytest.raises(
        InputError, match=r"was written with optimizer AdamW, the run's is torch\.optim\.sgd\.SGD"
    ):
        other.fit(2, resume_from=tmp_path / "run")


@pytest.mark.slow
def test_what_no_checkpoint_can_hold_is_refused(tmp_path):
    with pytest.raises(InputError, match="it keeps 'seen' for a whole group of parameters"):
        trainer(tmp_path, optimizer=user_tasks.group_counting, save=True).fit(1)


@pytest.mark.slow
@pytest.mark.parametrize("given", [-1.0, math.nan, None])
def test_a_rate_that_is_none_is_refused_with_its_step(tmp_path, given):
    with pytest.raises(
        InputError, match=rf"rate_schedule gives {given} for step 1, counted from 0; give a mul"
    ):
        trainer(tmp_path, rate_schedule=lambda step: given if step else 1.0).fit(3)
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 1


@pytest.mark.parametrize(("first", "second"), [(module(), "place"), (None, module())])
def test_weights_are_loaded_from_a_folder_into_a_model(first, second):
    with pytest.raises(InputError, match="give the folder of a checkpoint"):
        checkpoint_weights.load_weights(first, second)


@pytest.mark.slow
def test_trained_weights_come_back_and_the_module_stays_as_it_is(tmp_path):
    model = module()
    before = copy.deepcopy(model.state_dict())
    made = trainer(
        tmp_path, two_pipelines(), model, optimizer=SGD, save=True, rate_schedule=user_tasks.halving
    )
    made.fit(STEPS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    expected = copy.deepcopy(model)
    plain_losses(expected, SGD(expected.parameters()), user_tasks.halving)
    assert made.checkpoint is not None
    checkpoint_weights.load_weights(made.checkpoint, model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-12, atol=1e-12)
    assert not list((tmp_path / "run").glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the times of")  # they are measured for a second
def test_a_profile_is_measured_where_none_is_given(tmp_path):
    report = trainer(tmp_path, model=user_tasks.build_plain, profile=None).fit(2)
    assert report.predicted_step_s > 0
    profile = RunFolder(tmp_path / "run").profile.read_text()
    assert '"source": "measured"' in profile


@pytest.mark.slow
def test_a_mean_is_refused_when_it_shows(tmp_path):
    with pytest.raises(InputError, match=r"adds up to .*; give a sum over the samples"):
        trainer(tmp_path, loss=user_tasks.mean_squared_error).fit(1)


class Unsure:
    """Samples that differ each time they are read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(user_tasks.NUM_FEATURES).double(), torch.zeros(user_tasks.NUM_OUTPUTS)


class Locked:
    """A loss that no other process can be given."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (outputs - labels).square().sum()


def wrong_first(first: int, count: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(count + 1, user_tasks.NUM_FEATURES), torch.zeros(count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": iter([])}, "the data are a list_iterator, which has no samples by index"),
        ({"data": torch.utils.data.DataLoader(user_tasks.samples(4))}, "give its data set"),
        ({"data": []}, "the data set is empty"),
        ({"data": [1, 2]}, r"data\[[01]\] is a int; give \(inputs, label\) or a mapping"),
        ({"data": [{"x": torch.zeros(8)}]}, r"it needs inputs and 'labels'"),
        ({"data": [("text", 1)]}, "'input' of data.0. is a str; give tensors, arrays or numbers"),
        ({"data": Unsure()}, "give another sample when they are read again"),
        ({"data": wrong_first}, r"'input' of 1 samples is \(2, 8\); give a tensor \[1, ...\]"),
        ({"data": [(torch.zeros(3).double(), 1)]}, "the model fails on the first sample of the data"),
        ({"loss": nn.MSELoss()}, "the loss has reduction 'mean'; give reduction='sum'"),
        ({"loss": Locked()}, "the loss cannot be sent to the ranks .cannot pickle"),
        ({"plan": None}, "neither batch_size nor plan is given"),
        ({"dtype": "half"}, "dtype is 'half'; give float32, tf32, bf16, fp16, float64"),
        ({"dtype": torch.bfloat16}, "dtype is torch.bfloat16; give float32, tf32, bf16"),
        ({"plan": None, "batch_size": 8.0}, "batch_size is 8.0; give a whole number"),
        ({"plan": None, "batch_size": 0}, "batch_size is 0; give the samples of a step, at least 1"),
        ({"batch_size": 3}, "batch_size is 3, the plan's is 16; leave it out, or plan again"),
        ({"eval_data": user_tasks.samples(4)}, "eval_data have 4 samples; give at least a batch .16."),
        ({"eval_data": user_tasks.squared_error}, "eval_data are a function; give a data set with a length"),
        (
            {"eval_data": user_tasks.samples(16), "count_terms": lambda labels: 0},
            "the loss of eval_data has 0 terms; eval_data needs labels that count",
        ),
        ({"eval_every": 2}, "eval_every is 2, and there is no eval_data"),
        ({"cluster": "none.toml"}, "none.toml: no such file"),
        ({"loss": "mse"}, "the loss is a str"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "give what makes one, as functools"),
        ({"optimizer": "sgd"}, "the optimizer is a str"),
        ({"optimizer": list}, "the optimizer factory gives a list"),
        ({"optimizer": partial(torch.optim.SGD, lr=-1.0)}, "the optimizer factory fails: Invalid learning"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.0)}, "do not all have a learning rate above zero"),
        ({"optimizer": AdamW(-1.0)}, "learning_rate is -1.0"),
        ({"optimizer": AdamW(betas=(0.9, 1.0))}, r"betas are \[0.9, 1.0\]; give two numbers in \[0, 1\)"),
        ({"callbacks": [print]}, "a callback is a builtin_function_or_method without any of on_step_end"),
        ({"learning_rate": 0.1}, "there is no setting 'learning_rate'; there are total_steps, seed"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0; give more than zero"),
        ({"plan": chain_plan("mine", [0, 2, 4], 4)}, "the plan is for 4 layers, the model has 5"),
        ({"model": nn.Linear(8, 4)}, "Linear cannot be split: it has no list of alike blocks"),
        ({"model": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))}, "layer '1' is a BatchNorm1d"),
        ({"model": user_tasks.build_batch_norm}, "layer '1' is a BatchNorm1d"),
        ({"clip_norm": None}, "settings: clip_norm: input should be a valid number, found null"),
        ({"seed": 1.5}, "settings: seed: input should be a valid integer"),
        ({"seed": 2**64}, "give less than 2..63"),
        ({"schedule": "zzz"}, "settings: schedule: input should be '1f1b'"),
        ({"rate_schedule": 0.1}, "rate_schedule is 0.1; give a function"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS looks at all parameters at once"),
        ({"plan": "plan.json"}, "the plan is a str; give a Plan"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_one_line(tmp_path, options, message):
    options = {"plan": chain_plan("mine", [0, 5], 4), "data": user_tasks.samples(4), **options}
    model = options.pop("model", None) or module()
    options = {"optimizer": AdamW(), "loss": user_tasks.squared_error, "callbacks": (), **options}
    with pytest.raises(InputError, match=message) as caught:
        Trainer(model, **{"cluster": cluster_file(tmp_path), "folder": tmp_path / "run", **options})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_work_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chain = ChainModel.from_module(module(), torch.zeros(1, user_tasks.NUM_FEATURES, dtype=torch.float64))
    longer = made_up_profile_of(chain, "mine", dtype="float64", sequence_length=7)
    for wrong, message in (
        ({"dtype": "float32"}, "dtype of the run is 'float32', of its plan and profile 'float64'"),
        ({"dtype": "bf16"}, "dtype of the run is 'bfloat16-autocast', of its plan and profile 'float64'"),
        ({"profile": longer}, "sequence_length of the run is 1, of its plan and profile 7"),
    ):
        made = trainer(tmp_path, folder=None, **wrong)
        with pytest.raises(InputError, match=message):
            made.fit(1)
        assert made.folder is None and made.checkpoint is None
        assert not (tmp_path / "runs").exists()


def test_held_out_data_of_ones_own_are_known_by_their_first_and_last_batch():
    def sha256(data: object) -> str:
        return own_task(
            module(), user_tasks.samples(), user_tasks.squared_error, eval_data=data, eval_batch=2
        ).held_out_sha256

    held_out = user_tasks.samples(6)
    x, y = held_out[5]
    assert sha256(list(held_out)) == sha256(held_out)
    assert sha256([*held_out[:5], (x, -y)]) != sha256(held_out) != sha256(held_out[:4])
    assert sha256(None) == ""


@pytest.mark.slow
def test_a_profile_that_knows_nothing_of_shared_weights_is_refused(tmp_path):
    made = trainer(tmp_path, chain_plan("mine", [0, 3, 7], 4), user_tasks.build_usual().double())
    assert made.profile is not None
    layers = tuple(replace(layer, tied_to=None, tied_bytes=0.0) for layer in made.profile.layers)
    made.profile = replace(made.profile, layers=layers)
    with pytest.raises(InputError, match=r"'2.(weight|bias)' is in layers of 'here.[01]' and of"):
        made.fit(1)


def test_a_profile_does_not_keep_what_the_optimizer_of_a_trainer_needed(tmp_path):
    ranges = OwnerRange(0, "here/0", 0.0, 0.5), OwnerRange(0, "here/1", 0.5, 1.0)
    owners, plan = ("here/0",) * 5, replica_plan("mine", 5, (4, 8), (4, 8), zero=1)
    cut = replace(plan, state_owners=owners, owner_ranges=ranges)
    made = trainer(tmp_path, cut, optimizer=partial(torch.optim.Adafactor, lr=0.1))
    with pytest.raises(InputError, match="may need all of a parameter"):
        made.prepare()
    assert made.profile is not None and not made.profile.whole_states
    kept = replace(made.profile, whole_states=True)  # as it stands in the folder of such a run
    assert trainer(tmp_path, cut, optimizer=SGD, profile=kept).prepare().plan.owner_ranges == ranges
    assert not with_states(kept, {"optimizer": OptimizerKind.ADAMW}).whole_states


def test_only_states_of_our_own_adamw_may_be_on_hosts(tmp_path):
    plan = chain_plan("mine", [0, 5], 4)
    (whole,) = plan.pipelines[0].stages
    on_host = replace(whole, offload=(OPTIMIZER_STATES,))
    moved = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(on_host,)),))
    made = trainer(tmp_path, moved, optimizer=SGD)
    with pytest.raises(InputError, match="the optimizer has them on the device alone"):
        made.prepare()
    assert made.profile is not None
    for kind in OptimizerKind:
        resident = with_states(made.profile, {"optimizer": kind}).resident_states
        assert resident == (kind is not OptimizerKind.ADAMW)
