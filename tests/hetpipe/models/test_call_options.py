"""What Hugging Face's models are called with beside their inputs."""

import torch
from torch import Tensor
from transformers import BertForSequenceClassification

from hetpipe.models.block_structure import whole_logits
from transformers_runs import LENGTH, classifier


class Narrow(BertForSequenceClassification):
    """Takes nothing but ids and labels."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> object:
        return super().forward(input_ids, labels=labels)


def test_a_forward_that_takes_no_use_cache_is_not_given_it():
    model = Narrow(classifier().config)
    assert whole_logits(model, {"input_ids": torch.ones(2, LENGTH, dtype=torch.long)}).shape == (2, 3)
