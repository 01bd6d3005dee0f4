"""The settings of adapters: as --lora gives them, and as a PEFT folder does."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.errors import InputError
from hetpipe.runs.lora import LoraSettings, parse_lora, read_adapter_settings
from hetpipe.runs.settings import Settings, TaskSettings, read_settings, settings_text

NAMES = st.from_regex(r"[a-z_.]{1,8}", fullmatch=True)


@given(
    st.integers(1, 4096),
    st.floats(1e-3, 1e5).map(lambda value: float(f"{value:g}")),
    st.floats(0, 0.99).map(lambda value: float(f"{value:g}")),
    st.lists(NAMES, min_size=1, max_size=5),
    st.booleans(),
)
def test_the_text_of_settings_gives_them_back(rank, alpha, dropout, targets, rslora):
    settings = LoraSettings(rank, alpha, tuple(targets), dropout, rslora)
    assert parse_lora(settings.text) == settings


def test_what_is_not_given_has_a_default():
    assert parse_lora("targets = v_proj , q_proj, r = 8") == LoraSettings(8, 8.0, ("q_proj", "v_proj"), 0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is no key=value"),
        ("r=8", "targets is missing"),
        ("targets=q", "r is missing"),
        ("r=8,targets=", "targets are missing"),
        ("r=8,targets=q,,k", "'' is no key=value"),
        ("r=8.5,targets=q", "'8.5' is no whole number"),
        ("r=8,alpha=x,targets=q", "'x' is no number"),
        ("r=8,alpha=0,targets=q", "alpha is 0"),
        ("r=8,alpha=inf,targets=q", "alpha is inf"),
        ("r=-1,targets=q", "rank r is -1"),
        ("r=8,dropout=nan,targets=q", "dropout is nan"),
        ("r=8,drop=0.1,targets=q", "unknown key 'drop'; did you mean \"dropout\""),
        ("r=8,rslora=1,targets=q", "rslora is '1'; give true or false"),
        ("r=8,16,targets=q", "'16' is no key=value"),
        ("r=8,targets=q,targets=k", "targets is given twice"),
    ],
)  # fmt: skip
def test_a_text_that_is_none_is_refused(text, reason):
    with pytest.raises(InputError) as caught:
        parse_lora(text)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_other_adapters_are_another_model():
    one, other = parse_lora("r=8,targets=q,k"), parse_lora("r=8,targets=q")
    assert parse_lora("r=8,rslora=true,targets=q").suffix != parse_lora("r=8,rslora=false,targets=q").suffix
    assert one.suffix == parse_lora("targets=k,q,r=8").suffix != other.suffix
    settings = TaskSettings("tiny" + one.suffix, run=Settings(steps=1, lora=one))
    assert settings.base_model == "tiny"
    for model in ("tiny", "tiny" + other.suffix):
        with pytest.raises(InputError, match="is no model with the adapters r=8,alpha=8,targets=k,q"):
            TaskSettings(model, run=Settings(steps=1, lora=one))


def test_config_json_holds_them(tmp_path):
    path = tmp_path / "config.json"
    lora = parse_lora("r=8,alpha=16,dropout=0.1,rslora=true,targets=q,k")
    settings = Settings(steps=1, lora=lora, adapter="/there")
    path.write_text(settings_text(settings))
    assert read_settings(path) == settings
    path.write_text(path.read_text().replace('"r": 8', '"r": 0'))
    with pytest.raises(InputError, match="LoRA rank r is 0"):
        read_settings(path)


PEFT = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["v", "q"],
    "bias": "none", "use_dora": False, "rank_pattern": {}, "megatron_core": "megatron.core",
    "init_lora_weights": True, "task_type": "CAUSAL_LM", "layers_to_transform": None,
}  # fmt: skip


def peft_folder(place: Path, **changes: Any) -> Path:
    (place / "adapter_config.json").write_text(json.dumps({**PEFT, **changes}))
    return place


def test_a_peft_folder_says_what_its_adapters_are(tmp_path):
    assert read_adapter_settings(peft_folder(tmp_path)) == LoraSettings(8, 16.0, ("q", "v"), 0.1)
    stable = read_adapter_settings(peft_folder(tmp_path, use_rslora=True))
    assert stable == LoraSettings(8, 16.0, ("q", "v"), 0.1, rslora=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"}, {"use_dora": True}, {"use_rslora": "yes"}, {"rank_pattern": {"q": 4}},
        {"bias": "all"}, {"modules_to_save": ["head"]}, {"init_lora_weights": "pissa"},
        {"target_modules": "q|v"}, {"target_modules": None}, {"r": None}, {"r": 0}, {"lora_alpha": "x"},
        {"layers_to_transform": [1]}, {"of a later version": 1},
    ],
)  # fmt: skip
def test_adapters_that_compute_otherwise_are_refused(tmp_path, changes):
    (key,) = changes
    with pytest.raises(InputError) as caught:
        read_adapter_settings(peft_folder(tmp_path, **changes))
    assert "adapter_config.json: " in str(caught.value) and "\n" not in str(caught.value)
    assert key in str(caught.value).replace("rank r is", "r")
