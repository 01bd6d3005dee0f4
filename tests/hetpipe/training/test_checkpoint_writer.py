"""A checkpoint is of the moment at which it was begun, whatever training does while it is written."""

import errno
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cost_model.errors import InputError
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runtime.bucket_parameters import Part
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.torch_optimizer import TorchOptimizer
from hetpipe.training import checkpoint, checkpoint_writer
from hetpipe.training.checkpoint_copies import Copies, Hosts
from hetpipe.training.checkpoint_damage import damage_of
from hetpipe.training.checkpoint_owners import load_checkpoint
from hetpipe.training.checkpoint_room import free_host_bytes
from hetpipe.training.checkpoint_weights import read_weights
from hetpipe.training.checkpoint_writer import MOST_OF_HOST, CheckpointWriter
from hetpipe.training.joined_parts import JoinedParts
from hetpipe.training.run import verified_prediction
from runs import chain_plan, cluster_file, made_up_profile

MODEL = "gpt2-tiny"


@pytest.fixture
def writer(tmp_path) -> Iterator[CheckpointWriter]:
    """The writer of the only rank of a run."""
    profile = made_up_profile(MODEL)
    settings = TaskSettings.of(profile, Settings(steps=9, keep=2))
    chain = ChainModel.from_spec(model_spec(MODEL))
    plan = chain_plan(MODEL, [0, chain.num_layers], 16)
    program = verified_prediction(settings.run, cluster_file(tmp_path), profile, plan).program
    model = chain.materialise(range(chain.num_layers), seed=0)
    optimizer = Optimizer(model.owned_parameters(), (), 0.0)
    facts = {"vocabulary_sha256": "0" * 64, "data_sha256": "", "make_optimizer": None}
    task = cast(Any, SimpleNamespace(chain=chain, own_settings=lambda step: {}, **facts))
    run, copies = RunFolder(tmp_path / "run"), Copies(Hosts((0,), 0), 0)
    made = CheckpointWriter(run, settings, task, program, 0, model, optimizer, copies)
    yield made
    made.close()


def fill(writer: CheckpointWriter, value: float) -> None:
    """Set all that is trained and its states, as a step would."""
    with torch.no_grad():
        for name, parameter in writer.optimizer.parameters.items():
            for tensor in (parameter, *writer.optimizer.states(name).values()):
                tensor.fill_(value)


def values_in(folder) -> set[float]:
    return {float(element) for value in read_weights(folder).values() for element in value.unique()}


def test_training_goes_on_while_the_files_are_written(writer, monkeypatch):
    hold, real = threading.Event(), checkpoint.write_layer

    def slow(*arguments: Any) -> checkpoint.LayerFile:
        assert hold.wait(60)
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "write_layer", slow)
    fill(writer, 1.0)
    writer.begin(1, 16, None)
    fill(writer, 2.0)  # a step
    assert not writer.is_done and checkpoint.latest(writer.folder.checkpoints) is None
    hold.set()
    written = writer.finish()
    assert written is not None and (written.step, written.in_background) == (1, True)
    assert values_in(written.path) == {1.0} and damage_of(written.path) is None
    assert writer.is_done and writer.finish() is None and writer.go_on() is None


def test_without_room_for_a_copy_it_is_written_at_once(writer, monkeypatch):
    assert free_host_bytes() > 0
    monkeypatch.setattr(checkpoint_writer, "free_host_bytes", lambda: 1000.0)
    fill(writer, 1.0)
    writer.begin(1, 16, None)
    fill(writer, 2.0)
    written = writer.finish()
    assert written is not None and not written.in_background
    assert values_in(written.path) == {1.0}
    assert not writer._copies


def test_the_memory_of_the_copies_is_used_again(writer, monkeypatch):
    places = []
    for step in (1, 2):
        fill(writer, float(step))
        writer.begin(step, 16 * step, None)
        written = writer.finish()
        assert written is not None and written.in_background and values_in(written.path) == {float(step)}
        places.append({name: value.data_ptr() for name, value in writer._copies.items()})
        monkeypatch.setattr(checkpoint_writer, "free_host_bytes", lambda: 0.0)  # none more is needed
    assert places[0] == places[1] and len(places[0]) == 3 * len(writer.optimizer.parameters)


def test_the_memory_is_made_before_it_is_needed(writer, monkeypatch):
    with monkeypatch.context() as little:
        little.setattr(checkpoint_writer, "free_host_bytes", lambda: 1000.0)
        writer.make_memory()
    assert writer._made is None and not writer._copies
    fill(writer, 1.0)
    writer.make_memory()
    monkeypatch.setattr(checkpoint_writer, "free_host_bytes", lambda: 0.0)  # none more is needed
    writer.begin(1, 16, None)
    fill(writer, 2.0)
    written = writer.finish()
    assert written is not None and written.in_background and values_in(written.path) == {1.0}


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_ranges_that_are_not_joined_yet_have_room_beside_the_copies(writer, monkeypatch):
    part = Part("far.weight", 0, 8)
    optimizer = Optimizer({part.key: torch.nn.Parameter(torch.zeros(8, 1))}, (), 0.0)
    joined = JoinedParts(writer.program, 0, writer.task.chain, optimizer, 1.0)
    joined._writers, joined._shapes = {"far.weight": 0, "other.weight": 1}, {"far.weight": (10_000, 100)}
    assert joined.missing_bytes == pytest.approx(12e6, rel=1e-3)  # two states; rank 1 has its own
    copies = writer._layers()
    needed = sum(value.nbytes for layer in copies.values() for value in layer.changing.values())
    monkeypatch.setattr(checkpoint_writer, "free_host_bytes", lambda: (needed + 11e6) / MOST_OF_HOST)
    assert writer._has_room(copies)
    writer._parts = joined
    assert not writer._has_room(copies)
    joined._joined["far.weight"] = {}
    assert writer._has_room(copies)


def test_states_of_a_range_that_is_resumed_are_its_own_and_keep_no_whole_ones(writer):
    whole = dict(writer.model.owned_parameters())
    writer.optimizer = TorchOptimizer(torch.optim.Adam(whole.values()), whole, ())
    for parameter in whole.values():
        parameter.grad = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
    writer.optimizer.step(1e-3, 1.0)
    writer.begin(1, 16, None)
    written = writer.finish()
    assert written is not None
    name = max(whole, key=lambda name: whole[name].numel())
    part = Part(name, 8, 24)
    own = torch.nn.Parameter(torch.zeros(16, 1))
    resumed = TorchOptimizer(torch.optim.Adam([own]), {part.key: own}, ())
    load_checkpoint(written.path, writer.settings, writer.task, writer.model, resumed)
    assert torch.equal(own, part.of(whole[name])) and resumed.num_steps == 1
    for key, state in resumed.states(part.key).items():
        told = writer.optimizer.states(name)[name + key.removeprefix(part.key)]
        assert torch.equal(state, part.of(told) if told.dim() else told)
        assert state.untyped_storage().nbytes() <= 16 * 4


def test_the_thread_that_writes_leaves_cores_to_others(writer):
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    of_thread = writer._thread.submit(
        lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    ).result()
    assert of_thread == min(19, mine + checkpoint_writer.LESS_URGENT)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_cannot_be_written_is_one_line_and_the_one_before_stays(writer):
    fill(writer, 1.0)
    writer.begin(1, 16, None)
    first = writer.finish()
    with files_of_at_most(10_000):
        writer.begin(2, 32, None)
        with pytest.raises(InputError, match=r"the checkpoint of step 2 cannot be written \(") as caught:
            writer.finish()
    assert "\n" not in str(caught.value) and "File too large" in str(caught.value)
    assert first is not None and checkpoint.latest(writer.folder.checkpoints) == first.path
    assert damage_of(first.path) is None


def test_no_room_for_the_layers_of_other_hosts_is_that_line_too(writer, monkeypatch):
    def full(copies: Copies, folder: Path, written: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Copies, "exchange", full)
    writer.begin(1, 16, None)
    with pytest.raises(InputError, match=r"the checkpoint of step 1 cannot be written \(No space left on"):
        writer.finish()


def test_an_older_one_goes_only_when_the_new_one_is_whole(writer, monkeypatch):
    for step in (1, 2):
        writer.begin(step, 16 * step, None)
        writer.finish()
    writer.begin(3, 48, None)
    real, steps = checkpoint.keep_newest, []

    def watched(root: Any, keep: int) -> None:
        steps.append([step for step, _ in checkpoint.written(root)])
        real(root, keep)

    monkeypatch.setattr(checkpoint, "keep_newest", watched)
    writer.finish()
    assert steps == [[3, 2, 1]]
    assert [step for step, _ in checkpoint.written(writer.folder.checkpoints)] == [3, 2]
