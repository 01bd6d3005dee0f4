"""What does fine-tuning of large models need, and take, on cards of a desk? By estimates; see README.md."""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InfeasibleError
from hetpipe.models.names import model_entry
from hetpipe.profiling.layer_estimates import estimated_profile
from hetpipe.reporting.memory_tables import memory_uses
from hetpipe.runs.lora import parse_lora
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.simulation.prediction import evaluator
from partition.plan import Plan
from partition.problem import problem_of
from partition.solver import solve

LORA = "r=16,alpha=32,targets=q_proj,v_proj"


def llama(width: int, blocks: int, heads: int, key_heads: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary,
        "hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "intermediate_size": inner, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


MODELS = {
    "Llama-3-70B": llama(8192, 80, 64, 8, 28672, 128256),
    "27B": llama(5376, 62, 42, 21, 21504, 32000),  # the size of Gemma-3-27B, as a Llama
    "Llama-2-13B": llama(5120, 40, 40, 40, 13824, 32000),
    "Llama-2-7B": llama(4096, 32, 32, 32, 11008, 32000),
}


@dataclass(frozen=True)
class Case:
    """A model on the cards of one machine, and what was published of others on the same or like cards."""

    model: str
    load_in: str | None
    cards: tuple[tuple[str, int], ...]  # kind and GiB
    length: int
    batch: int


CASES = (
    Case("Llama-3-70B", "4bit", (("RTX-4090", 24), ("RTX-3090", 24), ("RTX-2080-Ti", 11)), 512, 16),
    Case("Llama-3-70B", "4bit", (("RTX-3090", 24),) * 2, 512, 16),
    Case("Llama-3-70B", "4bit", (("RTX-4090", 24),) * 2, 512, 16),
    Case("Llama-3-70B", "4bit", (("RTX-4090", 24),) * 4, 4096, 16),
    Case("27B", "4bit", (("RTX-4080", 16), ("RTX-3070", 8)), 512, 16),
    Case("Llama-2-13B", "4bit", (("RTX-2080-Ti", 11),) * 2, 512, 16),
    Case("Llama-2-7B", "4bit", (("RTX-3090", 24),) * 2, 512, 16),
)


def cluster_of(case: Case, place: Path) -> Cluster:
    """One machine; PCIe 3 between its cards."""
    cards = ", ".join(f'{{ kind = "{kind}", memory = "{size} GiB" }}' for kind, size in case.cards)
    path = place / "cards.toml"
    path.write_text(
        'driver_memory = "0 B"\n'  # part of the reserve
        '[network]\nbandwidth = "1 Gbit/s"\nlatency = "50 us"\n\n'
        f'[[nodes]]\nname = "desk"\ndevices = [{cards}]\n'
        'interconnect = { bandwidth = "10 GB/s", latency = "20 us" }\n'
    )
    return read_cluster(path)


def row(case: Case, place: Path, dtype: str) -> str:
    """A line of the table."""
    folder = place / case.model
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[case.model]))
    entry = model_entry(str(folder)).with_adapters(parse_lora(LORA), load_in=case.load_in)
    settings = TaskSettings(entry.name, case.length, dtype, Settings(steps=1, **entry.in_settings))
    cluster = cluster_of(case, place)
    kinds = tuple(dict.fromkeys(kind for kind, _ in case.cards))
    profile = estimated_profile(settings, kinds, allow_slow=True)
    cards = " + ".join(f"{kind} {size}" for kind, size in case.cards)
    start = f"| {case.model}, {case.load_in or dtype} | {cards} | {case.length} |"
    try:
        plan = solve(problem_of(profile, cluster, case.batch), evaluator(profile, cluster), proof_s=0.0)
    except InfeasibleError as error:
        lacks = "" if error.missing_bytes is None else f", {error.missing_bytes / 2**30:.1f} GiB are missing"
        return f"{start} no{lacks} | | | |"
    assert plan.predicted is not None
    step_s = plan.predicted.step_s
    uses = memory_uses(plan, profile, cluster)
    memory = ", ".join(
        f"{uses[name].total_bytes / 2**30:.1f} ({uses[name].frozen_bytes / 2**30:.1f} frozen)"
        for name in plan.device_names
    )
    rate = case.batch * case.length / step_s
    return f"{start} yes: {layers(plan)} | {step_s:.1f} | {rate:,.0f} | {memory} |"


def layers(plan: Plan) -> str:
    """The layers of each stage, by pipeline."""
    return " + ".join(
        "/".join(str(stage.num_layers) for stage in pipeline.stages) for pipeline in plan.pipelines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16-autocast", help="as profiles name it")
    options = parser.parse_args()
    print("| model | cards, GiB | tokens a sample | fits: layers | step s | tokens/s | GiB a card |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for case in CASES:
            print(row(case, Path(place), options.dtype), flush=True)


if __name__ == "__main__":
    main()
