"""bfloat16 autocast: any plan computes the same, half the bytes travel, gradients stay float32."""

import dataclasses
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import user_tasks
from cost_model.cluster import CPU, Device
from cost_model.cluster_file import read_cluster
from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST, check_fast, parse_dtype
from cost_model.errors import InputError
from cost_model.memory import StageShape, device_memory
from cost_model.profile import ModelProfile, profile_text
from hetpipe import cli
from hetpipe.data.task import prepare_data, registered_task
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.mixed_precision import boundary_dtype, kept_casts
from hetpipe.profiling.layer_profiler import profile_task
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runtime.rank_setup import boundaries_of
from hetpipe.runtime.stage_runner import Microbatch
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training import checkpoint
from hetpipe.training.user_loop import RankStages, execute
from partition.plan import Pipeline, Plan, Stage
from runs import (
    EMULATED_CLUSTER,
    RECOMPUTE,
    chain_plan,
    cluster_file,
    emulated_cluster,
    made_up_profile,
    made_up_profile_of,
    run,
)
from small_case import CLUSTER_TOML, small_profile

MODEL = "gpt2-tiny"  # a residual stream, which autocast alone would leave in float32
LOWERED = torch.bfloat16


def in_bf16(profile: ModelProfile) -> ModelProfile:
    return dataclasses.replace(profile, dtype=BFLOAT16_AUTOCAST)


def chain() -> ChainModel:
    return ChainModel.from_spec(model_spec(MODEL))


def inputs() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(2 * 16).reshape(2, 16) * 7 % 1000}


def test_what_travels_is_bfloat16_and_a_cut_changes_nothing():
    layers = chain().materialise(range(6), seed=0, lowered=LOWERED).eval()
    whole = layers.run(0, 6, inputs())[0]
    for cut in (1, 3, 5):
        carried = layers.run(0, cut, inputs())
        assert [tensor.dtype for tensor in carried] == [LOWERED]
        assert torch.equal(layers.run(cut, 6, inputs(), carried)[0], whole)
    assert whole.dtype == torch.float32
    plain = chain().materialise(range(6), seed=0).eval().run(0, 6, inputs())[0]
    assert 0 < (whole - plain).abs().max() < 0.02 * plain.abs().max()


def test_a_sequential_model_rounds_at_its_boundaries():
    layers = ChainModel.from_module(user_tasks.build_linear, torch.zeros(1, 8)).materialise(
        range(3), seed=0, lowered=LOWERED
    )
    x = {"x": torch.randn(4, 8)}
    carried = layers.run(0, 1, x)
    assert carried[0].dtype == LOWERED
    assert torch.equal(layers.run(1, 3, x, carried)[0], layers.run(0, 3, x)[0])


def test_gradients_are_float32_and_those_of_boundaries_are_not():
    layers = chain().materialise(range(3), seed=0, lowered=LOWERED).eval()
    carried = tuple(value.detach().requires_grad_() for value in layers.run(0, 2, inputs()))
    layers.run(2, 3, inputs(), carried)[0].sum().backward()
    assert carried[0].grad is not None and carried[0].grad.dtype == LOWERED
    gradients = [value.grad for value in layers.parameters_of(2).values()]
    assert all(value is not None and value.dtype == torch.float32 for value in gradients)


def test_the_shapes_of_messages_are_those_of_bfloat16(tmp_path):
    for dtype, expected in ((BFLOAT16_AUTOCAST, LOWERED), ("float32", torch.float32)):
        settings = TaskSettings("mine", 1, dtype)
        task = user_tasks.linear_task(RunFolder(tmp_path), settings)
        boundaries = boundaries_of(task.chain, boundary_dtype(dtype))
        microbatch = Microbatch(0, (0, 1, 2, 3), *task.batch(0, 4), 1.0)
        assert [shape.dtype for shape in boundaries(1, microbatch)] == [expected]


def test_a_loop_of_ones_own_computes_in_the_precision_of_its_profile(tmp_path):
    layers = ChainModel.from_module(user_tasks.build_linear, torch.zeros(1, 8))
    cluster = read_cluster(cluster_file(tmp_path))
    profile = made_up_profile_of(layers, "mine", CPU, 1e-4, dtype=BFLOAT16_AUTOCAST, sequence_length=1)
    program = lower(chain_plan("mine", [0, 3], 4, batch=4), profile, cluster)
    options = {"profile": profile, "cluster": cluster, "seed": 3}
    with pytest.raises(InputError, match="under a profile in bfloat16-autocast are in float32"):
        RankStages(program, layers, user_tasks.squared_error, dtype=torch.float64, **options)
    stages = RankStages(program, layers, user_tasks.squared_error, **options)
    x, y = torch.randn(4, 8), torch.randn(4, 4)
    losses = {}
    for lowered in (LOWERED, None):
        model = layers.materialise(range(3), seed=3, lowered=lowered)
        losses[lowered] = user_tasks.squared_error(model.run(0, 3, {"x": x})[0], y).item() / 4
    found = execute(program, stages, {"x": x}, y).loss
    assert found == pytest.approx(losses[LOWERED], rel=1e-6) != losses[None]
    stages.close()


class CountCasts(TorchDispatchMode):
    """Counts how often a matrix of a block's weights is lowered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == LOWERED:
            self.count += args[0].shape == (64, 192)  # attention's weights for queries, keys and values
        return func(*args, **kwargs)


def test_microbatches_share_the_lowered_weights_of_a_step():
    layers = chain().materialise([2], seed=0, lowered=LOWERED).eval()
    carried = (torch.randn(2, 16, 64).to(LOWERED).requires_grad_(),)

    def step() -> Tensor:
        for value in layers.parameters_of(2).values():
            value.grad = None
        with kept_casts():
            with torch.no_grad():  # as a stage does that computes again later
                layers.run(2, 3, inputs(), carried)
            outputs = [layers.run(2, 3, inputs(), carried)[0] for _ in range(3)]
            for output in outputs:
                output.float().square().sum().backward()
        gradient = layers.parameters_of(2)["transformer.h.1.attn.c_attn.weight"].grad
        assert gradient is not None
        return gradient.clone()

    with CountCasts() as casts:
        shared = step()
    assert casts.count <= 2  # of three microbatches; the forward without gradients may have its own
    for value in layers.parameters_of(2).values():
        value.grad = None
    for _ in range(3):
        layers.run(2, 3, inputs(), carried)[0].float().square().sum().backward()
    apart = layers.parameters_of(2)["transformer.h.1.attn.c_attn.weight"].grad
    assert apart is not None and torch.equal(shared, apart)
    with torch.no_grad():
        for value in layers.parameters_of(2).values():
            value.mul_(1.5)
    assert not torch.allclose(step(), shared, rtol=0.1)  # the next step has its own copies


class WatchGradients(TorchDispatchMode):
    """Counts the gradients in 16 bits of matrices of one shape that are alive at once."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.most = shape, 0
        self._alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.shape == self.shape and result.dtype == LOWERED:
            self._alive.add(result.untyped_storage())
            self.most = max(self.most, len(self._alive))
        return result


def test_the_gradient_of_a_lowered_weight_does_not_wait_for_those_of_other_layers():
    layers = chain().materialise([1, 2, 3, 4], seed=0, lowered=LOWERED).eval()
    carried = (torch.randn(2, 16, 64).to(LOWERED).requires_grad_(),)
    with kept_casts():
        outputs = [layers.run(1, 5, inputs(), carried)[0] for _ in range(2)]
        for output in outputs:
            with WatchGradients((64, 192)) as watch:
                output.float().square().sum().backward()
            assert watch.most == 1  # 4, one of each layer, in the second backward, if autocast has the copies


def test_dropout_in_bfloat16_keeps_the_expectation():
    x = torch.linspace(1, 2, 20000).to(LOWERED).reshape(1, -1)
    with KeyedDropout(0) as dropout:
        dropout.at(0, (0,))
        dropout.enter_layer(1)
        found = torch.nn.functional.dropout(x, 0.1)
    kept = found != 0
    ratio = found[kept].double() / x[kept].double()
    assert found.dtype == LOWERED
    assert float(ratio.mean()) == pytest.approx(1 / 0.9, rel=3e-4)  # 1 / 0.9 itself would be off by 1.6e-3


@pytest.mark.slow
def test_losses_do_not_depend_on_the_plan_and_follow_those_of_float32(tmp_path):
    profile = made_up_profile(MODEL)
    settings = Settings(MODEL, 8, learning_rate=1e-3, save=True)
    lowered = dataclasses.replace(settings, dtype=BFLOAT16_AUTOCAST)
    pipelines = (
        Pipeline(4, 12, (Stage(("here/0",), (0, 4), 2), Stage(("here/1",), (4, 6), 1))),
        Pipeline(4, 4, (Stage(("here/2",), (0, 6), 1),)),
    )
    plans = {
        "one": chain_plan(MODEL, [0, 6], 4),
        "two stages": chain_plan(MODEL, [0, 2, 6], 4),
        "recompute": chain_plan(MODEL, [0, 2, 6], 4, recompute=True),
        "by layer": chain_plan(MODEL, [0, 2, 6], 4, recompute=True, segment_layers=1),
        "two pipelines": Plan("manual", MODEL, 16, pipelines),
    }
    losses = {name: run(tmp_path / name, plan, lowered, in_bf16(profile))[1] for name, plan in plans.items()}
    _, exact = run(tmp_path / "float32", plans["one"], settings, profile)
    assert exact[-1] < exact[0] - 0.1  # it learns
    for name, found in losses.items():
        assert found == pytest.approx(losses["one"], rel=2e-4), name
        assert found == pytest.approx(exact, rel=5e-3), name
        assert found != exact
    for name in ("recompute", "by layer"):
        assert losses[name] == pytest.approx(losses["two stages"], rel=1e-6)
    folder = checkpoint.latest(tmp_path / "two stages" / "run" / "checkpoints")
    assert folder is not None
    for path in folder.glob("*.safetensors"):
        assert {value.dtype for value in load_file(path).values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert-tiny", "gpt2-tiny", "llama-tiny"])
def test_the_loss_is_near_that_of_plain_autocast(tmp_path, model):
    settings = TaskSettings(model)
    prepare_data(RunFolder(tmp_path), settings)
    task = registered_task(RunFolder(tmp_path), settings)
    data, labels = task.batch(0, 16)
    every = range(task.chain.num_layers)
    whole = task.chain.build().eval()
    weights = task.chain.materialise(every, seed=0).owned_parameters()
    with torch.no_grad():
        for name, value in whole.named_parameters():
            value.copy_(weights[name])
        with torch.autocast("cpu", LOWERED):
            output = whole(**data)
        logits = output.logits if hasattr(output, "logits") else output.prediction_logits
        plain = float(task.loss(logits.float(), labels))
        layers = task.chain.materialise(every, seed=0, lowered=LOWERED).eval()
        ours = float(task.loss(layers.run(0, len(every), data)[0], labels))
    assert ours == pytest.approx(plain, rel=2e-3)


def test_a_profile_counts_the_bytes_of_bfloat16(tmp_path):
    found = {}
    for dtype in ("float32", BFLOAT16_AUTOCAST):
        settings = TaskSettings("mine", 1, dtype)
        task = user_tasks.linear_task(RunFolder(tmp_path), settings)
        found[dtype] = profile_task(task, settings, "cpu", (8, 16), 0.01, device=torch.device("cpu"))
    plain, lowered = found.values()
    assert lowered.dtype == BFLOAT16_AUTOCAST
    # 8 -> 16 -> 12 -> 4: what travels, and is saved as input of the next layer, has two bytes an element
    assert [layer.output_bytes_per_sample for layer in plain.layers] == [64, 48, 0]
    assert [layer.output_bytes_per_sample for layer in lowered.layers] == [32, 24, 0]
    assert lowered.layers[1].saved_bytes_per_sample == plain.layers[1].saved_bytes_per_sample / 2 == 32
    assert [layer.parameter_bytes for layer in lowered.layers] == [
        layer.parameter_bytes for layer in plain.layers
    ]
    whole = [StageShape(0, 3, 1, 1)]
    assert device_memory(lowered, whole).parameter_bytes == 1.5 * device_memory(plain, whole).parameter_bytes


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A profile in bf16, measured once."""
    return profile_model(
        "bert-tiny", emulated_cluster(tmp_path_factory.mktemp("measured")), 64,
        dtype=BFLOAT16_AUTOCAST, budget_s=0.2, microbatch_sizes=(1, 4), use_cache=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=["plain", "recompute", "by layer"])
def test_measured_peaks_are_near_the_predicted_ones(tmp_path, measured, recompute):
    settings = Settings("bert-tiny", 1, dtype=BFLOAT16_AUTOCAST, save=False)
    plan = chain_plan("bert-tiny", [0, 2, 5, 8], 4, **recompute)
    report, _ = run(tmp_path / "run", plan, settings, measured, EMULATED_CLUSTER)
    for name, device in report.devices.items():
        assert device.peak_bytes is not None
        assert device.peak_bytes == pytest.approx(device.predicted_bytes, rel=0.15), name


def bf16(*kinds: str) -> dict[str, str]:
    return dict.fromkeys(kinds, BFLOAT16_AUTOCAST)


def device(kind: str) -> Device:
    return Device("old/0", "old", kind, 1e9)


@pytest.mark.parametrize("kind", ["P100", "V100", "NVIDIA GeForce GTX 1080 Ti", "Tesla T4", "RTX 2080 Ti"])
def test_devices_without_units_for_bfloat16_are_refused(kind):
    with pytest.raises(InputError, match=r"'old/0' is a .*gains nothing.*--exclude old/0.*--allow-slow"):
        check_fast(bf16("A100", kind), [device("A100"), device(kind)])
    check_fast({kind: "float32"}, [device(kind)])


@pytest.mark.parametrize("kind", ["A100", "RTX 3090", "H100", "emulated", "cpu", "unheard of"])
def test_other_devices_are_not(kind):
    check_fast(bf16("A100", kind), [device(kind)])


def test_precisions_have_one_name():
    assert parse_dtype("bf16") == parse_dtype(BFLOAT16_AUTOCAST) == BFLOAT16_AUTOCAST
    assert parse_dtype("fp16") == parse_dtype(FLOAT16_AUTOCAST) == FLOAT16_AUTOCAST
    with pytest.raises(InputError, match="--dtype 'fp8' is not supported; give auto, float32, tf32, bf16, "):
        parse_dtype("fp8")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cluster.toml").write_text(CLUSTER_TOML.replace('"slow"', '"V100"'))
    profile = small_profile()
    kinds = {"fast": profile.kinds["fast"], "V100": profile.kinds["slow"]}
    profile = dataclasses.replace(profile, kinds=kinds, links={})
    (tmp_path / "float32.json").write_text(profile_text(profile))
    (tmp_path / "bf16.json").write_text(profile_text(in_bf16(profile)))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "plan --profile float32.json --dtype bf16",
            "float32.json: a profile in float32, and --dtype is bf16",
        ),
        (
            "plan --profile bf16.json --dtype float32",
            "a profile in bfloat16-autocast, and --dtype is float32",
        ),
        ("plan --profile bf16.json", "device 'b/0' is a V100, which has no units for bfloat16"),
        ("compare --profile bf16.json --dtype bf16", "device 'b/0' is a V100"),
        ("profile --model bert-tiny --dtype bf16", "device 'b/0' is a V100"),
        ("run --model bert-tiny --dtype bf16", "device 'b/0' is a V100"),
        ("run --model bert-tiny --dtype half", "--dtype 'half' is not supported"),
    ],
)
def test_mixing_and_slow_devices_are_refused_in_one_line(files, capsys, line, message):
    assert cli.main([*line.split(), "--cluster", "cluster.toml"]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


def test_slow_devices_may_be_asked_for_or_left_out(files, capsys):
    for option in ("--allow-slow-bf16", "--exclude b"):
        line = f"plan --profile bf16.json --cluster cluster.toml --no-proof {option} --json"
        assert cli.main(line.split()) == 0, capsys.readouterr().err
