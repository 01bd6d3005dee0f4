"""transformers' Trainer over unequal devices: the same arguments, and the cluster."""

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerBase,
    SequenceFeatureExtractor,
    default_data_collator,
    set_seed,
)
from transformers.data.data_collator import DataCollatorWithPadding
from transformers.trainer_callback import TrainerCallback, TrainerState
from transformers.trainer_utils import EvalPrediction, PredictionOutput, TrainOutput

from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.known_clusters import cluster_path
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.user_data import LABELS
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.warned import warn_caller
from hetpipe.training import checkpoint
from hetpipe.training.checkpoint_weights import load_weights
from hetpipe.training.trained_model import TrainedModel
from hetpipe.training.trainer import Trainer
from hetpipe.training.transformers_arguments import NO_CLIPPING, Arguments
from hetpipe.training.transformers_callbacks import Intervals, TransformersCallbacks
from hetpipe.training.transformers_data import CollatedData, Collator, ignores_count, loss_of, taken_columns

RUN = "run"
"""The run folder, in the output folder; beside it lies what `save_model` writes."""


class TransformersTrainer:
    """Takes what transformers' Trainer takes, and trains over all devices of a cluster.

    args: transformers' TrainingArguments. A step has per_device_train_batch_size x
    gradient_accumulation_steps samples for each device of the cluster; how they are shared out is the plan's.
    The model has its trained weights after `train`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Collator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        *,
        cluster: Path | str,
        **others: Any,
    ) -> None:
        """Check everything that can be checked without training; cluster: the cluster file.

        others: what transformers' Trainer takes too, refused unless it is empty; and what `hetpipe.Trainer`
        takes by name, such as plan, profile and timeout_s.

        Raises: InputError naming an argument that cannot be kept, and why.
        """
        if args is None:
            from transformers.training_args import TrainingArguments

            args = TrainingArguments("tmp_trainer")
        others = _checked_others(others)
        _check_overridden(type(self), args)
        set_seed(args.seed)
        if compute_metrics is not None and list(args.label_names or (LABELS,)) != [LABELS]:
            raise InputError(
                f"label_names={args.label_names!r}: its metrics get {LABELS!r} alone; give ['{LABELS}'], "
                "or leave one of them out"
            )
        if (model is None) == (model_init is None):
            raise InputError("give the model, or model_init, which makes it")
        self.args, self.processing_class, self.compute_metrics = args, processing_class, compute_metrics
        made = model if model_init is None else _made_by(model_init)
        assert made is not None
        self.model: nn.Module = made
        self.state = TrainerState()
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._arguments = Arguments(args, len(read_cluster(cluster_path(cluster)).devices))
        self._cluster, self._others, self._optimizer_kind = cluster, others, optimizer_cls_and_kwargs
        pads = isinstance(processing_class, (PreTrainedTokenizerBase, SequenceFeatureExtractor))
        collates = DataCollatorWithPadding(processing_class) if pads else default_data_collator
        self.data_collator: Collator = data_collator or collates
        self._callbacks = [made() if isinstance(made, type) else made for made in callbacks or ()]
        if train_dataset is not None:
            self._data = self._collated(train_dataset, "train_dataset", self._arguments.batch_size, True)
            self._check_data()
            self._trainer, self._told = self._made()

    def train(self, resume_from_checkpoint: bool | str | None = None, **unknown: Any) -> TrainOutput:
        """Train as the arguments say; True goes on from the newest checkpoint in the output folder.

        Raises: InputError or InfeasibleError if it cannot be; as `hetpipe.Trainer.fit` while it is.
        """
        if unknown:
            raise InputError(f"train({next(iter(unknown))}=...) is nothing that can be kept; leave it out")
        if self.train_dataset is None:
            raise InputError("train_dataset is None; give the trainer what to train on")
        source = self._source(resume_from_checkpoint)
        begun_s = time.monotonic()
        self._trainer.fit(self.state.max_steps, resume_from=source)
        newest = checkpoint.latest(self._folder.checkpoints)
        kept = checkpoint.best(self._folder.checkpoints) if self.args.load_best_model_at_end else newest
        assert kept is not None  # a run ends with a checkpoint
        load_weights(kept, self.model)
        losses = [row["loss"] for row in self._folder.read_metrics()]
        mean = math.fsum(losses) / len(losses)
        metrics = {"train_runtime": time.monotonic() - begun_s, "train_loss": mean}
        self._told.end(metrics)
        return TrainOutput(self.state.global_step, mean, metrics)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the loss of the samples, and what `compute_metrics` says, computed by this process.

        Raises: InputError if there are no samples, or none has labels.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise InputError("eval_dataset is None; give the trainer, or evaluate, what to evaluate on")
        found = self._predicted(dataset, "eval_dataset", metric_key_prefix)
        metrics = {**found.metrics, "epoch": self.state.epoch or 0.0}
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: object = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return logits, labels and metrics of the samples, computed by this process.

        Raises: InputError if the samples have no labels.
        """
        return self._predicted(test_dataset, "test_dataset", metric_key_prefix)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, and the processing class, as a folder that transformers loads."""
        target = Path(output_dir or self.args.output_dir)
        self.model.save_pretrained(target)  # type: ignore[operator]  # nn.Module would call it a Tensor
        if self.processing_class is not None:
            self.processing_class.save_pretrained(target)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Tell one more callback."""
        self._callbacks.append(callback() if isinstance(callback, type) else callback)

    def is_world_process_zero(self) -> bool:
        """Return True: one process runs the script."""
        return True

    def _source(self, resume: bool | str | None) -> Path | str | None:
        """Return what to go on from, None to begin."""
        if resume is not True:
            return resume or None
        folder = self._folder
        if not checkpoint.written(folder.checkpoints):
            raise InputError(
                f"resume_from_checkpoint=True: {folder.path} holds no checkpoint to go on from; leave it out "
                "to begin"
            )
        return folder.path

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(Path(self.args.output_dir) / RUN)

    def _collated(self, dataset: Any, name: str, batch: int, trains: bool) -> CollatedData:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or isinstance(
            dataset, Mapping
        ):
            raise InputError(f"{name} is a {type(dataset).__name__}; give samples by index, with a length")
        if len(dataset) == 0:
            raise InputError(f"{name} is empty; give at least one sample")
        columns = taken_columns(self.model, self.args.label_names or (LABELS,))
        return CollatedData.of(
            dataset,
            self.data_collator,
            self.args.seed,
            columns=columns if self.args.remove_unused_columns else None,
            batch=batch,
            seed=self._arguments.shuffle_seed if trains else None,
            whole=self._arguments.read_together if trains and self.args.dataloader_drop_last else 1,
        )

    def _check_data(self) -> None:
        data, args = self._data, self.args
        if data.steps == 0:
            raise InputError(
                f"dataloader_drop_last=True leaves nothing: train_dataset has {len(self.train_dataset)} "
                f"samples, and {data.whole} are read together"
            )
        if args.eval_strategy != "no" and self.eval_dataset is None:
            raise InputError(f"eval_strategy={str(args.eval_strategy)!r} needs an eval_dataset; give one")
        if args.eval_strategy != "no" and self.compute_metrics is not None:
            raise InputError(
                "compute_metrics beside training cannot be kept, the loss alone is computed there; give "
                "eval_strategy='no' and call evaluate() after train(), or leave it out"
            )
        labels = data.samples(0, 1)[LABELS]
        self._arguments.check_accumulation(self.model, labels, data.count)
        count = args.gradient_accumulation_steps
        if count > 1 and ignores_count(self.model, data):
            warn_caller(
                f"gradient_accumulation_steps={count}: a {type(self.model).__name__} does not use how many "
                f"labels a step has, for which transformers adds up {count} means, and so has {count} times "
                "the losses and gradients; here a step has one mean"
            )

    def _made(self) -> tuple[Trainer, TransformersCallbacks]:
        """Return the trainer that does it, and what tells the callbacks."""
        args, data = self.args, self._data
        loss = loss_of(self.model, data)
        steps = self._arguments.max_steps(data.steps)
        every = partial(self._arguments.interval, steps_in_epoch=data.steps, max_steps=steps)
        self.state.max_steps, self.state.num_train_epochs = steps, math.ceil(steps / data.steps)
        told = TransformersCallbacks(
            self._callbacks,
            args,
            self.state,
            Intervals(data.steps, every("logging"), args.logging_first_step),
            {"processing_class": self.processing_class},
        )
        evaluates: dict[str, Any] = {}
        if args.eval_strategy != "no":
            held_out = self._collated(self.eval_dataset, "eval_dataset", data.batch, False)
            evaluates = {"eval_data": held_out, "eval_every": every("eval")}
        trainer = Trainer(
            self.model,
            data,
            self._arguments.optimizer(self.model, self._optimizer_kind),
            loss,
            cluster=self._cluster,
            **{
                "batch_size": data.batch,
                "dtype": self._arguments.dtype(self.model),
                "folder": self._folder.path,
                "callbacks": [told],
                "progress": not args.disable_tqdm,
                "rate_schedule": self._arguments.rates(steps, self._optimizer_kind),
                "count_terms": loss.terms,
                "example": data.longest(),
                "clip_norm": args.max_grad_norm or NO_CLIPPING,
                "seed": args.seed,
                "total_steps": steps,
                "every": every("save"),
                "keep": args.save_total_limit or 0,
                "log": self._arguments.log,
                **evaluates,
                **self._others,
            },
        )
        return trainer, told

    def _predicted(self, dataset: Any, name: str, prefix: str) -> PredictionOutput:
        begun_s, args = time.monotonic(), self.args
        data = self._collated(dataset, name, args.per_device_eval_batch_size, False)
        loss = loss_of(self.model, data)
        total, terms, found = 0.0, 0, []
        precision = self._arguments.dtype(self.model)
        for outputs, labels in TrainedModel(self.model, precision).outputs(data, data.batch):
            total, terms = total + float(loss(outputs, labels)), terms + loss.terms(labels)
            found.append((outputs.cpu(), labels.cpu()))
        count = len(dataset)
        logits, answers = (_joined(each)[:count] for each in zip(*found, strict=True))
        metrics = {f"{prefix}_loss": total / terms}
        if self.compute_metrics is not None:
            own = self.compute_metrics(EvalPrediction(predictions=logits, label_ids=answers))
            metrics |= {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": own[key] for key in own}
        metrics[f"{prefix}_runtime"] = time.monotonic() - begun_s
        return PredictionOutput(logits, answers, metrics)


def _made_by(model_init: Callable[..., nn.Module]) -> nn.Module:
    """Return the model; as in transformers, what makes it may take a trial, of which there is none."""
    return model_init(None) if len(inspect.signature(model_init).parameters) == 1 else model_init()


def _joined(parts: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    """Return the parts [samples, length, ...] one after another, filled up with -100 as transformers does."""
    if parts[0].dim() > 1:
        longest = max(part.shape[1] for part in parts)
        parts = [_lengthened(part, longest) for part in parts]
    return np.asarray(torch.cat(list(parts)).numpy())


def _lengthened(part: Tensor, length: int) -> Tensor:
    filler = part.new_full((part.shape[0], length - part.shape[1], *part.shape[2:]), IGNORE_LABEL)
    return torch.cat([part, filler], dim=1)


_REFUSED = {
    "compute_loss_func": "give hetpipe.Trainer a loss of your own",
    "optimizers": "they hold parameters of this process, ranks have their own; give optimizer_cls_and_kwargs",
    "preprocess_logits_for_metrics": "do it in compute_metrics",
    "tokenizer": "give it as processing_class, as transformers does",
}


def _checked_others(others: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is for `hetpipe.Trainer`.

    Raises: InputError for what transformers' Trainer takes and this cannot keep.
    """
    for name, remedy in _REFUSED.items():
        if others.get(name) not in (None, (None, None)):
            raise InputError(f"{name} cannot be kept; {remedy}")
    return {name: value for name, value in others.items() if name not in _REFUSED}


_OVERRIDDEN = {
    "compute_loss": "give hetpipe.Trainer a loss of your own",
    "create_optimizer": "give optimizer_cls_and_kwargs",
    "create_optimizer_and_scheduler": "give optimizer_cls_and_kwargs, and lr_scheduler_type",
    "create_scheduler": "give lr_scheduler_type",
    "evaluate": "give eval_strategy='no', or compute_metrics",
}


def _check_overridden(kind: type[TransformersTrainer], args: Any) -> None:
    """Check that a class derived from `TransformersTrainer` changes nothing that only transformers calls.

    Raises: InputError for a method of transformers' Trainer that nothing here would call.
    """
    unheard = set(dir(transformers.Trainer)) - set(dir(TransformersTrainer))
    if args.eval_strategy != "no" and kind.evaluate is not TransformersTrainer.evaluate:
        unheard |= {"evaluate"}
    for name in sorted(unheard & set(dir(kind))):
        raise InputError(
            f"{kind.__name__} has {name}, which is called by transformers' Trainer and not here; "
            f"{_OVERRIDDEN.get(name, 'leave it out')}"
        )
