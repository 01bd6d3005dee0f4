"""The arguments of transformers' Trainer as settings of a run: kept exactly, or refused."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST, FLOAT32, FLOAT64
from cost_model.errors import InputError
from hetpipe.data.task import OptimizerFactory
from hetpipe.runs.metric_sinks import SinkKind, checked_sinks
from hetpipe.training.given_optimizer import AdamW
from hetpipe.training.transformers_data import accepts_count

NO_CLIPPING = 1e30

_KEPT = {
    *(
        "output_dir",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
    ),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16"),
    *("logging_strategy", "logging_steps", "logging_first_step", "report_to", "run_name", "disable_tqdm"),
    *("eval_strategy", "eval_steps", "per_device_eval_batch_size", "save_strategy", "save_steps"),
    *("save_total_limit", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("seed", "data_seed", "train_sampling_strategy", "dataloader_drop_last", "remove_unused_columns"),
    *("label_names", "average_tokens_across_devices"),
}
"""Arguments that `Arguments` or the trainer reads, each with the meaning that it has in transformers."""

_WITHOUT_EFFECT = {
    *("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "log_level", "log_level_replica"),
    *("log_on_each_node", "logging_nan_inf_filter", "use_cpu", "local_rank", "project", "save_only_model"),
    *("save_on_each_node", "skip_memory_metrics", "eval_accumulation_steps", "eval_do_concat_batches"),
    *("eval_use_gather_object", "prediction_loss_only", "hub_token", "hub_model_id", "hub_strategy"),
    *("hub_private_repo", "hub_always_push", "hub_revision", "use_cache", "ddp_timeout", "ddp_backend"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    *("torch_empty_cache_steps", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *(
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "length_column_name",
    ),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
}
"""Arguments that change no result, of what hetpipe does by itself: processes, memory, loading."""

_REMEDIES = {
    "label_smoothing_factor": "give hetpipe.Trainer a loss of your own",
    "neftune_noise_alpha": "leave it out",
    "deepspeed": "leave it out; the plan shards what has to be",
    "fsdp": "leave it out; the plan shards what has to be",
    "torch_compile": "give hetpipe run --compile, or leave it out",
    "push_to_hub": "push after save_model",
    "auto_find_batch_size": "leave it out; the plan cuts the batch so that it fits",
    "train_sampling_strategy": "give random or sequential",
}
_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer] | None] = {
    "adamw_torch": None,
    "adamw_torch_fused": None,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
"""None: AdamW of the settings."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What transformers' TrainingArguments ask of a run: read from them, and checked, when it is made.

    given: the TrainingArguments. num_devices: of the cluster.

    Raises: InputError naming an argument that cannot be kept.
    """

    given: Any
    num_devices: int

    def __post_init__(self) -> None:
        given = self.given
        for field in dataclasses.fields(given):
            if field.name in _KEPT | _WITHOUT_EFFECT:
                continue
            value = getattr(given, field.name)
            if not _is_default(field, value):
                self._refuse(field.name, value)
        self._check_choice("optim", _OPTIMIZERS)
        self._check_choice("train_sampling_strategy", ("random", "sequential"))
        self._check_choice("save_strategy", ("no", "steps", "epoch"))
        self._check_choice("eval_strategy", ("no", "steps", "epoch"))
        self._check_choice("logging_strategy", ("no", "steps", "epoch"))
        if not given.average_tokens_across_devices:
            self._refuse("average_tokens_across_devices", False)
        if given.load_best_model_at_end and (
            given.metric_for_best_model not in (None, "loss", "eval_loss") or given.greater_is_better
        ):
            raise InputError(
                f"metric_for_best_model={given.metric_for_best_model!r}: beside training the loss alone is "
                "computed; give 'eval_loss', the least of which is the best"
            )
        checked_sinks(self.log)

    @property
    def batch_size(self) -> int:
        """Return the samples of a step, of all devices together."""
        return self.read_together * int(self.given.gradient_accumulation_steps)

    @property
    def read_together(self) -> int:
        """Return the samples that all devices together read at once, of which a step may have several."""
        return int(self.given.per_device_train_batch_size) * self.num_devices

    @property
    def log(self) -> tuple[SinkKind, ...]:
        """Return where the metrics of each step are sent."""
        names = self.given.report_to
        names = [names] if isinstance(names, str) else list(names or ())
        return checked_sinks([name for name in names if name != "none"])

    @property
    def shuffle_seed(self) -> int | None:
        """Return the seed of the order of the samples, None where they come as they are."""
        if str(self.given.train_sampling_strategy) == "sequential":
            return None
        return int(self.given.seed if self.given.data_seed is None else self.given.data_seed)

    def max_steps(self, steps_in_epoch: int) -> int:
        """Return the steps of training."""
        if self.given.max_steps > 0:
            return int(self.given.max_steps)
        epochs: float = self.given.num_train_epochs
        return max(1, math.ceil(epochs * steps_in_epoch))

    def interval(self, what: str, steps_in_epoch: int, max_steps: int) -> int:
        """Return each how many steps there is to be logging, eval or save; 0 for never."""
        strategy = getattr(self.given, f"{what}_strategy")
        if strategy == "no":
            return 0
        if strategy == "epoch":
            return steps_in_epoch
        steps: float = getattr(self.given, f"{what}_steps") or self.given.logging_steps
        return math.ceil(steps * max_steps) if steps < 1 else int(steps)

    def rates(
        self, max_steps: int, chosen: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None
    ) -> Callable[[int], float]:
        """Return the learning rate of each step, as a multiple of the highest, by transformers' schedules.

        chosen: `optimizer_cls_and_kwargs`, which may have a rate of its own.

        Raises: InputError for one that depends on more than the step.
        """
        name, warmup = self.given.lr_scheduler_type, self.given.get_warmup_steps(max_steps)
        # some schedules name rates, not multiples of it
        highest = self.given.learning_rate if chosen is None else _rate_of(*chosen)
        dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=highest)
        try:
            made = get_scheduler(name, dummy, warmup, max_steps, self.given.lr_scheduler_kwargs or None)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise InputError(f"lr_scheduler_type={str(name)!r}: {error}") from None
        if type(made) is not torch.optim.lr_scheduler.LambdaLR:
            self._refuse("lr_scheduler_type", getattr(name, "value", name))
        rate: Callable[[int], float] = made.lr_lambdas[0]
        return rate

    def optimizer(
        self, model: nn.Module, chosen: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    ) -> AdamW | OptimizerFactory:
        """Return the optimizer; chosen: `optimizer_cls_and_kwargs`, whose weight decay does not count.

        Raises: InputError if weight decay is to reach other parameters than matrices.
        """
        given = self.given
        decay = given.weight_decay
        if decay:
            _check_decay(model, decay)
        if chosen is not None:
            return partial(_of_matrices_and_vectors, *chosen, decay)
        made = _OPTIMIZERS[given.optim]
        if made is not None:
            return partial(_of_matrices_and_vectors, made, {"lr": given.learning_rate}, decay)
        betas = (given.adam_beta1, given.adam_beta2)
        return AdamW(given.learning_rate, betas, given.adam_epsilon, decay)

    def dtype(self, model: nn.Module) -> str:
        """Return the precision of training.

        Raises: InputError for weights in which nothing is trained here.
        """
        held = {
            value.dtype for value in model.parameters() if value.is_floating_point() and value.requires_grad
        }
        if held == {torch.float64}:
            return FLOAT64
        if held - {torch.float32}:
            raise InputError(
                f"the model's weights are in {', '.join(sorted(map(str, held)))}; load it in float32, and "
                "give bf16=True to compute in 16 bits"
            )
        return BFLOAT16_AUTOCAST if self.given.bf16 else FLOAT16_AUTOCAST if self.given.fp16 else FLOAT32

    def check_accumulation(self, model: nn.Module, labels: torch.Tensor, num_samples: int) -> None:
        """Check that the loss of a step is one mean over its labels, as transformers computes it too.

        Raises: InputError where it takes means of means.
        """
        count = self.given.gradient_accumulation_steps
        alike = labels.dim() == 1 and num_samples % self.batch_size == 0
        if count > 1 and not accepts_count(model) and not alike:
            raise InputError(
                f"gradient_accumulation_steps={count}: transformers takes the mean of {count} means for a "
                f"{type(model).__name__}, here a step has one; give 1, and per_device_train_batch_size="
                f"{self.given.per_device_train_batch_size * count}, which is cut as devices need it"
            )

    def _check_choice(self, name: str, known: Any) -> None:
        value = getattr(self.given, name)
        value = getattr(value, "value", value)
        if value not in known:
            raise InputError(
                f"{name}={value!r} cannot be kept; {_REMEDIES.get(name, 'give ' + ', '.join(known))}"
            )

    def _refuse(self, name: str, value: object) -> None:
        raise InputError(f"{name}={value!r} cannot be kept; {_REMEDIES.get(name, 'leave it out')}")


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    """Return whether an argument asks for nothing."""
    if value is None or value is False or value in ("", [], {}, ()):
        return True
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if value == default or str(getattr(value, "value", value)) == str(default):
        return True
    return field.name in _MADE_OF_NOTHING


_MADE_OF_NOTHING = {"accelerator_config", "fsdp_config"}
"""Arguments that transformers fills with an object of defaults."""


def _check_decay(model: nn.Module, decay: float) -> None:
    """Check that the parameters which transformers lets decay are those that do here: matrices."""
    forbidden = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decaying = set(get_parameter_names(model, [nn.LayerNorm], forbidden))
    for name, value in model.named_parameters():
        if value.requires_grad and (value.dim() > 1) != (name in decaying):
            does = "lets" if name in decaying else "does not let"
            raise InputError(
                f"weight_decay={decay}: transformers {does} {name!r} decay, here matrices do and vectors do "
                "not; give 0.0"
            )


def _rate_of(kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> float:
    """Return the learning rate of an optimizer: that of its options, else the default of its class.

    Raises: InputError if it cannot be made.
    """
    try:
        made = kind([nn.Parameter(torch.zeros(1))], **options)
    except (TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"optimizer_cls_and_kwargs: {reason}; give a class of torch.optim and its options"
        ) from None
    return float(made.param_groups[0].get("lr", 0.0))


def _of_matrices_and_vectors(
    made: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    decay: float,
    parameters: list[nn.Parameter],
) -> torch.optim.Optimizer:
    """Return an optimizer of which vectors do not decay; of groups the decay counts, not that of options."""
    groups = [
        {"params": [value for value in parameters if value.dim() > 1], "weight_decay": decay},
        {"params": [value for value in parameters if value.dim() <= 1], "weight_decay": 0.0},
    ]
    return made([group for group in groups if group["params"]], **options)
