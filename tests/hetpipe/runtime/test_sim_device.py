"""The runtime on a device made of Python: the same numbers, and how often the host waits for it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import sim_calls
from cost_model.cluster_file import read_cluster
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Pipeline, Plan, Stage
from runs import cluster_file, made_up_profile


def on_device(main: str, *arguments: Any) -> list[dict[str, Any]]:
    """What a process of its own emits, which has the device for good."""
    events: list[dict[str, Any]] = []
    run_ranks(sim_calls.call, (main, *arguments), RankGroup(("sim",), (1,)), events.append)
    return events


def trained(folder: Path, model: str, cuts: list[int]) -> list[dict[str, Any]]:
    """Three stages on one device, recomputed in part, two microbatches: on both devices."""
    stages = tuple(
        Stage(("here/0",), (start, stop), 3, recompute=start == 0) for start, stop in pairwise(cuts)
    )
    plan = Plan("manual", model, 4, (Pipeline(2, 4, stages),))
    profile, cluster = made_up_profile(model), read_cluster(cluster_file(folder))
    return on_device("train", model, lower(plan, profile, cluster), profile, cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cuts"), [("llama-tiny", [0, 2, 4, 6]), ("bert-tiny", [0, 3, 5, 8])])
def test_a_step_has_the_same_numbers_and_one_wait_of_the_host(tmp_path, model, cuts):
    """The wait is that for loss and norm, beside that for the end of the step: none between microbatches."""
    events = trained(tmp_path, model, cuts)
    host, device = ([event for event in events if event["place"] == place] for place in ("cpu", "sim"))
    for here, there in zip(host[:-1], device[:-1], strict=True):
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-6)
        assert there["norm"] == pytest.approx(here["norm"], rel=1e-5)
        assert (there["waits"], there["event_waits"]) == (1, 1)
        assert (here["waits"], here["event_waits"]) == (0, 0)
    assert device[-1]["weights"] == pytest.approx(host[-1]["weights"], rel=1e-3, abs=1e-3)  # sums of each


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
