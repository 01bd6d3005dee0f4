"""The registry of models, and the loss."""

import json
import math
import subprocess
import sys

import pytest
import torch

from cost_model.errors import InputError
from hetpipe.models.huggingface import attention_sentence, model_spec, registered_models
from hetpipe.models.loss import loss_sum
from hetpipe.models.tasks import Task


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("bert-base", 110_106_428),
        ("bert-large", 336_226_108),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        # 2 x 16,000 x 512, the last norm, and 16 blocks of 4 x 512^2 + 3 x 512 x 1,376 + 2 x 512
        ("llama-small", 2 * 16_000 * 512 + 512 + 16 * (4 * 512**2 + 3 * 512 * 1376 + 2 * 512)),
    ],
)
def test_parameters_are_those_of_the_published_model(name, num_parameters):
    with torch.device("meta"):
        model = model_spec(name).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


@pytest.mark.parametrize("name", registered_models())
def test_every_model_says_its_sizes_and_shrinks_to_the_same_class(name):
    spec = model_spec(name)
    with torch.device("meta"):
        model, small = spec.build(), spec.shrunk().build()
    assert spec.name == name
    assert spec.vocabulary_size == model.config.vocab_size
    assert spec.max_sequence_length == model.config.max_position_embeddings >= 512
    assert type(small) is type(model)
    assert small.config.vocab_size == spec.shrunk().vocabulary_size
    assert small.config.num_hidden_layers == 4
    assert not getattr(model.config, "use_cache", False)


@pytest.mark.parametrize(("name", "implementation"), [("bert-tiny", "eager"), ("llama-tiny", "sdpa")])
def test_attention_is_fused_only_where_it_drops_nothing(name, implementation):
    with torch.device("meta"):
        assert model_spec(name).build().config._attn_implementation == implementation


def test_unknown_models_are_refused_with_the_closest_name():
    with pytest.raises(InputError, match="unknown model 'bert-larg'; did you mean 'bert-large'"):
        model_spec("bert-larg")
    with pytest.raises(InputError, match="unknown model 'gtp2'; did you mean 'gpt2'"):
        model_spec("gtp2")


@pytest.mark.parametrize("name", ["zzz", "t5-small", "albert-base", "distilbert-base", "gemma-tiny"])
def test_another_family_is_no_near_miss(name):
    with pytest.raises(InputError, match=f"unknown model '{name}'; known models: bert-base, "):
        model_spec(name)


def test_names_load_without_torch():
    code = "import sys, hetpipe.models.names as m; m.registered_models(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_masked_loss_sums_over_labelled_tokens():
    labels = torch.tensor([[1, -100, 3]])
    assert loss_sum(Task.MASKED_LM, torch.zeros(1, 3, 4), labels).item() == pytest.approx(2 * math.log(4))


def test_causal_loss_scores_each_position_against_the_next_label():
    logits = torch.full((1, 3, 4), -1e4)
    logits[0, 0, 2] = logits[0, 1, 3] = 0.0  # sure of 2, then of 3; the last position predicts nothing
    assert loss_sum(Task.CAUSAL_LM, logits, torch.tensor([[0, 2, 3]])).item() == 0.0


def test_loss_is_float32_even_for_bfloat16_logits():
    logits = torch.zeros(1, 2, 4, dtype=torch.bfloat16)
    assert loss_sum(Task.MASKED_LM, logits, torch.tensor([[0, 1]])).dtype == torch.float32


def test_what_attention_dropout_costs_is_said_and_how_to_do_without(tmp_path):
    """16 heads of 512 x 512 scores in float32 are 16 MiB."""
    told = attention_sentence("bert-large", None, 512)
    assert told is not None and "attention_probs_dropout_prob of bert-large is 0.1" in told
    assert "16 x 512 x 512 scores of a sample, 16.00 MiB" in told
    assert '"attention_probs_dropout_prob": 0' in told
    assert "attn_pdrop of gpt2 is 0.1" in str(attention_sentence("gpt2", None, 64))
    assert attention_sentence("llama-small", None, 512) is None
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.0, "n_layer": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert attention_sentence(tmp_path.name, tmp_path, 512) is None
    (tmp_path / "config.json").write_text(json.dumps({**config, "attn_pdrop": 0.3}))
    assert "is 0.3" in str(attention_sentence(tmp_path.name, tmp_path, 512))
