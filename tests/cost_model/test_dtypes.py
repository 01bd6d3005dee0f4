"""Precisions by kind: what --dtype means, what a kind has fastest, and what is refused."""

import dataclasses
import re

import pytest

from cost_model.catalogue import ACCELERATORS, accelerator
from cost_model.cluster import Device
from cost_model.dtypes import (
    BFLOAT16_AUTOCAST,
    FLOAT16_AUTOCAST,
    FLOAT32,
    MIXED,
    TF32,
    check_fast,
    common_dtype,
    dtypes_of,
    fastest,
    scales_loss,
)
from cost_model.errors import InputError
from cost_model.profile import ModelProfile, profile_from_data
from cost_model.roofline import FITTED, estimate_kind, layer_work, nearest_kind
from small_case import small_profile

FASTEST = {
    BFLOAT16_AUTOCAST: ("A100", "RTX 3090", "RTX-4090", "H100", "L4", "emulated-A100", "A10G"),
    FLOAT16_AUTOCAST: (
        "V100",
        "T4",
        "RTX 2080 Ti",
        "Titan RTX",
        "P100",
        "Tesla P100-SXM2-16GB",
        "emulated-T4",
    ),
    FLOAT32: ("GTX 1080 Ti", "P40", "K80", "cpu", "emulated"),
}


@pytest.mark.parametrize(
    ("dtype", "kind"), [(dtype, kind) for dtype, kinds in FASTEST.items() for kind in kinds]
)
def test_auto_gives_each_kind_the_fastest_that_it_has(dtype, kind):
    assert fastest(kind) == dtype
    assert dtypes_of("auto", [kind]) == {kind: dtype}


def test_the_fastest_is_never_slower_by_the_catalogue():
    names = {BFLOAT16_AUTOCAST: "bfloat16", FLOAT16_AUTOCAST: "float16", FLOAT32: "float32"}
    for card in ACCELERATORS:
        rate = card.peak(names[fastest(card.name)])[0]
        assert rate >= max(card.peak_flops.values())


def test_a_kind_may_have_its_own():
    kinds = ("A100", "V100", "T4")
    assert dtypes_of(None, kinds) == dict.fromkeys(kinds, FLOAT32)
    assert dtypes_of("tf32", kinds) == dict.fromkeys(kinds, TF32)
    found = dtypes_of("fp16,A100=bf16", kinds)
    assert found == {"A100": BFLOAT16_AUTOCAST, "V100": FLOAT16_AUTOCAST, "T4": FLOAT16_AUTOCAST}
    assert dtypes_of("V100 = fp16, auto, T4=fp16", kinds) == found
    assert common_dtype(found) == MIXED and scales_loss(found.values())
    assert common_dtype(dtypes_of("bf16", kinds)) == BFLOAT16_AUTOCAST
    assert not scales_loss([BFLOAT16_AUTOCAST, FLOAT32])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fp8",
            "--dtype 'fp8' is not supported; give auto, float32, tf32, bf16, fp16, float64, or one for each",
        ),
        ("", "--dtype '' is not supported"),
        ("A100=fp8,V100=fp16", "--dtype 'fp8' is not supported"),
        ("bf16,V10=fp16", "--dtype 'bf16,V10=fp16': there is no kind 'V10'; did you mean \"V100\"?"),
        ("V100=fp16", "--dtype 'V100=fp16' says nothing of kind 'A100'; add A100=..., or one for all"),
        ("fp16,bf16", "--dtype 'fp16,bf16' gives two for all kinds"),
    ],
)
def test_what_is_no_precision_is_refused_in_one_line(text, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        dtypes_of(text, ["A100", "V100"])
    assert "\n" not in str(caught.value)


def test_a_kind_that_the_catalogue_does_not_know_has_no_fastest():
    with pytest.raises(
        InputError, match=r"--dtype auto: the catalogue has no accelerator 'RTX-9090'.*RTX-9090=bf16"
    ):
        dtypes_of("auto", ["RTX-9090"])
    assert dtypes_of("auto,RTX-9090=bf16", ["RTX-9090"]) == {"RTX-9090": BFLOAT16_AUTOCAST}


@pytest.mark.parametrize("other", [BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST, FLOAT32, TF32])
def test_all_train_beside_others_but_float64(other):
    with pytest.raises(InputError, match=r"float64 on A100, .* on P40: these do not train one model"):
        common_dtype({"A100": "float64", "P40": other})
    assert common_dtype({"A100": BFLOAT16_AUTOCAST, "V100": FLOAT16_AUTOCAST, "P40": other}) == MIXED
    assert common_dtype({"A100": other, "P40": other}) == other


def test_devices_without_units_are_refused_whatever_the_precision():
    def refused(kind: str, dtype: str) -> bool:
        try:
            check_fast({kind: dtype}, [Device("n/0", "n", kind, 1e9)])
        except InputError as error:
            assert (
                "--dtype auto" in str(error)
                and "--exclude n/0" in str(error)
                and "--allow-slow" in str(error)
            )
            return True
        return False

    assert (
        refused("GTX 1080 Ti", FLOAT16_AUTOCAST)
        and refused("V100", TF32)
        and refused("T4", BFLOAT16_AUTOCAST)
    )
    assert not any(refused(kind, FLOAT16_AUTOCAST) for kind in ("V100", "P100", "A100", "cpu"))
    assert not refused("A100", TF32)


def on(profile: ModelProfile, kind: str, dtype: str) -> ModelProfile:
    times = dataclasses.replace(profile.kinds["fast"], source="measured")
    return dataclasses.replace(profile, kinds={kind: times}, dtype=dtype, links={})


def test_a_kind_is_estimated_in_its_own_precision():
    profile = on(small_profile(), "A100", BFLOAT16_AUTOCAST)
    old = accelerator("V100")
    assert nearest_kind(profile, old, FLOAT16_AUTOCAST) == "A100"
    found = estimate_kind(profile, "A100", old, dtype=FLOAT16_AUTOCAST)
    slow = estimate_kind(profile, "A100", old, allow_slow=True)
    for index, layer in enumerate(profile.layers):
        samples = found.microbatch_sizes[-1]
        times = profile.kinds["A100"].layers[index].forward_s[-1]
        here = layer_work(layer, profile, samples, backward=False, dtype=BFLOAT16_AUTOCAST)
        if here.flops / accelerator("A100").peak("bfloat16")[0] > times:
            continue  # looked up, not multiplied
        there = layer_work(layer, profile, samples, backward=False, dtype=FLOAT16_AUTOCAST)
        ratio = FITTED.seconds(there, old) / FITTED.seconds(here, accelerator("A100"))
        assert found.layers[index].forward_s[-1] == pytest.approx(times * ratio)
        assert found.layers[index].forward_s[-1] <= slow.layers[index].forward_s[-1]
    mixed = profile.with_kinds(
        {**profile.kinds, "V100": found}, {"A100": BFLOAT16_AUTOCAST, "V100": FLOAT16_AUTOCAST}
    )
    assert mixed.dtype == MIXED and mixed.dtype_of("V100") == FLOAT16_AUTOCAST
    assert profile_from_data(mixed.to_json(), "p") == mixed
    alone = mixed.with_kinds({"V100": mixed.kinds["V100"]}, mixed.dtypes)
    assert (alone.dtype, alone.kinds["V100"].dtype) == (FLOAT16_AUTOCAST, None)


@pytest.mark.parametrize(
    ("dtype", "own", "message"),
    [
        (MIXED, None, "kinds.fast has no dtype, and the profile is mixed"),
        (MIXED, "half", "kinds.fast.dtype 'half' is unknown"),
        (FLOAT32, BFLOAT16_AUTOCAST, "kinds.fast is in bfloat16-autocast, the profile in float32"),
    ],
)
def test_a_profile_says_the_precision_of_each_kind_or_of_all(dtype, own, message):
    data = small_profile().to_json()
    data["dtype"] = dtype
    for kind in data["kinds"].values():
        if own is not None:
            kind["dtype"] = own
    with pytest.raises(InputError, match=re.escape(message)):
        profile_from_data(data, "p")
