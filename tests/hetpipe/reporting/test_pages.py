"""The page of a run: what it says is what the run's files say, and it loads nothing."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from hetpipe import cli
from hetpipe.reporting.pages import live_data, page_data, page_text, write_page
from hetpipe.reporting.pages.page_data import MOST_POINTS
from hetpipe.reporting.pages.page_text import NO_REPORT
from hetpipe.runs.run_folder import RunFolder
from hetpipe.simulation.schedule_selection import lower
from partition.plan_file import plan_text, read_plan
from run_folders import add_steps, made_up_run
from small_case import (
    CLUSTER_TOML,
    HOST_CLUSTER,
    many_alike,
    plan_of,
    small_plan,
    small_profile,
    with_states_on_the_host,
)

SVG = "http://www.w3.org/2000/svg"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_up_run(tmp_path / "run")


def data_in(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_page_has_what_the_files_say(run: RunFolder):
    add_steps(run, 3)
    data = page_data(run)
    step_s = data["predicted"]["step_s"]
    assert data["title"] == "made-up on cluster, 3 samples a step"
    assert data["report"] == {"step_s": 1.1 * step_s, "bubble": 0.3, "error": pytest.approx(0.1)}
    assert data["steps"] == [1, 2, 3]
    assert data["series"]["loss"] == [5.0, 2.5, pytest.approx(5 / 3)]
    assert [each["title"] for each in data["timelines"]] == ["predicted", "measured, by the wall clock"]
    kinds = [event[1] for event in data["timelines"][0]["events"] if event[0] == 0]
    assert kinds.count("forward") == kinds.count("backward") == 3
    assert kinds.count("optimizer") == 1
    assert [row[0] for row in data["stages"]["rows"]] == ["0", "1"]
    assert [each["device"] for each in data["memory"]] == ["a/0", "b/0"]
    for each in data["memory"]:
        assert sum(size for _, size, _ in each["parts"]) == each["total"] <= each["usable"]
        assert each["peak"] == 90.0
    assert [each["busy"] for each in data["devices"]] == [0.75, 0.5]
    assert data["results"][0]["rows"][0][0] == "step"


def test_a_page_says_the_bound_as_the_command_line_does_and_its_plans_on_demand(run: RunFolder):
    plan = read_plan(run.plan)
    bounded = replace(plan.predicted, bound_s=plan.predicted.step_s / 1.1, bound_space="chains")
    run.write(run.plan, plan_text(replace(plan, predicted=bounded)))
    data = page_data(run)
    (proven,) = (text for text in data["sentences"] if "faster" in text)
    assert proven.startswith("proven: no plan of its kind can be faster than ")
    assert proven.endswith("; this one is at most 10.0% slower than the best")
    assert "chains" not in " ".join(data["sentences"])
    assert data["bound"].startswith("no plan (chains) can be faster than ")


def test_messages_are_counted_by_link_and_direction(run: RunFolder):
    links = page_data(run)["links"]
    assert [row[:2] for row in links["rows"]] == [["a/0", "b/0"], ["b/0", "a/0"]]
    assert [row[3] for row in links["rows"]] == ["3", "3"]
    # 32 or 48 bytes at 40 bytes a second; at most one at a time
    assert all(0 < int(row[6].rstrip("%")) <= 100 for row in links["rows"])


def test_a_run_that_goes_on_has_a_page_too(tmp_path: Path):
    run = made_up_run(tmp_path / "run", ended=False)
    data = page_data(run)
    assert data["report"] is None
    assert data["steps"] == data["results"] == data["devices"] == []
    assert [each["title"] for each in data["timelines"]] == ["predicted"]


def test_a_page_of_a_run_without_report_says_so_and_what_it_lost(tmp_path: Path):
    run = made_up_run(tmp_path / "run", ended=False)
    lost = {"kind": "killed", "error": "rank 1", "noticed_after_s": 0.5, "again_s": 9.0, "after_step": 7}
    run.write(run.recoveries, json.dumps({**lost, "from_step": 5, "where": "b/0", "devices": ["a/0"]}) + "\n")
    data = data_in(write_page(run).read_text())
    assert data["state"] == NO_REPORT
    (told,) = data["marks"]
    assert told.startswith("losses: 1, noticed after 0.5 s, trained again after 9.0 s; 2 steps were done")
    assert data_in(write_page(made_up_run(run.path)).read_text())["state"] == ""


def test_steps_of_devices_of_another_plan_are_not_drawn(run: RunFolder):
    plan = plan_of([("a/0", 0, 4, 1)], 3)
    run.write(run.plan, plan_text(plan))
    run.write(run.program, lower(plan, small_profile(), read_cluster(run.cluster)).text)
    assert [each["title"] for each in page_data(run)["timelines"]] == ["predicted"]


def test_rates_are_of_samples_where_these_have_no_tokens(run: RunFolder):
    add_steps(run, 1)
    data = page_data(run)
    assert (data["rate"], data["rates"]) == ("tokens/s", [32.0])
    run.write(run.image_processor, "{}")
    data = page_data(run)
    assert (data["rate"], data["rates"]) == ("samples/s", [4.0])


def test_the_last_figures_of_held_out_samples_are_said_as_the_command_line_does(run: RunFolder):
    add_steps(run, 1, eval_loss=2.0, eval_f1=0.25, eval_s=1.0)
    add_steps(run, 1, eval_loss=1.0, eval_f1=0.5, eval_bleu=23.456, eval_s=1.0)
    add_steps(run, 1)
    data = page_data(run)
    assert data["last_figures"] == {"f1": "50.00%", "bleu": "23.46"}
    assert data["figures"] == {"f1": [0.25, 0.5, None], "bleu": [None, 23.456, None]}


def test_memory_of_a_host_has_a_row_of_its_own(run: RunFolder):
    run.write(run.cluster, HOST_CLUSTER)
    plan = with_states_on_the_host(small_plan(num_samples=3))
    run.write(run.plan, plan_text(plan))
    run.write(run.program, lower(plan, small_profile(), read_cluster(run.cluster)).text)
    *devices, host = page_data(run)["memory"]
    assert [each["device"] for each in devices] == ["a/0", "b/0"]
    assert (host["device"], host["usable"], host["peak"]) == ("a, memory of the host", 2000.0, None)
    assert [part for part, _, _ in host["parts"]] == ["state"]
    assert host["total"] == 2 * (400 - 40 + 200 + 200)  # of AdamW; 40 bytes of the embeddings are not trained


def test_pipelines_alike_have_the_rows_of_one_where_there_are_many(run: RunFolder):
    run.write(run.cluster, CLUSTER_TOML.replace('memory = "10 kB"', 'memory = "10 kB", count = 21'))
    plan, _ = many_alike(20)
    run.write(run.plan, plan_text(plan))
    run.write(run.program, lower(plan, small_profile(), read_cluster(run.cluster)).text)
    data = page_data(run)
    (step,) = data["timelines"]
    assert [name for name, _ in step["labels"]] == [
        "a/0  fast, 19 alike", "b/0  slow (estimated), 19 alike", "a/20  fast", "b/20  slow (estimated)",
    ]  # fmt: skip
    assert {event[0] for event in step["events"]} == set(range(4))
    assert len(step["idle"]) == 4
    assert [each["device"] for each in data["memory"]] == ["a/0, 19 alike", "b/0, 19 alike", "a/20", "b/20"]


def test_steps_of_another_plan_do_not_count_as_busy(run: RunFolder):
    add_steps(run, 5, busy_s=[1.0, 1.0, 1.0])
    assert live_data(run.read_metrics(), ["a/0", "b/0"], 8)["devices"] == []
    add_steps(run, 2, slow={"b/0": 1.5})
    a, b = live_data(run.read_metrics(), ["a/0", "b/0"], 8)["devices"]
    assert (a["busy"], a["steps"], a["slow"], b["slow"]) == (0.75, 2, None, 1.5)


def test_long_runs_keep_what_stands_out(run: RunFolder):
    add_steps(run, 3 * MOST_POINTS)
    add_steps(run, 1, spike=True)
    add_steps(run, 1, eval_loss=3.0)
    add_steps(run, 1)
    add_steps(run, 1, finite=False)
    found = live_data(run.read_metrics(), ["a/0", "b/0"], 8)
    count = 3 * MOST_POINTS
    assert found["thinned"]
    assert {count + 1, count + 2, count + 4} <= set(found["steps"])
    assert len(found["steps"]) <= MOST_POINTS + 4
    assert (found["rate"], found["rates"][0]) == ("tokens/s", 32.0)
    assert any("1 of" in note and "stood out" in note for note in found["notes"])
    assert any("1 of" in note and "changed nothing" in note for note in found["notes"])


def test_names_are_text_and_nothing_is_loaded(tmp_path: Path):
    name = '</script><img src="http://elsewhere/" onerror="alert(1)">'
    run = made_up_run(tmp_path / "run", cluster_name=name)
    page = page_text(page_data(run))
    data = data_in(page)
    assert name in data["title"]
    assert not data["live"]
    outside = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert "<img" not in outside
    assert page.count("</script>") == 2
    assert set(re.findall(r"https?://[^\s\"')]+", outside)) <= {SVG, "http://elsewhere/&quot;"}
    assert "connect-src 'none'" in outside
    assert "connect-src 'self'" in page_text(page_data(run), live=True)


def test_writing_is_refused_where_there_is_no_run(tmp_path: Path):
    with pytest.raises(InputError, match=r"no run folder, it holds no plan.json"):
        write_page(RunFolder(tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_plot_writes_the_page_of_a_run(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "pages" / "mine.html"
    assert cli.main(["plot", str(run.path), "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert data_in(page.read_text())["name"] == "run"
    assert cli.main(["plot", str(run.path)]) == 0
    assert f"{run.page}\n" in capsys.readouterr().out
    assert data_in(run.page.read_text())["name"] == "run"
