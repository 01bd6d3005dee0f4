"""A plan as a model of torchgpipe, which trains it in one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from hetpipe.runtime.accelerators import names_here, vendor_here
from hetpipe.runtime.gpus import gpu_index
from partition.plan import Plan

ALWAYS, NEVER = "always", "never"


def to_torchgpipe(
    plan: Plan, model: nn.Sequential, devices: Cluster | Sequence[torch.device | str] | None = None
) -> Any:
    """Return a `torchgpipe.GPipe` (Kim et al., 2020) with the plan's balance, microbatches and devices.

    plan: of one pipeline, on one host. model: its layers, which are moved to their devices, not copied.
    devices: the cluster of the plan, whose CPUs and emulated devices become the CPU and whose GPUs the GPU
    with their index; or a device for each stage. None: GPUs by their index where torch sees any, else CPUs.

    What torchgpipe does not know is left out: it keeps all microbatches in flight (GPipe), sums no gradients
    between processes, and drops by torch's own random numbers, so that with dropout results differ from ours.
    It splits a batch into num_microbatches of equal size, give or take one sample.

    Raises: InputError for a plan or model that torchgpipe cannot run; says why and what can.
    """
    if len(plan.pipelines) > 1:
        raise InputError(
            f"the plan has {len(plan.pipelines)} pipelines, torchgpipe runs one; plan with --pipelines 1, or "
            "train with hetpipe.Trainer"
        )
    (pipeline,) = plan.pipelines
    if not isinstance(model, nn.Sequential):
        raise InputError(
            f"the model is a {type(model).__name__}, torchgpipe takes an nn.Sequential; use hetpipe.Trainer"
        )
    if len(model) != plan.num_layers:
        raise InputError(
            f"the model has {len(model)} layers, the plan is for {plan.num_layers}; plan for this model"
        )
    _check_parameters(model)
    recompute = {stage.recompute for stage in pipeline.stages}
    if len(recompute) > 1:
        some = [index for index, stage in enumerate(pipeline.stages) if stage.recompute]
        raise InputError(
            f"stages {some} recompute and the others do not, torchgpipe has one mode for all; set recompute "
            "alike in all stages"
        )
    from torchgpipe import GPipe

    return GPipe(
        model,
        balance=[stage.num_layers for stage in pipeline.stages],
        devices=_devices_of(plan, devices),
        chunks=pipeline.num_microbatches,
        checkpoint=ALWAYS if recompute == {True} else NEVER,
    )


def _check_parameters(model: nn.Sequential) -> None:
    children = list(model.named_children())
    if len(children) != len(model):
        raise InputError("a layer occurs twice in the model, torchgpipe needs each once; use hetpipe.Trainer")
    holders: dict[nn.Parameter, str] = {}
    for name, child in children:
        for parameter in child.parameters():
            if parameter in holders:
                raise InputError(
                    f"layers {holders[parameter]} and {name} share a parameter, torchgpipe cannot; use "
                    "hetpipe.Trainer"
                )
            holders[parameter] = name


def _devices_of(plan: Plan, devices: Cluster | Sequence[torch.device | str] | None) -> list[torch.device]:
    """Return the torch device of each stage."""
    names = [stage.device for stage in plan.pipelines[0].stages]
    if isinstance(devices, Cluster):
        on_cpu = {name: not devices.device(name).is_gpu for name in names}
    elif devices is not None:
        if len(devices) != len(names):
            raise InputError(f"{len(devices)} devices are given for {len(names)} stages; give one for each")
        return [torch.device(device) for device in devices]
    else:
        on_cpu = dict.fromkeys(names, vendor_here() is None)
    known_here = {name for name in names if isinstance(devices, Cluster) and on_cpu[name]}
    nodes = sorted({name.rpartition("/")[0] for name in names if name not in known_here})
    if len(nodes) > 1:
        raise InputError(
            f"the plan uses nodes {', '.join(nodes)}, torchgpipe one host; use hetpipe.Trainer, or give the "
            "cluster if the devices are emulated"
        )
    cluster = devices if isinstance(devices, Cluster) else None
    return [torch.device("cpu") if on_cpu[name] else _gpu(name, cluster) for name in names]


def _gpu(name: str, cluster: Cluster | None) -> torch.device:
    index = gpu_index(cluster.device(name)) if cluster else int(name.rpartition("/")[2])
    vendor, count = vendor_here(), len(names_here())
    if vendor is None or index >= count:
        raise InputError(f"device {name!r} is GPU {index}, this host has {count}; give devices")
    return torch.device(vendor.device_type, index)
