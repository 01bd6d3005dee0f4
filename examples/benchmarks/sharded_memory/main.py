"""Is the memory of sharded and offloaded training predicted, device by device? See README.md.

Emulated devices count the bytes of every live tensor; the prediction comes from a profile of a few layers.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers

from cost_model.cluster_file import read_cluster
from cost_model.sharding import OwnerRange
from hetpipe.models.names import ModelEntry, model_entry
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.settings import Settings
from hetpipe.training.run import measure
from partition.estimates.optimizer_sharding import with_state_owners
from partition.plan import FROZEN_WEIGHTS, OPTIMIZER_STATES, SAVED_ACTIVATIONS, Pipeline, Plan, Stage

BATCH, SEQUENCE_LENGTH, BLOCKS = 12, 64, 6
END = BLOCKS + 2
CLUSTER = """
name = "emulated"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [
    { kind = "emulated", speed = 0.5, memory = "2 GiB" },
    { kind = "emulated", speed = 0.5, memory = "1 GiB" },
    { kind = "emulated", speed = 0.5, memory = "512 MiB" },
]
host_memory = "2 GiB"
host_link = { bandwidth = "12 GB/s", latency = "10 us" }
"""
LORA = LoraSettings(8, 16.0, ("q_proj", "v_proj", "down_proj"))
HEAD = LoraSettings(8, 16.0, ("lm_head",))
BF16, FP16 = "bfloat16-autocast", "float16-autocast"


def replicas(*shares: tuple[int, int], by_layer: bool = False, together: int = 1) -> tuple[Pipeline, ...]:
    """The whole model on each device: (microbatch size, samples); by_layer: the last one recomputes.

    together: so many microbatches pass each layer in one round of it.
    """
    last = len(shares) - 1
    return tuple(
        Pipeline(
            size,
            samples,
            (
                Stage(
                    (f"here/{index}",),
                    (0, END),
                    together,
                    recompute=by_layer and index == last,
                    segment_layers=int(by_layer and index == last),
                ),
            ),
        )
        for index, (size, samples) in enumerate(shares)
    )


def cut(size: int, stop: int, offload: tuple[str, ...] = ()) -> tuple[Pipeline, ...]:
    """One device with the whole model, and a pipeline of two with five microbatches of a sample."""
    stages = (
        Stage(("here/1",), (0, stop), 2, offload=offload),
        Stage(("here/2",), (stop, END), 1, offload=offload),
    )
    whole = Stage(("here/0",), (0, END), 1, offload=offload)
    return Pipeline(size, BATCH - 5, (whole,)), Pipeline(1, 5, stages)


EVEN = replicas((1, 4), (1, 4), (1, 4))
UNEVEN = replicas((4, 7), (2, 3), (1, 2))
ONCE = replicas((4, 4), (4, 4), (4, 4))
OFF, SAVED, ALL = (
    (OPTIMIZER_STATES,),
    (SAVED_ACTIVATIONS,),
    (OPTIMIZER_STATES, FROZEN_WEIGHTS, SAVED_ACTIVATIONS),
)


@dataclass(frozen=True)
class Combination:
    """What is trained, in what dtype, and what is where. zero: as in plan.json.

    ranged: layers of which the first device owns a half, the second 5/16, and the last one the rest.
    """

    name: str
    zero: int
    pipelines: tuple[Pipeline, ...]
    model: str = "llama"
    dtype: str = "float32"
    lora: LoraSettings | None = None
    layer_zero: tuple[int, ...] | None = None
    ranged: tuple[int, ...] = ()


COMBINATIONS = (
    Combination("Llama, uneven replicas", 2, UNEVEN),
    Combination("Llama, uneven replicas", 3, UNEVEN),
    Combination("Llama, one microbatch each", 3, ONCE),
    Combination("Llama, one recomputes by layer", 3, replicas((2, 4), (2, 4), (2, 4), by_layer=True)),
    Combination("Llama, one cut in two", 2, cut(2, 4)),
    Combination("Llama in bf16, uneven replicas", 2, UNEVEN, dtype=BF16),
    Combination("Llama in fp16, one cut in two", 2, cut(2, 4), dtype=FP16),
    Combination("GPT-2, tied weights cut apart", 2, cut(1, 5), model="gpt2"),
    Combination("GPT-2, uneven replicas", 3, UNEVEN, model="gpt2"),
    Combination("Llama with LoRA, even replicas", 2, EVEN, lora=LORA),
    Combination("Llama with LoRA, even replicas", 3, EVEN, lora=LORA),
    Combination("Llama, all frozen below the head", 3, EVEN, lora=HEAD),
    Combination("Llama, states on the host", 0, cut(2, 4, OFF)),
    Combination("Llama, states on the host", 1, replicas((2, 4), (2, 4), (2, 4)), dtype=BF16),
    Combination("Llama, activations on the host", 0, cut(4, 4, SAVED)),
    Combination("GPT-2, activations on the host", 0, cut(2, 5, SAVED), model="gpt2"),
    Combination("Llama in bf16, activations on the host", 0, cut(4, 4, SAVED), dtype=BF16),
    Combination("Llama with LoRA, all on the host", 0, cut(4, 4, ALL), lora=LORA),
    Combination("Llama, all microbatches together", 2, replicas((2, 6), (2, 3), (1, 3), together=3)),
    Combination(
        "Llama, one recomputes, all together",
        3,
        replicas((2, 5), (2, 4), (1, 3), by_layer=True, together=3),
    ),
    Combination("Llama, in groups of two", 3, replicas((1, 5), (2, 4), (1, 3), together=2)),
    Combination("Llama, one cut in two", 3, cut(2, 4)),
    Combination("Llama, one cut in two, states alone above", 3, cut(2, 4), layer_zero=4 * (3,) + 4 * (1,)),
    Combination("GPT-2, tied weights cut apart", 3, cut(1, 5), model="gpt2"),
    Combination("GPT-2, ranges of three layers", 1, UNEVEN, model="gpt2", ranged=(0, 3, END - 1)),
    Combination("Llama, ranges of three layers", 2, UNEVEN, ranged=(0, 3, END - 1)),
    Combination("Llama, ranges of three layers", 3, UNEVEN, ranged=(0, 3, END - 1)),
)


@dataclass(frozen=True)
class Row:
    """A device's bytes at its peak in one step."""

    combination: str
    zero: int
    device: str
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """Return predicted over measured, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def rows(combination: Combination, place: Path, budget_s: float) -> Iterator[Row]:
    """Profile the model of a combination, run a step of its plan, and compare the bytes of each device."""
    cluster_file = place / "cluster.toml"
    cluster_file.write_text(CLUSTER)
    cluster, entry = read_cluster(cluster_file), _entry(combination, place)
    profile = profile_model(
        str(entry.place), cluster, SEQUENCE_LENGTH,
        dtype=combination.dtype, budget_s=budget_s, microbatch_sizes=(1, 2, 4), lora=combination.lora,
    )  # fmt: skip
    levels = combination.layer_zero
    plan = Plan("manual", entry.name, BATCH, combination.pipelines, combination.zero, layer_zero=levels)
    if plan.zero:
        plan = in_ranges(with_state_owners(plan, profile, cluster), combination.ranged)
    settings = Settings.of(plan, profile, steps=1, save=False, **entry.in_settings)
    for device, memory in measure(settings, cluster_file, profile, plan).devices.items():
        assert memory.peak_bytes is not None
        yield Row(combination.name, plan.zero, device, memory.predicted_bytes, memory.peak_bytes)


def in_ranges(plan: Plan, layers: tuple[int, ...]) -> Plan:
    """Return a plan of three devices that hold all layers, with three owners of some of these."""
    ends = (0.0, 0.5, 0.8125, 1.0)
    devices = [f"here/{index}" for index in range(3)]
    owners = [devices[0] if layer in layers else owner for layer, owner in enumerate(plan.state_owners or ())]
    ranges = tuple(
        OwnerRange(layer, name, start, stop)
        for layer in layers
        for name, start, stop in zip(devices, ends, ends[1:], strict=False)
    )
    return replace(plan, state_owners=tuple(owners), owner_ranges=ranges) if layers else plan


def _entry(combination: Combination, place: Path) -> ModelEntry:
    """Return the model of a combination, whose folder is written if it is not there."""
    folder = place / combination.model
    if not folder.exists():
        torch.manual_seed(0)
        _built(combination.model).save_pretrained(folder)
    entry = model_entry(str(folder))
    return entry if combination.lora is None else entry.with_adapters(combination.lora)


def _built(model: str) -> transformers.PreTrainedModel:
    """Return a model of six blocks of width 256 and 2,048 tokens, its weights drawn at random."""
    if model == "gpt2":
        gpt2 = transformers.GPT2Config(
            vocab_size=2048, n_positions=256, n_embd=256, n_layer=BLOCKS, n_head=8,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(gpt2)
    llama = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=BLOCKS,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(llama)


def main() -> None:
    """Print a line for each combination, with each device, and the worst error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of measurement for each profile")
    parser.add_argument("--only", nargs="*", type=int, help="numbers of the lines, from 1")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    found: list[Row] = []
    devices = [f"here/{index}" for index in range(3)]
    print(f"| | | zero | {' | '.join(devices)} |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for number, combination in enumerate(COMBINATIONS, 1):
            if options.only and number not in options.only:
                continue
            mine = list(rows(combination, Path(place), options.budget))
            found += mine
            cells = (
                f"{row.predicted_bytes / 1e6:.2f} / {row.measured_bytes / 1e6:.2f} ({row.error:+.1%})"
                for row in mine
            )
            print(f"| {number} | {combination.name} | {combination.zero} | {' | '.join(cells)} |", flush=True)
    worst = max(found, key=lambda row: abs(row.error))
    print(
        f"\n{len(found)} rows; worst {worst.error:+.1%}: {worst.combination}, zero {worst.zero}, "
        f"{worst.device}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
