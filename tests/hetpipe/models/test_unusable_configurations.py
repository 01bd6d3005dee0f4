"""A config.json of which no model can be built, or run, is refused in a line that names it."""

import json
from pathlib import Path

import pytest

from runs import EMULATED_CLUSTER
from shell import Shell

BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 16, "vocab_size": 512}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "vocab_size": 512}
LLAMA = {**BERT, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
OPT = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": 512}
UNBUILDABLE = [
    ({**BERT, "num_attention_heads": 3}, "BertForMaskedLM cannot be built so: ValueError: The hidden size"),
    ({**GPT2, "n_head": 3}, "GPT2LMHeadModel cannot be built so: ValueError: "),
    ({**OPT, "hidden_size": 16, "num_attention_heads": 3}, "OPTForCausalLM cannot be built so: ValueError: "),
    ({**BERT, "num_attention_heads": 0}, "BertForMaskedLM cannot be built so: ZeroDivisionError: "),
    ({**BERT, "num_attention_heads": 4, "hidden_act": "gulu"}, "knows no 'gulu', which is its hidden_act"),
    ({**BERT, "pad_token_id": 600}, "cannot be built so: AssertionError: Padding_idx must be within"),
    ({**BERT, "hidden_size": -16, "num_attention_heads": 4}, "cannot be built so: RuntimeError: "),
    ({**BERT, "vocab_size": 0}, "vocab_size is 0; give how many there are, 1 or more"),
    ({**BERT, "vocab_size": -5}, "vocab_size is -5; give how many there are, 1 or more"),
    ({**BERT, "vocab_size": "many"}, "the configuration of this BertConfig cannot be used: "),
    ({**BERT, "num_hidden_layers": -2}, "num_hidden_layers is -2; give the number of blocks, 1 or more"),
    ({**GPT2, "n_layer": 0}, "n_layer is 0; give the number of blocks, 1 or more"),
    ({**BERT, "max_position_embeddings": 0}, "max_position_embeddings is 0; give how many there are, 1 or"),
    ({**BERT, "model_type": "gpt2"}, "BertForMaskedLM is of model type 'bert', and model_type is 'gpt2'"),
]


def mine(hetpipe: Shell, config: dict[str, object]) -> Path:
    """Write a folder with a configuration alone, and a cluster of devices that are here."""
    folder = hetpipe.folder / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    hetpipe.write("cluster.toml", EMULATED_CLUSTER)
    return folder / "config.json"


def refusal(hetpipe: Shell, line: str) -> str:
    """Return the one line beside what is said of the folder that a verb ends with."""
    result = hetpipe(line)
    assert (result.code, result.out) == (2, ""), result
    (told,) = (line for line in result.err.splitlines() if not line.startswith("note: "))
    assert told.startswith("error: ") and len(told) < 600
    return told


@pytest.mark.parametrize(("config", "reason"), UNBUILDABLE)
def test_what_cannot_be_built_is_refused_before_anything_starts(hetpipe: Shell, monkeypatch, config, reason):
    where = mine(hetpipe, config)
    before = sorted(hetpipe.folder.rglob("*"))
    monkeypatch.setattr("hetpipe.runtime.processes.run_ranks", None)  # no rank is started
    for line in ("profile", "plan", "run --steps 2"):
        told = refusal(hetpipe, f"{line} --model ./mine --cluster cluster.toml")
        assert told.startswith(f"error: {where}: ") and reason in told
    assert reason in refusal(hetpipe, "check --model ./mine")
    assert sorted(hetpipe.folder.rglob("*")) == before


def test_more_tokens_than_positions_are_refused(hetpipe: Shell, monkeypatch):
    mine(hetpipe, {**BERT, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 16})
    monkeypatch.setattr("hetpipe.runtime.processes.run_ranks", None)
    told = refusal(hetpipe, "plan --model ./mine --cluster cluster.toml")
    assert "sequence length 64 is above 16, the most that mine@" in told


@pytest.mark.slow
def test_what_is_built_and_cannot_be_run_is_refused(hetpipe: Shell):
    """Its tiny copy can: only a forward at its own size tells, on a device or where all is estimated."""
    where = mine(hetpipe, {**LLAMA, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 3})
    cards = EMULATED_CLUSTER.replace('"emulated", count = 3, speed = 0.5', '"RTX-4090"')
    for text in (EMULATED_CLUSTER, cards):
        hetpipe.write("cluster.toml", text)
        told = refusal(hetpipe, "plan --model ./mine --cluster cluster.toml --profile-budget 1")
        assert told.startswith(f"error: {where}: the model cannot be run so: RuntimeError: ")
