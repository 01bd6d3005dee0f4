"""Is a step with weights on the host as long as predicted, beside one with memory for all? See README.md.

    python examples/benchmarks/offload/measured.py [--rounds 2] [--steps 3] [--profile FILE]

Two emulated devices of one speed, of which the second has little memory and its host's beside it, are trained
on in turn.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InfeasibleError
from cost_model.host_memory import movable_bytes
from cost_model.layer_costs import Prices
from cost_model.profile import ModelProfile, profile_text, read_profile
from hetpipe.commands.measure import measure_rounds
from hetpipe.models.names import ModelEntry, model_entry
from hetpipe.profiling.profile_cache import processor_name, profile_model
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.measured_rounds import MeasuredRounds, losses_apart
from hetpipe.simulation.prediction import evaluator
from partition.plan import Plan
from partition.problem import problem_of
from partition.solver import solve

LORA = LoraSettings(4, 8.0, ("q_proj", "v_proj"))
TIMES = 8
WITHOUT, WITH = "memory for all", "on the host"
NETWORK = 'name = "offload"\n[network]\nbandwidth = "10 Gbit/s"\nlatency = "50 us"\n'


def model_of(blocks: int, place: Path) -> ModelEntry:
    """Return adapters beside a small Llama whose weights are drawn at random, written to a folder."""
    folder = place / f"llama-{blocks}"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1376, num_hidden_layers=blocks,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return model_entry(str(folder)).with_adapters(LORA)


def nodes_of(options: argparse.Namespace) -> dict[str, str]:
    """Return a node of a cluster file for each of the two."""
    device = f'devices = [{{ kind = "emulated", speed = {options.speed}, memory = "%s" }}]\n'
    host = f'host_memory = "4 GiB"\nhost_link = {{ bandwidth = "{options.link}", latency = "10 us" }}\n'
    return {
        WITHOUT: '[[nodes]]\nname = "ample"\n' + device % "8 GiB",
        WITH: '[[nodes]]\nname = "small"\n' + device % f"{options.memory} MiB" + host,
    }


def cluster_of(place: Path, *nodes: str) -> Cluster:
    path = place / "cluster.toml"
    path.write_text(NETWORK + "\n".join(nodes))
    return read_cluster(path)


def planned(profile: ModelProfile, cluster: Cluster, batch: int) -> Plan:
    return solve(problem_of(profile, cluster, batch), evaluator(profile, cluster), proof_s=0.0)


def with_blocks(profile: ModelProfile, blocks: int) -> ModelProfile:
    """Return the profile of fewer of its blocks, which are all alike."""
    kept = [*range(blocks + 1), profile.num_layers - 1]
    kinds = {
        name: replace(kind, layers=tuple(kind.layers[layer] for layer in kept))
        for name, kind in profile.kinds.items()
    }
    return replace(profile, layers=tuple(profile.layers[layer] for layer in kept), kinds=kinds)


def most_blocks(profile: ModelProfile, alone: Cluster, batch: int) -> int:
    """Return how many blocks the small device takes that keeps all itself."""
    for blocks in range(1, profile.num_layers - 1):
        try:
            planned(with_blocks(profile, blocks), alone, batch)
        except InfeasibleError:
            return blocks - 1
    return profile.num_layers - 2


def profile_of(entry: ModelEntry, cluster: Cluster, options: argparse.Namespace) -> ModelProfile:
    """Return what was kept of a profile, or a new one."""
    if options.profile is not None and options.profile.exists():
        return read_profile(options.profile)
    found = profile_model(
        str(entry.place), cluster, options.sequence_length, budget_s=options.profile_budget,
        microbatch_sizes=(1, 2, 4), lora=LORA, use_cache=False,
    )  # fmt: skip
    if options.profile is not None:
        options.profile.write_text(profile_text(found))
    return found


def table(plans: dict[str, Plan], rounds: dict[str, MeasuredRounds]) -> str:
    """Markdown: predicted beside measured seconds of a step, and how often as long as with memory for all."""
    first = plans[WITHOUT].predicted
    lines = [
        "| | plan | predicted s | measured s, median [min, max] of n | error "
        "| times as long: predicted | measured |",
        "|---" * 7 + "|",
    ]
    for name, plan in plans.items():
        assert plan.predicted is not None and first is not None
        (pipeline,), found = plan.pipelines, rounds[name]
        (stage,), seconds = pipeline.stages, found.step_seconds
        words = [f"microbatches of {pipeline.microbatch_size}"]
        words += [
            "recompute" + (f" by {stage.segment_layers}" if stage.segment_layers else "")
        ] * stage.recompute
        words += [f"{', '.join(stage.offload)} on the host"] * bool(stage.offload)
        star = " *" if any(report.host_overloaded for report in found.reports) else ""
        lines.append(
            f"| {name} | {'; '.join(words)} | {plan.predicted.step_s:.3f} | {found.step_s:.3f} "
            f"[{min(seconds):.3f}, {max(seconds):.3f}] of {len(seconds)}{star} | {found.error:+.1%} "
            f"| {plan.predicted.step_s / first.step_s:.2f} | {found.step_s / rounds[WITHOUT].step_s:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--memory", type=float, default=64.0, help="MiB of the small device")
    parser.add_argument("--link", default="400 MB/s", help="between the small device and its host, each way")
    parser.add_argument("--speed", type=float, default=0.3, help="of both devices; 1 is a core of this host")
    parser.add_argument("--batch", type=int, default=4, help="samples a step")
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="each runs both plans once, in turn")
    parser.add_argument("--steps", type=int, default=3, help="of a run; the first is not timed")
    parser.add_argument("--profile-budget", type=float, default=30.0)
    parser.add_argument("--profile", type=Path, help="where the profile is kept for another time")
    parser.add_argument("--predict", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place, nodes = Path(name), nodes_of(options)
        entry = model_of(options.blocks, place)
        profile = profile_of(entry, cluster_of(place, nodes[WITHOUT]), options)
        alone = cluster_of(place, nodes[WITH].split("host_memory")[0])
        fitting = most_blocks(profile, alone, options.batch)
        plans = {
            which: planned(profile, cluster_of(place, node), options.batch) for which, node in nodes.items()
        }
        size = plans[WITH].pipelines[0].microbatch_size
        link = cluster_of(place, nodes[WITH]).nodes[0].host_memory
        assert link is not None
        forward_s = Prices(profile).forward_s(alone.devices[0], 1, 2, size)
        move_s = link.link.transfer_s(movable_bytes(profile, 1))
        print(
            f"{options.memory:g} MiB take {fitting} blocks alone, the model has {options.blocks}, "
            f"{options.blocks / fitting:.3g} times as many; a block's weights come in {move_s * 1e3:.1f} ms, "
            f"its forward takes {forward_s * 1e3:.1f} ms\n"
        )
        if options.predict:
            for which, plan in plans.items():
                assert plan.predicted is not None
                print(f"{which}: {plan.predicted.step_s:.3f} s, {plan.pipelines[0]}")
            return
        cluster_of(place, *nodes.values())
        rounds = measure_rounds(
            plans, profile, place / "cluster.toml", options.steps,
            rounds=options.rounds, quiet=True, model=entry,
        )  # fmt: skip
    print(table(plans, rounds))
    print(f"\nLosses agree to {losses_apart(list(rounds.values())) or 0.0:.1e}; * host overloaded")
    for name, each in rounds.items():
        for device, memory in each.reports[0].devices.items():
            assert memory.peak_bytes is not None
            error = memory.predicted_bytes / memory.peak_bytes - 1
            print(
                f"{name}: {device} {memory.peak_bytes / 1e6:.2f} of {memory.usable_bytes / 1e6:.2f} MB, "
                f"predicted {error:+.1%}"
            )
    print(f"{processor_name()}, torch {torch.__version__}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in rounds.values()], indent=1) + "\n")


if __name__ == "__main__":
    main()
