"""Frozen weights in their own bytes: the bits that float32 copies of them give, and one copy of each."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import user_tasks
from cost_model.cluster import CPU
from cost_model.cluster_file import read_cluster
from cost_model.dtypes import BFLOAT16_AUTOCAST
from cost_model.errors import InputError
from cost_model.memory import StageShape, checkpoint_bytes, device_memory
from hetpipe.data.user_task import own_task
from hetpipe.models.chain import ChainModel
from hetpipe.models.frozen_weights import NO_USE, Use
from hetpipe.models.huggingface import ModelSpec, model_spec
from hetpipe.models.partial_model import LayerModel
from hetpipe.profiling.layer_profiler import profile_task
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import TaskSettings
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training.trainer import AdamW, Callback, Trainer
from hetpipe.training.user_loop import RankStages, execute
from runs import EMULATED_CLUSTER, chain_plan, cluster_file, emulated_cluster, made_up_profile_of

WIDTH, INNER, VOCABULARY, LENGTH = 24, 40, 56, 7
IDS = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 5 % VOCABULARY
EXAMPLE = {"input_ids": torch.zeros(1, LENGTH, dtype=torch.long)}
NARROW, WIDE = (torch.bfloat16, torch.float16), torch.float32


def llama(**sizes: int) -> nn.Module:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    usual = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 3,
        "num_attention_heads": 2, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**usual, **sizes}))


def gpt2() -> nn.Module:
    """Its head is the embedding, its blocks are made of Conv1D."""
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=LENGTH, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=INNER, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return BertForMaskedLM(config)


class Mixed(nn.Module):
    """Uses one weight in a product and, in the same forward, in a norm: not to be rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.watched = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.plain(x) + self.watched(x) / self.watched.weight.norm()) * self.scale


def sequential() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Mixed(), nn.Linear(WIDTH, INNER), Mixed2())


class Mixed2(nn.Module):
    """A convolution over the sequence, and a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Conv1d(INNER, VOCABULARY, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        return self.over_time(x.transpose(1, 2)).transpose(1, 2) * self.scale


BUILDERS = {"llama": llama, "gpt2": gpt2, "bert": bert, "sequential": sequential}


def frozen(kind: str, given: torch.dtype = WIDE, **sizes: int) -> nn.Module:
    """A model of which vectors alone are trained, without dropout."""
    torch.manual_seed(3)
    model = BUILDERS[kind](**sizes).to(given).eval()
    for value in model.parameters():
        value.requires_grad_(value.dim() == 1)
    return model


def chain_of(model: nn.Module, kind: str = "llama") -> ChainModel:
    return ChainModel.from_module(model, IDS[:1] if kind == "sequential" else EXAMPLE, name="mine")


def in_float32(chain: ChainModel) -> ChainModel:
    """The same model with a float32 copy of every frozen weight."""
    return replace(
        chain,
        layer_parameters=tuple(
            tuple(replace(info, keeps=NO_USE) for info in infos) for infos in chain.layer_parameters
        ),
    )


def results(layers: LayerModel, num_layers: int, cut: int) -> list[Tensor]:
    """Outputs, gradients of all that is trained, and the gradient that crosses a cut."""
    carried = tuple(value.detach() for value in layers.run(0, cut, {"input_ids": IDS}))
    carried = tuple(value.requires_grad_(value.is_floating_point()) for value in carried)
    after = layers.run(cut, num_layers, {"input_ids": IDS}, carried)[0]
    whole = layers.run(0, num_layers, {"input_ids": IDS})[0]
    (after.square().sum() + whole.square().sum()).backward()
    gradients = [value.grad for value in layers.owned_parameters().values() if value.requires_grad]
    assert all(value is not None for value in gradients)
    found = [after, whole, *gradients, *(value.grad for value in carried if value.requires_grad)]
    return [value.detach() for value in found if value is not None]


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("lowered", [None, *NARROW])
@pytest.mark.parametrize("given", [*NARROW, WIDE])
def test_the_bits_are_those_of_float32_copies(kind, lowered, given):
    chain = chain_of(frozen(kind, given), kind)
    num_layers = chain.num_layers
    layers = chain.materialise(range(num_layers), 0, lowered=lowered).eval()
    plain = in_float32(chain).materialise(range(num_layers), 0, lowered=lowered).eval()
    ours, theirs = (results(model, num_layers, 2) for model in (layers, plain))
    assert len(ours) == len(theirs) > 5
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    held = layers.owned_parameters()
    assert {value.dtype for value in plain.owned_parameters().values()} == {WIDE}
    assert {value.dtype for value in held.values() if value.requires_grad} == {WIDE}
    narrow = [name for name, value in held.items() if value.dtype != WIDE]
    assert bool(narrow) == (given != WIDE or lowered is not None)
    stored = sum(value.numel() * value.element_size() for value in held.values())
    shared = sum(held[info.name].numel() * held[info.name].element_size()
                 for info in chain.parameters(num_layers - 1) if info.shared)  # fmt: skip
    assert sum(layer.stored for layer in chain.weight_bytes(WIDE, lowered)) == stored + shared


def dtypes(chain: ChainModel, lowered: torch.dtype | None) -> dict[str, torch.dtype]:
    return {
        info.name: info.kept_dtype(WIDE, lowered)
        for layer in range(chain.num_layers)
        for info in chain.parameters(layer)
    }


def test_only_what_is_exact_is_kept_in_fewer_bytes():
    chain = chain_of(frozen("sequential"), "sequential")
    assert {name for name, dtype in dtypes(chain, torch.bfloat16).items() if dtype != WIDE} == {
        "1.plain.weight", "2.weight", "3.over_time.weight",
    }  # fmt: skip
    assert set(dtypes(chain, None).values()) == {WIDE}
    given = dtypes(chain_of(frozen("sequential", torch.float16), "sequential"), None)
    assert {name for name, dtype in given.items() if dtype == torch.float16} == {
        "0.weight", "1.plain.weight", "2.weight", "3.over_time.weight",
    }  # fmt: skip
    # rows of the shared matrix are looked up, which is not to round what was given in float32
    shared = "transformer.wte.weight"
    assert dtypes(chain_of(frozen("gpt2")), torch.bfloat16)[shared] == WIDE
    assert dtypes(chain_of(frozen("gpt2", torch.bfloat16)), torch.bfloat16)[shared] == torch.bfloat16
    embedding = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 2))
    embedding[0].requires_grad_(False)
    chain = chain_of(embedding.to(torch.bfloat16), "sequential")
    assert dtypes(chain, None) == {"0.weight": WIDE, "1.weight": WIDE, "1.bias": WIDE}


def test_what_autocast_lowers_is_known_by_layer():
    chain = chain_of(gpt2())
    first, block, _, head = ({info.name: info.uses for info in chain.parameters(layer)} for layer in range(4))
    shared = "transformer.wte.weight"
    assert first[shared] == Use.LOOKED_UP and head[shared] == Use.MULTIPLIED
    assert {use for name, use in block.items() if "ln" in name} == {Use.OTHER}
    assert {use for name, use in block.items() if "ln" not in name} == {Use.MULTIPLIED}


class Made(TorchDispatchMode):
    """Records every tensor made while it is active that has as many elements as a frozen matrix."""

    def __init__(self, counts: set[int]) -> None:
        super().__init__()
        self.counts, self.most, self.seen = counts, 0, 0
        self.alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.old = {value.untyped_storage()._cdata for value in tensors()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel() in self.counts:
                storage = leaf.untyped_storage()
                if storage._cdata not in self.old:
                    self.seen += 1
                    self.alive.add(storage)
        self.most = max(self.most, len({storage._cdata for storage in self.alive}))
        return result


def tensors() -> list[Tensor]:
    gc.collect()
    found = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    return [value for value in found if not value.is_meta]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16_AUTOCAST])
@pytest.mark.parametrize("given", [torch.bfloat16, WIDE])
def test_nobody_has_a_second_copy_a_gradient_or_a_state_of_a_frozen_weight(tmp_path, given, dtype):
    model = frozen("llama", given)
    counts = {value.numel() for value in model.parameters() if value.dim() > 1}
    assert counts == {WIDTH * WIDTH, WIDTH * INNER, WIDTH * VOCABULARY}
    names = {name for name, value in model.named_parameters() if value.dim() > 1}
    chain = chain_of(model)
    save_file({name: value.detach() for name, value in model.named_parameters()}, tmp_path / "weights")
    chain = replace(chain, given=tmp_path / "weights")
    del model
    before = {id(value) for value in tensors()}
    cluster = read_cluster(cluster_file(tmp_path))
    profile = made_up_profile_of(chain, "mine", dtype=dtype, sequence_length=LENGTH)
    program = lower(chain_plan("mine", [0, 5], 1, batch=2), profile, cluster)
    stages = RankStages(program, chain, user_tasks.next_token_loss, profile=profile, cluster=cluster)
    optimizer = torch.optim.AdamW(stages.parameters(), lr=0.1)
    chain.know_boundaries({"input_ids": IDS[:1]})
    with Made(counts) as made:
        execute(program, stages, {"input_ids": IDS}, IDS, optimizer=optimizer)
    held = stages.model.owned_parameters()
    mine = [value for value in tensors() if id(value) not in before and value.numel() in counts]
    assert {value.untyped_storage()._cdata for value in mine} == {
        held[name].untyped_storage()._cdata for name in names
    }
    assert all(held[name].grad is None for name in names)
    assert len(optimizer.state) == len(held) - len(names)
    narrow = dtype != "float32" or given != WIDE
    assert {held[name].element_size() for name in names if "embed" not in name} == {2 if narrow else 4}
    cast = given != WIDE and dtype == "float32"
    assert bool(made.seen) == cast and made.most <= 2  # casts, for the time of one operation
    stages.close()


def test_a_profile_holds_stored_trained_and_lowered_bytes(tmp_path):
    rows = user_tasks.sequences(8)
    found = {}
    for given in (WIDE, torch.bfloat16):
        model = frozen("llama", given, vocab_size=user_tasks.VOCABULARY)
        task = own_task(model, rows, user_tasks.next_token_loss)
        for dtype in ("float32", BFLOAT16_AUTOCAST):
            settings = TaskSettings("mine", user_tasks.LENGTH, dtype)
            task.write_weights(RunFolder(tmp_path))
            made = task(RunFolder(tmp_path), settings)
            found[given, dtype] = profile_task(made, settings, CPU, (2,), 0.01, device=torch.device("cpu"))
    matrices, norms = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER, 2 * WIDTH
    for (given, dtype), profile in found.items():
        embedding, block = profile.layers[:2]
        narrow = dtype != "float32" or given != WIDE
        assert block.parameter_bytes == (2 if narrow else 4) * matrices + 4 * norms
        assert block.trained_bytes == 4 * norms and block.num_parameters == matrices + norms
        assert block.lowered_bytes == 0  # norms are not lowered
        # float32 matrices that autocast would cast are kept so; a checkpoint holds them as they were given
        assert block.rounded_bytes == (2 * matrices if dtype != "float32" and given == WIDE else 0)
        rows_bytes = given.itemsize * WIDTH * user_tasks.VOCABULARY
        assert (embedding.parameter_bytes, embedding.trained_bytes) == (rows_bytes, 0)
    plain, cast = (found[given, "float32"].layers[1].workspace_at(2) for given in (WIDE, torch.bfloat16))
    assert cast > plain  # the weight in float32, for the time of a product


@pytest.mark.parametrize(("pattern", "tied", "frozen_with"), [("wte", 0, 1), ("ln", 1, 0)])
def test_a_profile_counts_shared_weights_once_be_they_frozen_or_not(tmp_path, pattern, tied, frozen_with):
    model = user_tasks.build_gpt2().to(torch.bfloat16)
    for name, value in model.named_parameters():
        value.requires_grad_(pattern not in name)
    task = own_task(model, user_tasks.sequences(8), user_tasks.next_token_loss)
    task.write_weights(RunFolder(tmp_path))
    settings = TaskSettings("mine", user_tasks.LENGTH)
    made = task(RunFolder(tmp_path), settings)
    profile = profile_task(made, settings, CPU, (2,), 0.01, device=torch.device("cpu"))
    head, shared = profile.layers[-1], 16 * user_tasks.VOCABULARY  # width x rows
    assert (head.tied_to, head.tied_bytes) == (("embeddings", 4 * shared) if tied else (None, 0))
    assert (head.frozen_with, head.frozen_with_bytes) == (
        ("embeddings", 2 * shared) if frozen_with else (None, 0)
    )
    need = device_memory(profile, [StageShape(0, profile.num_layers, 1, 1)])
    held = made.chain.materialise(range(made.chain.num_layers), 0).owned_parameters().values()
    assert need.parameter_bytes == sum(value.numel() * value.element_size() for value in held)


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, metrics: Any) -> None:
        self.found.append(metrics["loss"])


def trained(
    place: Path, model: nn.Module, steps: int, resume_from: Path | None = None
) -> tuple[Path, Losses]:
    place.mkdir()
    told = Losses()
    length = user_tasks.LENGTH
    profile = made_up_profile_of(chain_of(model), "mine", dtype=BFLOAT16_AUTOCAST, sequence_length=length)
    made = Trainer(
        model, user_tasks.sequences(16), AdamW(1e-2), user_tasks.next_token_loss,
        plan=chain_plan("mine", [0, 2, 5], 2, 4), cluster=cluster_file(place), folder=place / "run",
        profile=profile, dtype=BFLOAT16_AUTOCAST, seed=0, save=True,
        rate_schedule=user_tasks.constant, callbacks=[told],
    )  # fmt: skip
    made.fit(steps, resume_from=resume_from)
    assert made.checkpoint is not None
    return made.checkpoint, told


@pytest.mark.slow
@pytest.mark.parametrize("given", [torch.bfloat16, WIDE])
def test_a_checkpoint_holds_frozen_weights_as_they_were_given(tmp_path, given):
    model = frozen("llama", given, vocab_size=user_tasks.VOCABULARY, max_position_embeddings=16)
    straight, losses = trained(tmp_path / "straight", model, 3)
    profile = made_up_profile_of(chain_of(model), "mine", dtype=BFLOAT16_AUTOCAST)
    first, _ = trained(tmp_path / "first", model, 2)
    again, rest = trained(tmp_path / "again", model, 3, resume_from=first)
    assert rest.found == losses.found[2:]
    for path in (straight, first, again):
        held = {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}
        assert sum(value.nbytes for value in held.values()) == checkpoint_bytes(profile)
        for name, value in model.named_parameters():
            same = torch.equal(held[name].to(value.dtype), value)
            assert same != value.requires_grad, name
            if not value.requires_grad:
                assert torch.promote_types(held[name].dtype, given) == held[name].dtype
    other = frozen("llama", given, vocab_size=user_tasks.VOCABULARY, max_position_embeddings=16)
    with torch.no_grad():
        other.get_parameter("model.layers.1.mlp.up_proj.weight").add_(1)
    if given != torch.bfloat16:  # kept as bfloat16, of which the checkpoint cannot be
        with pytest.raises(InputError, match=r"up_proj.weight' is not that of the model at hand"):
            trained(tmp_path / "other", other, 3, resume_from=first)


def test_a_folder_in_bfloat16_is_read_in_bfloat16(tmp_path):
    stored = llama().to(torch.bfloat16)
    stored.save_pretrained(tmp_path / "llama")
    spec = model_spec(str(tmp_path / "llama"))

    def build(make: Any) -> nn.Module:
        model: nn.Module = make()
        for value in model.parameters():
            value.requires_grad_(value.dim() == 1)
        return model

    spec = replace(spec, build=partial(build, spec.build), build_shrunk=partial(build, spec.build_shrunk))
    assert isinstance(spec, ModelSpec)
    chain = ChainModel.from_spec(spec)
    for lowered in (None, torch.bfloat16):
        held = chain.materialise((0, 2, 4), 0, lowered=lowered).owned_parameters()
        for name, value in held.items():
            given = stored.get_parameter(name)
            assert value.dtype == (WIDE if value.dim() == 1 else torch.bfloat16), name
            assert torch.equal(value, given.to(value.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16_AUTOCAST])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_measured_peaks_are_within_a_twentieth_of_the_predicted_ones(tmp_path, monkeypatch, dtype, is_frozen):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6}
    model = frozen("llama", torch.bfloat16, vocab_size=user_tasks.VOCABULARY, **sizes)
    for value in model.parameters():
        value.requires_grad_(value.requires_grad or not is_frozen)
    data = user_tasks.sequences(16)
    task = own_task(model, data, user_tasks.next_token_loss)
    profile = profile_model(
        "mine", emulated_cluster(tmp_path), user_tasks.LENGTH, dtype=dtype, budget_s=0.05,
        microbatch_sizes=(4,), task=task,
    )  # fmt: skip
    made = Trainer(
        model, data, AdamW(1e-2), user_tasks.next_token_loss,
        plan=chain_plan("mine", [0, 2, 5, 8], 4, 16),
        cluster=cluster_file(tmp_path, EMULATED_CLUSTER), folder=tmp_path / "run", profile=profile,
        dtype=dtype, seed=0, save=False,
    )  # fmt: skip
    report = made.fit(1)
    for name, device in report.devices.items():
        assert device.peak_bytes == pytest.approx(device.predicted_bytes, rel=0.05), name
