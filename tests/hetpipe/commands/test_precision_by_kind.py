"""The precision of each kind, from a profile to a plan."""

import dataclasses
import json
from pathlib import Path

import pytest

from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST, FLOAT32, MIXED
from cost_model.profile import profile_text, read_profile
from hetpipe import cli
from small_case import CLUSTER_TOML, small_profile

GPUS = {"RTX-3090": "bfloat16", "T4": "float16", "GTX-1080-Ti": "float32"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = CLUSTER_TOML.replace('"fast"', '"A100"').replace('"slow"', '"V100"')
    (tmp_path / "cluster.toml").write_text(text)
    profile = small_profile()
    for name, kind, of, dtype in (
        ("a100", "A100", "fast", BFLOAT16_AUTOCAST),
        ("v100", "V100", "slow", FLOAT16_AUTOCAST),
    ):
        times = dataclasses.replace(profile.kinds[of], source="measured")
        own = dataclasses.replace(profile, dtype=dtype, kinds={kind: times}, links={}, all_reduces=())
        (tmp_path / f"{name}.json").write_text(profile_text(own))
    return tmp_path


def test_a_kind_is_added_in_its_own_precision_and_planned_for(files, capsys):
    line = "profile --profile a100.json --dtype auto --estimate V100 -o both.json"
    assert cli.main(line.split()) == 0, capsys.readouterr().err
    profile = read_profile(files / "both.json")
    assert profile.dtype == MIXED
    assert profile.dtypes == {"A100": BFLOAT16_AUTOCAST, "V100": FLOAT16_AUTOCAST}
    plan = "plan --profile both.json --cluster cluster.toml --no-proof"
    capsys.readouterr()
    assert cli.main(plan.split()) == 0
    shown = capsys.readouterr().out
    assert "in float16 (estimated)" in " ".join(shown.split())
    assert "computes: V100 in float16, A100 in bfloat16\n" in shown
    for dtype in ("auto", "V100=fp16,A100=bf16"):
        assert cli.main([*plan.split(), "--dtype", dtype]) == 0


def test_profiles_of_hosts_in_different_precisions_are_joined(files, capsys):
    assert cli.main(["profile", "--merge", "a100.json", "v100.json", "-o", "both.json"]) == 0
    profile = read_profile(files / "both.json")
    assert profile.dtypes == {"A100": BFLOAT16_AUTOCAST, "V100": FLOAT16_AUTOCAST}
    parts = [read_profile(files / f"{name}.json") for name in ("a100", "v100")]
    for part in parts:
        for kind, times in part.kinds.items():
            assert profile.kinds[kind].layers == times.layers
    line = "compare --profile both.json --cluster cluster.toml --no-proof --json"
    assert cli.main(line.split()) == 0
    strategies = json.loads(capsys.readouterr().out.partition("\n")[2])["strategies"]
    assert any(entry["fits"] for entry in strategies)


def test_a_kind_in_32_bits_is_added_to_one_in_16_where_its_bytes_are_known(files, capsys):
    plain = dataclasses.replace(small_profile(), kinds={}, links={})
    wide = tuple(
        dataclasses.replace(layer, output_bytes_per_sample=2 * layer.output_bytes_per_sample)
        for layer in plain.layers
    )
    times = dataclasses.replace(small_profile().kinds["fast"], source="measured")
    plain = dataclasses.replace(plain, layers=wide, kinds={"emulated": times})
    (files / "plain.json").write_text(profile_text(plain))
    assert cli.main(["profile", "--merge", "a100.json", "plain.json", "-o", "both.json"]) == 0
    line = "profile --profile both.json --dtype auto --estimate GTX-1080-Ti -o all.json"
    assert cli.main(line.split()) == 0, capsys.readouterr().err
    profile = read_profile(files / "all.json")
    assert profile.dtypes == {"A100": BFLOAT16_AUTOCAST, "emulated": FLOAT32, "GTX-1080-Ti": FLOAT32}
    assert profile.on("GTX-1080-Ti").layers == wide == profile.on("emulated").layers
    assert profile.on("A100").layers == small_profile().layers
    sent = {
        (one, other): profile.message_bytes_per_sample(1, one, other)
        for one in ("A100", "GTX-1080-Ti")
        for other in ("A100", "GTX-1080-Ti")
    }
    assert sent.pop(("GTX-1080-Ti", "GTX-1080-Ti")) == 20.0 and set(sent.values()) == {10.0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --profile a100.json --dtype fp8", "--dtype 'fp8' is not supported"),
        ("plan --profile a100.json --dtype bf16,T4=fp16", "there is no kind 'T4'"),
        ("plan --profile a100.json --dtype fp16", "a profile in bfloat16-autocast, and --dtype is fp16"),
        ("run --model bert-tiny --dtype V100=fp16", "says nothing of kind 'A100'"),
        ("run --model bert-tiny --dtype V100=fp16,A100=float64", "these do not train one model together"),
        (
            "profile --profile a100.json --dtype auto --estimate GTX-1080-Ti",
            "no bytes of layers in float32, only in bfloat16-autocast; profile any device in float32",
        ),
        ("run --model bert-tiny --dtype tf32", "is a V100, which has no units for tf32"),
        ("profile --profile a100.json --dtype fp16 --estimate V100", "and --dtype is fp16; profile again"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(files, capsys, line, message):
    options = [] if line.startswith("profile") else ["--cluster", "cluster.toml"]
    assert cli.main([*line.split(), *options]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


@pytest.mark.slow
def test_cards_that_are_not_here_are_planned_for_each_in_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kinds = (
        f'[[nodes]]\nname = "{kind}"\ndevices = [{{ kind = "{kind}", memory = "16 GiB" }}]\n' for kind in GPUS
    )
    network = '[network]\nbandwidth = "10 Gbit/s"\nlatency = "50 us"\n'
    (tmp_path / "cluster.toml").write_text(network + "".join(kinds))
    line = "plan --model llama-tiny --sequence-length 8 --cluster cluster.toml --no-proof --dtype auto"
    for kind, dtype in GPUS.items():
        assert cli.main([*line.split(), "--pin", f"{kind}/0=0-5"]) == 0, capsys.readouterr().err
        assert f"{kind} in {dtype} (estimated)" in " ".join(capsys.readouterr().out.split())
