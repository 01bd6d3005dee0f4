"""The tasks that models are trained for, and how classes of transformers are called that have their heads."""

from enum import StrEnum


class Task(StrEnum):
    """The quantity that a model is trained to predict."""

    MASKED_LM = "masked-lm"
    CAUSAL_LM = "causal-lm"


HEADS = {
    "ForCausalLM": Task.CAUSAL_LM,
    "LMHeadModel": Task.CAUSAL_LM,
    "ForMaskedLM": Task.MASKED_LM,
}
"""Ends of the names of classes, each with the task of its head."""
