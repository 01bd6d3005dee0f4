"""The roofline: limits by hand, the fit, estimated kinds, and the shipped figures against the benchmark."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from cost_model.catalogue import accelerator
from cost_model.dtypes import BFLOAT16_AUTOCAST
from cost_model.errors import InputError
from cost_model.known_errors import BLOCKS, WHOLE_STEPS, KnownError, distrust, known_error
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile, profile_from_data, profile_text, read_profile
from cost_model.roofline import (
    FITTED,
    Measurement,
    Roofline,
    Work,
    estimate_kind,
    fit,
    launch_bound,
    layer_work,
    nearest_kind,
)
from hetpipe import cli
from hetpipe.commands import profile as profile_verb
from places import load_benchmark

A100, T4, V100 = accelerator("A100"), accelerator("T4"), accelerator("V100")
IDEAL = Roofline(1.0, 1.0, 1e-30, 1e-30, 1e-9, 1e-9, 1.0, 1e-9, 1e-12)
"""All of the peak, all of the bandwidth, no energy, no overhead."""


def profile(kind: str = "A100") -> ModelProfile:
    """Return an embedding that is looked up and a block that multiplies, 1,000 tokens a sample."""
    times = (LayerTimes((1e-4, 2e-4), (1e-4, 2e-4)), LayerTimes((0.2, 0.4), (0.4, 0.8)))
    return ModelProfile(
        model="made-up",
        sequence_length=1000,
        dtype="float32",
        layers=(LayerProfile("embeddings", 4e9, 4e6, 4e6), LayerProfile("block", 4e9, 4e6, 40e6)),
        kinds={kind: KindProfile("measured", (1, 2), times, optimizer_s_per_byte=1e-11)},
    )


def test_much_arithmetic_is_limited_by_the_peak():
    assert IDEAL.seconds(Work(19.5e12, 1.0, 1.0, "float32"), A100) == pytest.approx(1.0)
    assert IDEAL.seconds(Work(312e12, 1.0, 1.0, "float16"), A100) == pytest.approx(1.0)


def test_little_arithmetic_is_limited_by_the_bandwidth():
    assert IDEAL.seconds(Work(1.0, 1555e9, 0.0, "float32"), A100) == pytest.approx(1.0)
    assert IDEAL.seconds(Work(0.0, 0.0, 1555e9, "float32"), A100) == pytest.approx(1.0)


def test_power_limits_a_small_card():
    # 70 J at 35e-12 J a FLOP are 2e12 FLOP/s, below the T4's 8.1e12
    capped = dataclasses.replace(IDEAL, float32_joules=35e-12)
    assert capped.seconds(Work(2e12, 0.0, 0.0, "float32"), T4) == pytest.approx(1.0, rel=1e-2)


def test_half_of_the_efficiency_at_half_flops():
    slow = dataclasses.replace(IDEAL, half_flops=19.5e12)
    assert slow.seconds(Work(19.5e12, 1.0, 0.0, "float32"), A100) == pytest.approx(2.0)


def test_fit_finds_the_roofline_that_made_the_times():
    truth = dataclasses.replace(FITTED, bandwidth_efficiency=0.6, overhead_s=1e-4)
    works = [
        Work(flops * passes, 1e8, 5e7 * passes * scale, dtype, passes == 2)
        for scale, flops in enumerate((1e10, 1e11, 1e12, 1e13), start=1)
        for passes in (1, 2)
        for dtype in ("float32", "float16")
    ]
    devices = [accelerator(kind) for kind in ("A100", "T4", "V100", "P100", "L4", "A6000")]
    found = fit([Measurement(d, work, truth.seconds(work, d)) for d in devices for work in works])
    ratios = [found.seconds(w, d) / truth.seconds(w, d) for d in devices for w in works]
    assert statistics.median(abs(ratio - 1) for ratio in ratios) < 0.05


def test_fit_needs_measurements():
    with pytest.raises(InputError, match="no measurements"):
        fit([])


def test_an_estimate_scales_each_layer_by_what_limits_it():
    estimated = estimate_kind(profile(), "A100", T4, roofline=IDEAL)
    assert estimated.source == "estimated" and estimated.microbatch_sizes == (1, 2)
    embedding, block = estimated.layers
    assert embedding.forward_s[0] == pytest.approx(1e-4 * 1555 / 320, rel=1e-3)  # looked up: by bandwidth
    # per sample 2e12 FLOP (0.1026 and 0.2469 s) and 44e6 bytes (0.028 and 0.138 ms)
    ratio = (2e12 / 8.1e12 + 44e6 / 320e9) / (2e12 / 19.5e12 + 44e6 / 1555e9)
    assert block.forward_s[1] == pytest.approx(0.4 * ratio, rel=1e-6)
    assert estimated.optimizer_s_per_byte == pytest.approx(1e-11 * 1555 / 320)


def test_attention_multiplies_beside_the_weights():
    block = LayerProfile(
        "block", 4e9, 4e6, 40e6, attention_flops_per_sample=1e12, attention_backward_flops_per_sample=2.5e12
    )
    ahead, behind = (layer_work(block, profile(), 3, backward=backward) for backward in (False, True))
    # 1e9 parameters and 1,000 tokens: 2e12 FLOP a sample, twice in the backward
    assert (ahead.flops, behind.flops) == (3 * (2e12 + 1e12), 3 * (4e12 + 2.5e12))
    assert layer_work(block, profile(), 3, backward=True, multiplies=False).flops == 3 * 2.5e12


def test_the_same_kind_is_estimated_as_it_was_measured():
    estimated = estimate_kind(profile(), "A100", A100)
    assert estimated.layers[1].backward_s == pytest.approx((0.4, 0.8))


def test_nothing_is_estimated_from_unknown_or_estimated_kinds():
    with pytest.raises(InputError, match=r"no measured kind \(cpu\) is in the catalogue"):
        nearest_kind(profile("cpu"), T4)
    one = profile()
    two = dataclasses.replace(one, kinds={**one.kinds, "T4": estimate_kind(one, "A100", T4)})
    with pytest.raises(InputError, match="are estimated; estimate from a measured kind"):
        estimate_kind(two, "T4", V100)
    assert nearest_kind(two, T4) == "A100"


def test_a_kind_without_units_for_bfloat16_is_not_priced_silently():
    lowered = dataclasses.replace(profile(), dtype=BFLOAT16_AUTOCAST)
    with pytest.raises(InputError, match=r"^T4 has no units for bfloat16, .*--allow-slow$"):
        estimate_kind(lowered, "A100", T4)
    with pytest.raises(InputError, match=r"^V100 has no units"):
        estimate_kind(dataclasses.replace(profile("V100"), dtype=BFLOAT16_AUTOCAST), "V100", A100)
    block = estimate_kind(lowered, "A100", T4, roofline=IDEAL, allow_slow=True).layers[1]
    traffic = 44e6 / 320e9, 44e6 / 1555e9  # the other rates: float32 on the T4, 16 bit on the A100
    ratio = (2e12 / 8.1e12 + traffic[0]) / (2e12 / 312e12 + traffic[1])
    assert block.forward_s[1] == pytest.approx(0.4 * ratio, rel=1e-6)
    assert distrust("T4", BFLOAT16_AUTOCAST) == "no units for bfloat16, priced at its float32 rate"
    assert distrust("A100", BFLOAT16_AUTOCAST) is None
    assert distrust("made-up", BFLOAT16_AUTOCAST) == "not in the catalogue"


def test_unchecked_and_far_off_kinds_are_not_trusted():
    assert distrust("A100") is None and distrust("GTX 1080 Ti") is None
    assert distrust("K80") == "never checked against a measurement"
    assert distrust("GH200") == "median error 46%, too fast, where it was checked"
    assert distrust("NVIDIA A10") == "median error 24%, too fast, where it was checked"
    assert distrust("made-up") == "not in the catalogue"


def test_the_larger_of_two_known_errors_counts():
    assert known_error("T4") == BLOCKS["T4"] and known_error("RTX 4090") == WHOLE_STEPS["RTX-4090"]
    assert known_error("RTX 2080 Ti") == BLOCKS["RTX-2080-Ti"] == KnownError(0.178, -0.178)
    assert known_error("A6000") == WHOLE_STEPS["A6000"] and known_error("K80") is None
    assert str(KnownError(0.3, -0.3)) == "median error 30%, too slow,"
    assert str(KnownError(0.3, 0.1)) == "median error 30%"


def test_estimates_start_from_a_kind_that_is_not_far_off():
    one = profile("GH200")
    assert nearest_kind(one, accelerator("H100")) == "GH200"
    both = dataclasses.replace(one, kinds={**one.kinds, "T4": one.kinds["GH200"]})
    assert nearest_kind(both, accelerator("H100")) == "T4"


def test_times_that_hardly_grow_are_bound_by_launches():
    flat, steep = LayerTimes((1.0, 1.2), (2.0, 2.3)), LayerTimes((1.0, 3.0), (2.0, 5.0))
    assert launch_bound(KindProfile("measured", (1, 4), (flat, flat))) == "x 1.2 from 1 to 4 samples"
    assert launch_bound(KindProfile("measured", (1, 4), (steep,))) is None
    assert launch_bound(KindProfile("measured", (4, 5), (flat,))) is None
    assert launch_bound(KindProfile("measured", (4,), (LayerTimes((1.0,), (2.0,)),))) is None


def test_shipped_figures_are_those_of_the_benchmark():
    module = load_benchmark("roofline/main.py")
    data = module.points()
    assert {entry.device.name for _, entry in data} == BLOCKS.keys()
    assert set(module.step_kinds()) == WHOLE_STEPS.keys()
    fitted = dataclasses.asdict(fit([entry for _, entry in data]))
    assert fitted == pytest.approx(dataclasses.asdict(FITTED), rel=0.02)
    checks = (
        (module.errors_of, BLOCKS, ("GH200", "RTX-3090")),
        (module.step_errors_of, WHOLE_STEPS, ("GH200", "GTX-1080-Ti")),
    )
    for errors_of, table, kinds in checks:
        for kind in kinds:
            found = dataclasses.astuple(module.known_error(errors_of(kind, data)))
            assert found == pytest.approx(dataclasses.astuple(table[kind]), abs=0.01)


@pytest.fixture
def measured_a100(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile_verb, "measure", lambda *_, **__: (profile(), None))
    cluster = 'name = "c"\n[network]\nbandwidth = "1 GB/s"\nlatency = "0 s"\n[[nodes]]\nname = "n"\n'
    Path("c.toml").write_text(cluster + 'devices = [{ kind = "A100", memory = "40 GiB" }]\n')


@pytest.mark.usefixtures("measured_a100")
def test_the_command_adds_estimated_kinds_and_says_so(capsys):
    line = "profile --model bert-tiny --cluster c.toml --estimate T4 --estimate K80"
    assert cli.main(line.split()) == 0
    out, err = capsys.readouterr()
    said = "estimated, not measured: T4, K80; not to be trusted: K80 (never checked against a measurement)"
    assert "layers on A100, T4, K80" in out and said in out.splitlines() and err == ""
    assert cli.main([*line.split(), "-o", "p.json", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == f"note: {said}\n"
    kinds = profile_from_data(json.loads(out), "stdout").kinds
    assert [kind.source for kind in kinds.values()] == ["measured", "estimated", "estimated"]


@pytest.mark.usefixtures("measured_a100")
def test_the_command_refuses_measured_and_unknown_kinds(capsys):
    for kind, text in (("A100", "was measured; leave out --estimate A100"), ("T44", 'did you mean "T4"?')):
        assert cli.main(["profile", "--model", "bert-tiny", "--cluster", "c.toml", "--estimate", kind]) == 2
        assert text in capsys.readouterr().err


def test_the_command_goes_on_from_one_profile(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("p.json").write_text(profile_text(profile()))
    assert cli.main(["profile", "--profile", "p.json", "--estimate", "T4", "-o", "p.json"]) == 0
    found = read_profile(Path("p.json"))
    assert found.kinds["A100"] == profile().kinds["A100"]
    assert found.kinds["T4"] == estimate_kind(profile(), "A100", T4)
    assert "2 layers on A100, T4; wrote p.json" in capsys.readouterr().out
    again = "profile --profile p.json --estimate T4 --estimate L4 -o q.json"  # an estimate may be made anew
    assert cli.main(again.split()) == 0
    assert list(read_profile(Path("q.json")).kinds) == ["A100", "T4", "L4"]
    assert read_profile(Path("q.json")).kinds["T4"] == found.kinds["T4"]
    assert cli.main(["profile", "--profile", "p.json", "--estimate", "A100"]) == 2
    assert "'A100' was measured" in capsys.readouterr().err


def test_the_command_prices_kinds_without_bfloat16_only_if_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("p.json").write_text(profile_text(dataclasses.replace(profile(), dtype=BFLOAT16_AUTOCAST)))
    line = "profile --profile p.json --estimate T4"
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "T4 has no units for bfloat16" in err
    assert cli.main([*line.split(), "--allow-slow-bf16"]) == 0
    assert (
        "not to be trusted: T4 (no units for bfloat16, priced at its float32 rate)" in capsys.readouterr().out
    )


def test_the_command_says_how_far_off_its_kinds_and_its_source_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    times = LayerTimes((0.2, 0.22), (0.4, 0.44))
    kinds = {"GH200": KindProfile("measured", (1, 4), (times, times))}
    Path("p.json").write_text(profile_text(dataclasses.replace(profile(), kinds=kinds)))
    assert cli.main(["profile", "--profile", "p.json", "--estimate", "A10"]) == 0
    out, err = capsys.readouterr()
    off = "median error 46%, too fast, where it was checked"
    assert f"warning: A10 is estimated from GH200, which is itself far off: {off}" in err
    assert "whose times hardly grow with the microbatch (x 1.1 from 1 to 4 samples)" in err
    said = "not measured: A10; not to be trusted: A10 (median error 24%, too fast, where it was checked)"
    assert said in out
