"""The largest microbatch that `hetpipe profile` shows for a stage of ZeRO is the largest that really fits."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from cost_model.cluster_file import read_cluster
from cost_model.profile import read_profile
from partition.plan import Pipeline, Plan, Stage
from partition.plan_file import plan_text
from shell import Shell

CLUSTER = """
reserve = "0 B"
network = { bandwidth = "10 Gbit/s", latency = "50 us" }
[[nodes]]
name = "a"
devices = [{ kind = "emulated-large", memory = "14.2 MB" }, { kind = "emulated-small", memory = "9.8 MB" }]
"""


@pytest.fixture
def profiled(hetpipe: Shell) -> list[dict[str, str]]:
    """Rows of the table that is shown, by kind and stage; profile.json is written."""
    hetpipe.write("cluster.toml", CLUSTER)
    hetpipe.write("ample.toml", re.sub(r"[0-9.]+ MB", "1 GiB", CLUSTER))
    line = "profile --model bert-tiny --cluster cluster.toml --sequence-length 16 --show -o profile.json"
    told = hetpipe(f"{line} --microbatch-sizes 1,2,4,8,16 --profile-budget 0.5")
    assert told.code == 0, told.err
    rows = [text.split() for text in told.out.splitlines() if text.startswith((" emulated", "emulated-"))]
    return [
        {"kind": row[0], **{str(zero): row[3 + zero] for zero in range(4)}} for row in rows if len(row) == 7
    ]


@pytest.mark.slow
def test_one_sample_more_than_the_largest_microbatch_exceeds_the_memory(
    hetpipe: Shell, profiled, tmp_path: Path
):
    """Of ZeRO's stages 0 and 2."""
    profile, cluster = read_profile(tmp_path / "profile.json"), read_cluster(tmp_path / "cluster.toml")

    def peaks(sizes: Mapping[str, int], zero: int) -> dict[str, float]:
        """Bytes counted in a step with room for all; a/1 owns what is sharded."""
        pipelines = tuple(
            Pipeline(size, 2 * size, (Stage((name,), (0, profile.num_layers), 1),))
            for name, size in sizes.items()
        )
        owners = ("a/1",) * profile.num_layers if zero else None
        plan = Plan("largest", profile.model, 2 * sum(sizes.values()), pipelines, zero, owners)
        hetpipe.write("plan.json", plan_text(plan))
        folder = tmp_path / f"{sum(sizes.values())} zero {zero}"
        line = "run --model bert-tiny --plan plan.json --profile profile.json --cluster ample.toml --steps 1"
        told = hetpipe(f"{line} --run-folder '{folder}'")
        assert told.code == 0, told.err
        report = json.loads((folder / "report.json").read_text())
        return {name: entry["peak_bytes"] for name, entry in report["devices"].items()}

    for zero in (0, 2):
        by_kind = {row["kind"]: int(row[str(zero)].rstrip("+")) for row in profiled}
        largest = {device.name: by_kind[device.kind] for device in cluster.devices}
        assert largest["a/0"] > largest["a/1"] > 0
        fits = peaks(largest, zero)
        exceeds = peaks({name: size + 1 for name, size in largest.items()}, zero)
        for device in cluster.devices if zero == 0 else cluster.devices[:1]:
            assert fits[device.name] <= device.usable_bytes < exceeds[device.name], zero
