"""Frozen parameters stay as they are, bit for bit, and all others train as torch alone trains them."""

import copy
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frozen_models
import trainers
import user_tasks
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.memory import trained_bytes
from cost_model.profile import ModelProfile
from frozen_models import SEED, build_frozen, decaying
from hetpipe.data.keyed_order import epoch_order
from hetpipe.data.user_task import own_task
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.split_check import check_split
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.program.instructions import Compute, Direction, Pass, Program, Transfer
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training import checkpoint_weights
from hetpipe.training.trainer import Callback, Trainer
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, cluster_file, made_up_profile_of, replica_plan

BATCH, STEPS = 8, 3
TOKENS = {"input_ids": frozen_models.EXAMPLE}
FEATURES = torch.zeros(1, user_tasks.NUM_FEATURES)


def names_of(chain: ChainModel) -> set[str]:
    return {info.name for layer in range(chain.num_layers) for info in chain.parameters(layer)}


def reached_of(chain: ChainModel) -> set[str]:
    infos = [info for layer in range(chain.num_layers) for info in chain.parameters(layer)]
    return {info.name for info in infos if info.reached}


def unfrozen(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if value.requires_grad}


def replicas(num_layers: int, zero: int = 0) -> Plan:
    """Two pipelines: the whole model on one device, and on two; under zero 3 three devices with all of it."""
    if zero == 3:
        return replica_plan("mine", num_layers, (2, 5), (1, 1), (2, 2), zero=zero)
    one = Pipeline(2, 5, (Stage(("here/0",), (0, num_layers), 3),))
    two = Pipeline(1, 3, (Stage(("here/1",), (0, 2), 2), Stage(("here/2",), (2, num_layers), 1)))
    return Plan("manual", "mine", BATCH, (one, two), zero=zero)


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, metrics: Any) -> None:
        self.found.append(metrics["loss"])


def trainer(place: Path, plan: Plan, model: Any, kind: str, **options: Any) -> Trainer:
    is_tokens = kind != "sequential"
    place.mkdir(exist_ok=True)
    chain = ChainModel.from_module(model, TOKENS if is_tokens else FEATURES.double())
    length = user_tasks.LENGTH if is_tokens else 1
    return Trainer(
        model, user_tasks.sequences(24) if is_tokens else user_tasks.samples(), decaying,
        frozen_models.loss_of(kind), plan=plan, cluster=cluster_file(place), folder=place / "run",
        profile=made_up_profile_of(chain, "mine", dtype="float64", sequence_length=length),
        dtype="float64", seed=SEED, save=True, rate_schedule=user_tasks.constant, **options,
    )  # fmt: skip


def train_alone(model: nn.Module, kind: str) -> list[float]:
    """The same training by torch alone, in place; gives the losses."""
    data = user_tasks.sequences(24) if kind != "sequential" else user_tasks.samples()
    optimizer, found = decaying([value for value in model.parameters() if value.requires_grad]), []
    order = epoch_order(SEED, 0, len(data))
    for step in range(STEPS):
        rows = [data[order[position]] for position in range(step * BATCH, (step + 1) * BATCH)]
        if kind == "sequential":
            x, y = (torch.stack(part) for part in zip(*rows, strict=True))
            loss = user_tasks.squared_error(model(x), y)
        else:
            ids = torch.stack([row["input_ids"] for row in rows])
            loss = user_tasks.next_token_loss(model(input_ids=ids, use_cache=False).logits, ids)
        optimizer.zero_grad()
        (loss / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item() / BATCH)
    return found


def check_weights(found: nn.Module, expected: nn.Module, before: nn.Module) -> None:
    """Frozen ones are what they were, bit for bit; the others changed, to what torch alone makes of them."""
    values, first = dict(expected.named_parameters()), dict(before.named_parameters())
    for name, value in found.named_parameters():
        assert torch.equal(value, first[name]) != values[name].requires_grad, name
        torch.testing.assert_close(value, values[name], rtol=1e-10, atol=1e-12, msg=name)


CASES = {
    # the first stage trains nothing
    "blocks": ("llama", r"embed_tokens|layers\.[01]\.", chain_plan("mine", [0, 3, 6], 2, BATCH)),
    # the last one trains nothing, and is run again
    "head": (
        "llama", r"layers\.[23]\.|^model\.norm|lm_head",
        chain_plan("mine", [0, 3, 6], 4, BATCH, recompute=True),
    ),
    # segments of which one trains nothing, or a norm alone
    "segments": (
        "llama", r"embed_tokens|layers\.(0|2)\.|q_proj|lm_head",
        chain_plan("mine", [0, 3, 6], 4, BATCH, recompute=True, segment_layers=1),
    ),
    "embeddings": ("llama", "embed_tokens", replicas(6)),
    "all but a head": ("llama", r"^model\.", replicas(6, zero=1)),
    # two stages only forward, the last one takes no gradient of its input
    "nothing but a head": ("llama", r"^model\.", chain_plan("mine", [0, 2, 5, 6], 1, BATCH, recompute=True)),
    "a middle block": (
        "llama", r"embed_tokens|layers\.[013]\.|^model\.norm|lm_head",
        chain_plan("mine", [0, 2, 4, 6], 1, BATCH),
    ),
    "single tensors": ("llama", r"layers\.1\.self_attn\.q_proj|layers\.2\.mlp\.up_proj|norm", replicas(6)),
    # the shared matrix is on both devices
    "tied": ("gpt2", r"wte", chain_plan("mine", [0, 2, 4], 2, BATCH)),
    "tied replicas": ("gpt2", r"wte|h\.0\.|ln", replicas(4, zero=1)),
    "sequential": ("sequential", r"^0\.|bias", replicas(7)),
    "shared layer": ("sequential", r"^2\.", chain_plan("mine", [0, 3, 5, 7], 2, BATCH)),
    **{
        f"{name}, zero {zero}": (kind, pattern, replicas(num_layers, zero))
        for zero in (2, 3)
        for name, kind, pattern, num_layers in (
            ("blocks", "llama", r"embed_tokens|layers\.[01]\.", 6),
            ("a middle block", "llama", r"embed_tokens|layers\.[013]\.|^model\.norm|lm_head", 6),
            ("single tensors", "llama", r"layers\.1\.self_attn\.q_proj|layers\.2\.mlp\.up_proj|norm", 6),
            ("nothing but a head", "llama", r"^model\.", 6),
            ("tied replicas", "gpt2", r"wte|h\.0\.|ln", 4),
            ("trained ties", "gpt2", r"h\.0\.|ln", 4),
            ("shared layer", "sequential", r"^2\.", 7),
        )
    },
}  # fmt: skip
SHARDED = (
    "blocks, zero 2",
    "trained ties, zero 2",
    "a middle block, zero 3",
    "tied replicas, zero 3",
    "shared layer, zero 3",
)
"""Of what is frozen where gradients or weights are sharded; random models and plans are below."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        case if "zero" not in case or case in SHARDED else pytest.param(case, marks=pytest.mark.exhaustive)
        for case in CASES
    ],
)
def test_a_module_trains_where_it_is_not_frozen(tmp_path, case):
    kind, pattern, plan = CASES[case]
    torch.manual_seed(7)
    model = build_frozen(kind, pattern).double()
    before, expected = copy.deepcopy(model), copy.deepcopy(model)
    alone = train_alone(expected, kind)
    told = Losses()
    made = trainer(tmp_path, plan, model, kind, callbacks=[told])
    made.fit(STEPS)
    assert told.found == pytest.approx(alone, rel=1e-12)
    assert made.checkpoint is not None
    checkpoint_weights.load_weights(made.checkpoint, model)
    check_weights(model, expected, before)
    assert unfrozen(model) == unfrozen(before)


@pytest.mark.slow
def test_what_a_factory_freezes_stays_as_it_is_drawn(tmp_path):
    factory = partial(build_frozen, "llama", r"embed_tokens|layers\.0\.")
    chain = ChainModel.from_module(factory, TOKENS)
    drawn = chain.materialise(range(6), SEED, torch.float64).owned_parameters()
    before = factory().double()
    with torch.no_grad():
        for name, value in before.named_parameters():
            value.copy_(drawn[name])
    expected, found, told = copy.deepcopy(before), factory().double(), Losses()
    alone = train_alone(expected, "llama")
    made = trainer(tmp_path, chain_plan("mine", [0, 2, 6], 2, BATCH), factory, "llama", callbacks=[told])
    made.fit(STEPS)
    assert told.found == pytest.approx(alone, rel=1e-12)
    assert made.checkpoint is not None
    checkpoint_weights.load_weights(made.checkpoint, found)
    check_weights(found, expected, before)


@pytest.mark.slow
def test_training_goes_on_where_a_stage_trains_nothing(tmp_path):
    kind, pattern, plan = CASES["blocks"]
    torch.manual_seed(7)
    model = build_frozen(kind, pattern).double()
    straight, first, second = Losses(), Losses(), Losses()
    trainer(tmp_path / "straight", plan, model, kind, callbacks=[straight]).fit(STEPS)
    begun = trainer(tmp_path / "first", plan, model, kind, callbacks=[first])
    begun.fit(STEPS - 1)
    other = replace(replicas(6), zero=1)
    resumed = trainer(tmp_path / "second", other, model, kind, callbacks=[second])
    resumed.fit(STEPS, resume_from=begun.checkpoint)
    assert first.found + second.found == pytest.approx(straight.found, rel=1e-12)


def random_plan(rng: random.Random, chain: ChainModel) -> Plan:
    """Up to three devices: a chain, or two pipelines, with shared devices and sharded states."""
    last = chain.num_layers

    def pipeline(devices: list[str], samples: int) -> Pipeline:
        cuts = [0, *sorted(rng.sample(range(1, last), len(devices) - 1)), last]
        stages = tuple(
            Stage((device,), cut, len(devices) - index, rng.random() < 0.3)
            for index, (device, cut) in enumerate(zip(devices, pairwise(cuts), strict=True))
        )
        return Pipeline(rng.choice([1, 2]), samples, stages)

    names = ["here/0", "here/1", "here/2"]
    if rng.random() < 0.3:
        return Plan("manual", "mine", BATCH, (pipeline(names, BATCH),))
    second = rng.choice([names[2:], names[1:], names])
    pipelines = (pipeline(names if second == names else names[:2], 5), pipeline(second, 3))
    return Plan("manual", "mine", BATCH, pipelines, zero=rng.choice([0, 1]))


def profile_of(chain: ChainModel, kind: str) -> ModelProfile:
    length = 1 if kind == "sequential" else user_tasks.LENGTH
    return made_up_profile_of(chain, "mine", dtype="float64", sequence_length=length)


def random_sharded_plan(rng: random.Random, chain: ChainModel, zero: int) -> Plan:
    """Three devices; under zero 2 some in one pipeline."""
    if zero == 3 or rng.random() < 0.5:
        shares = rng.sample([(1, 1), (2, 3), (2, 4), (3, 2)], 2)
        rest = BATCH - sum(samples for _, samples in shares)
        return replica_plan("mine", chain.num_layers, *shares, (rng.choice([1, 2]), rest), zero=zero)
    stop, size = rng.randrange(1, chain.num_layers), rng.choice([1, 2])
    cut = Stage(("here/1",), (0, stop), 2), Stage(("here/2",), (stop, chain.num_layers), 1)
    whole = Stage(("here/0",), (0, chain.num_layers), 2)
    return Plan("manual", "mine", BATCH, (Pipeline(size, 5, (whole,)), Pipeline(1, 3, cut)), zero=zero)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [None, 2, 3])
@pytest.mark.parametrize("kind", frozen_models.BUILDERS)
def test_random_parameters_are_frozen_under_random_plans(tmp_path, kind, zero):
    cluster = read_cluster(cluster_file(tmp_path))
    cases, chains = [], {}
    for seed in range(6 if zero is None else 4):
        chain = chains[seed] = frozen_models.chain_of(kind, seed)
        profile, rng = profile_of(chain, kind), random.Random(seed)
        plan = random_plan(rng, chain) if zero is None else random_sharded_plan(rng, chain, zero)
        cases.append((kind, seed, lower(plan, profile, cluster), profile))
    names = ("here/0", "here/1", "here/2")
    events: list[dict[str, Any]] = []
    run_ranks(frozen_models.train_cases, (cases, cluster), RankGroup(names, (1,) * 3), events.append)
    assert len(events) == 3 * len(cases)
    for seed, chain in chains.items():
        mine = [event for event in events if tuple(event["case"]) == (kind, seed)]
        check_case(kind, seed, chain, mine)
        check_ran(next(program for _, other, program, _ in cases if other == seed), chain, mine)


def check_case(kind: str, seed: int, chain: ChainModel, events: Iterable[dict[str, Any]]) -> None:
    """What all ranks have after the steps is what one process has."""
    model = frozen_models.build_random(kind, seed).double()
    drawn = chain.materialise(range(chain.num_layers), SEED, torch.float64).owned_parameters()
    before = {name: value.detach().clone() for name, value in drawn.items()}
    values = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            value.copy_(before[name])
    trained = [value for value in values.values() if value.requires_grad]
    optimizer, losses, norms = decaying(trained), [], []
    for step in range(frozen_models.STEPS):
        inputs, labels = frozen_models.batch(kind, step)
        output = model(*inputs.values()) if kind == "sequential" else model(**inputs, use_cache=False).logits
        loss = frozen_models.loss_of(kind)(output, labels) / BATCH
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        losses.append(loss.item())
    seen: set[str] = set()
    for event in events:
        assert event["losses"] == pytest.approx(losses, rel=1e-11)
        assert event["norms"] == pytest.approx(norms, rel=1e-11)
        assert set(event["trained"]) == event["weights"].keys() & unfrozen(model)
        for name, weights in event["weights"].items():
            value: Tensor = torch.tensor(weights, dtype=torch.float64)
            assert torch.equal(value, before[name]) != values[name].requires_grad, (seed, name)
            torch.testing.assert_close(value, values[name].detach(), rtol=1e-9, atol=1e-11)
            seen.add(name)
    assert seen == values.keys()


def check_ran(program: Program, chain: ChainModel, events: Iterable[dict[str, Any]]) -> None:
    """Each rank ran its list, without a backward or gradient message below the first trained layer."""
    assert program.first_trained == chain.first_trained
    ran = {event["rank"]: event["ran"] for event in events}
    for rank, instructions in enumerate(program.ranks):
        expected = [
            entry
            for entry in instructions
            if not (isinstance(entry, Transfer) and entry.direction is Direction.RECV)
        ]
        assert ran[rank] == list(map(str, expected))
        for entry in expected:
            if isinstance(entry, Compute) and entry.op is Pass.BACKWARD:
                assert program.stage(entry).stop > chain.first_trained
            if isinstance(entry, Transfer) and entry.op is Pass.BACKWARD:
                assert program.stage(entry).start > chain.first_trained


@pytest.mark.slow
@pytest.mark.parametrize("kind", frozen_models.BUILDERS)
def test_split_equals_whole_with_random_parameters_frozen(kind):
    for seed in range(4):
        factory = partial(frozen_models.build_random, kind, seed)
        chain = frozen_models.chain_of(kind, seed)
        assert reached_of(chain) == unfrozen(factory()), seed
        report = check_split(factory, chain.example)
        assert report.passed, (seed, report.reason)


def test_a_frozen_shared_weight_has_no_gradient_to_sum():
    chain = ChainModel.from_module(partial(build_frozen, "gpt2", "wte"), TOKENS)
    held = [info for layer in (0, 3) for info in chain.parameters(layer) if "wte" in info.name]
    assert [(info.tied, info.reached) for info in held] == [(False, False)] * 2
    layers = chain.materialise((0, 3), SEED)
    assert (
        layers.parameters_of(0)["transformer.wte.weight"] is layers.parameters_of(3)["transformer.wte.weight"]
    )


def test_a_small_copy_says_nothing_of_what_is_frozen():
    factory = partial(build_frozen, "llama", r"layers\.[02]\.|norm")
    for shrunk in (frozen_models.build_llama, partial(build_frozen, "llama", "q_proj|lm_head")):
        chain = ChainModel.from_module(factory, TOKENS, shrunk=shrunk)
        assert reached_of(chain) == unfrozen(factory())


def test_a_model_of_which_everything_is_frozen_is_refused():
    for kind, example in (("llama", TOKENS), ("sequential", FEATURES)):
        with pytest.raises(InputError, match=r"has nothing to train: .* has requires_grad") as caught:
            ChainModel.from_module(build_frozen(kind, ""), example)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="nothing to train"):
        own_task(build_frozen("sequential", ""), user_tasks.samples(), user_tasks.squared_error)


class Biased(nn.Module):
    """Blocks take what is made from a parameter, besides what the block before gives: all, or the second."""

    def __init__(self, *, all_blocks: bool) -> None:
        super().__init__()
        self.bias, self.all_blocks = nn.Parameter(torch.ones(8)), all_blocks
        self.blocks = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        doubled = (2 * self.bias).expand_as(x)
        for index, block in enumerate(self.blocks):
            x = block(x, doubled if self.all_blocks or index == 1 else x)
        return x


def build_biased(*, all_blocks: bool, is_frozen: bool) -> Biased:
    torch.manual_seed(0)
    model = Biased(all_blocks=all_blocks)
    model.bias.requires_grad_(not is_frozen)
    return model


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_all_blocks_take_from_a_parameter_travels_with_what_they_give(is_frozen):
    build = partial(build_biased, all_blocks=True, is_frozen=is_frozen)
    report = check_split(build, {"x": torch.randn(1, 8)})
    assert report.passed, report.reason
    chain = ChainModel.from_module(build, {"x": torch.zeros(1, 8)})
    assert ("bias" in reached_of(chain)) is not is_frozen


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_one_block_takes_from_a_parameter_is_refused(is_frozen):
    # ranks without the parameter would compute it from zeros
    model = build_biased(all_blocks=False, is_frozen=is_frozen)
    with pytest.raises(InputError, match="its blocks do not all pass on the same tensors"):
        ChainModel.from_module(model, {"x": torch.zeros(1, 8)})


def test_a_model_of_the_command_line_is_trained_in_full():
    spec = model_spec("gpt2-tiny")
    chain = ChainModel.from_spec(spec)
    assert reached_of(chain) == names_of(chain)


@pytest.mark.slow
def test_nothing_is_planned_for_frozen_parameters_but_themselves(tmp_path):
    model = build_frozen("llama", r"embed_tokens|layers\.[01]\.|layers\.3\.mlp")
    task = own_task(model, user_tasks.sequences(8), user_tasks.next_token_loss)
    cluster = read_cluster(cluster_file(tmp_path))
    profile = profile_model(
        "mine", cluster, user_tasks.LENGTH, budget_s=0.1, microbatch_sizes=(2,), task=task
    )
    frozen = [
        sum(4.0 * value.numel() for name, value in model.named_parameters() if part in name and keep(value))
        for keep in (lambda value: not value.requires_grad, lambda value: True)
        for part in ("embed_tokens", "layers.0.", "layers.1.", "layers.2.", "layers.3.", "lm_head")
    ]
    assert [layer.unreached_bytes for layer in profile.layers] == frozen[:6]
    norm = 4.0 * 8
    held = [*frozen[6:11], frozen[11] + norm]
    assert [layer.parameter_bytes for layer in profile.layers] == held
    assert trained_bytes(profile, range(6)) == sum(held) - sum(frozen[:6])
    assert trained_bytes(profile, range(3)) == 0.0
    kind = next(iter(profile.kinds.values()))
    assert kind.optimizer_s_per_byte > 0
    # nothing is kept for the backward below the first block that is trained, and all of it above
    saved = [layer.saved_bytes_per_sample for layer in profile.layers]
    assert saved[:3] == [0.0] * 3 and min(saved[3:]) > 0
    backwards = [times.backward_s[0] for times in kind.layers]
    assert max(backwards[:3]) < min(backwards[3:])


@pytest.mark.slow
def test_a_profile_of_a_model_with_more_frozen_is_refused(tmp_path):
    """It has no memory for the gradients and states of what is trained now."""
    model = user_tasks.build_plain().double()
    chain = ChainModel.from_module(model, torch.zeros(1, user_tasks.NUM_FEATURES, dtype=torch.float64))
    profile = made_up_profile_of(chain, "mine", dtype="float64", sequence_length=1)
    first = replace(profile.layers[0], unreached_bytes=profile.layers[0].parameter_bytes)
    frozen = replace(profile, layers=(first, *profile.layers[1:]))
    with pytest.raises(InputError, match=r"'0' .* trains 0 bytes, of the model 1,152: less .* frozen"):
        trainers.trainer(tmp_path, model=model, profile=frozen).fit(1)
    model[0].requires_grad_(False)
    assert trainers.trainer(tmp_path, model=model, profile=frozen).fit(1).steps == 1
