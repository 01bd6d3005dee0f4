"""Who writes which layers of a checkpoint, and what a rank takes from one: any plan reads any."""

from pathlib import Path

import torch

from cost_model.errors import InputError
from hetpipe.data.task import TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.models.frozen_weights import is_rounded
from hetpipe.models.partial_model import LayerModel
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.settings import TaskSettings
from hetpipe.runtime.bucket_parameters import parts_in
from hetpipe.runtime.optimizer import OPTIMIZER_STATES, Optimizer
from hetpipe.training import checkpoint
from hetpipe.training.frozen_base import base_hashes, check_base
from partition.plan import Plan


def home_layers(chain: ChainModel) -> dict[str, int]:
    """Return the layer in whose file each parameter is stored: the first that holds it."""
    homes: dict[str, int] = {}
    for layer in range(chain.num_layers):
        for info in chain.parameters(layer):
            homes.setdefault(info.name, layer)
    return homes


def _fill_frozen(parameter: torch.Tensor, found: torch.Tensor, name: str, source: Path) -> None:
    """Take a weight into a parameter that is kept in fewer bits: the same, or it would be another model.

    Raises: InputError if it is not the one that the parameter holds.
    """
    if not torch.equal(parameter, found.to(parameter.device, parameter.dtype)):
        raise InputError(
            f"{source}: its {name!r} is not that of the model at hand, where it is frozen and kept in "
            f"{parameter.dtype}; export the checkpoint, and begin with the exported model"
        )


def written_by(plan: Plan, device: str) -> list[int]:
    """Return the layers that a device writes: those whose states it has, or whose lowest owner it is.

    Of a layer that several own the one with its first range writes it (`joined_parts`).
    """
    held = plan.layers_of(device)
    if plan.state_owners is not None:
        return [layer for layer in held if plan.state_owners[layer] == device]
    lower = plan.device_names[: plan.device_names.index(device)]
    return [layer for layer in held if not any(layer in plan.layers_of(name) for name in lower)]


def check_checkpoint(manifest: checkpoint.Manifest, settings: TaskSettings, source: Path) -> None:
    """Check that the run can go on from the checkpoint.

    Raises: InputError naming what differs.
    """
    check_adapters(manifest, settings.lora, source)
    for key in ("model", "seed", "sequence_length"):
        check_same(manifest, key, getattr(settings, key), source)
    check_steps(manifest, settings.run.steps, source)


def check_steps(manifest: checkpoint.Manifest, steps: int, source: Path) -> None:
    """Check that a run of so many steps has some left to do after a checkpoint.

    Raises: InputError if not.
    """
    if manifest.step >= steps:
        raise InputError(f"{source}: is at step {manifest.step}, the run ends at step {steps}; raise --steps")


def check_same(manifest: checkpoint.Manifest, key: str, mine: str | int, source: Path) -> None:
    """Check that a run has the model, or whatever the key names, of the checkpoint.

    Raises: InputError naming both.
    """
    theirs = getattr(manifest, key)
    if mine != theirs:
        raise InputError(f"{source}: its {key} is {theirs!r}, the run's {mine!r}; give the same to resume")


def check_adapters(manifest: checkpoint.Manifest, lora: LoraSettings | None, source: Path) -> None:
    """Check that a run has the adapters of the checkpoint.

    Raises: InputError naming both, and what to give.
    """
    if lora != manifest.lora:
        mine, theirs = (found.text if found else "none" for found in (lora, manifest.lora))
        option = f"--lora {theirs}" if manifest.lora else "no --lora"
        raise InputError(f"{source}: its adapters are {theirs}, the run's {mine}; give {option} to resume")


def check_optimizer(manifest: checkpoint.Manifest, name: str, source: Path) -> None:
    """Check that the states of the checkpoint are those of the named optimizer.

    Raises: InputError naming both.
    """
    theirs = manifest.optimizer.get("name", name)
    if theirs != name:
        raise InputError(f"{source}: was written with optimizer {theirs}, the run's is {name}; give the same")


def load_checkpoint(
    source: Path, settings: TaskSettings, task: TrainingTask, model: LayerModel, optimizer: Optimizer
) -> tuple[int, int]:
    """Fill the layers of this rank from a checkpoint of any plan; return (step, samples seen).

    Raises: InputError naming file and reason if it does not fit the run or is damaged.
    """
    manifest = checkpoint.read_manifest(source)
    check_checkpoint(manifest, settings, source)
    if manifest.vocabulary_sha256 != task.vocabulary_sha256:
        raise InputError(f"{source}: was trained with another vocabulary than the run's")
    if len(manifest.layers) != task.chain.num_layers:
        raise InputError(
            f"{source}: has {len(manifest.layers)} layers, {settings.model} has {task.chain.num_layers}"
        )
    check_optimizer(manifest, optimizer.name, source)
    homes = home_layers(task.chain)
    check_base(manifest.base, base_hashes(task.chain, model, settings.seed), source)
    owned = model.held_parameters()
    parameters = {name: value for name, value in owned.items() if name not in task.chain.base}
    found_steps = manifest.optimizer.get("steps")
    num_steps = found_steps if isinstance(found_steps, int) else manifest.step
    parts = parts_in(optimizer.parameters)
    for layer in sorted({homes[name] for name in (*parameters, *(part.name for part in parts.values()))}):
        mine = [name for name in parameters if homes[name] == layer]
        cut = {key: part for key, part in parts.items() if homes[part.name] == layer}
        wanted = [key for name in mine for key in (name, *(f"{name}.{s}" for s in OPTIMIZER_STATES))]
        reached = set(optimizer.parameters)
        wanted = [key for key in wanted if key in parameters or key.rsplit(".", 1)[0] in reached]
        for name in {part.name for part in cut.values()}:
            wanted += [name, *(f"{name}.{s}" for s in OPTIMIZER_STATES)]
        # of another optimizer than ours the file knows which states each parameter has
        names = wanted if optimizer.name == Optimizer.name else None
        tensors = checkpoint.read_layer(source, manifest, layer, names)
        for name in mine:
            if name not in reached and is_rounded(parameters[name].dtype, tensors[name].dtype):
                _fill_frozen(parameters[name], tensors[name], name, source)
            else:
                with torch.no_grad():
                    parameters[name].copy_(tensors[name])
            optimizer.load_states(name, tensors, num_steps)
        for key, part in cut.items():
            whole = tensors[part.name]
            with torch.no_grad():
                optimizer.parameters[key].copy_(part.of(whole))
            states = {
                key + name.removeprefix(part.name): (
                    part.of(state).clone() if state.shape == whole.shape else state  # not a view of all
                )
                for name, state in tensors.items()
                if name.startswith(f"{part.name}.")
            }
            optimizer.load_states(key, states, num_steps)
    optimizer.num_steps = num_steps  # also where no parameter is trained
    return manifest.step, manifest.samples_seen
