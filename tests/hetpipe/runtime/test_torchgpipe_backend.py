"""A plan as a torchgpipe model: the gradients of the whole model, our balance, devices and microbatches."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import user_tasks
from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InputError
from hetpipe.runtime.torchgpipe_backend import to_torchgpipe
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan

CPU_KINDS = ("cpu", "emulated", "emulated")


def cluster(kinds: tuple[str, ...] = CPU_KINDS) -> Cluster:
    """A node for each device, as emulated clusters often have."""
    nodes = tuple(
        Node(f"n{index}", (Device(f"n{index}/0", f"n{index}", kind, 1e9),))
        for index, kind in enumerate(kinds)
    )
    return Cluster("some", Link(1e-4, 1e9), nodes)


def plan(cuts: tuple[int, ...] = (0, 1, 4, 5), microbatch_size: int = 4, **stage: bool) -> Plan:
    stages = tuple(
        Stage((f"n{index}/0",), (cuts[index], cuts[index + 1]), len(cuts) - 1 - index, **stage)
        for index in range(len(cuts) - 1)
    )
    return Plan("manual", "mine", 10, (Pipeline(microbatch_size, 10, stages),))


def gradients(model: nn.Module, run: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, user_tasks.NUM_FEATURES, generator=generator, dtype=torch.float64)
    user_tasks.squared_error(run(x), torch.sin(x[:, : user_tasks.NUM_OUTPUTS])).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_equal_those_of_the_whole_model(recompute):
    whole = user_tasks.build_plain().double()
    split = copy.deepcopy(whole)
    made = to_torchgpipe(plan(recompute=recompute), split, cluster())
    assert made.balance == [1, 3, 1]
    assert made.chunks == 3
    assert made.checkpoint == ("always" if recompute else "never")
    assert made.devices == [torch.device("cpu")] * 3
    expected, found = gradients(whole, whole), gradients(split, made)
    assert expected.keys() == found.keys() and len(found) == 6
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


def test_devices_may_be_given_or_follow_from_the_names():
    model = user_tasks.build_plain()
    assert to_torchgpipe(plan(), model, ["cpu"] * 3).devices == [torch.device("cpu")] * 3
    if not torch.cuda.is_available():
        made = to_torchgpipe(chain_plan("mine", [0, 2, 5], 4), user_tasks.build_plain())
        assert made.devices == [torch.device("cpu")] * 2


def mixed_recompute() -> Plan:
    whole = plan()
    (pipeline,) = whole.pipelines
    stages = (replace(pipeline.stages[0], recompute=True), *pipeline.stages[1:])
    return replace(whole, pipelines=(replace(pipeline, stages=stages),))


def two_pipelines() -> Plan:
    pipelines = tuple(Pipeline(4, 5, (Stage((f"n{index}/0",), (0, 5), 1),)) for index in range(2))
    return Plan("manual", "mine", 10, pipelines)


def tied() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    model[4].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("chosen", "model", "devices", "message"),
    [
        (two_pipelines(), user_tasks.build_plain(), cluster(), "the plan has 2 pipelines, torchgpipe runs"),
        (mixed_recompute(), user_tasks.build_plain(), cluster(), r"stages \[0\] recompute and the others"),
        (plan(), nn.Linear(2, 2), cluster(), "the model is a Linear, torchgpipe takes an nn.Sequential"),
        (plan(), user_tasks.build(), cluster(), "the model has 6 layers, the plan is for 5"),
        (plan(), tied(), cluster(), "layers 0 and 4 share a parameter"),
        (plan(), user_tasks.build_plain(), ["cpu"], "1 devices are given for 3 stages"),
        (plan(), user_tasks.build_plain(), None, "the plan uses nodes n0, n1, n2, torchgpipe one host"),
        (plan(), user_tasks.build_plain(), cluster(("A100",) * 3), "the plan uses nodes n0, n1, n2"),
        (plan((0, 1, 5)), user_tasks.build_plain(), cluster(("cpu", "A100")), "is GPU 0, this host"),
    ],
)  # fmt: skip
def test_what_torchgpipe_cannot_run_is_refused_in_one_line(chosen, model, devices, message):
    if torch.cuda.is_available() and "this host" in message:
        pytest.skip("this host has that GPU")
    with pytest.raises(InputError, match=message) as caught:
        to_torchgpipe(chosen, model, devices)
    assert "\n" not in str(caught.value)
