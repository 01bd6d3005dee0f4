"""Six short runs on emulated devices: fixed plans, made-up profiles, dropout; losses depend on no clock."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hetpipe

STEPS = 4
BATCH = 12
SEQUENCE_LENGTH = 32
BLOCK_BYTES = 199936.0
ENDS = {
    "bert-tiny": (
        6,
        394240.0,
        {"parameter_bytes": 300552.0, "tied_bytes": 262144.0, "unreached_bytes": 17160.0},
    ),
    "gpt2-tiny": (4, 393216.0, {"parameter_bytes": 262656.0, "tied_bytes": 262144.0}),
}
"""Blocks, bytes of the embeddings, and what the head holds: its matrix is that of the embeddings."""
LAYER_S = 2e-4
SPEEDS = (0.5, 0.4, 0.3, 0.2)
CLUSTER = "\n".join(
    [
        'name = "emulated"',
        '[network]\nbandwidth = "10 Gbit/s"\nlatency = "50 us"',
        '[[nodes]]\nname = "here"\ndevices = [',
        *[f'  {{ kind = "emulated", speed = {speed}, memory = "1 GiB" }},' for speed in SPEEDS],
        "]\n",
    ]
)

Stage = tuple[int, int, int]
"""Device, first layer, in_flight; the stage stops where the next one begins."""


@dataclass(frozen=True, slots=True)
class Training:
    """A run: a model, and pipelines as (microbatch size, samples, stages)."""

    name: str
    model: str
    pipelines: tuple[tuple[int, int, tuple[Stage, ...]], ...]
    zero: int = 0
    recompute: bool = False
    dtype: str = "float32"
    schedule: str | None = None


TRAININGS = (
    Training("uneven pipeline", "bert-tiny", ((2, 12, ((0, 0, 3), (1, 4, 2), (2, 7, 1))),)),
    Training(
        "two pipelines",
        "gpt2-tiny",
        ((2, 7, ((0, 0, 2), (1, 4, 1))), (1, 5, ((2, 0, 3), (3, 3, 2)))),
    ),
    Training(
        "shared devices",
        "bert-tiny",
        ((2, 8, ((0, 0, 2), (1, 5, 1))), (1, 4, ((1, 0, 2), (0, 2, 2), (2, 5, 1)))),
    ),
    Training(
        "ZeRO-1",
        "gpt2-tiny",
        ((2, 6, ((0, 0, 2), (1, 2, 1))), (3, 6, ((2, 0, 1), (3, 4, 1)))),
        zero=1,
    ),
    Training(
        "recompute, GPipe", "bert-tiny", ((3, 12, ((0, 0, 4), (1, 5, 4))),), recompute=True, schedule="gpipe"
    ),
    Training(
        "bf16, interleaved",
        "gpt2-tiny",
        ((2, 12, ((0, 0, 4), (1, 1, 3), (0, 3, 2), (1, 5, 1))),),
        dtype="bfloat16-autocast",
    ),
)


def losses_of(training: Training, folder: Path) -> list[str]:
    """Return the loss of each step, every digit of it."""
    cluster, profile, plan = (folder / name for name in ("cluster.toml", "profile.json", "plan.json"))
    cluster.write_text(CLUSTER, encoding="utf-8")
    profile.write_text(json.dumps(profile_of(training.model, training.dtype)), encoding="utf-8")
    plan.write_text(json.dumps(plan_of(training)), encoding="utf-8")
    settings = hetpipe.Settings(
        model=training.model,
        steps=STEPS,
        global_batch_size=BATCH,
        sequence_length=SEQUENCE_LENGTH,
        learning_rate=1e-3,
        dtype=training.dtype,
        schedule=None if training.schedule is None else hetpipe.Schedule(training.schedule),
    )
    run_folder = hetpipe.RunFolder(folder / "run")
    hetpipe.train(settings, cluster, hetpipe.read_profile(profile), hetpipe.read_plan(plan), run_folder)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [repr(json.loads(line)["loss"]) for line in lines]
    assert len(losses) == STEPS
    return losses


def plan_of(training: Training) -> dict[str, Any]:
    """Return plan.json's data."""
    num_layers = ENDS[training.model][0] + 2
    pipelines = [
        {
            "microbatch_size": size,
            "num_samples": num_samples,
            "stages": _stages(stages, num_layers, recompute=training.recompute),
        }
        for size, num_samples, stages in training.pipelines
    ]
    return {
        "format": "hetpipe.plan/1",
        "strategy": "manual",
        "model": training.model,
        "global_batch_size": BATCH,
        "zero": training.zero,
        "pipelines": pipelines,
    }


def _stages(stages: Sequence[Stage], num_layers: int, *, recompute: bool) -> list[dict[str, Any]]:
    stops = [*[start for _, start, _ in stages[1:]], num_layers]
    return [
        {"devices": [f"here/{device}"], "layers": [start, stop], "in_flight": flight, "recompute": recompute}
        for (device, start, flight), stop in zip(stages, stops, strict=True)
    ]


def profile_of(model: str, dtype: str) -> dict[str, Any]:
    """Return profile.json's data: the model's sizes, and times that nobody measured."""
    num_blocks, embedding_bytes, head = ENDS[model]
    layers: list[dict[str, Any]] = [{"name": "embeddings", "parameter_bytes": embedding_bytes}]
    layers += [{"name": f"block{index}", "parameter_bytes": BLOCK_BYTES} for index in range(num_blocks)]
    layers.append({"name": "head", "tied_to": "embeddings", **head})
    sizes = {"output_bytes_per_sample": 8192.0, "saved_bytes_per_sample": 5e5}
    times = {"forward_s": [LAYER_S, 2 * LAYER_S], "backward_s": [2 * LAYER_S, 4 * LAYER_S]}
    kind = {"source": "measured", "microbatch_sizes": [1, 2], "optimizer_s_per_byte": 1e-10}
    return {
        "format": "hetpipe.profile/1",
        "model": model,
        "sequence_length": SEQUENCE_LENGTH,
        "dtype": dtype,
        "layers": [{**sizes, **layer} for layer in layers],
        "kinds": {"emulated": {**kind, "layers": [times] * len(layers)}},
    }
