"""The readers of files that come from elsewhere, each with a valid tree to mutate."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import save
from cost_model.cluster_file import read_cluster
from cost_model.profile import read_profile
from cost_model.strict_files import canonical_sha256
from hetpipe.runs.lora import ADAPTER_CONFIG_FILE, read_adapter_settings
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import read_settings
from hetpipe.training.checkpoint import MANIFEST_FILE, read_manifest
from mutations import mutations, survive, toml_text, toml_tree
from partition.plan_file import read_plan

GOLDEN = Path(__file__).parents[1] / "golden"
CLUSTER = """
name = "lab"
[network]
bandwidth = "1 Gbit/s"
latency = "50 us"
[[nodes]]
name = "big"
interconnect = { bandwidth = "16 GB/s", latency = "5 us" }
devices = [
  { kind = "V100", memory = "16 GiB", count = 2 },
  { kind = "emulated", speed = 0.5, memory = "2 GiB" },
]
[[nodes]]
name = "old"
devices = [{ kind = "T4", memory = "16 GiB", price_per_hour = 0.5, watts = 70 }]
[[links]]
nodes = ["big", "old"]
bandwidth = "100 Mbit/s"
latency = "1 ms"
"""
ADAPTER = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1,
    "bias": "none",
    "target_modules": ["c_attn", "c_proj"], "init_lora_weights": True,
}  # fmt: skip
SETTINGS = {"format": "hetpipe.config/2", "steps": 10, "seed": 1, "every": 5, "betas": [0.9, 0.99]}
TRACE = {
    "traceEvents": [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "predicted"}},
        {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "big/0"}},
        {"ph": "X", "pid": 0, "tid": 0, "name": "0F0", "ts": 1.0, "dur": 2.0},
        {"ph": "X", "pid": 0, "tid": 0, "name": "STEP", "ts": 3.0, "dur": 2.0},
    ]
}


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of a file, a valid tree of it, and how the file is written."""

    path: Path
    valid: Any
    read: Callable[[], object]
    text_of: Callable[[Any], str] = json.dumps

    def survives(self, seed: int, count: int) -> tuple[int, int]:
        """Check as many mutations; return how many gave a value, and how many an error in one line."""
        values = 0
        for content in mutations(self.valid, seed, count, self.text_of):
            self.path.write_bytes(content)
            values += survive(self.read, content)
        return values, count - values


def _golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def signed(tree: Any) -> str:
    """Return a manifest with the hash that it should have, so that what it says is read."""
    if isinstance(tree, dict):
        tree = {key: value for key, value in tree.items() if key != "sha256"}
        tree["sha256"] = canonical_sha256(tree)
    return json.dumps(tree)


def readers(folder: Path) -> dict[str, Reader]:
    """Return the readers by name; their files go to a folder."""
    cluster, profile, plan = folder / "cluster.toml", folder / "profile.json", folder / "plan.json"
    settings = folder / "config.json"
    kept, adapter, run = save(folder / "checkpoints"), folder / "adapter", RunFolder(folder / "run")
    adapter.mkdir()
    run.path.mkdir()
    manifest = kept / MANIFEST_FILE
    return {
        "cluster": Reader(cluster, toml_tree(CLUSTER), lambda: read_cluster(cluster), toml_text),
        "profile": Reader(profile, _golden("profile.json"), lambda: read_profile(profile)),
        "plan": Reader(plan, _golden("plan.json"), lambda: read_plan(plan)),
        "manifest": Reader(manifest, json.loads(manifest.read_text()), lambda: read_manifest(kept), signed),
        "settings": Reader(settings, SETTINGS, lambda: read_settings(settings)),
        "trace": Reader(run.trace, TRACE, run.read_traces),
        "adapter": Reader(
            adapter / ADAPTER_CONFIG_FILE, ADAPTER, lambda: read_adapter_settings(adapter)
        ),
    }  # fmt: skip
