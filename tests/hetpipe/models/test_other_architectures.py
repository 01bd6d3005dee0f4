"""Folders of architectures that hetpipe has no line for: split exactly, or refused in one true sentence."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from cost_model.errors import CheckFailedError, InputError
from hetpipe import cli
from hetpipe.data.task import registered_task
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.huggingface_folder import ALSO_TESTED, ARCHITECTURES
from hetpipe.models.kept_proofs import require_split
from hetpipe.models.names import model_entry
from hetpipe.models.split_check import check_split
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import NARROW, OTHERS, save_other
from runs import chain_plan, made_up_profile, run


def test_the_command_line_lists_what_is_tested_here():
    assert sorted(ALSO_TESTED) == sorted(OTHERS)
    assert len(ALSO_TESTED) + len(ARCHITECTURES) >= 40


LIKE_ANOTHER = {
    "ArceeForCausalLM", "CamembertForMaskedLM", "CodeGenForCausalLM", "ErnieForMaskedLM",
    "GraniteForCausalLM", "HeliumForCausalLM", "NemotronForCausalLM", "OlmoForCausalLM", "Phi3ForCausalLM",
    "SmolLM3ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "XLMRobertaForMaskedLM",
}  # fmt: skip
"""Those whose blocks are another one's but for a norm, an activation or a name."""


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(one, marks=[pytest.mark.exhaustive] * (one in LIKE_ANOTHER)) for one in OTHERS],
)
def test_its_split_is_exact_and_every_layer_has_the_weights_that_were_saved(tmp_path, architecture):
    model = save_other(tmp_path / "mine", architecture)
    spec = model_spec(str(tmp_path / "mine"))
    report = check_split(spec)
    assert report.passed, report.reason
    chain = ChainModel.from_spec(spec)
    found = {}
    for layer in range(chain.num_layers):
        found |= chain.materialise([layer], seed=0).owned_parameters()
    saved = dict(model.named_parameters())
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TRAINED = {
    "OPTForCausalLM": {"dropout": 0.0},
    "Gemma2ForCausalLM": {},
    "RobertaForMaskedLM": NO_DROPOUT,
    "DebertaV2ForMaskedLM": NO_DROPOUT,
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TRAINED)
def test_its_first_loss_is_that_of_transformers(tmp_path, architecture):
    folder = tmp_path / "mine"
    model = save_other(folder, architecture, **TRAINED[architecture])
    entry = model_entry(str(folder))
    settings = Settings(steps=1, model_folder=entry.place, save=False)
    losses = {
        name: run(tmp_path / name, chain_plan(entry.name, cuts, 8), settings, profile_of(folder))[1][0]
        for name, cuts in (("whole", [0, 5]), ("split", [0, 2, 5]))
    }
    task = registered_task(RunFolder(tmp_path / "whole" / "run"), TaskSettings(entry.name, 32, run=settings))
    inputs, labels = task.batch(0, 16)
    with torch.no_grad():
        expected = model.train()(**inputs, labels=labels).loss.item()
    for name, loss in losses.items():
        assert loss == pytest.approx(expected, rel=1e-6), name


def profile_of(folder):
    name = model_entry(str(folder)).name
    return replace(made_up_profile(str(folder)), model=name, sequence_length=32)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        (
            "?MixtralForCausalLM",
            "config.json: transformers stores the weights of MixtralForCausalLM under other names",
        ),
        ("?RoFormerForMaskedLM", "split differs from whole: the loss is off by"),
        ("?BertLMHeadModel", "it sees the tokens that it is to predict; is is_decoder missing"),
    ],
)
def test_what_cannot_be_proven_is_refused(tmp_path, architecture, reason):
    save_other(tmp_path / "mine", architecture)
    with pytest.raises((InputError, CheckFailedError), match=reason):
        require_split(model_spec(str(tmp_path / "mine")))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "xmodel"}, "has no model type 'xmodel', and code of a folder's own is not run"),
        ({"model_type": "../os"}, "model_type '../os' names no model of transformers"),
        ({"architectures": ["OPTXForCausalLM"]}, "has no OPTXForCausalLM of model type 'opt'"),
        ({"is_encoder_decoder": True}, "has an encoder and a decoder"),
        ({"architectures": ["OPTForCausalML"]}, r"see hetpipe models\); did you mean OPTForCausalLM\?"),
        ({"architectures": ["OPTModel"]}, "is for no task that is trained here"),
        (
            {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForSequenceClassification"]},
            r"reads input_values, and data here are texts \(input_ids\) and images",
        ),
        (
            {
                "model_type": "whisper",
                "architectures": ["WhisperForConditionalGeneration"],
                "is_encoder_decoder": True,
            },
            "config.json: WhisperForConditionalGeneration reads input_features, and data here are texts",
        ),
    ],
)
def test_a_wrong_configuration_is_one_line(tmp_path, changes, reason):
    save_other(tmp_path / "mine", "OPTForCausalLM")
    path = tmp_path / "mine" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=reason):
        model_spec(str(tmp_path / "mine"))


def test_training_proves_the_split_first_with_any_profile(tmp_path):
    folder = tmp_path / "mine"
    save_other(folder, "?BertLMHeadModel")
    entry = model_entry(str(folder))
    settings = Settings(steps=1, model_folder=entry.place, save=False)
    with pytest.raises(CheckFailedError, match="it sees the tokens that it is to predict"):
        run(tmp_path / "run", chain_plan(entry.name, [0, 5], 8), settings, profile_of(folder))


def test_hetpipe_check_takes_it(tmp_path, capsys):
    save_other(tmp_path / "mine", "FalconForCausalLM")
    assert cli.main(["check", "--model", str(tmp_path / "mine")]) == 0
    assert "split equals whole" in capsys.readouterr().out


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "GPT2LMHeadModel", "ElectraForMaskedLM"])
def test_a_default_model_of_transformers_with_dropout_takes_the_attention_that_can_be_keyed(architecture):
    def build():
        torch.manual_seed(0)
        return default_model(architecture)

    example = {"input_ids": torch.arange(8).reshape(1, 8)}
    assert default_model(architecture).config._attn_implementation == "sdpa"
    report = check_split(build, example)
    assert report.passed, report.reason
    given = default_model(architecture)
    ChainModel.from_module(given, example)
    assert given.config._attn_implementation == "eager"


def default_model(architecture):
    model = getattr(transformers, architecture)
    shallow = {"n_embd": 32, "n_layer": 3, "n_head": 4} if architecture.startswith("GPT2") else NARROW
    return model(model.config_class(vocab_size=64, **shallow))
