"""Compiled blocks: the same losses and gradients, dropout's masks too, from one graph for each shape."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import user_tasks
from cost_model.cluster import CPU, Device
from cost_model.errors import InputError
from folders import tiny_model
from hetpipe.models.adapters import task_spec
from hetpipe.models.chain import ChainModel
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.names import model_entry
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runtime.compilers import check_compilers
from hetpipe.training.run import train
from runs import chain_plan, cluster_file, made_up_profile_of

DROPOUT: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3},
    "GPT2LMHeadModel": {"resid_pdrop": 0.3, "attn_pdrop": 0.3},
    "LlamaForCausalLM": {},
}


@pytest.fixture
def traced(monkeypatch) -> list[int]:
    """Graphs that are run as torch runs them: what is tested is what goes into them. Counts them."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.backends.debugging.aot_eager(graph, example)

    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda forward, **how: compile_with(forward, backend=backend, **how)
    )
    torch._dynamo.reset()
    return graphs


def steps(
    chain: ChainModel,
    *,
    compiled: bool,
    length: int = 6,
    dropout: KeyedDropout | None = None,
    positions: tuple[int, ...] | None = None,
) -> list[Any]:
    """Losses and gradients of three steps with samples of their own, and the layers."""
    layers = chain.materialise(range(chain.num_layers), 0, compiled=compiled).train()
    dropout = dropout or KeyedDropout(0)
    dropout.traces = compiled
    layers.on_layer = dropout.enter_layer
    inputs = {"input_ids": torch.arange(2 * length).view(2, length)}
    if positions is not None:
        inputs["position_ids"] = torch.tensor(positions).expand(2, length).clone()
    found: list[Any] = []
    for step, samples in enumerate([(4, 9), (0, 1), (2**40, 7)]):
        layers.zero_grad()
        dropout.at(step, samples, range(chain.num_layers))
        with dropout:
            (logits,) = layers.run(0, chain.num_layers, inputs)
        loss = logits.square().mean()
        loss.backward()
        gradients = {name: value.grad for name, value in layers.owned_parameters().items()}
        found.append(
            (loss.item(), {name: value.clone() for name, value in gradients.items() if value is not None})
        )
    return [*found, layers]


def check_same(found: list[Any], expected: list[Any], tolerance: float) -> None:
    for (loss, gradients), (other, others) in zip(found[:-1], expected[:-1], strict=True):
        assert loss == pytest.approx(other, rel=tolerance)
        assert gradients.keys() == others.keys()
        for name, value in others.items():
            assert (gradients[name] - value).abs().max() <= tolerance * value.abs().max() + 1e-9, name


def chain_of(architecture: str) -> ChainModel:
    implementation = "eager" if DROPOUT[architecture] else "sdpa"
    model = tiny_model(architecture, attn_implementation=implementation, **DROPOUT[architecture])
    return ChainModel.from_module(model, {"input_ids": torch.arange(6)[None]})


@pytest.mark.parametrize("architecture", sorted(DROPOUT))
def test_losses_and_gradients_are_the_same_with_one_graph_for_all_blocks_and_steps(traced, architecture):
    """The first step of each is watched for other random numbers, so not compiled."""
    chain = chain_of(architecture)
    expected, found = (steps(chain, compiled=compiled) for compiled in (False, True))
    check_same(found, expected, 1e-6)
    assert len(traced) == 1
    losses = [loss for loss, _ in found[:-1]]
    assert len(set(losses)) == (3 if DROPOUT[architecture] else 1)
    check_same(steps(chain, compiled=True, length=5), steps(chain, compiled=False, length=5), 1e-6)
    assert len(traced) == 2
    assert not any("_orig_mod" in name for name in found[-1].state_dict())
    assert list(found[-1].state_dict()) == list(expected[-1].state_dict())


@pytest.mark.parametrize("adapters", [None, LoraSettings(2, 4.0, ("q_proj", "v_proj"), dropout=0.3)])
def test_rows_of_packed_samples_are_the_same_with_adapters_too(traced, adapters):
    """Two samples a row, of which the second begins anew: no graph sees over the boundary."""
    base = model_entry("llama-tiny")
    entry = base if adapters is None else base.with_adapters(adapters)
    chain = ChainModel.from_spec(
        task_spec(TaskSettings(entry.name, 6, run=Settings(steps=1, pack=True, **entry.in_settings)))
    )
    positions = (0, 1, 2, 0, 1, 2)
    expected, found = (steps(chain, compiled=compiled, positions=positions) for compiled in (False, True))
    check_same(found, expected, 1e-5)
    assert len(traced) == (1 if adapters is None else 2)  # before the first adapter nothing has a gradient
    apart = steps(chain, compiled=True, positions=(0, 1, 2, 3, 4, 5))
    assert abs(apart[0][0] - found[0][0]) > 1e-6 * abs(found[0][0])  # the mask counts


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Choosing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_cannot_be_compiled_is_refused_in_one_line(traced):
    chain = ChainModel.from_module(Own(), {"x": torch.ones(1, 8)})
    layers = chain.materialise([1, 2], 0, compiled=True)
    with pytest.raises(InputError, match="block0 cannot be compiled") as caught:
        layers.run(1, 2, {"x": torch.ones(2, 8)}, (torch.ones(2, 8),))
    assert "\n" not in str(caught.value) and "leave out --compile" in str(caught.value)
    chain = ChainModel.from_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), torch.ones(1, 8))
    with pytest.raises(InputError, match="--compile is for models with a list of blocks"):
        chain.materialise([0], 0, compiled=True)


def test_frozen_weights_in_other_bytes_are_refused():
    model = tiny_model("LlamaForCausalLM").bfloat16()
    for name, value in model.named_parameters():
        value.requires_grad_("mlp" not in name)
    chain = ChainModel.from_module(model, {"input_ids": torch.arange(6)[None]})
    with pytest.raises(InputError, match=r"block0\.mlp\.\w+ holds frozen weights in other bytes"):
        chain.materialise([1], 0, compiled=True)


def test_without_a_compiler_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="there is no 'no-such-compiler' here; install g\\+\\+"):
        check_compilers([Device("here/0", "here", CPU, 1e9)])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_run_compiles_before_its_first_step(tmp_path):
    """By torch's own compiler, for both sizes of microbatches; of few operations, each takes it seconds."""
    example = {"x": torch.zeros(1, user_tasks.NUM_FEATURES)}
    chain = ChainModel.from_module(user_tasks.Residuals, example, name="mine")
    plan, cluster = chain_plan("mine", [0, chain.num_layers], 2, batch=3), cluster_file(tmp_path)
    profile = made_up_profile_of(chain, "mine", sequence_length=1)
    losses = []
    for compiled in (False, True):
        folder = RunFolder(tmp_path / f"compiled {compiled}")
        train(
            Settings(steps=2, save=False), cluster, replace(profile, compiled=compiled), plan, folder,
            make_task=user_tasks.residual_task,
        )  # fmt: skip
        losses.append([entry["loss"] for entry in folder.read_metrics()])
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-5)
