"""The runtime on devices made of Python: the same numbers, and how often the host waits for them."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import sim_calls
from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.profile import ModelProfile
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.program.instructions import Program
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training import run as training
from partition.plan import OPTIMIZER_STATES, Pipeline, Plan, Stage
from runs import CPU_CLUSTER, chain_plan, cluster_file, made_up_profile, run

LLAMA, BERT = ("llama-tiny", [0, 2, 4, 6]), ("bert-tiny", [0, 3, 5, 8])


def on_device(main: str, *arguments: Any, num_ranks: int = 1) -> list[dict[str, Any]]:
    """What processes of their own emit, which have the devices for good."""
    events: list[dict[str, Any]] = []
    group = RankGroup(("sim",) * num_ranks, (1,) * num_ranks)
    run_ranks(sim_calls.call, (main, *arguments), group, events.append)
    return events


def three_stages(folder: Path, model: str, cuts: list[int]) -> tuple[str, Program, ModelProfile, Cluster]:
    """Three stages on one device, recomputed in part, two microbatches."""
    stages = tuple(
        Stage(("here/0",), (start, stop), 3, recompute=start == 0) for start, stop in pairwise(cuts)
    )
    plan = Plan("manual", model, 4, (Pipeline(2, 4, stages),))
    profile, cluster = made_up_profile(model), read_cluster(cluster_file(folder))
    return model, lower(plan, profile, cluster), profile, cluster


HOST_MEMORY = 'host_memory = "1 GiB"\nhost_link = { bandwidth = "1 GB/s", latency = "10 us" }\n'


@pytest.mark.slow
def test_states_on_the_host_come_and_go_on_streams_of_their_own(tmp_path):
    """Copies are late there: a step that did not wait for one would have other weights."""
    _, program, profile, _ = three_stages(tmp_path, *LLAMA)
    cluster = read_cluster(cluster_file(tmp_path, CPU_CLUSTER + HOST_MEMORY))
    (pipeline,) = program.plan.pipelines
    stages = tuple(replace(stage, offload=(OPTIMIZER_STATES,)) for stage in pipeline.stages)
    plan = replace(program.plan, pipelines=(replace(pipeline, stages=stages),))
    with_states_there = LLAMA[0], lower(plan, profile, cluster), profile, cluster
    found = {"here": on_device("train_on_streams", LLAMA[0], program, profile, cluster)}
    found["there"] = on_device("train_on_streams", *with_states_there)
    for here, there in zip(found["here"], found["there"], strict=True):
        assert there["place"] == here["place"]
        for figure in ("loss", "norm", "weights"):
            if figure in here:
                assert there[figure] == here[figure], (here["place"], figure)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cuts"), [LLAMA, BERT])
def test_a_step_has_the_same_numbers_and_one_wait_of_the_host(tmp_path, model, cuts):
    """The wait is that for loss and norm, beside that for the end of the step: none between microbatches."""
    events = on_device("train", *three_stages(tmp_path, model, cuts))
    host = [event for event in events if event["place"] == "cpu"]
    for place in ("sim:0", "sim:1"):
        device = [event for event in events if event["place"] == place]
        for here, there in zip(host[:-1], device[:-1], strict=True):
            assert there["loss"] == pytest.approx(here["loss"], rel=1e-6)
            assert there["norm"] == pytest.approx(here["norm"], rel=1e-5)
            assert (there["waits"], there["event_waits"]) == (1, 1)
        assert device[-1]["weights"] == pytest.approx(host[-1]["weights"], rel=1e-3, abs=1e-3)  # sums of each


def of_kinds(folder: Path, first: str, second: str) -> Cluster:
    devices = f'[{{ kind = "{first}", memory = "4 GiB" }}, {{ kind = "{second}", memory = "4 GiB" }}]'
    head = CPU_CLUSTER.partition("devices")[0]
    return read_cluster(cluster_file(folder, f"{head}devices = {devices}\n"))


@pytest.mark.slow
def test_ranks_on_two_kinds_of_devices_and_on_the_host_train_as_on_the_host_alone(tmp_path):
    """A pipeline, replicas, and replicas of which each has half of the states, of gradients, of weights."""
    model = "llama-tiny"
    halves = tuple(Pipeline(2, 4, (Stage((f"here/{index}",), (0, 6), 1),)) for index in range(2))
    replicas = Plan("manual", model, 8, halves)
    owners = ("here/0",) * 3 + ("here/1",) * 3
    sharded = (replace(replicas, zero=zero, state_owners=owners) for zero in (1, 2, 3))
    plans = (chain_plan(model, [0, 3, 6], 2, 8), replicas, *sharded)
    kinds = (("cpu", "cpu"), ("Sim-A", "Sim-B"), ("Sim-A", "cpu"))
    cases = []
    for plan in plans:
        for pair in kinds:
            cluster, profile = of_kinds(tmp_path, *pair), made_up_profile(model)
            profile = replace(profile, kinds=dict.fromkeys(pair, profile.kinds["cpu"]))
            cases.append((lower(plan, profile, cluster), profile, cluster))
    events = on_device("train_together", model, cases, num_ranks=2)
    for number in range(len(cases)):
        first = number - number % len(kinds)
        for rank in range(2):
            mine, alone = (
                [event for event in events if (event["case"], event["rank"]) == (case, rank)]
                for case in (number, first)
            )
            assert [event["loss"] for event in mine] == pytest.approx([event["loss"] for event in alone])
            assert [event["norm"] for event in mine] == pytest.approx([event["norm"] for event in alone])
            if kinds[number - first] == ("Sim-A", "Sim-B"):
                assert all(event["waits"] == 1 and event["messages"] > 0 for event in mine)
            else:  # what meets a CPU is copied, and no device gives anything to the other ranks
                assert all(event["messages"] == 0 for event in mine)


@pytest.mark.slow
def test_too_little_memory_is_given_back_and_asked_for_again_and_still_less_refused(tmp_path):
    events = on_device("train_in_little", *three_stages(tmp_path, *LLAMA))
    enough, just, less = (
        [event for event in events if event["share"] == share] for share in (None, 1.0, 0.9)
    )
    assert [event["retries"] for event in enough] == [0, 0]
    assert sum(event["retries"] for event in just) > 0
    for one, other in zip(enough, just, strict=True):
        assert (one["loss"], one["norm"]) == (other["loss"], other["norm"])
        assert other["waits"] == 1 + other["retries"]  # each of which waits for the device
    assert "bytes do not fit beside" in less[-1]["told"] and less[-1]["refused"] == 1


@pytest.mark.slow
def test_what_the_driver_takes_is_measured_before_the_first_step_and_refused_if_too_much(tmp_path):
    plan = Plan("manual", "llama-tiny", 2, (Pipeline(1, 2, (Stage(("here/0",), (0, 6), 1),)),))
    profile, cluster = made_up_profile("llama-tiny"), read_cluster(cluster_file(tmp_path))
    fits, refused = on_device("room", "llama-tiny", lower(plan, profile, cluster), profile, cluster)
    assert fits["driver_bytes"] == 2.0**20
    assert refused["missing_bytes"] == 2.0**21
    assert "take 4,194,304 of its" in refused["refused"]
    assert '2,097,152 bytes are missing: give the device driver_memory = "4 MiB"' in refused["refused"]


@pytest.mark.slow
def test_a_profile_is_made_and_what_does_not_fit_is_left_out():
    model = "llama-tiny"
    chain = ChainModel.from_spec(model_spec(model))
    for event in on_device("profile", model):
        profile = event["profile"]
        assert list(profile["kinds"]["sim"]["microbatch_sizes"]) == [1, 2]
        assert [layer["name"] for layer in profile["layers"]] == list(chain.layer_names)
        assert all(layer["saved_bytes_per_sample"] > 0 for layer in profile["layers"])


def test_masks_are_the_same_and_drawing_them_waits_for_nothing():
    (event,) = on_device("masks")
    assert event["same"] and event["waits"] == 0
    assert 4 * 33 * 0.5 < event["kept"] < 4 * 33 * 0.9  # 0.7 of them are expected


def test_who_does_not_wait_is_found_and_errors_come_out_of_a_backward():
    found = {key: value for event in on_device("rules") for key, value in event.items()}
    spoilt, arrived = found["late"]
    assert all(map(math.isnan, spoilt)) and arrived == [0.0, 1.0, 2.0, 3.0]
    assert found["asked"] == [False, True]
    assert found["changed"] == ("memory of the host was changed while it was copied to the device")
    assert found["untimed"] == "the time of an event was asked for before the host had waited for it"
    assert "wrote last, and has not waited for it" in found["raced"]
    assert "read last, and has not waited for it" in found["overwritten"]
    assert found["waited"] == [2.0, 4.0, 6.0, 8.0] and found["timed"]
    assert "tensors of two devices" in found["two"] and "of the host and of the device" in found["mixed"]
    assert "16384 bytes do not fit" in found["backward"]


@pytest.mark.slow
def test_a_run_on_the_device_is_saved_and_resumed_as_on_the_host(tmp_path, monkeypatch):
    """A whole run but for the choice of the device: data, steps, checkpoint, report."""
    model, plan = "bert-tiny", chain_plan("bert-tiny", [0, 8], 4)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a stage waits for what it needs to arrive\n" * 400)

    def losses(kind: str, steps: int, resume: Path | None = None) -> list[float]:
        settings = Settings(
            model, steps=steps, total_steps=4, learning_rate=1e-3, data=(str(corpus),),
            resume_from=None if resume is None else str(resume),
        )  # fmt: skip
        cluster = CPU_CLUSTER.replace('"cpu"', f'"{kind}"')
        report, found = run(tmp_path / kind, plan, settings, made_up_profile(model, kind), cluster)
        assert report.owners_agree and report.emulated is False
        return found

    expected = losses("cpu", 4)
    monkeypatch.setattr(training, "check_here", lambda *_: None)
    monkeypatch.setattr(training, "train_rank", sim_calls.train_rank)
    losses("Sim-A", 2)
    saved = RunFolder(tmp_path / "Sim-A" / "run").checkpoints / "step-000002"
    assert losses("Sim-A", 4, saved) == pytest.approx(expected, rel=1e-5)
