"""How much longer is a step on a card whose host keeps the frozen weights? By estimates; see README.md."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InfeasibleError
from cost_model.profile import ModelProfile
from hetpipe.models.names import model_entry
from hetpipe.profiling.layer_estimates import estimated_profile
from hetpipe.runs.lora import parse_lora
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.simulation.prediction import evaluator
from partition.plan import Plan
from partition.problem import problem_of
from partition.solver import solve

LORA = "r=16,alpha=32,targets=q_proj,v_proj"
KIND = "RTX-4090"
GIB = 2**30


def llama(blocks: int) -> dict[str, Any]:
    """A Llama with blocks of Llama-3-70B's size and a vocabulary of 32,000."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000,
        "hidden_size": 8192, "num_hidden_layers": blocks, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def profile_of(blocks: int, place: Path, length: int) -> ModelProfile:
    folder = place / f"llama-{blocks}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama(blocks)))
    entry = model_entry(str(folder)).with_adapters(parse_lora(LORA))
    run = Settings(steps=1, **entry.in_settings)
    settings = TaskSettings(entry.name, length, "bfloat16-autocast", run)
    return estimated_profile(settings, (KIND,), allow_slow=True)


def cluster_of(place: Path, memory_gib: float, link: str | None) -> Cluster:
    """One card; link: bytes each way between it and 512 GiB of its host, None for none."""
    lent = f'host_memory = "512 GiB"\nhost_link = {{ bandwidth = "{link}", latency = "10 us" }}\n'
    path = place / "card.toml"
    path.write_text(
        'driver_memory = "0 B"\n[network]\nbandwidth = "1 Gbit/s"\nlatency = "50 us"\n\n[[nodes]]\n'
        f'name = "desk"\ndevices = [{{ kind = "{KIND}", memory = "{memory_gib} GiB" }}]\n'
        + (lent if link else "")
    )
    return read_cluster(path)


def planned(profile: ModelProfile, cluster: Cluster, batch: int) -> Plan | None:
    try:
        return solve(problem_of(profile, cluster, batch), evaluator(profile, cluster), proof_s=0.0)
    except InfeasibleError:
        return None


def most_blocks(place: Path, memory_gib: float, batch: int, length: int) -> int:
    """Return how many blocks the card takes that keeps all itself."""
    card = cluster_of(place, memory_gib, None)

    def fits(blocks: int) -> bool:
        return planned(profile_of(blocks, place, length), card, batch) is not None

    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", type=float, default=24.0, help="GiB of the card")
    parser.add_argument("--batch", type=int, default=64, help="samples a step")
    parser.add_argument("--sequence-length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--times", type=int, nargs="+", default=[8], help="as many blocks as fit alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        fitting = most_blocks(place, options.memory, options.batch, options.sequence_length)
        print(f"{options.memory:g} GiB take {fitting} blocks\n")
        print("| blocks | times as many | link | step s | with memory s | ratio | microbatch | offload |")
        print("|---|---|---|---|---|---|---|---|")
        for times in options.times:
            profile = profile_of(times * fitting, place, options.sequence_length)
            ample = planned(profile, cluster_of(place, 4096, None), options.batch)
            for link in ("12 GB/s", "25 GB/s", "50 GB/s"):
                plan = planned(profile, cluster_of(place, options.memory, link), options.batch)
                start = f"| {times * fitting} | {times} | {link} |"
                if plan is None or ample is None:
                    print(f"{start} does not fit | | | | |")
                    continue
                assert plan.predicted is not None and ample.predicted is not None
                step_s, other_s = plan.predicted.step_s, ample.predicted.step_s
                pipeline = plan.pipelines[0]
                words = ", ".join(pipeline.stages[0].offload)
                print(
                    f"{start} {step_s:.1f} | {other_s:.1f} | {step_s / other_s:.2f} "
                    f"| {pipeline.microbatch_size} | {words} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
