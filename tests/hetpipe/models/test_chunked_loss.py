"""The loss in chunks of tokens: the same loss and gradients, with fewer bytes, or refused in one line."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import user_tasks
from cost_model.errors import InputError
from cost_model.profile import read_profile
from folders import MODELS, tiny_model
from hetpipe.data.task import TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.loss import IGNORED_LABEL, loss_sum
from hetpipe.models.tasks import Task
from hetpipe.program.instructions import Compute, Pass, Program
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.settings import Settings
from hetpipe.runtime.byte_counter import ByteCounter
from hetpipe.runtime.stage_runner import Microbatch, StageRunner
from partition.plan import Pipeline, Plan, Stage
from peft_models import TARGETS, peft_model
from runs import RECOMPUTE, chain_plan, made_up_profile, replica_plan, run

SAMPLES, LENGTH = 3, 7

CLUSTER = """
name = "one"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [{ kind = "emulated", count = 1, speed = 0.5, memory = "2 GiB" }]
"""


def ids() -> Tensor:
    return torch.randint(1, 60, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


def labels(ignored: float = 0.3) -> Tensor:
    given = ids()
    return given.masked_fill(
        torch.rand(given.shape, generator=torch.Generator().manual_seed(2)) < ignored, -100
    )


def task_of(model: nn.Module, architecture: str) -> TrainingTask:
    predicts = Task.MASKED_LM if architecture.startswith("Bert") else Task.CAUSAL_LM
    chain = ChainModel.from_module(model, {"input_ids": ids()[:1]})
    batch = {"input_ids": ids()}, labels()
    return TrainingTask(
        chain, partial(loss_sum, predicts), lambda *_: batch, lambda count: count, predicts=predicts
    )


def outcome(
    task: TrainingTask,
    num_chunks: int | None,
    dtype: torch.dtype = torch.float64,
    lowered: torch.dtype | None = None,
    **stage: Any,
) -> dict[str, Tensor]:
    """The loss, weighed by the tokens of a step, and the gradients by name, of one stage with all layers."""
    chain = task.chain
    model = chain.materialise(range(chain.num_layers), 0, dtype, "cpu", lowered).train()
    reached = {info.name for infos in chain.layer_parameters for info in infos if info.reached}
    for name, value in model.owned_parameters().items():
        value.requires_grad_(name in reached)
    stages = (Stage(("a/0",), (0, chain.num_layers), 1, **stage),)
    program = Program(Plan("one", "mine", SAMPLES, (Pipeline(SAMPLES, SAMPLES, stages),)), (), ())
    runner = StageRunner(program, model, KeyedDropout(0), task.loss_of(model, num_chunks))
    inputs, scores = task.batch(0, SAMPLES)
    runner.forward(Compute(Pass.FORWARD, 0, 0, 0), Microbatch(0, (0, 1, 2), inputs, scores, 1 / 17), ())
    runner.backward(Compute(Pass.BACKWARD, 0, 0, 0), ())
    found = {name: value.grad for name, value in model.owned_parameters().items() if value.grad is not None}
    return {"loss": runner.take_loss(), **found}


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys() and len(found) > 1
    for name, value in expected.items():
        difference = (found[name] - value).abs().max() / value.abs().max().clamp(min=1e-6)
        assert difference <= tolerance, name


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_loss_and_gradients_are_the_same(architecture):
    """BERT's and GPT-2's projections are tied to the embeddings, BERT's has a bias."""
    task = task_of(tiny_model(architecture), architecture)
    expected = outcome(task, None)
    for num_chunks in (1, 4, 100):
        check_same(outcome(task, num_chunks), expected, 1e-12)
    check_same(outcome(task, 4, **RECOMPUTE[2]), expected, 1e-12)


@pytest.mark.parametrize("frozen", ["lm_head", "model.norm", "model."])
def test_frozen_parts_stay_so(frozen):
    model = tiny_model("LlamaForCausalLM")
    for name, value in model.named_parameters():
        value.requires_grad_(not name.startswith(frozen))
    task = task_of(model, "Llama")
    check_same(outcome(task, 4), outcome(task, None), 1e-12)


@pytest.mark.parametrize("more", [(), ("lm_head",)])
def test_adapters_of_the_blocks_and_of_the_projection(more):
    architecture = "LlamaForCausalLM"
    lora = LoraSettings(2, 4.0, (*TARGETS[architecture], *more))
    task = task_of(peft_model(tiny_model(architecture), lora), architecture)
    expected = outcome(task, None)
    assert any("lm_head" in name for name in expected) == bool(more)
    check_same(outcome(task, 4), expected, 1e-12)


def test_under_autocast_the_loss_is_that_of_rounded_logits():
    task = task_of(tiny_model("GPT2LMHeadModel"), "GPT2")
    expected = outcome(task, None, torch.float32, torch.bfloat16)
    found = outcome(task, 4, torch.float32, torch.bfloat16)
    assert found["loss"] == pytest.approx(float(expected["loss"]), rel=1e-6)
    check_same(found, expected, 2e-2)  # sums of chunks are not rounded to bfloat16
    assert all(value.dtype is torch.float32 for name, value in found.items() if name != "loss")


def test_no_token_that_counts_gives_no_loss():
    task = task_of(tiny_model("BertForMaskedLM"), "Bert")
    nothing = {"input_ids": ids()}, torch.full((SAMPLES, LENGTH), IGNORED_LABEL)
    found = outcome(replace(task, batch=lambda *_: nothing), 4)
    assert all(value.abs().max() == 0.0 for value in found.values())


def test_logits_are_never_all_there():
    """Of 3 x 63 tokens that are scored and 4,096 words, in float64: several times 6.2 MB, without chunks."""
    logits_bytes = SAMPLES * 63 * 4096 * 8
    task = task_of(tiny_model("LlamaForCausalLM", vocab_size=4096), "Llama")
    long = torch.arange(SAMPLES * 64).view(SAMPLES, 64)
    task = replace(task, batch=lambda *_: ({"input_ids": long}, long))
    peaks = []
    for num_chunks in (None, 18):
        with ByteCounter() as counter:
            outcome(task, num_chunks)
        peaks.append(counter.peak_bytes)
    assert peaks[0] - peaks[1] > 2 * logits_bytes


class Scaled(nn.Module):
    """Does to its logits what Gemma or Cohere do; or drops some of what enters its projection."""

    def __init__(self, factor: float = 1.0, dropout: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        head = nn.Linear(8, 64)
        self.head = head if dropout is None else nn.Sequential(nn.Dropout(dropout), head)
        self.factor = factor

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if self.factor == 1.0 else logits * self.factor


class Unnamed(Scaled):
    get_output_embeddings = None  # type: ignore[assignment]


def test_own_models_that_say_what_projects_can_be_cut():
    task = task_of(Scaled(), "Own")
    check_same(outcome(task, 4), outcome(task, None), 1e-12)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Scaled(2.0), "Scaled does more with its logits than to return them"),
        (Scaled(dropout=0.1), "Scaled has dropout inside its projection"),
        (Unnamed(), "Unnamed names no projection"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(model, message):
    with pytest.raises(InputError, match=message) as caught:
        outcome(task_of(model, "Own"), 4)
    assert "\n" not in str(caught.value) and "leave out --loss-chunks" in str(caught.value)


def test_a_loss_of_the_users_is_refused():
    task = replace(task_of(Scaled(), "Own"), predicts=None, loss=user_tasks.squared_error)
    with pytest.raises(InputError, match="--loss-chunks is 4, and the loss is one of your own"):
        outcome(task, 4)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_takes_the_chunks_of_its_profile(tmp_path, zero):
    plan, settings = chain_plan("bert-tiny", [0, 4, 8], 2, batch=4), Settings(steps=2, save=False)
    if zero:
        plan = replica_plan("bert-tiny", 8, (2, 3), (1, 1), zero=zero)
    profile = made_up_profile("bert-tiny")
    _, plain = run(tmp_path / "plain", plan, settings, profile)
    _, chunked = run(tmp_path / "chunked", plan, settings, replace(profile, loss_chunks=8))
    assert chunked == pytest.approx(plain, rel=2e-6)


@pytest.mark.slow
def test_a_profile_counts_the_bytes_of_chunks(hetpipe):
    hetpipe.write("one.toml", CLUSTER)
    made = []
    for name, option in (("plain", ""), ("chunked", "--loss-chunks 8")):
        line = "profile --model bert-tiny --cluster one.toml --profile-budget 0.1 --microbatch-sizes 4"
        assert hetpipe(f"{line} {option} -o {name}.json").code == 0
        made.append(read_profile(hetpipe.folder / f"{name}.json"))
    plain, chunked = made
    assert (plain.loss_chunks, chunked.loss_chunks) == (None, 8)
    assert chunked.layers[-1].workspace_at(4) + 4 * chunked.layers[-1].saved_bytes_per_sample < 0.5 * (
        plain.layers[-1].workspace_at(4) + 4 * plain.layers[-1].saved_bytes_per_sample
    )
    line = "run --model bert-tiny --cluster one.toml --profile plain.json --dry-run"
    found = hetpipe(f"{line} --loss-chunks 8")
    assert found.code == 2
    assert "a profile with no chunks of the loss, and --loss-chunks is 8" in found.err
