"""Kinds in float16, bfloat16 and float32 beside each other: computed as written down, resumed, by command."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import user_tasks
from cost_model.cluster_file import read_cluster
from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST, FLOAT32, MIXED
from cost_model.other_clusters import without
from cost_model.profile import ModelProfile, read_profile
from folders import tiny_model
from hetpipe import cli
from hetpipe.models.chain import ChainModel
from hetpipe.models.mixed_precision import lowered_dtype
from hetpipe.models.names import model_entry
from hetpipe.profiling.merging import merge
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.training import checkpoint_weights
from hetpipe.training.checkpoint import read_manifest
from hetpipe.training.run import measure
from hetpipe.training.trainer import AdamW, Trainer
from partition.estimates.plan_memory import plan_memory
from partition.plan import Pipeline, Plan, Stage
from runs import cluster_file, made_up_profile_of

OLD, NEW, PLAIN = "emulated-V100", "emulated-RTX-3090", "emulated-GTX-1080-Ti"
IN_16 = (FLOAT16_AUTOCAST, BFLOAT16_AUTOCAST, BFLOAT16_AUTOCAST)
IN_32 = (FLOAT32, FLOAT32, FLOAT32)
EACH_ITS_OWN = (FLOAT16_AUTOCAST, BFLOAT16_AUTOCAST, FLOAT32)
CLUSTER = f"""
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "old"
devices = [{{ kind = "{OLD}", count = 2, memory = "1 GiB" }}]
[[nodes]]
name = "new"
devices = [{{ kind = "{NEW}", count = 2, memory = "1 GiB" }}]
[[nodes]]
name = "plain"
devices = [{{ kind = "{PLAIN}", memory = "1 GiB" }}]
"""
BATCH, STEPS = 8, 4
CUT = Plan(
    "manual",
    "mine",
    BATCH,
    (
        Pipeline(
            4,
            BATCH,
            (Stage(("new/0",), (0, 1), 3), Stage(("old/0",), (1, 3), 2), Stage(("new/1",), (3, 4), 1)),
        ),
    ),
)
THREE = Plan(
    "manual",
    "mine",
    BATCH,
    (
        Pipeline(
            4,
            BATCH,
            (Stage(("new/0",), (0, 1), 3), Stage(("plain/0",), (1, 2), 2), Stage(("old/0",), (2, 4), 1)),
        ),
    ),
)
REPLICAS = Plan(
    "manual",
    "mine",
    BATCH,
    (
        Pipeline(2, 4, (Stage(("plain/0",), (0, 4), 2, recompute=True),)),
        Pipeline(2, 4, (Stage(("old/0",), (0, 2), 2), Stage(("new/0",), (2, 4), 1))),
    ),
    zero=1,
    state_owners=("plain/0", "old/0", "new/0", "plain/0"),
)


def layers() -> ChainModel:
    return ChainModel.from_module(user_tasks.build_gpt2, user_tasks.gpt2_example(), name="mine")


def profile(dtypes: tuple[str, ...]) -> ModelProfile:
    length = user_tasks.LENGTH
    parts = [
        made_up_profile_of(layers(), "mine", kind, 1e-4, dtype=dtype, sequence_length=length)
        for kind, dtype in zip((OLD, NEW, PLAIN), dtypes, strict=True)
    ]
    return merge(parts)


def trainer(folder: Path, plan: Plan, dtypes: tuple[str, ...] = EACH_ITS_OWN, **options: Any) -> Trainer:
    """dtypes: of OLD, NEW and PLAIN."""
    folder.mkdir(exist_ok=True)
    return Trainer(
        user_tasks.build_gpt2,
        user_tasks.sequences(40),
        AdamW(1e-2),
        user_tasks.next_token_loss,
        cluster=cluster_file(folder, CLUSTER),
        plan=plan,
        profile=profile(dtypes),
        count_terms=user_tasks.num_next_tokens,
        folder=folder / "run",
        shuffle=False,
        total_steps=STEPS,
        clip_norm=1e30,
        **options,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return RunFolder(folder / "run").read_metrics()


def by_hand(
    stages: list[tuple[str, int, int]], scale: float, step: int = 0, weights: dict[str, Tensor] | None = None
) -> tuple[float, float]:
    """Return loss and gradient norm of a step of (precision, start, stop), in one process.

    weights: None for those of the beginning.
    """
    data = user_tasks.sequences(40)[step * BATCH : (step + 1) * BATCH]
    ids = torch.stack([row["input_ids"] for row in data])
    chain = layers()
    model = [
        chain.materialise(tuple(range(start, stop)), seed=0, lowered=lowered_dtype(dtype))
        for dtype, start, stop in stages
    ]
    for each in model if weights is not None else ():
        with torch.no_grad():
            for name, value in each.owned_parameters().items():
                value.copy_(weights[name])
    total, terms = 0.0, user_tasks.num_next_tokens(ids)
    for start in range(0, BATCH, 4):
        part = {"input_ids": ids[start : start + 4]}
        carried: tuple[Tensor, ...] = ()
        for each, (dtype, first, stop) in zip(model, stages, strict=True):
            enters_as = lowered_dtype(dtype) or torch.float32
            carried = each.run(first, stop, part, tuple(tensor.to(enters_as) for tensor in carried))
        loss = user_tasks.next_token_loss(carried[0], part["input_ids"]) / terms
        (loss * scale).backward()
        total += float(loss.detach())
    gradients: dict[str, Tensor] = {}
    for each in model:
        for name, value in each.owned_parameters().items():
            assert value.grad is not None
            gradients[name] = gradients.get(name, 0) + value.grad / scale
    return total, float(torch.cat([value.flatten() for value in gradients.values()]).norm())


def stages_in(plan: Plan, dtypes: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """The stages of a pipeline as `by_hand` takes them."""
    of_nodes = dict(zip(("old", "new", "plain"), dtypes, strict=True))
    return [(of_nodes[stage.device.split("/")[0]], *stage.layers) for stage in plan.pipelines[0].stages]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "dtypes"),
    [
        (CUT, IN_16),
        (CUT, (BFLOAT16_AUTOCAST, FLOAT32, FLOAT32)),
        (THREE, EACH_ITS_OWN),
    ],
    ids=["bf16-fp16-bf16", "f32-bf16-f32", "bf16-f32-fp16"],
)
def test_a_plan_over_several_computes_what_is_written_down(tmp_path, plan, dtypes):
    trainer(tmp_path / "cut", plan, dtypes, save=False).fit(1)
    (first,) = metrics(tmp_path / "cut")
    assert first["finite"] and first.get("loss_scale") == (2.0**16 if FLOAT16_AUTOCAST in dtypes else None)
    loss, norm = by_hand(stages_in(plan, dtypes), first.get("loss_scale") or 1.0)
    assert first["loss"] == pytest.approx(loss, rel=1e-6)
    assert first["gradient_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.slow
def test_it_goes_on_under_other_plans(tmp_path):
    whole = trainer(tmp_path / "whole", THREE, every=2)
    whole.fit(STEPS)
    exact = [step["loss"] for step in metrics(tmp_path / "whole")]
    assert exact[-1] < exact[0]
    source = tmp_path / "whole" / "run" / "checkpoints" / "step-000002"
    assert read_manifest(source).loss_scale is not None
    for name, plan in (("replicas", REPLICAS), ("same", THREE)):
        again = trainer(tmp_path / name, plan)
        again.fit(STEPS, resume_from=source)
        losses = [step["loss"] for step in metrics(tmp_path / name)]
        assert losses == pytest.approx(exact[2:], rel=2e-2)
        assert (losses == exact[2:]) == (name == "same")
        end = read_manifest(tmp_path / name / "run" / "checkpoints" / "step-000004").loss_scale
        assert end is not None and (end.value, end.good_steps) == (2.0**16, 4)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:dtype is")
@pytest.mark.parametrize("begun_in", [EACH_ITS_OWN, IN_32], ids=["mixed", "float32"])
def test_each_precision_goes_on_from_the_states_of_each_other(tmp_path, begun_in):
    """Plans in float32 agree; where layers are rounded, the next step is that of the same weights by hand."""
    begun = tmp_path / "begun"
    trainer(begun, THREE, begun_in).fit(2)
    source = begun / "run" / "checkpoints" / "step-000002"
    weights = checkpoint_weights.read_weights(source)

    def again(name: str, plan: Plan, dtypes: tuple[str, ...]) -> list[dict[str, Any]]:
        trainer(tmp_path / name, plan, dtypes, save=False).fit(STEPS, resume_from=source)
        return metrics(tmp_path / name)

    exact, _ = by_hand([(FLOAT32, 0, 4)], 1.0, 2, weights)
    plans = {"three": THREE, "cut": CUT, "replicas": REPLICAS}
    in_32 = [[step["loss"] for step in again(name, plan, IN_32)] for name, plan in plans.items()]
    assert [losses[0] for losses in in_32] == pytest.approx([exact] * 3, rel=1e-6)
    for losses in in_32[1:]:
        assert losses == pytest.approx(in_32[0], rel=1e-6)
    for name, plan, dtypes in (("mixed", THREE, EACH_ITS_OWN), ("mixed cut", CUT, IN_16)):
        first = again(name, plan, dtypes)[0]
        loss, norm = by_hand(stages_in(plan, dtypes), first["loss_scale"], 2, weights)
        assert (first["loss"], first["gradient_norm"]) == pytest.approx((loss, norm), rel=1e-6)
        assert loss != exact


@pytest.mark.slow
def test_memory_is_that_of_the_precision_of_the_kind(tmp_path):
    (tmp_path / "base").mkdir()
    config = tiny_model(
        "LlamaForCausalLM", hidden_size=128, intermediate_size=352, num_hidden_layers=5
    ).config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "base")  # no weights: drawn
    path = cluster_file(tmp_path, CLUSTER)
    entry, dtypes = (
        model_entry(str(tmp_path / "base")),
        {OLD: FLOAT32, NEW: BFLOAT16_AUTOCAST, PLAIN: FLOAT32},
    )
    measured = profile_model(
        str(entry.place), without(read_cluster(path), ["old"]), 64,
        dtype=dtypes, budget_s=0.2, microbatch_sizes=(2,), use_cache=False,
    )  # fmt: skip
    stages = (Stage(("new/0",), (0, 4), 2), Stage(("plain/0",), (4, 7), 1))
    plan = Plan("manual", entry.name, 4, (Pipeline(2, 4, stages),))
    settings = Settings.of(plan, measured, steps=1, save=False, **entry.in_settings)
    devices = measure(settings, path, measured, plan).devices
    assert devices.keys() == {"new/0", "plain/0"}
    for name, device in devices.items():
        assert device.peak_bytes == pytest.approx(device.predicted_bytes, rel=0.05), name
    # by the bytes of the kind that needs most
    most = {name: plan_memory(plan, measured, name).total_bytes for name in devices}
    assert most["new/0"] > 1.05 * (devices["new/0"].peak_bytes or 0.0)


@pytest.mark.slow
def test_auto_measures_plans_trains_and_resumes_with_each_kind_in_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cluster_file(tmp_path, CLUSTER)
    line = "--model bert-tiny --cluster cluster.toml --sequence-length 8 --dtype auto --profile-budget 0.1"
    assert cli.main(["profile", *line.split(), "--microbatch-sizes", "1,2", "-o", "p.json"]) == 0
    found = read_profile(tmp_path / "p.json")
    assert found.dtype == MIXED
    assert found.dtypes == {OLD: FLOAT16_AUTOCAST, NEW: BFLOAT16_AUTOCAST, PLAIN: FLOAT32}
    run = (
        "run --model bert-tiny --cluster cluster.toml --profile p.json --dtype auto --global-batch-size 4 "
        "--no-proof --run-folder run --json"
    )
    capsys.readouterr()
    pins = [
        "--pin",
        "new/0=0-2",
        "--pin",
        "plain/0=3-4",
        "--pin",
        "old/0=5-7",
        "--pipelines",
        "1",
        "--max-devices",
        "3",
    ]
    assert cli.main([*run.split(), "--steps", "2", *pins]) == 0, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out)
    assert {stage["device"] for stage in report["stages"]} == {"new/0", "plain/0", "old/0"}
    other = ["--pin", "old/0=0-3", "--pin", "plain/0=4-7", *pins[6:]]
    assert cli.main([*run.split(), "--steps", "3", "--resume", "run", *other]) == 0
    steps = RunFolder(tmp_path / "run").read_metrics()
    assert len(steps) == 3 and steps[0]["loss_scale"] == 2.0**16
    for step, later in pairwise(steps):  # across the resume, too
        assert later["loss_scale"] == step["loss_scale"] * (1 if step["finite"] else 0.5)
