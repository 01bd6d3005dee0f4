"""Models as chains of layers: what is found, what is allocated, and that split equals whole."""

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from cost_model.errors import InputError
from hetpipe.models.chain import ChainModel, TensorSpec
from hetpipe.models.huggingface import ModelSpec, model_spec
from hetpipe.models.split_check import check_split
from hetpipe.models.tasks import Task

SIZES = {
    "vocab_size": 128,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
KEYS = {"num_key_value_heads": 2, "head_dim": 8}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}


def build(package, prefix, suffix, options):
    folder = f"transformers.models.{package}"
    config = getattr(importlib.import_module(f"{folder}.configuration_{package}"), f"{prefix}Config")(
        **options
    )
    config._attn_implementation = "eager"
    return getattr(importlib.import_module(f"{folder}.modeling_{package}"), prefix + suffix)(config)


def spec_of(package, prefix, suffix, options):
    task = Task.CAUSAL_LM if suffix == "ForCausalLM" else Task.MASKED_LM
    factory = partial(build, package, prefix, suffix, options)
    return ModelSpec(package, task, 128, 64, factory, factory)


class Pair(nn.Module):
    """Takes and returns a tensor and a skip connection."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.dropout = nn.Dropout(0.2)

    def forward(self, pair):
        x, skip = pair
        return self.dropout(torch.tanh(self.linear(x))) * self.scale, skip + x


class Fork(nn.Module):
    def forward(self, x):
        return x, x.sin()


class Join(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


def sequential():
    model = nn.Sequential(nn.Linear(5, 8), Fork(), Pair(8), Pair(8), Join(), nn.Linear(8, 3))
    nn.init.constant_(model[0].bias, 0.25)
    model[3].linear.weight = model[2].linear.weight
    return model


class Skipping(nn.Module):
    """A model whose head reads what came before the blocks, behind the back of the chain."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        start = x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x + start


class Remembering(Skipping):
    """The same by numbers, which no operation of torch gives away."""

    def forward(self, x):
        x = self.first(x)
        start = x.detach().tolist()
        for block in self.blocks:
            x = block(x)
        return x + torch.tensor(start, dtype=x.dtype)


class WithUnused(nn.Module):
    """Blocks between two linear layers, and a parameter beside them that no forward uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Table(nn.Module):
    """Adds a table that is saved with the model and one that is not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("saved", torch.ones(4))
        self.register_buffer("derived", torch.ones(4), persistent=False)

    def forward(self, x):
        return x + self.saved + self.derived


def centre_batch():
    class Centre(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    return nn.Sequential(nn.Linear(4, 4), Centre(), nn.Linear(4, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny", "llama-tiny"])
def test_split_equals_whole_for_registered_models(name):
    report = check_split(model_spec(name))
    assert report.passed, report.reason
    assert report.cuts == ((0, 1, 2, 3, 4, 5), (0, 3), (0, 1, 3, 5))


@pytest.mark.slow
def test_split_equals_whole_at_full_size():
    assert check_split(model_spec("gpt2-tiny"), full=True).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        ("llama", "Llama", "ForCausalLM", {**SIZES, "tie_word_embeddings": True}),
        ("roberta", "Roberta", "ForMaskedLM", SIZES),
        ("qwen3", "Qwen3", "ForCausalLM", {**SIZES, **KEYS}),
        ("mixtral", "Mixtral", "ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
        ("gemma2", "Gemma2", "ForCausalLM", {**SIZES, **KEYS}),
        ("opt", "OPT", "ForCausalLM", {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16}),
        ("deberta_v2", "DebertaV2", "ForMaskedLM", SIZES),  # blocks return tuples
    ],
    ids=lambda model: model[0],
)
def test_split_equals_whole_for_models_never_seen(model):
    report = check_split(spec_of(*model))
    assert report.passed, report.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (("t5", "T5", "ForConditionalGeneration", {"vocab_size": 128}), "its forward fails on input_ids"),
        (
            ("deberta_v2", "DebertaV2", "ForMaskedLM", {**SIZES, **RELATIVE}),
            "argument 'rel_embeddings' .* not the samples",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_models_that_are_no_chain_are_refused_with_the_reason(model, reason):
    with pytest.raises(InputError, match=reason) as error:
        ChainModel.from_spec(spec_of(*model))
    assert "\n" not in str(error.value)


def test_split_equals_whole_for_a_sequential_with_tuples_and_tied_weights():
    report = check_split(sequential, torch.randn(1, 5, generator=torch.Generator().manual_seed(0)))
    assert report.passed, report.reason
    assert report.gradient_difference <= 1e-15


def test_an_example_of_several_samples_is_refused_and_not_taken_for_one():
    with pytest.raises(InputError, match=r"the example has 4 samples in '.*'; give the inputs of one, as"):
        check_split(sequential, torch.randn(4, 5))


def test_what_a_chain_cannot_carry_is_refused():
    with pytest.raises(InputError, match="after the blocks of 'blocks' it uses what was made from"):
        check_split(Skipping, {"x": torch.arange(4.0)[None]})


def test_check_finds_what_the_chain_did_not_see():
    report = check_split(Remembering, {"x": torch.arange(4.0)[None]})
    assert not report.passed
    assert "split differs from whole: the loss is off" in report.reason


def test_check_finds_models_that_depend_on_the_microbatch_size():
    report = check_split(centre_batch, torch.arange(4.0)[None])
    assert not report.passed
    assert report.reason.startswith("the microbatch size changes the result")
    assert report.gradient_difference == 0.0


@pytest.fixture(scope="module")
def bert():
    return ChainModel.from_spec(model_spec("bert-tiny"))


@pytest.fixture(scope="module")
def bert_large():
    return ChainModel.from_spec(model_spec("bert-large"))


def test_bert_large_is_26_layers_described_without_weights(bert_large):
    assert bert_large.layer_names[:2] == ("embeddings", "block0")
    assert bert_large.layer_names[-2:] == ("block23", "head")
    sizes = [
        sum(torch.Size(info.shape).numel() for info in bert_large.parameters(layer)) for layer in range(26)
    ]
    tied = 30522 * 1024
    assert sizes == [31_782_912, *[12_596_224] * 24, 2_133_820 + tied]
    assert sum(sizes) - tied == 336_226_108


def test_boundaries_carry_the_hidden_state_alone(bert_large):
    hidden = (TensorSpec((128, 1024), torch.float32),)
    assert bert_large.boundary(1, 128) == bert_large.boundary(25, 128) == hidden
    with pytest.raises(ValueError, match="boundaries of bert-large are 1 to 25"):
        bert_large.boundary(0, 128)


def test_boundaries_of_a_sequential_may_be_tuples():
    chain = ChainModel.from_module(sequential, torch.zeros(1, 5))
    vector = TensorSpec((8,), torch.float32)
    assert [len(chain.boundary(layer)) for layer in range(1, 6)] == [1, 2, 2, 2, 1]
    assert chain.boundary(3) == (vector, vector)
    assert chain.layer_names == ("0", "1", "2", "3", "4", "5")


def test_the_tied_embedding_is_listed_by_both_its_layers(bert):
    name = "bert.embeddings.word_embeddings.weight"
    listed = {
        layer: info
        for layer in range(bert.num_layers)
        for info in bert.parameters(layer)
        if info.name == name
    }
    assert list(listed) == [0, bert.num_layers - 1]
    assert [info.name for info in bert.parameters(0) if info.tied] == [name]
    both = bert.materialise((0, bert.num_layers - 1), seed=0)
    assert both.parameters_of(0)[name] is both.parameters_of(bert.num_layers - 1)[name]
    assert list(both.owned_parameters()).count(name) == 1


def test_the_pooler_is_not_reached_by_the_loss_and_takes_no_gradient(bert):
    unreached = [info.name for info in bert.parameters(bert.num_layers - 1) if not info.reached]
    assert unreached == [
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
    ]
    assert all(info.reached for layer in range(bert.num_layers - 1) for info in bert.parameters(layer))
    head = bert.materialise([bert.num_layers - 1], seed=0).owned_parameters()
    assert not any(head[name].requires_grad for name in unreached)


def test_every_parameter_has_a_layer_also_one_that_nobody_uses():
    chain = ChainModel.from_module(WithUnused, {"x": torch.zeros(1, 4)})
    listed = [info.name for layer in range(chain.num_layers) for info in chain.parameters(layer)]
    assert sorted(listed) == sorted(name for name, _ in WithUnused().named_parameters())
    (unused,) = [info for info in chain.parameters(chain.num_layers - 1) if info.name == "unused"]
    assert not unused.reached
    head = chain.materialise([chain.num_layers - 1], seed=0).owned_parameters()
    assert torch.equal(head["unused"], torch.ones(5))  # as the factory made it, so a checkpoint holds it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_derived_tables_of_hugging_face_keep_their_precision(dtype):
    chain = ChainModel.from_spec(model_spec("llama-tiny"))
    tables = {name: table for name, table in chain.build().named_buffers() if "inv_freq" in name}
    assert tables
    placed = dict(chain.materialise([1], seed=0, dtype=dtype).model.named_buffers())
    for (
        name,
        table,
    ) in tables.items():  # in bfloat16 a frequency is off by up to 2^-9: 8 radians at position 4,096
        assert placed[name].dtype == torch.float32
        assert torch.equal(placed[name], table)


def test_buffers_of_other_models_take_the_dtype_of_the_weights():
    chain = ChainModel.from_module(lambda: nn.Sequential(nn.Linear(4, 4), Table()), torch.zeros(1, 4))
    placed = dict(chain.materialise([0, 1], seed=0, dtype=torch.bfloat16).model.named_buffers())
    assert {name: table.dtype for name, table in placed.items()} == {
        "1.saved": torch.bfloat16,
        "1.derived": torch.bfloat16,
    }


def test_only_owned_weights_are_allocated(bert):
    layers = bert.materialise([2, 3], seed=0)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in layers.parameters()
    }
    owned = sum(4 * parameter.numel() for parameter in layers.owned_parameters().values())
    others = len([parameter for parameter in layers.parameters() if not parameter.requires_grad])
    assert owned == 4 * sum(torch.Size(info.shape).numel() for k in (2, 3) for info in bert.parameters(k))
    assert sum(storages.values()) <= owned + 4 * others


@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny", "llama-tiny"])
def test_initial_weights_do_not_depend_on_who_holds_what(name):
    chain = ChainModel.from_spec(model_spec(name))
    state = torch.get_rng_state()
    whole = chain.materialise(range(chain.num_layers), seed=1).owned_parameters()
    assert torch.equal(torch.get_rng_state(), state)
    for layers in ([0], [1, 2], [chain.num_layers - 1], [0, 3, chain.num_layers - 1]):
        part = chain.materialise(layers, seed=1).owned_parameters()
        assert all(torch.equal(part[key], whole[key]) for key in part)
    other = chain.materialise([1], seed=2).owned_parameters()
    assert any(not torch.equal(other[key], whole[key]) for key in other)
    double = chain.materialise([1], seed=1, dtype=torch.float64).owned_parameters()
    assert all(torch.equal(double[key], whole[key].double()) for key in double)


@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny", "llama-tiny"])
def test_initial_weights_have_the_distribution_of_the_model(name):
    spec = model_spec(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = dict(spec.build().named_parameters())
    chain = ChainModel.from_spec(spec)
    ours = chain.materialise(range(chain.num_layers), seed=0).owned_parameters()
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        if theirs[key].unique().numel() == 1:  # biases and norms
            assert torch.equal(weight, theirs[key]), key
        else:
            assert torch.equal((weight == 0).all(-1), (theirs[key] == 0).all(-1)), key  # padding rows
            assert weight.std().item() == pytest.approx(theirs[key].std().item(), rel=0.1), key
            assert abs(weight.mean().item()) < 5 * weight.std().item() / weight.numel() ** 0.5 + 1e-3, key


def test_a_sequential_keeps_the_weights_that_its_factory_gives_it():
    chain = ChainModel.from_module(sequential, torch.zeros(1, 5))
    assert chain.materialise([0], seed=0).owned_parameters()["0.bias"].unique().item() == 0.25
    first, last = chain.materialise([2], seed=0), chain.materialise([3], seed=0)
    assert torch.equal(first.parameters_of(2)["2.linear.weight"], last.parameters_of(3)["2.linear.weight"])


def test_one_instance_runs_any_range_that_it_owns(bert):
    layers = bert.materialise([0, 1, 3, 4, 7], seed=0).eval()
    inputs = {"input_ids": torch.arange(12).view(2, 6)}
    both = layers.run(0, 2, inputs)
    assert torch.equal(layers.run(1, 2, inputs, layers.run(0, 1, inputs))[0], both[0])
    assert torch.equal(
        layers.run(4, 5, inputs, layers.run(3, 4, inputs, both))[0], layers.run(3, 5, inputs, both)[0]
    )
    assert layers.run(7, 8, inputs, both)[0].shape == (2, 6, 1024)
    with pytest.raises(ValueError, match=r"layers \[1, 4\) are not all owned here; owned: \[0, 1, 3, 4, 7\]"):
        layers.run(1, 4, inputs, both)
    with pytest.raises(ValueError, match="layer 3 does not take 0 carried tensors"):
        layers.run(3, 4, inputs)


def test_hooks_see_every_layer_and_every_inner_boundary(bert):
    layers = bert.materialise(range(bert.num_layers), seed=0)
    inputs = {"input_ids": torch.arange(6)[None]}
    entered, crossed = [], []
    layers.on_layer, layers.on_boundary = entered.append, lambda layer, _: crossed.append(layer)
    hidden = layers.run(0, 3, inputs)
    assert (entered, crossed) == ([0, 1, 2], [1, 2])
    entered.clear(), crossed.clear()
    layers.run(5, 8, inputs, hidden)
    assert (entered, crossed) == ([-1, 5, 6, 7], [6, 7])
    entered.clear(), crossed.clear()
    layers.run(7, 8, inputs, hidden)
    assert (entered, crossed) == ([-1, 7], [])


def test_running_leaves_the_gradient_mode_as_it_was_even_on_failure(bert):
    layers = bert.materialise([3], seed=0)
    inputs = {"input_ids": torch.arange(6)[None]}
    with pytest.raises(RuntimeError):
        layers.run(3, 4, inputs, (torch.zeros(1, 6, 5),))
    assert torch.is_grad_enabled()
    hidden = (torch.zeros(1, 6, 64),)
    assert layers.run(3, 4, inputs, hidden)[0].requires_grad
    with torch.no_grad():
        assert not layers.run(3, 4, inputs, hidden)[0].requires_grad


def test_a_materialised_model_cannot_be_moved(bert):
    with pytest.raises(TypeError, match="materialise it with that device and dtype"):
        bert.materialise([1], seed=0).double()


def test_split_is_refused_where_the_shrunken_copy_is_of_another_class():
    spec = replace(model_spec("gpt2-tiny"), build_shrunk=model_spec("bert-tiny").build)
    with pytest.raises(InputError, match="shrunken copy"):
        ChainModel.from_spec(spec)
