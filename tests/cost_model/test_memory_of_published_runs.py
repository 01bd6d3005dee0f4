"""Runs of GPT on up to 3,072 A100s of 80 GiB, of which the plan says that they fit, as they did.

Model sizes, shares of a model in a tensor-parallel group, stages and microbatches: Narayanan et al. (SC
2021), table 1, the rows without interleaving, as `examples/sc21/run_table_1.sh` of Megatron-LM has them; all
of them recompute layer by layer. Bytes that a layer keeps: Korthikanti et al. (MLSys 2023), equation 2.
"""

from dataclasses import dataclass, replace

import pytest

from cost_model.dtypes import FLOAT16_AUTOCAST
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.memory import StageShape, device_memory, leanest_segments
from cost_model.profile import KindProfile, ModelProfile

TOKENS, VOCABULARY = 2048, 51_200
A100_BYTES = 80 * 2**30


@dataclass(frozen=True)
class Run:
    """A row of the table: hidden size, attention heads, layers, group of devices, stages, microbatch."""

    hidden: int
    heads: int
    num_layers: int
    group: int
    stages: int
    microbatch_size: int
    devices: int


RUNS = {
    "1.7B": Run(2304, 24, 24, group=1, stages=1, microbatch_size=16, devices=32),
    "3.6B": Run(3072, 32, 30, group=2, stages=1, microbatch_size=16, devices=64),
    "7.5B": Run(4096, 32, 36, group=4, stages=1, microbatch_size=16, devices=128),
    "18B": Run(6144, 48, 40, group=8, stages=1, microbatch_size=8, devices=256),
    "39B": Run(8192, 64, 48, group=8, stages=2, microbatch_size=4, devices=512),
    "1T": Run(25600, 160, 128, group=8, stages=64, microbatch_size=1, devices=3072),
}


def profile_of(run: Run) -> ModelProfile:
    """The share of one device of a group in each layer: weights and what is split, and the rest whole."""
    entry = TOKENS * run.hidden
    scores = 5 * run.heads * TOKENS / run.hidden
    block = LayerProfile(
        "block",
        parameter_bytes=4 * 12 * run.hidden**2 / run.group,
        lowered_bytes=2 * 12 * run.hidden**2 / run.group,
        output_bytes_per_sample=2 * entry,
        saved_bytes_per_sample=entry * (10 + (24 + scores) / run.group),
    )
    table_bytes = 4 * VOCABULARY * run.hidden / run.group
    embeddings = LayerProfile("embeddings", table_bytes, 2 * entry, saved_bytes_per_sample=entry)
    head = LayerProfile(
        "head",
        table_bytes,
        0.0,
        saved_bytes_per_sample=4 * entry + 6 * TOKENS * VOCABULARY / run.group,
        lowered_bytes=table_bytes / 2,
        tied_to="embeddings",
        tied_bytes=table_bytes,
    )
    blocks = (replace(block, name=f"block{index}") for index in range(run.num_layers))
    layers = (embeddings, *blocks, head)
    times = KindProfile("measured", (1,), tuple(LayerTimes((1.0,), (1.0,)) for _ in layers))
    return ModelProfile("gpt", TOKENS, FLOAT16_AUTOCAST, layers, {"A100": times})


def fullest_bytes(run: Run, *, whole_stages: bool) -> float:
    """Bytes of the fullest device of a run, by 1F1B; recompute of whole stages, or of what is leanest."""
    profile, each = profile_of(run), run.num_layers // run.stages
    needs = []
    for stage in range(run.stages):
        first, last = stage == 0, stage == run.stages - 1
        start, stop = 1 + stage * each - first, 1 + (stage + 1) * each + last
        shape = StageShape(start, stop, run.stages - stage, run.microbatch_size, recompute=True)
        if not whole_stages:
            shape = shape._replace(segment_layers=leanest_segments(profile, shape))
        summed_bytes = sum(profile.layers[layer].parameter_bytes for layer in range(start, stop))
        needs.append(device_memory(profile, [shape], summed_bytes=summed_bytes).total_bytes)
    return max(needs)


@pytest.mark.parametrize("name", RUNS)
def test_runs_that_recomputed_layer_by_layer_fit(name: str):
    assert fullest_bytes(RUNS[name], whole_stages=False) < 0.95 * A100_BYTES


def test_most_would_not_fit_if_they_recomputed_whole_stages():
    needs = {name: fullest_bytes(run, whole_stages=True) for name, run in RUNS.items()}
    assert {name for name, need in needs.items() if need > A100_BYTES} == {"1.7B", "3.6B", "7.5B", "18B"}
