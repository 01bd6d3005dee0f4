"""A rank reads the samples of its own pipelines, and on a device those of the next step ahead."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cost_model.errors import InputError
from hetpipe.data.task import TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.program.instructions import Program
from hetpipe.runtime.rank_setup import microbatches, slices
from hetpipe.training.rank_data import RankData
from partition.plan import Pipeline, Plan, Stage

HOST, DEVICE = torch.device("cpu"), torch.device("meta")
BATCH, STEPS = 8, 3


def two_pipelines() -> Program:
    """Five samples on the first two devices, three on the last two."""
    plan = Plan(
        "manual",
        "mine",
        BATCH,
        (
            Pipeline(2, 5, (Stage(("n/0",), (0, 1), 1), Stage(("n/1",), (1, 2), 1))),
            Pipeline(3, 3, (Stage(("n/2",), (0, 1), 1), Stage(("n/3",), (1, 2), 1))),
        ),
    )
    return Program(plan, (), ((), (), (), ()))


class Data:
    """Samples that are their own positions, and who read which."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []
        self.threads: list[int] = []

    def __call__(self, first: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
        self.read.append((first, count))
        self.threads.append(threading.get_ident())
        positions = torch.arange(first, first + count)
        return {"x": positions}, positions % 2


def task(data: object, **options: object) -> TrainingTask:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    chain = ChainModel.from_module(model, torch.zeros(1, 1))
    return TrainingTask(chain, lambda outputs, labels: labels.sum(), data, lambda count: count, **options)


@pytest.fixture
def data() -> Iterator[Data]:
    yield Data()


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_reads_its_pipelines_alone(data, rank):
    program = two_pipelines()
    mine = RankData(task(data), program, rank, HOST, STEPS * BATCH)
    whole = data(BATCH, BATCH)
    data.read.clear()
    found = mine.step(BATCH)
    pipeline = rank // 2
    assert data.read == [(BATCH, 5) if pipeline == 0 else (BATCH + 5, 3)]
    assert found.weight == 1 / BATCH
    ours = microbatches(program, 1, found.by_pipeline, found.weight)
    theirs = slices(program, 1, *whole, found.weight)
    for index in range(program.plan.pipelines[pipeline].num_microbatches):
        one, other = ours(pipeline, index), theirs(pipeline, index)
        assert one.samples == other.samples
        assert torch.equal(one.inputs["x"], other.inputs["x"]) and torch.equal(one.labels, other.labels)


def test_terms_that_the_user_counts_are_those_of_the_whole_step(data):
    counted = RankData(
        task(data, count_terms=lambda labels: int(labels.sum())), two_pipelines(), 3, HOST, BATCH
    )
    found = counted.step(0)
    assert found.weight == 1 / 4  # odd positions of 0 to 7
    assert data.read == [(0, BATCH)]
    assert found.by_pipeline[1][0]["x"].tolist() == [5, 6, 7]
    half = RankData(task(data, count_terms=lambda labels: 0.5), two_pipelines(), 3, HOST, BATCH)
    assert half.step(0).weight == 2  # a sum of weights of classes


@pytest.mark.parametrize(
    "terms", [0, -3, float("nan"), float("inf"), "8", None, torch.tensor(0), torch.ones(8)]
)
def test_a_step_without_a_number_of_terms_is_refused(data, terms):
    """Divided by infinity, loss and gradients were zero."""
    counted = RankData(task(data, count_terms=lambda labels: terms), two_pipelines(), 3, HOST, BATCH)
    with pytest.raises(InputError, match=r"the loss of a step has .* terms; a step needs labels that count"):
        counted.step(0)


def test_on_a_device_the_next_step_is_read_ahead_by_another_thread(data):
    ahead = RankData(task(data), two_pipelines(), 0, DEVICE, STEPS * BATCH)
    for step in range(STEPS):
        found = ahead.step(step * BATCH)
        assert found.any_inputs["x"].device == DEVICE
    ahead.close()
    assert data.read == [(0, 5), (BATCH, 5), (2 * BATCH, 5)]  # none beyond the end
    first, *later = data.threads
    assert first == threading.get_ident() and first not in later


def test_on_the_host_nothing_is_read_ahead(data):
    between = RankData(task(data), two_pipelines(), 0, HOST, STEPS * BATCH)
    between.step(0)
    assert data.read == [(0, 5)]


def test_data_that_draw_from_torchs_generator_are_read_between_steps(data):
    """Layers are watched not to move it, and would be blamed."""

    def noisy(first: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(first)
        torch.rand(1)
        return data(first, count)

    drawn = RankData(task(noisy), two_pipelines(), 0, DEVICE, STEPS * BATCH)
    drawn.step(0)
    drawn.close()
    assert data.read == [(0, 5)]


def test_what_goes_wrong_ahead_is_said_in_the_step_that_needs_it(data):
    def ends(first: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
        if first:
            raise InputError("the data end")
        return data(first, count)

    failing = RankData(task(ends), two_pipelines(), 0, DEVICE, STEPS * BATCH)
    failing.step(0)
    with pytest.raises(InputError, match="the data end"):
        failing.step(BATCH)
    failing.close()
