"""What do the rules of published systems gain on clusters like theirs, by our simulator? See README.md."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parents[2]
sys.path += [str(EXAMPLES / "benchmarks" / "planner"), str(EXAMPLES / "clusters")]

from estimated_profile import PASSES, SHARE, published, with_kinds  # noqa: E402
from measured_cases import measured_profile  # noqa: E402
from poplar_stages import stage_rows  # noqa: E402

from cost_model.catalogue import accelerator  # noqa: E402
from cost_model.cluster import Cluster  # noqa: E402
from cost_model.cluster_file import read_cluster  # noqa: E402
from cost_model.errors import InfeasibleError  # noqa: E402
from cost_model.layer_profile import LayerTimes  # noqa: E402
from cost_model.profile import KindProfile, ModelProfile  # noqa: E402
from hetpipe.simulation.prediction import evaluator  # noqa: E402
from partition.auto import STRATEGIES  # noqa: E402
from partition.baselines.strategy import TooManyDevicesError  # noqa: E402
from partition.estimates.pipeline_costs import PipelineCosts  # noqa: E402
from partition.explanation.gains import with_ample_memory  # noqa: E402
from partition.plan import Pipeline, Plan, Stage  # noqa: E402
from partition.problem import Problem, problem_of  # noqa: E402

SHOWN = ("ddp", "poplar-0", "whale-dp", "hap", "heterog", "hetpipe-ed", "zorse", "auto")
MEASURED = {
    "A100-SXM4-80GB": "A100-80",
    "A800-SXM4-80GB": "A100-80",
    "A100-SXM4-40GB": "A100-40",
    "V100-SXM2-16GB": "V100-16",
    "V100S-PCIE-32GB": "V100-16",
    "V100-PCIE-16GB": "V100-16",
    "V100-PCIE-32GB": "V100-16",
    "RTX-2080-Ti": "RTX-2080",
}
"""The kind whose layers of OPT-350M were measured in the place of a kind of the catalogue."""
OF_BERT = {"V100-PCIE-16GB": "V100-SXM2-32GB", "T4": "T4", "P100-PCIE-12GB": "P100-PCIE"}
"""The same of the blocks of BERT-large."""
LINES = json.loads((Path(__file__).parent / "measured_lines.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Case:
    """A cluster shaped after a published one, with a model, the samples of a step, and what was claimed."""

    cluster: str
    model: str
    batch: int
    claim: str


CASES = (
    Case("poplar-a", "OPT-350M", 1024, "Poplar: 1.02 to 3.92 over all three clusters"),
    Case("poplar-b", "OPT-350M", 1024, "Poplar: as above"),
    Case("poplar-b", "bert_large", 1024, "Poplar: as above"),
    Case("poplar-c", "OPT-350M", 1024, "Poplar: as above"),
    Case("heterog", "bert_large", 128, "HeteroG: up to 3.22 (222 % faster) over data parallelism"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", nargs="+", default=[case.cluster for case in CASES])
    options = parser.parse_args()
    for case in CASES:
        if case.cluster in options.clusters:
            print(table(case), flush=True)
    print(cephalo_plan())


def profile_for(cluster: Cluster, model: str) -> ModelProfile:
    """The layers of a model on the kinds of a cluster; what was not measured is estimated, and marked so."""
    kinds = {device.kind for device in cluster.devices}
    if model == "OPT-350M":
        found, stands = measured_profile(model, sorted(set(MEASURED.values()))), MEASURED
        kept = kinds | {"RTX-2080-Ti"}  # of which others are estimated
        renamed = {name: found.kinds[stands[name]] for name in stands if name in kept}
        return with_kinds(dataclasses.replace(found, kinds=renamed), kinds)
    found = published(model)
    known = dict(found.kinds)
    if model in LINES:
        known |= {kind: _kind_of_lines(found, kind, lines) for kind, lines in LINES[model].items()}
        known |= {name: known[stand] for name, stand in OF_BERT.items() if name in kinds}
    return with_kinds(dataclasses.replace(found, kinds=known), kinds)


def _kind_of_lines(profile: ModelProfile, kind: str, lines: Mapping[str, list[float]]) -> KindProfile:
    """Return the times of blocks by the lines of a kind, at the sizes of the others."""
    sizes = next(iter(profile.kinds.values())).microbatch_sizes
    forward, backward = (
        tuple((lines[which][0] * size + lines[which][1]) / 1e3 for size in sizes)
        for which in ("forward", "backward")
    )
    bandwidth = accelerator(kind).memory_bandwidth_bytes_per_s
    times = (LayerTimes(forward, backward),) * profile.num_layers
    return KindProfile("measured", sizes, times, optimizer_s_per_byte=PASSES / (SHARE * bandwidth))


def table(case: Case) -> str:
    """Markdown: step and gain over `ddp`, as it is and with ample memory, beside the bound of shares."""
    cluster = read_cluster(case.cluster)
    profile = profile_for(cluster, case.model)
    problem = problem_of(profile, cluster, case.batch)
    steps, ample = steps_of(problem), steps_of(with_ample_memory(problem))
    lines = [
        f"### {case.cluster}: {case.model}, {case.batch} samples; {case.claim}\n",
        f"{kinds_text(profile, cluster, case.model)}. {bound_text(problem)}\n",
        "| strategy | predicted step s | gain over ddp | by computation | by memory |",
        "|---|---|---|---|---|",
    ]
    for name in SHOWN:
        if name not in steps:
            lines.append(f"| {name} | does not fit | | {gain(ample, name)} | |")
            continue
        by_memory = ""
        if "ddp" in steps and name in ample:
            by_memory = f"{steps['ddp'] / steps[name] / (ample['ddp'] / ample[name]):.2f}"
        lines.append(
            f"| {name} | {steps[name]:.3f} | {gain(steps, name)} | {gain(ample, name)} | {by_memory} |"
        )
    if case.cluster.startswith("poplar"):
        lines += [
            "\n| ZeRO | equal shares, s | Poplar, s | gain | by computation | by memory |",
            "|---|---|---|---|---|---|",
            *stage_rows(problem),
        ]
    return "\n".join(lines) + "\n"


def steps_of(problem: Problem) -> Mapping[str, float]:
    """The predicted step of each strategy that has a plan."""
    evaluate, found = evaluator(problem.profile, problem.cluster), {}
    for name in SHOWN:
        try:
            found[name] = evaluate(STRATEGIES[name](problem, evaluate)).step_s
        except (InfeasibleError, TooManyDevicesError):
            continue
    return found


def gain(steps: Mapping[str, float], name: str) -> str:
    return f"{steps['ddp'] / steps[name]:.2f}" if {"ddp", name} <= steps.keys() else ""


def bound_text(problem: Problem) -> str:
    """Say what shares by speed gain at most: the mean speed over the least, each at its best microbatch."""
    costs, layers = PipelineCosts(problem), problem.profile.num_layers
    speeds = [
        max(size / costs.busy_s(device, 0, layers, size) for size in problem.microbatch_sizes)
        for device in problem.cluster.devices
    ]
    bound, ratio = sum(speeds) / len(speeds) / min(speeds), max(speeds) / min(speeds)
    text = f"Shares by speed can gain at most {bound:.2f}"
    if 2 * sum(speed > min(speeds) * 1.001 for speed in speeds) == len(speeds):
        return f"{text}: (r + 1) / 2 for r = {ratio:.2f}."
    return f"{text}; the fastest kind is {ratio:.2f} times as fast as the slowest."


def kinds_text(profile: ModelProfile, cluster: Cluster, model: str) -> str:
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    counts = {kind: sum(device.kind == kind for device in cluster.devices) for kind in kinds}
    stands = MEASURED if model == "OPT-350M" else OF_BERT
    return ", ".join(
        f"{counts[kind]} {kind} ({profile.kind(kind).source}"
        + (f", layers of {stands[kind]})" if stands.get(kind, kind) != kind else ")")
        for kind in kinds
    )


def cephalo_plan() -> str:
    """The plan that Cephalo's repository shows for GPT-2.7B on L4, L4, A6000 and P40, beside ours.

    Its shares of 64 samples are 13, 12, 34 and 5 in 1, 2, 1 and 1 microbatches, states apart. Whole weights
    on each device do not fit here, so that both are planned with ample memory.
    """
    cluster = read_cluster("cephalo")
    wanted = ("L4", "L4", "A6000", "P40")
    left, names = list(cluster.devices), []
    for kind in wanted:
        device = next(each for each in left if each.kind.startswith(kind))
        left.remove(device)
        names.append(device.name)
    nodes = tuple(
        dataclasses.replace(node, devices=tuple(each for each in node.devices if each.name in names))
        for node in cluster.nodes
    )
    cluster = dataclasses.replace(cluster, nodes=tuple(node for node in nodes if node.devices))
    profile = with_kinds(published("gpt_2.7b"), {device.kind for device in cluster.devices})
    problem = with_ample_memory(problem_of(profile, cluster, 64))
    shares = zip(names, (13, 12, 34, 5), (1, 2, 1, 1), strict=True)
    pipelines = tuple(
        Pipeline(-(-samples // count), samples, (Stage((name,), (0, profile.num_layers), 1),))
        for name, samples, count in shares
    )
    theirs = problem.plan("published", pipelines)
    evaluate = evaluator(problem.profile, problem.cluster)
    plans: dict[str, Plan] = {"published plan": theirs}
    plans |= {name: STRATEGIES[name](problem, evaluate) for name in ("ddp", "cephalo", "poplar-0", "auto")}
    lines = [
        "### cephalo: GPT-2.7B on 2 L4, A6000, P40, 64 samples, with ample memory\n",
        "| plan | shares | predicted step s |",
        "|---|---|---|",
    ]
    for name, plan in plans.items():
        text = ", ".join(
            f"{entry.num_samples} on {'+'.join(stage.device for stage in entry.stages)}"
            for entry in plan.pipelines
        )
        lines.append(f"| {name} | {text} | {evaluate(plan).step_s:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
