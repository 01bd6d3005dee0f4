"""Tiny folders of the architectures that have no line in hetpipe's table: what their users save."""

import importlib
from pathlib import Path
from typing import Any

import torch

NARROW = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
LIKE_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4}
DECODER = {"is_decoder": True}
ONE_HEAD_WIDTH = {"head_dim": 8, "num_key_value_heads": 2}
OWN_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ArceeForCausalLM": ("arcee", {**NARROW, **ONE_HEAD_WIDTH}),
    "BertLMHeadModel": ("bert", {**NARROW, **DECODER}),
    "BioGptForCausalLM": ("biogpt", NARROW),
    "BloomForCausalLM": ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "CodeGenForCausalLM": ("codegen", {**LIKE_GPT2, "rotary_dim": 4}),
    "CohereForCausalLM": ("cohere", {**NARROW, **OWN_TOKENS}),
    "FalconForCausalLM": ("falcon", NARROW),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", LIKE_GPT2),
    "GPTJForCausalLM": ("gptj", {**LIKE_GPT2, "rotary_dim": 4}),
    "GPTNeoForCausalLM": (
        "gpt_neo",
        {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]},
    ),
    "Gemma2ForCausalLM": ("gemma2", {**NARROW, **ONE_HEAD_WIDTH}),
    "GemmaForCausalLM": ("gemma", {**NARROW, **ONE_HEAD_WIDTH}),
    "GlmForCausalLM": ("glm", {**NARROW, **ONE_HEAD_WIDTH, **OWN_TOKENS}),
    "GraniteForCausalLM": ("granite", NARROW),
    "HeliumForCausalLM": ("helium", {**NARROW, **ONE_HEAD_WIDTH}),
    "MambaForCausalLM": ("mamba", {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}),
    "MptForCausalLM": ("mpt", {"d_model": 32, "n_layers": 3, "n_heads": 4}),
    "NemotronForCausalLM": ("nemotron", {**NARROW, **ONE_HEAD_WIDTH, **OWN_TOKENS}),
    "OPTForCausalLM": (
        "opt",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "Olmo2ForCausalLM": ("olmo2", {**NARROW, **OWN_TOKENS}),
    "OlmoForCausalLM": ("olmo", {**NARROW, **OWN_TOKENS}),
    "PersimmonForCausalLM": ("persimmon", NARROW),
    "Phi3ForCausalLM": ("phi3", {**NARROW, **OWN_TOKENS}),
    "PhiForCausalLM": ("phi", NARROW),
    "SmolLM3ForCausalLM": ("smollm3", {**NARROW, **OWN_TOKENS}),
    "StableLmForCausalLM": ("stablelm", NARROW),
    "Starcoder2ForCausalLM": ("starcoder2", {**NARROW, **OWN_TOKENS}),
    "AlbertForMaskedLM": ("albert", {**NARROW, "embedding_size": 16}),
    "CamembertForMaskedLM": ("camembert", NARROW),
    "DebertaV2ForMaskedLM": ("deberta-v2", NARROW),
    "DistilBertForMaskedLM": ("distilbert", {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}),
    "ElectraForMaskedLM": ("electra", {**NARROW, "embedding_size": 16}),
    "ErnieForMaskedLM": ("ernie", NARROW),
    "ModernBertForMaskedLM": ("modernbert", {**NARROW, **OWN_TOKENS, "sep_token_id": 2, "cls_token_id": 1}),
    "MPNetForMaskedLM": ("mpnet", NARROW),
    "RobertaForMaskedLM": ("roberta", NARROW),
    "XLMRobertaForMaskedLM": ("xlm-roberta", NARROW),
}
"""Class, model type and sizes of each whose split is proven."""

LABELS = {"num_labels": 3}
IMAGES = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
CONVNEXT = {
    "image_size": 32,
    "num_channels": 1,
    "num_labels": 10,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1] * 4,
}

CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("bert", {**NARROW, **LABELS}),
    "DebertaV2ForSequenceClassification": ("deberta-v2", {**NARROW, **LABELS}),
    "DistilBertForSequenceClassification": (
        "distilbert",
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, **LABELS},
    ),
    "GPT2ForSequenceClassification": ("gpt2", {**LIKE_GPT2, **OWN_TOKENS, **LABELS}),
    "LlamaForSequenceClassification": ("llama", {**NARROW, **OWN_TOKENS, **LABELS}),
    "RobertaForSequenceClassification": ("roberta", {**NARROW, **LABELS}),
    "BertForTokenClassification": ("bert", {**NARROW, **LABELS}),
    "DistilBertForTokenClassification": (
        "distilbert",
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, **LABELS},
    ),
    "RobertaForTokenClassification": ("roberta", {**NARROW, **LABELS}),
    "ConvNextForImageClassification": ("convnext", CONVNEXT),
    "DeiTForImageClassification": ("deit", {**NARROW, **IMAGES}),
    "ViTForImageClassification": ("vit", {**NARROW, **IMAGES}),
    "BertForQuestionAnswering": ("bert", NARROW),
    "DebertaV2ForQuestionAnswering": ("deberta-v2", NARROW),
    "DistilBertForQuestionAnswering": (
        "distilbert",
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
    ),
    "ElectraForQuestionAnswering": ("electra", {**NARROW, "embedding_size": 16}),
    "GPT2ForQuestionAnswering": ("gpt2", {**LIKE_GPT2, **OWN_TOKENS}),
    "RobertaForQuestionAnswering": ("roberta", NARROW),
}
"""The same, of classifiers, and of what finds answers."""

LIKE_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "max_position_embeddings": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
LIKE_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "decoder_start_token_id": 0,
}

TRANSLATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "BartForConditionalGeneration": ("bart", {**LIKE_BART, "decoder_start_token_id": 3}),
    "BlenderbotForConditionalGeneration": ("blenderbot", LIKE_BART),
    "M2M100ForConditionalGeneration": (
        "m2m_100",
        {**LIKE_BART, "decoder_start_token_id": 3, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    ),
    "MBartForConditionalGeneration": ("mbart", LIKE_BART),
    "MT5ForConditionalGeneration": ("mt5", LIKE_T5),
    "MarianMTModel": ("marian", LIKE_BART),
    "PLBartForConditionalGeneration": ("plbart", LIKE_BART),
    "PegasusForConditionalGeneration": ("pegasus", LIKE_BART),
    "T5ForConditionalGeneration": ("t5", LIKE_T5),
    "UMT5ForConditionalGeneration": ("umt5", LIKE_T5),
}
"""The same, of encoder-decoders."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "MixtralForCausalLM": ("mixtral", {**NARROW, **ONE_HEAD_WIDTH, "num_local_experts": 2}),
    "RoFormerForMaskedLM": ("roformer", {**NARROW, "embedding_size": 32}),
    "BertLMHeadModel": ("bert", NARROW),
    "ResNetForImageClassification": (
        "resnet",
        {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4},
    ),
}
"""The same, of those that cannot be."""


def save_other(folder: Path, architecture: str, **changes: Any) -> Any:
    """Write a tiny model with random weights as its library does; gives it.

    architecture: of `OTHERS`, or of `REFUSED` with a question mark before it.
    """
    kind, sizes = (
        REFUSED[architecture[1:]]
        if architecture[0] == "?"
        else {**OTHERS, **CLASSIFIERS, **TRANSLATORS}[architecture]
    )
    architecture = architecture.removeprefix("?")
    name = kind.replace("-", "_")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    found = getattr(module, architecture)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        model = found(found.config_class(**{"vocab_size": 512, **sizes, **changes}))
        with torch.no_grad():
            stored = [value for name, value in model.named_buffers() if name == "final_logits_bias"]
            for value in (*(value for value in model.parameters() if value.requires_grad), *stored):
                value.add_(0.05 * torch.randn(value.shape))
    model.save_pretrained(folder)
    return model
