"""What transformers' Trainer would compute otherwise than ours is refused, or said."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, ViTImageProcessorPil, default_data_collator
from transformers.data.data_collator import DataCollatorWithPadding

from cost_model.errors import InputError
from hetpipe.training.transformers_trainer import TransformersTrainer
from runs import cluster_file
from transformers_runs import arguments, causal, texts


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("compute_loss", "Mine has compute_loss, .* not here; give hetpipe.Trainer a loss of your own"),
        ("create_optimizer", "give optimizer_cls_and_kwargs"),
        ("get_train_dataloader", "leave it out"),
        ("evaluate", "give eval_strategy='no'"),
    ],
)
def test_methods_that_nothing_would_call_are_refused(tmp_path: Path, name: str, said: str):
    own = type("Mine", (TransformersTrainer,), {name: lambda self, *given: None, "mine": len})
    args = arguments(tmp_path / "out", eval_strategy="steps", eval_steps=1)
    with pytest.raises(InputError, match=said):
        own(causal(), args, train_dataset=texts(), eval_dataset=texts(), cluster=cluster_file(tmp_path))


def test_only_what_has_texts_or_sounds_pads_them(tmp_path: Path):
    def collator(processing: Any) -> Any:
        args, cluster = arguments(tmp_path / "out"), cluster_file(tmp_path)
        return TransformersTrainer(causal(), args, processing_class=processing, cluster=cluster).data_collator

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    assert isinstance(collator(tokenizer), DataCollatorWithPadding)
    assert hasattr(ViTImageProcessorPil, "pad")  # of pictures
    assert collator(ViTImageProcessorPil()) is default_data_collator
