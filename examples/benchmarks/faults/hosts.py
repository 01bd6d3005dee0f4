"""Do the hosts that are left go on, when one is killed or its link is cut? See README.md."""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from hetpipe.runs.run_folder import RunFolder
from hetpipe.training.checkpoint import written
from hetpipe.training.checkpoint_damage import damage_of

sys.path.append(str(Path(__file__).parents[3] / "tests" / "support"))

from leftovers import in_shared_memory

from host_runs import ALONE, LINE, Runs, hosts_with_folders
from three_hosts import has_namespaces

KILLED, CUT, SILENT = "host killed", "link cut", "launcher stopped"
LOST = 2
"""The host that is lost: the leader cannot be, and the second keeps copies."""
STEPS_AFTER = 5
SOON_S = 120.0
LOSSES_AGREE = 2e-6
ENDLESS = 1000
"""Steps of the schedule; each part of the run ends by SIGTERM."""
ONE_DEVICE = """
[network]
bandwidth = "1 Gbit/s"
latency = "1 ms"
[[nodes]]
name = "one"
devices = [{ kind = "emulated", memory = "1 GiB" }]
"""


@dataclass(slots=True)
class Seen:
    """What was seen of each kind of fault."""

    noticed_s: dict[str, list[float]] = field(default_factory=dict)
    again_s: dict[str, list[float]] = field(default_factory=dict)
    repeated: dict[str, list[int]] = field(default_factory=dict)

    def add(self, kind: str, noticed_s: float, again_s: float, repeated: int) -> None:
        self.noticed_s.setdefault(kind, []).append(noticed_s)
        self.again_s.setdefault(kind, []).append(again_s)
        self.repeated.setdefault(kind, []).append(repeated)

    def table(self) -> str:
        """Return the rows of the README."""
        rows = [
            "| fault | times | noticed after | trains again after | steps repeated |",
            "|---|---|---|---|---|",
        ]
        for kind, noticed_s in self.noticed_s.items():
            cells = [
                f"{statistics.median(values):.2f} s ({max(values):.2f} at most)"
                for values in (noticed_s, self.again_s[kind])
            ]
            steps = self.repeated[kind]
            cells.append(f"{statistics.median(steps):.0f} ({max(steps)} at most)")
            rows.append(f"| {kind} | {len(noticed_s)} | {' | '.join(cells)} |")
        return "\n".join(rows)


def one_fault(runs: Runs, kind: str, round_: int, seen: Seen) -> None:
    """Start or go on with the run on three hosts, lose one, and end it when the others have gone on."""
    host, folder = runs.hosts[LOST], RunFolder(runs.folders[0] / "run")
    before = len(folder.read_metrics()) if folder.metrics.exists() else 0
    lines = len(folder.recoveries.read_text().splitlines()) if folder.recoveries.exists() else 0
    meet = f"--rendezvous tcp://{runs.hosts[0].address}:{29500 + round_}"
    runs.start(f"{LINE} {meet} --steps {ENDLESS} --every 5 -q --run-folder run --resume auto")
    runs.wait_for_step(folder, before + 4)
    when_s = time.time()
    if kind == CUT:
        host.cut()
    elif kind == KILLED:
        host.kill()
    else:
        runs.started[LOST].send_signal(signal.SIGSTOP)
    end_s = time.monotonic() + SOON_S
    while not folder.recoveries.exists() or len(folder.recoveries.read_text().splitlines()) == lines:
        assert time.monotonic() < end_s, "nothing was noticed"
        time.sleep(0.05)
    row = json.loads(folder.recoveries.read_text().splitlines()[-1])
    seen.add(kind, row["noticed"] - when_s, row["again_s"], row["after_step"] - row["from_step"])
    while len(folder.read_metrics()) < row["after_step"] + STEPS_AFTER:
        assert time.monotonic() < end_s, "the hosts that are left do not go on"
        time.sleep(0.1)
    runs.started[0].send_signal(signal.SIGTERM)
    if kind == CUT:
        runs.started[LOST].wait(SOON_S)  # it has ended by itself: its leader is lost
        host.mend()
    elif kind == SILENT:
        runs.started[LOST].kill()
    ends = [process.wait(SOON_S) for process in runs.started[:LOST]]
    assert ends == [128 + signal.SIGTERM] * LOST, ends
    launchers = [process.pid for process in runs.started]
    for process in runs.started:
        process.communicate()
    runs.started.clear()
    pids = [pid for each in runs.hosts for pid in each.pids()]
    assert not pids, f"left over: {pids}"  # so nobody listens there
    folders = in_shared_memory(launchers[:LOST])
    folders |= {path for each in runs.folders[:LOST] for path in each.glob("hetpipe-*")}
    assert not folders, f"left over: {folders}"


def check(runs: Runs, place: Path) -> float:
    """Train alone, undisturbed, as many steps; return how far losses differ, relative.

    Raises: AssertionError for a step that is missing or twice, another loss, or a damaged checkpoint.
    """
    folder = RunFolder(runs.folders[0] / "run")
    mine = folder.read_metrics()
    (place / "one.toml").write_text(ONE_DEVICE)
    whole = f"{ALONE} --profile {folder.profile} --steps {len(mine)} --total-steps {ENDLESS} --no-save -q"
    command = [sys.executable, "-m", "hetpipe", "run", *whole.split(), "--run-folder", "alone"]
    subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
    alone = RunFolder(place / "alone").read_metrics()
    assert [row["step"] for row in mine] == list(range(1, len(mine) + 1)), "a step is missing, or twice"
    assert [row["samples_seen"] for row in mine] == [row["samples_seen"] for row in alone]
    for each in runs.folders:
        for _, kept in written(each / "run" / "checkpoints"):
            assert damage_of(kept) is None, damage_of(kept)
    worst = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(mine, alone, strict=True))
    assert worst <= LOSSES_AGREE, f"losses differ by {worst:.1e}"
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=20, help="links cut")
    parser.add_argument("--kills", type=int, default=5, help="hosts killed with all that runs there")
    parser.add_argument("--stops", type=int, default=5, help="launchers stopped")
    options = parser.parse_args()
    if not has_namespaces():
        raise SystemExit("hosts of their own cannot be made here; be root where there are `ip` and `tc`")
    begun_s, seen = time.monotonic(), Seen()
    kinds = [CUT] * options.cuts + [KILLED] * options.kills + [SILENT] * options.stops
    random.Random(0).shuffle(kinds)
    with tempfile.TemporaryDirectory(prefix="faults-") as name, hosts_with_folders(Path(name)) as runs:
        for number, kind in enumerate(kinds):
            one_fault(runs, kind, number, seen)
            print(f"{kind}: {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
        steps = len(RunFolder(runs.folders[0] / "run").read_metrics())
        print(seen.table(), flush=True)  # whatever is found to be wrong
        worst = check(runs, Path(name))
    print(
        f"{len(kinds)} faults in {time.monotonic() - begun_s:.0f} s, {steps} steps; losses differ by "
        f"{worst:.1e} at most"
    )


if __name__ == "__main__":
    main()
