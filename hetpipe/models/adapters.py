"""Adapters (LoRA) in a model: put there by peft beside layers of a frozen base, drawn by name, merged."""

import importlib
import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from cost_model.strict_files import did_you_mean
from hetpipe.models.block_structure import refused_on_error
from hetpipe.models.huggingface import ModelSpec, model_spec
from hetpipe.models.packed_inputs import packed
from hetpipe.models.quantized_weights import Packing, bitsandbytes, dense
from hetpipe.runs.lora import ALL_LINEAR, LoraSettings
from hetpipe.runs.quantization import Quantization, load_in_suffix
from hetpipe.runs.settings import TaskSettings

ADAPTER = "default"
"""The name that peft gives to an adapter unless told otherwise."""

_LINEAR = ("Linear", "Conv1D")


def task_spec(settings: TaskSettings) -> ModelSpec:
    """Return the model of a run, with the adapters of its settings, beside a base held as they say.

    Raises: InputError as `model_spec`, `held_in`, `with_adapters` and `packed`.
    """
    spec = _with_own_weights(settings)
    return packed(spec) if settings.run.pack else spec


def _with_own_weights(settings: TaskSettings) -> ModelSpec:
    spec = held_in(model_spec(settings.base_model, settings.model_folder), settings.run.load_in)
    if settings.lora is None:
        check_trainable(spec.name, spec.quantization)
        return spec
    return with_adapters(spec, settings.lora)


def held_in(spec: ModelSpec, load_in: str | None) -> ModelSpec:
    """Return a model whose frozen matrices are held in "4bit" or "8bit"; None: as they are given.

    Raises: InputError if bitsandbytes is not installed.
    """
    if load_in is not None:
        quantization = Quantization(load_in)
        spec = replace(spec, name=spec.name + load_in_suffix(load_in), quantization=quantization)
    if spec.quantization is not None:
        bitsandbytes()
    return spec


def packings_of(spec: ModelSpec) -> dict[str, Packing]:
    """Return which parameters of a model are held in 4 or 8 bits, by name: those that transformers takes.

    That is the weights of all linear layers but the output embeddings, what is tied to others, and what the
    quantization skips.

    Raises: InputError if there are none.
    """
    if spec.quantization is None:
        return {}
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    with torch.device("meta"):
        model = spec.build()
    names = {id(value): name for name, value in model.named_parameters()}
    skip = None if spec.quantization.skip is None else list(spec.quantization.skip)
    with base_alone(model):
        left = HfQuantizer.get_modules_to_not_convert(
            cast(Any, model), skip, getattr(model, "_keep_in_fp32_modules", None)
        )
        found = {
            names[id(module.weight)]: Packing(spec.quantization, isinstance(module, Conv1D))
            for name, module in model.named_modules()
            if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, left)
        }
    if not found:
        raise InputError(
            f"{spec.name} has no linear layer to hold in {spec.quantization.bits} bits; leave --load-in out"
        )
    return found


def check_trainable(name: str, quantization: Quantization | None) -> None:
    """Check that the weights of a model without adapters are not quantized.

    Raises: InputError if they are.
    """
    if quantization is not None:
        raise InputError(
            f"{name}: weights in {quantization.bits} bits cannot be trained, only adapters beside them; give "
            "--lora or --adapter"
        )


def peft_starts_cuda() -> bool:
    """Return whether CUDA starts when peft is loaded, which would be lost to the ranks that a server forks.

    Where there is a GPU, bitsandbytes does so, which peft loads; see bitsandbytes/cuda_specs.py.
    """
    return importlib.util.find_spec("bitsandbytes") is not None and torch.accelerator.is_available()


def with_adapters(spec: ModelSpec, lora: LoraSettings) -> ModelSpec:
    """Return a model whose linear layers of these names have adapters, and whose base is frozen.

    Raises: InputError if it has no such layers, or peft is not installed.
    """
    loaded_peft()
    _check_targets(spec, lora)
    return replace(
        spec,
        name=spec.name + lora.suffix,
        build=partial(_build, spec.build, lora),
        build_shrunk=partial(_build, spec.build_shrunk, lora),
        base=spec,
    )


def peft_config_of(spec: ModelSpec) -> Any:
    """Return peft's LoraConfig of a model with adapters, with what peft found out about its layers."""
    with torch.device("meta"):
        model = spec.build()
    return cast(Any, model).peft_config[ADAPTER]


def loaded_peft() -> ModuleType:
    """Return peft; InputError where it is not installed."""
    # bitsandbytes, which peft loads, says on CPUs that a faster kernel is not installed
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise InputError(f'adapters need peft ({error}); pip install -e ".[lora]"') from None


def _build(build: Callable[[], nn.Module], lora: LoraSettings) -> nn.Module:
    model = build()
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    config = loaded_peft().LoraConfig(
        r=lora.r,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        use_rslora=lora.rslora,
    )
    with refused_on_error(f"adapters {lora.text}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft sees by itself that GPT-2's layers lie transposed, and says so
        loaded_peft().inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    return model


def with_named_targets(spec: ModelSpec, lora: LoraSettings) -> LoraSettings:
    """Return settings whose targets are names: of ALL_LINEAR, those that peft takes it for.

    Raises: InputError if there is more beside it, or a name is of the head as well.
    """
    if ALL_LINEAR not in lora.targets:
        return lora
    if lora.targets != (ALL_LINEAR,):
        raise InputError(f"LoRA target {ALL_LINEAR!r} is all there are; leave the others out, or it")
    with torch.device("meta"):
        model: Any = spec.build_shrunk()
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if type(module).__name__ in _LINEAR}
    targets = {name.rpartition(".")[-1] for name, module in linear.items() if module is not head}
    if any(module is head and name.rpartition(".")[-1] in targets for name, module in linear.items()):
        raise InputError(f"LoRA target {ALL_LINEAR!r}: {spec.name} calls its head as others; name them")
    return replace(lora, targets=tuple(targets))


def _check_targets(spec: ModelSpec, lora: LoraSettings) -> None:
    """Check that each target names linear layers, alike in all blocks.

    Raises: InputError naming one that does not, and what it may have meant.
    """
    with torch.device("meta"):
        model = spec.build_shrunk()
    shared = {id(value) for value in _tied(model)}
    names: dict[str, bool] = {}  # what a layer may be called -> whether its weights are another's too
    for name, module in model.named_modules():
        if type(module).__name__ in _LINEAR:
            parts = re.split(r"\.\d+\.", f".{name}")[-1].lstrip(".").split(".")
            for start in range(len(parts)):
                names[".".join(parts[start:])] = id(cast(Any, module).weight) in shared
    for target in lora.targets:
        if target not in names:
            near = did_you_mean(target, [name for name in names if "." not in name])
            raise InputError(f"LoRA target {target!r}: {spec.name} has no such linear layer; {near}")
        if names[target]:
            raise InputError(
                f"LoRA target {target!r}: {spec.name} shares its weights with another layer, from which "
                "a merged adapter could not be told; leave it out"
            )


def _tied(model: nn.Module) -> Iterator[nn.Parameter]:
    seen: set[int] = set()
    for _, value in model.named_parameters(remove_duplicate=False):
        if id(value) in seen:
            yield value
        seen.add(id(value))


def has_adapters(model: nn.Module) -> bool:
    """Return whether peft has put anything into a model, of whatever method."""
    return any(getattr(module, "peft_config", None) for module in model.modules())


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters.

    >>> base_name("model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter is one that `with_adapters` added."""
    return re.search(rf"\.lora_[AB]\.{ADAPTER}\.weight$", name) is not None


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that have adapters, by name; each holds the base's layer as `base_layer`."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


@contextmanager
def base_alone(model: nn.Module) -> Iterator[None]:
    """Have the model without its adapters inside the context, on the same parameters."""
    adapted = adapted_layers(model)
    for name, layer in adapted.items():
        _put(model, name, cast(nn.Module, layer.base_layer))
    try:
        yield
    finally:
        for name, layer in adapted.items():
            _put(model, name, layer)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent)._modules[leaf] = module


def draw_adapters(layer: nn.Module) -> None:
    """Draw new adapters of a layer as peft does: A at random, B zero."""
    cast(Any, layer).reset_lora_parameters(ADAPTER, True)


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the base with the adapters merged into them, by the base's names.

    Quantized ones are dequantized, and stay so.
    """
    weights = {
        base_name(name): dense(value, value.dtype)
        for name, value in model.named_parameters()
        if not is_adapter(name)
    }
    for name, layer in adapted_layers(model).items():
        delta = cast(Any, layer).get_delta_weight(ADAPTER)
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + delta
    return weights
