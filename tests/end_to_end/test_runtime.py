"""What a step holds and for how long, and steps that differ from the ones before."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import runtime_mains
import user_tasks
from cost_model.cluster import CPU
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.memory import StageShape, stage_activation_bytes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.models.chain import ChainModel, TensorSpec
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.runs.settings import Settings
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.training.handover import Handover
from hetpipe.training.rank import KEPT_STEPS, _Run
from hetpipe.training.run import prepare, verified_prediction
from partition.plan import Pipeline
from random_cases import MODULES, Case, chain_of
from runs import chain_plan, cluster_file
from runtime_mains import case_of, stages


def run(main: Any, case: Case, *arguments: Any) -> list[dict[str, Any]]:
    names = case.program.device_names
    events: list[dict[str, Any]] = []
    group = RankGroup(names, (1,) * len(names), preload=MODULES, timeout_s=120.0)
    run_ranks(main, arguments, group, events.append)
    return events


def three_owners(model: str, size: int, *num_samples: int) -> Case:
    """A chain of three devices, and a pipeline over the last two the other way round."""
    first = Pipeline(size, num_samples[0], stages((0, 0, 2, 3), (1, 2, 4, 2), (2, 4, 6, 1)))
    second = Pipeline(size + 1, num_samples[1], stages((2, 0, 2, 2), (1, 2, 6, 1), recompute=True))
    return case_of(model, first, second)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2-tiny", "pairs"])
def test_batch_size_and_sequence_length_may_change_from_step_to_step(model):
    cases = [three_owners(model, 1, 5, 3), three_owners(model, 2, 3, 7), three_owners(model, 3, 4, 1)]
    turns = [(0, 8), (0, 5), (1, 11), (0, 11), (2, 3), (1, 8), (2, 12)]
    (event,) = run(runtime_mains.train_under_all, cases[0], cases, turns)
    assert len(event["differences"]) == len(turns)
    assert max(event["differences"]) <= 1e-11


def test_what_travels_follows_the_shapes_of_the_inputs():
    gpt2, pairs = chain_of("gpt2-tiny"), chain_of("pairs")
    for length in (8, 5):
        hidden = TensorSpec((length, 16), torch.float32)
        assert gpt2.boundary_for(1, {"input_ids": torch.zeros(3, length, dtype=torch.long)}) == (hidden,)
        x = torch.zeros(3, length, 8, dtype=torch.float64)
        vector, mark = TensorSpec((length, 8), torch.float32), TensorSpec((length,), torch.int64)
        assert pairs.boundary_for(3, {"any name": x}) == (vector, mark)
    convolution = ChainModel.from_module(_convolutions, torch.zeros(1, 3, 8, 8))
    assert convolution.boundary_for(1, {"x": torch.zeros(2, 3, 6, 10)})[0].shape_per_sample == (4, 4, 8)


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))


def deep(model: str, num_microbatches: int, **recompute: Any) -> Case:
    entries = ((0, 0, 2, 3), (1, 2, 4, 2), (2, 4, 6, 1))
    return case_of(model, Pipeline(2, 2 * num_microbatches, stages(*entries, **recompute)))


def interleaved(model: str, num_microbatches: int) -> Case:
    """Two devices at two stages each, and a second pipeline that ends where the first begins."""
    first = Pipeline(1, num_microbatches, stages((0, 0, 1, 4), (1, 1, 3, 3), (0, 3, 5, 2), (1, 5, 6, 1)))
    second = Pipeline(1, num_microbatches, stages((1, 0, 4, 2), (0, 4, 6, 2)))
    return case_of(model, first, second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "most"),
    [
        (deep, 1.0),
        (lambda *arguments: deep(*arguments, recompute=True), 1.0),
        (lambda *arguments: deep(*arguments, recompute=True, segment_layers=1), 1.0),
        (interleaved, 1.5),  # how many of their in_flight two stages hold at once depends on the order
    ],
    ids=["chain", "recompute", "by layer", "interleaved"],
)
def test_memory_does_not_grow_with_the_microbatches(make, most):
    cases = [make("pairs", count) for count in (8, 64)]
    events = run(runtime_mains.peak_bytes, cases[0], cases)
    peaks = {(event["case"], event["rank"]): event["bytes"] for event in events}
    num_ranks = len(cases[0].program.device_names)
    assert len(peaks) == 2 * num_ranks
    for rank in range(num_ranks):
        assert 0 < peaks[1, rank] <= most * peaks[0, rank], rank


@pytest.mark.slow
def test_a_gradient_waits_for_a_stage_that_has_more_in_flight():
    flights = [(1, 1), (2, 1), (6, 1), (3, 3), (6, 3)]
    cases = [
        case_of("gpt2-tiny", Pipeline(2, 24, stages((0, 0, 3, before), (1, 3, 6, here))))
        for before, here in flights
    ]
    events = run(runtime_mains.peak_bytes, cases[0], cases)
    peaks = {flights[event["case"]]: event["bytes"] for event in events if event["rank"] == 1}
    message = 2 * 8 * 16 * 8  # samples, tokens, width, float64
    layers = (replace(it, output_bytes_per_sample=message / 2) for it in cases[0].profile.layers)
    profile = replace(cases[0].profile, layers=tuple(layers))
    for before, here in flights:
        shape = StageShape(3, 6, here, 2, in_flight_before=before)
        alike = stage_activation_bytes(profile, shape._replace(in_flight_before=here))[1]
        more = stage_activation_bytes(profile, shape)[1] - alike
        assert more == message * (before - here) == peaks[before, here] - peaks[here, here]


def test_a_rank_keeps_the_events_of_its_last_steps_only(tmp_path):
    num_steps = KEPT_STEPS + 5
    settings = Settings("mine", num_steps, sequence_length=1, clip_norm=1e30)
    layers = tuple(LayerProfile(str(index), 1000.0, 64.0, 64.0) for index in range(3))
    times = LayerTimes((0.001,), (0.002,))
    profile = ModelProfile("mine", 1, "float32", layers, {CPU: KindProfile("measured", (1,), (times,) * 3)})
    folder = RunFolder(tmp_path / "run")
    cluster = cluster_file(tmp_path)
    prediction = verified_prediction(settings, cluster, profile, chain_plan("mine", [0, 3], 16))
    prepare(folder, settings, cluster, profile, prediction, own_data=True)
    handover = Handover.fill(tmp_path, prediction.costs, prediction.trace)
    run = _Run.open(folder, user_tasks.linear_task, handover, 0, lambda event: None)
    run.train()
    assert len(run.outcomes) == KEPT_STEPS
    report = read_report(folder.report)
    assert report.steps == len(report.step_s_all) == num_steps
    assert report.stages[0].measured_busy_s > 0
