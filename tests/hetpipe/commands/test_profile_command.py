"""hetpipe profile: merging, calibration and mistakes on the command line; and how accuracy is said."""

import statistics
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from cost_model.profile import profile_text, read_profile
from hetpipe import cli
from hetpipe.commands import profile as profile_verb
from hetpipe.profiling.median_error import standard_error_of_median
from hetpipe.runs.run_report import report_text
from partition.plan_file import plan_text
from reports import report_of
from small_case import CLUSTER_TOML as CLUSTER
from small_case import small_plan, small_profile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    whole = small_profile()
    for kind, entry in whole.kinds.items():
        part = replace(whole, kinds={kind: entry}, links={})
        (tmp_path / f"{kind}.json").write_text(profile_text(part))
        (tmp_path / f"{kind}-short.json").write_text(profile_text(replace(part, sequence_length=4)))
    run = tmp_path / "run"
    run.mkdir()
    plan = small_plan()
    (run / "cluster.toml").write_text(CLUSTER)
    (run / "profile.json").write_text(profile_text(whole))
    (run / "plan.json").write_text(plan_text(plan))
    (run / "report.json").write_text(report_text(report_of(plan, [(10.0, 12.0), (10.0, 10.0)])))
    return tmp_path


def test_profiles_of_several_hosts_are_merged(folder, capsys):
    assert cli.main(["profile", "--merge", "fast.json", "slow.json", "-o", "both.json"]) == 0
    assert read_profile(folder / "both.json") == replace(small_profile(), links={})
    assert "4 layers on fast, slow; wrote both.json" in capsys.readouterr().out


def test_a_run_corrects_its_profile(folder):
    assert cli.main(["profile", "--from-run", "run", "-o", "new.json"]) == 0
    before, after = small_profile(), read_profile(folder / "new.json")
    assert after.kinds["fast"].layers[0].forward_s == pytest.approx((1.2, 2.4))
    assert after.kinds["slow"] == before.kinds["slow"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--merge fast.json slow-short.json", "profiles of sequence_length 8 and 4 cannot be joined"),
        ("--merge fast.json", "--merge is given 1 files"),
        ("--merge fast.json no.json", "no.json: no such file"),
        ("fast.json slow.json", "fast.json: to join profiles, give --merge"),
        ("--merge fast.json slow.json --from-run run", "exclude each other"),
        ("--merge fast.json slow.json --profile fast.json", "--merge and --profile exclude each other"),
        ("fast.json --estimate T4", "to go on from one, --profile fast.json"),
        ("--profile fast.json --model bert-tiny", "--model is for measuring, and --profile measures nothing"),
        ("--from-run run --dtype bf16", "--dtype is for measuring, and --from-run measures nothing"),
        ("--profile fast.json --estimate T4", "no measured kind (fast) is in the catalogue to estimate T4"),
        (
            "--model bert-tiny --cluster run/cluster.toml --dtype bf16 --estimate T4",
            "T4 has no units for bfloat16, and would be estimated at its float32 rate",
        ),
        ("--from-run no-run", "no-run: holds no report.json"),
        ("--model bert-tiny", "Missing option '--cluster'"),
        ("--cluster run/cluster.toml", "Missing option '--model'"),
        ("--model bert-tiny --cluster run/cluster.toml --microbatch-sizes 1,x", "'1,x' is no list of sizes"),
        ("--model bert-tiny --cluster run/cluster.toml --microbatch-sizes 0", "'0' is no list of sizes"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, line, message):
    assert cli.main(["profile", *line.split(), "-o", "new.json"]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""
    assert not (folder / "new.json").exists()


def test_what_does_not_fit_and_how_accurate_it_is_are_said(folder, capsys, monkeypatch):
    profile = small_profile()
    fast = replace(
        profile.kinds["fast"], standard_error=0.014, standard_error_of="block0 forward, microbatch 1"
    )
    given = replace(profile, kinds={"fast": fast})
    monkeypatch.setattr(profile_verb, "profile_model", lambda *_, **__: given)
    line = "profile --model bert-tiny --cluster run/cluster.toml --microbatch-sizes 1,2,4"
    line += " --sequence-length 8 --dtype float32"
    assert cli.main(line.split()) == 0
    out, err = capsys.readouterr()
    said = "standard error of the median: worst 1.4 % (block0 forward, microbatch 1), reached"
    assert said in out.splitlines()
    assert err == "warning: microbatches of 4 do not fit on 'fast' and were left out\n"


@pytest.mark.parametrize("num", [3, 8, 40])
def test_standard_error_is_the_spread_of_medians(num):
    """Against an oracle: medians of many samples of a normal and of a one-sided distribution."""
    random = Random(num)
    for draw in (lambda: random.gauss(10, 1), lambda: 1 + random.expovariate(1)):
        samples = [[draw() for _ in range(num)] for _ in range(2000)]
        spread = statistics.stdev(statistics.median(values) for values in samples)
        estimate = statistics.mean(standard_error_of_median(values) for values in samples)
        assert estimate == pytest.approx(spread, rel=0.35)
