"""A plan with controls: what is set in code plans anew; without ipywidgets the plan is shown as it is."""

import sys

import pytest

from cost_model.errors import InputError
from hetpipe.reporting.plan_explorer import NO_CONTROLS, PlanExplorer
from small_case import small_cluster, small_profile

CHANGES = {
    "devices": ["remove b", "remove a"],
    "speed": ["speed b 2"],
    "memory": ["memory a 100 B, memory b 100 B"],
}


def explorer(changes: dict[str, list[str]] = CHANGES) -> PlanExplorer:
    return PlanExplorer(small_profile(), small_cluster(), 4, changes, proof_s=0.0)


def test_a_control_plans_anew_and_back():
    shown = explorer()
    today, text, picture = shown.row, shown.text, shown.picture
    assert today.plan is not None and set(today.plan.device_names) == {"a/0", "b/0"}
    shown.controls["devices"].value = "remove b"
    assert shown.row.plan is not None and shown.row.plan.device_names == ("a/0",)
    assert shown.row.plan.predicted != today.plan.predicted
    assert shown.text.startswith("what if: remove b (0.") and "remove b" in shown._said.value
    assert shown.picture.startswith(b"\x89PNG") and shown.picture != picture
    assert bytes(shown._picture.value) == shown.picture
    shown.controls["devices"].value = ""
    assert (shown.row, shown.text, shown.picture) == (today, text, picture)


def test_changes_of_several_controls_are_made_together():
    shown = explorer()
    shown.controls["devices"].value = "remove a"
    alone_s = shown.row.step_s
    shown.controls["speed"].value = "speed b 2"
    assert shown.change == "remove a, speed b 2"
    assert alone_s is not None and shown.row.step_s == pytest.approx(alone_s / 2)


def test_where_nothing_fits_the_reason_is_shown():
    shown = explorer()
    shown.controls["memory"].value = "memory a 100 B, memory b 100 B"
    assert shown.row.plan is None
    assert "no plan: " in shown.text and "missing" in shown._said.value
    assert shown.picture.startswith(b"\x89PNG")


def test_of_changes_that_contradict_each_other_stands_the_reason_and_no_older_picture(capsys):
    shown = explorer()
    shown.controls["devices"].value = "remove b"
    before = shown.row, shown.text, shown.picture
    shown.controls["speed"].value = "speed b 2"
    assert shown.text.startswith("what if: remove b, speed b 2\ncannot be planned for: ")
    assert "the cluster has no device or node 'b'" in shown.text
    assert "the cluster has no device or node" in shown._said.value
    assert shown.row.plan is None and shown.row.reason is not None
    assert shown.picture == b"" == bytes(shown._picture.value)
    assert shown._picture.layout.display == "none"
    shown._ipython_display_()
    assert "image/png" not in capsys.readouterr().out
    shown.controls["speed"].value = ""
    assert (shown.row, shown.text, shown.picture) == before
    assert bytes(shown._picture.value) == shown.picture and shown._picture.layout.display is None


def test_what_is_no_change_is_refused_at_once():
    with pytest.raises(InputError, match="unknown change 'ad'"):
        explorer({"cards": ["ad 1 fast to a"]})


def test_without_ipywidgets_the_plan_is_shown_as_it_is(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    shown = explorer()
    assert shown.controls == {}
    shown._ipython_display_()
    out = capsys.readouterr().out
    assert out.startswith(NO_CONTROLS + "\n") and "image/png" in out
    assert shown.planned("remove b").plan is not None
