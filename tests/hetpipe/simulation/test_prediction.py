"""A prediction: one value whose parts belong together; and the bound beside it."""

from dataclasses import FrozenInstanceError, replace

import pytest

import hetpipe
from hetpipe.program.instructions import Schedule
from hetpipe.program.lowering import lower_as
from hetpipe.simulation import prediction as prediction_module
from hetpipe.simulation import schedule_selection
from hetpipe.simulation.prediction import evaluator, predict, with_bound
from hetpipe.simulation.simulator import simulate
from small_case import small_cluster, small_plan, small_profile

CASE = (small_profile(), small_cluster())


def test_the_parts_of_a_prediction_belong_together():
    plan = small_plan(num_samples=4)
    prediction = hetpipe.predict(plan, *CASE, Schedule.GPIPE)
    assert prediction.program == lower_as(plan, *CASE, Schedule.GPIPE)
    assert prediction.costs.program is prediction.program
    assert prediction.trace == simulate(prediction.costs)
    assert prediction.plan == replace(prediction.program.plan, predicted=prediction.figures)
    with pytest.raises(FrozenInstanceError):
        prediction.trace = prediction.trace  # type: ignore[misc]


def test_a_prediction_reads_like_its_figures():
    prediction, figures = predict(small_plan(), *CASE), evaluator(*CASE)(small_plan())
    found = (prediction.step_s, prediction.samples_per_s, prediction.bubble, prediction.devices)
    assert found == (figures.step_s, figures.samples_per_s, figures.bubble, figures.devices)
    assert prediction.figures == figures


def test_what_was_simulated_to_choose_a_schedule_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch):
    traces = []

    def counted(costs):
        traces.append(simulate(costs))
        return traces[-1]

    monkeypatch.setattr(schedule_selection, "simulate", counted)
    monkeypatch.setattr(prediction_module, "simulate", counted)
    prediction = predict(small_plan(), *CASE, Schedule.AUTO)
    assert len(traces) == len(prediction.choice.step_s) > 1
    assert any(prediction.trace is trace for trace in traces)
    assert prediction.step_s == prediction.choice.step_s[prediction.choice.schedule]


def test_a_bound_is_added_where_all_kinds_are_profiled():
    profile, cluster = CASE
    plain = predict(small_plan(), profile, cluster)
    bounded = with_bound(plain, profile, cluster)
    assert plain.figures.bound_s is None
    assert bounded.figures.bound_s is not None and bounded.figures.bound_s <= bounded.step_s
    assert bounded.plan.predicted is bounded.figures
    assert bounded.trace is plain.trace
    unknown = replace(cluster, nodes=(*cluster.nodes, *_other_kind(cluster)))
    without = with_bound(plain, profile, unknown)
    assert without.figures == plain.figures
    assert without.plan.cluster_sha256 == unknown.sha256


def _other_kind(cluster):
    node = cluster.nodes[0]
    return (replace(node, name="z", devices=(replace(node.devices[0], name="z/0", kind="unknown"),)),)
