"""A stage that runs layer by layer keeps what backwards need, and nothing of frozen layers below."""

from dataclasses import replace

import torch

import user_tasks
from hetpipe.models.chain import ChainModel
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.program.instructions import Compute, Pass, Program
from hetpipe.runtime.byte_counter import ByteCounter
from hetpipe.runtime.stage_runner import Microbatch, StageRunner
from partition.plan import Pipeline, Plan, Stage

SAMPLES = 4


def frozen_below() -> torch.nn.Module:
    """Linear, Tanh, Linear, GELU, Linear; the first two give 512 bytes each, the first is frozen."""
    model = user_tasks.build_plain().double()
    model[0].requires_grad_(False)
    return model


def test_outputs_of_frozen_layers_are_let_go_of_before_the_backward() -> None:
    model = frozen_below()
    chain = ChainModel.from_module(model, torch.zeros(1, user_tasks.NUM_FEATURES, dtype=torch.float64))
    assert chain.first_trained == 2
    layers = chain.materialise(range(5), 0, torch.float64).train()
    for name, value in layers.owned_parameters().items():
        value.requires_grad_(not name.startswith("0."))
    stages = (Stage(("a/0",), (0, 5), 1),)
    plan = Plan("one", "mine", SAMPLES, (Pipeline(SAMPLES, SAMPLES, stages),), zero=2)
    program = Program(plan, (), (), first_trained=2)
    runner = StageRunner(program, layers, KeyedDropout(0), user_tasks.squared_error)
    x, y = (torch.stack(part) for part in zip(*user_tasks.samples(SAMPLES), strict=True))
    microbatch = Microbatch(0, tuple(range(SAMPLES)), {"x": x}, y, 1 / SAMPLES)
    forward = Compute(Pass.FORWARD, 0, 0, 0)
    with ByteCounter() as counter:
        for layer in range(5):
            runner.forward(replace(forward, layer=layer), microbatch, ())
        held = list(counter._known.values())
        for layer in (4, 3, 2):
            runner.backward(Compute(Pass.BACKWARD, 0, 0, 0, layer), ())
    assert held.count(512) == 1  # what enters the first trained layer
    assert runner.num_in_flight == 0

    expected = model.requires_grad_(True)
    with torch.no_grad():
        for name, value in expected.named_parameters():
            value.copy_(layers.owned_parameters()[name])
    (user_tasks.squared_error(expected(x), y) / SAMPLES).backward()
    for name, value in layers.owned_parameters().items():
        if name.startswith("0."):
            assert value.grad is None
        else:
            torch.testing.assert_close(value.grad, dict(expected.named_parameters())[name].grad)
