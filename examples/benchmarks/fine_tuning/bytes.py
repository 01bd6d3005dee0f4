"""Is the memory of fine-tuning predicted? Full training, LoRA and QLoRA, rank by rank. See bytes.md.

Emulated devices count the bytes of every live tensor; the prediction comes from a profile of a few layers.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from cost_model.cluster_file import read_cluster
from cost_model.profile import ModelProfile
from hetpipe.models.names import ModelEntry, model_entry
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.settings import Settings
from hetpipe.training.run import measure
from partition.plan import Pipeline, Plan, Stage

BATCH, SEQUENCE_LENGTH, BLOCKS = 8, 64, 6
LORA = LoraSettings(8, 16.0, ("q_proj", "v_proj", "down_proj"))
CLUSTER = """
name = "emulated"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [{ kind = "emulated", count = 3, speed = 0.5, memory = "2 GiB" }]
"""


@dataclass(frozen=True)
class Mode:
    """What is trained, and how everything is held: dtype of the folder's weights, --load-in, --dtype."""

    name: str
    folder: str = "float32"
    lora: LoraSettings | None = LORA
    load_in: str | None = None
    dtype: str = "float32"


BF16 = "bfloat16-autocast"
MODES = (
    Mode("full, float32", lora=None),
    Mode("full, bf16", lora=None, dtype=BF16),
    Mode("LoRA, float32"),
    Mode("LoRA, base in bfloat16", folder="bfloat16"),
    Mode("LoRA, bf16", folder="bfloat16", dtype=BF16),
    Mode("QLoRA, 8 bit", load_in="8bit"),
    Mode("QLoRA, 8 bit, bf16", folder="bfloat16", load_in="8bit", dtype=BF16),
    Mode("QLoRA, 4 bit", load_in="4bit"),
    Mode("QLoRA, 4 bit, bf16", folder="bfloat16", load_in="4bit", dtype=BF16),
    Mode("LoRA of the head alone", lora=LoraSettings(8, 16.0, ("lm_head",))),  # stages without a backward
)
END = BLOCKS + 2
PIPELINES = {
    "three unequal stages": (
        Pipeline(
            2,
            BATCH,
            (
                Stage(("here/0",), (0, 4), 3),
                Stage(("here/1",), (4, 6), 2),
                Stage(("here/2",), (6, END), 1),
            ),
        ),
    ),
    "two pipelines, one recomputes": (
        Pipeline(1, 3, (Stage(("here/0",), (0, END), 1),)),
        Pipeline(
            1,
            5,
            (
                Stage(("here/1",), (0, 5), 2, recompute=True, segment_layers=1),
                Stage(("here/2",), (5, END), 1),
            ),
        ),
    ),
}


@dataclass(frozen=True)
class Row:
    """A device's bytes at its peak in one step."""

    mode: str
    plan: str
    device: str
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """Return predicted over measured, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def rows(mode: Mode, place: Path, budget_s: float) -> Iterator[Row]:
    """Profile a mode, run one step of each plan, and compare the bytes of each device."""
    cluster_file = place / "cluster.toml"
    cluster_file.write_text(CLUSTER)
    entry = _entry(mode, place)
    profile = profile_model(
        str(entry.place), read_cluster(cluster_file), SEQUENCE_LENGTH,
        dtype=mode.dtype, budget_s=budget_s, microbatch_sizes=(1, 2), use_cache=False,
        lora=mode.lora, load_in=mode.load_in,
    )  # fmt: skip
    for name, pipelines in PIPELINES.items():
        yield from _rows_of(
            mode, name, Plan("manual", entry.name, BATCH, pipelines), entry, profile, cluster_file
        )


def _entry(mode: Mode, place: Path) -> ModelEntry:
    """Return the model of a mode, whose folder is written if it is not there."""
    folder = place / f"base-{mode.folder}"
    if not folder.exists():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=BLOCKS,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).to(getattr(torch, mode.folder))
        model.save_pretrained(folder)
    entry = model_entry(str(folder))
    return entry if mode.lora is None else entry.with_adapters(mode.lora, load_in=mode.load_in)


def _rows_of(
    mode: Mode, name: str, plan: Plan, entry: ModelEntry, profile: ModelProfile, cluster_file: Path
) -> Iterator[Row]:
    settings = Settings.of(plan, profile, steps=1, save=False, **entry.in_settings)
    report = measure(settings, cluster_file, profile, plan)
    for device, memory in report.devices.items():
        assert memory.peak_bytes is not None
        yield Row(mode.name, name, device, memory.predicted_bytes, memory.peak_bytes)


def main() -> None:
    """Print a row for each device of each plan of each mode, and the worst error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of measurement for each profile")
    parser.add_argument("--modes", nargs="*", default=[mode.name for mode in MODES])
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    found: list[Row] = []
    print("| | plan | device | predicted | measured | error |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for mode in MODES:
            if mode.name not in options.modes:
                continue
            for row in rows(mode, Path(place), options.budget):
                found.append(row)
                print(
                    f"| {row.mode} | {row.plan} | {row.device} | {row.predicted_bytes / 1e6:.3f} MB | "
                    f"{row.measured_bytes / 1e6:.3f} MB | {row.error:+.1%} |",
                    flush=True,
                )
    worst = max(found, key=lambda row: abs(row.error))
    print(f"\n{len(found)} rows; worst {worst.error:+.1%}: {worst.mode}, {worst.plan}, {worst.device}")
    if options.json is not None:
        options.json.write_text(json.dumps([row.__dict__ for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
