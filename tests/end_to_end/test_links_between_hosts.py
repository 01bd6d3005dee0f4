"""Links between three hosts are what they were shaped to, and the plan is for what was measured."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.cluster_file import read_cluster
from cost_model.profile import read_profile
from cost_model.units import parse_seconds
from hetpipe.profiling.merging import merge
from hetpipe.simulation.prediction import evaluator
from host_runs import NODES, hosts_with_folders
from partition.problem import problem_of
from partition.solver import solve
from runs import made_up_profile
from three_hosts import has_namespaces

SHAPED_BYTES_PER_S = {("big", "mid"): 1.25e8, ("big", "small"): 1.25e7, ("mid", "small"): 1.25e7}
WITHIN = 0.1
LINE = (
    "--model bert-tiny --cluster cluster.toml --token-file token --trust-network --sequence-length 16 "
    "--profile-budget 1"
)
OUTPUTS = ("-o profile.json --cluster-output measured.toml", "", "")


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="no network namespaces can be made here")
@pytest.mark.alone
def test_measured_bandwidths_are_the_shaped_ones_and_change_the_plan(tmp_path: Path):
    with hosts_with_folders(tmp_path, fresh=True) as runs:
        runs.start(
            f"{LINE} --rendezvous tcp://{runs.hosts[0].address}:29501", options=OUTPUTS, command="profile"
        )
        ended = runs.ends(0, 0, 0)
        profile = read_profile(runs.folders[0] / "profile.json")
        cluster = read_cluster(runs.folders[0] / "measured.toml")
    assert set(profile.kinds) == {"emulated", "emulated-slow"}
    for name, member in zip(NODES[1:], ended[1:], strict=True):
        assert f"note: {name}: measuring is over" in member.err
    found = {link.nodes: link.link for link in cluster.links}
    assert {nodes: link.bandwidth_bytes_per_s for nodes, link in found.items()} == pytest.approx(
        SHAPED_BYTES_PER_S, rel=WITHIN
    )
    told = re.search(r"note: measured big to small: \d+(\.\d)? Mbit/s, latency (\S+ [mu]?s)\n", ended[0].err)
    assert told is not None  # three digits of it, of which the file has four: 87.85 us may be 87.8 or 87.9
    assert parse_seconds(told[2]) == pytest.approx(found["big", "small"].latency_s, rel=6e-3)
    over = re.search(r"measured a sum of [\d.]+ [KM]iB over big, mid, small: .* ([-+][\d.]+)%", ended[0].err)
    assert over is not None
    assert -30 < float(over[1]) < 100  # a busy machine sums late

    # by layers whose times are made up: at those of this host both plans may be the same
    kinds = ("emulated", "emulated-slow")
    profile = merge([made_up_profile("bert-tiny", kind, 0.001) for kind in kinds])
    all_fast = tuple(replace(link, link=found["big", "mid"]) for link in cluster.links)
    plans = [
        solve(problem_of(profile, each, 16), evaluator(profile, each), proof_s=0.0)
        for each in (cluster, replace(cluster, links=all_fast))
    ]
    assert plans[0].pipelines != plans[1].pipelines
