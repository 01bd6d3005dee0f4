"""Which modules ranks of a model load, told without loading any: for a server that forks ranks later on."""

from collections.abc import Iterable
from dataclasses import replace

from cost_model.cluster import Device
from hetpipe.models.names import ModelEntry, model_entry
from hetpipe.runs.settings import TaskSettings

RANKS = ("hetpipe.training.rank", "hetpipe.profiling.layer_profiler", "torch._dynamo")
"""Where what ranks run is, and what torch loads with the first optimizer, in a second or two of each rank."""
OF_TABLE = ("bert", "gpt2", "llama")
"""Families of the models known by name, which begin with them."""


def modules_ahead(entry: ModelEntry, devices: Iterable[Device]) -> tuple[str, ...]:
    """Return the names of modules that ranks of these devices load for a model.

    The one of transformers is told by the type of the model; ranks of the few that are elsewhere load it
    themselves, as they do whatever is not named here.
    """
    family = _family(entry)
    modules = [f"transformers.models.{family}.modeling_{family}"] if family else []
    if not all(device.is_gpu for device in devices):
        modules.append("hetpipe.models.dropout_ahead")
    if entry.lora is not None:
        modules.append("hetpipe.models.peft_ahead")
    return (*RANKS, *modules)


def modules_of(settings: TaskSettings, devices: Iterable[Device]) -> tuple[str, ...]:
    """Return the names of modules that ranks of these devices load for the model of a run.

    Raises: InputError if there is no such model.
    """
    entry = model_entry(str(settings.model_folder or settings.base_model))
    return modules_ahead(replace(entry, lora=settings.lora), devices)


def _family(entry: ModelEntry) -> str:
    if entry.folder is None:
        return next((family for family in OF_TABLE if entry.name.startswith(family)), "")
    return entry.folder.family
