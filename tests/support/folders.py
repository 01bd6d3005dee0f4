"""Tiny Hugging Face folders, made as a user makes them: with save_pretrained."""

import importlib
from pathlib import Path
from typing import Any

import torch

SIZES = {"vocab_size": 512, "tie_word_embeddings": True}
NARROW = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BertForMaskedLM": ("bert", "BertConfig", {**NARROW, **NO_DROPOUT}),
    "BertForPreTraining": ("bert", "BertConfig", {**NARROW, **NO_DROPOUT}),
    "GPT2LMHeadModel": ("gpt2", "GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, **NO_GPT2_DROPOUT}),
    "GPTNeoXForCausalLM": ("gpt_neox", "GPTNeoXConfig", {**NARROW, "tie_word_embeddings": False}),
    "LlamaForCausalLM": ("llama", "LlamaConfig", {**NARROW, "tie_word_embeddings": False}),
    "MistralForCausalLM": ("mistral", "MistralConfig", {**NARROW, "num_key_value_heads": 2}),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2Config", {**NARROW, "num_key_value_heads": 2}),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3Config", {**NARROW, "num_key_value_heads": 2, "head_dim": 8}),
}


def model_class(architecture: str) -> Any:
    family = MODELS[architecture][0]
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), architecture)


def tiny_model(architecture: str, seed: int = 7, **changes: Any) -> Any:
    """A model whose every weight is random, norms and biases too; the same of the same seed."""
    family, config_name, sizes = MODELS[architecture]
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(module, config_name)(**{**SIZES, **sizes, **changes})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = model_class(architecture)(config)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.05 * torch.randn(value.shape, generator=generator))
    return model


def save_model(folder: Path, architecture: str, **changes: Any) -> Any:
    """Write a tiny model; gives it."""
    model = tiny_model(architecture, **changes)
    model.save_pretrained(folder)
    return model
