"""The tasks that models are trained for, and how classes of transformers are called that have their heads."""

from enum import StrEnum


class Task(StrEnum):
    """The quantity that a model is trained to predict."""

    MASKED_LM = "masked-lm"
    CAUSAL_LM = "causal-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    IMAGE_CLASSIFICATION = "image-classification"
    TRANSLATION = "translation"
    QUESTION_ANSWERING = "question-answering"

    @property
    def classifies(self) -> bool:
        """Return whether what is predicted is one of the labels in the model's configuration."""
        return self in _CLASSIFIES

    @property
    def translates(self) -> bool:
        """Return whether one text is predicted from another, by an encoder and a decoder."""
        return self is Task.TRANSLATION

    @property
    def needs_data(self) -> bool:
        """Return whether hetpipe brings no data of its own for it."""
        return self.classifies or self.translates or self.answers

    @property
    def reads_text(self) -> bool:
        """Return whether the model takes tokens of a vocabulary."""
        return self is not Task.IMAGE_CLASSIFICATION

    @property
    def pads(self) -> bool:
        """Return whether texts are filled up to one length, which a mask then hides."""
        return self in _PADS

    @property
    def answers(self) -> bool:
        """Return whether what is predicted is where an answer begins and ends in a text."""
        return self is Task.QUESTION_ANSWERING


_CLASSIFIES = (Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.IMAGE_CLASSIFICATION)
_PADS = (
    *(Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION),
    *(Task.TRANSLATION, Task.QUESTION_ANSWERING),
)

HEADS = {
    "ForCausalLM": Task.CAUSAL_LM,
    "LMHeadModel": Task.CAUSAL_LM,
    "ForMaskedLM": Task.MASKED_LM,
    "ForSequenceClassification": Task.SEQUENCE_CLASSIFICATION,
    "ForTokenClassification": Task.TOKEN_CLASSIFICATION,
    "ForImageClassification": Task.IMAGE_CLASSIFICATION,
    "ForConditionalGeneration": Task.TRANSLATION,
    "MTModel": Task.TRANSLATION,
    "ForQuestionAnswering": Task.QUESTION_ANSWERING,
}
"""Ends of the names of classes, each with the task of its head."""
