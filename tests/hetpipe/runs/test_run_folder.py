import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cost_model.errors import InputError
from hetpipe.program.trace import chrome_trace
from hetpipe.runs.run_folder import MEASURED, PREDICTED, RunFolder, numbered_runs
from hetpipe.simulation.prediction import simulate_plan
from small_case import small_cluster, small_plan, small_profile


def test_folders_are_numbered_by_model(tmp_path: Path):
    root = tmp_path / "runs"
    names = [RunFolder.create(root, model).path.name for model in ("gpt2", "gpt2", "gpt2-tiny", "gpt2")]
    assert names == ["gpt2-001", "gpt2-002", "gpt2-tiny-001", "gpt2-003"]
    assert [run.path.name for run in numbered_runs(root, "gpt2")] == ["gpt2-003", "gpt2-002", "gpt2-001"]
    assert numbered_runs(root, "bert") == ()
    assert numbered_runs(tmp_path / "nothing", "bert") == ()


def test_numbers_are_never_given_twice(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: RunFolder.create(tmp_path, "m").path, range(24)))
    assert len(set(made)) == 24


def test_a_number_above_a_gap_or_999_counts_on(tmp_path: Path):
    (tmp_path / "m-999").mkdir()
    assert RunFolder.create(tmp_path, "m").path.name == "m-1000"
    assert [run.path.name for run in numbered_runs(tmp_path, "m")] == ["m-1000", "m-999"]


def test_a_root_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(InputError, match="no run folder can be made there"):
        RunFolder.create(tmp_path / "runs", "m")


def test_metrics_are_read_to_the_last_whole_line(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.read_metrics() == ()
    folder.metrics.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert folder.read_metrics() == ({"step": 1, "loss": 2.5},)
    folder.metrics.write_text('{"step": 1, "lo\n{"step": 2, "loss": 2.5}\n')
    with pytest.raises(InputError, match="line 1 is not JSON"):
        folder.read_metrics()
    for text in ('{"a": 1}', "[1]", '{"step": "1"}', "9" * 3000):
        folder.metrics.write_text(f"{text}\n")
        with pytest.raises(InputError, match="line 1 is of no step; take it out"):
            folder.read_metrics()


def test_traces_survive_the_file(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.read_traces() == {}
    traces = {
        PREDICTED: simulate_plan(small_plan(num_samples=3), small_profile(), small_cluster()),
        MEASURED: simulate_plan(small_plan(num_samples=4), small_profile(), small_cluster()),
    }
    folder.write(folder.trace, chrome_trace(list(traces.items())))
    found = folder.read_traces()
    assert found.keys() == traces.keys()
    for name, trace in traces.items():
        assert found[name].device_names == trace.device_names
        assert [str(e.instruction) for e in found[name].events] == [str(e.instruction) for e in trace.events]
        assert found[name].makespan_s == pytest.approx(trace.makespan_s, abs=1e-8)


def test_chrome_trace_is_what_perfetto_reads():
    trace = simulate_plan(small_plan(num_samples=1), small_profile(), small_cluster())
    events = json.loads(chrome_trace([("predicted", trace)]))["traceEvents"]
    compute = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    assert next((event["name"], event["ts"], event["dur"]) for event in compute) == ("0F0", 0, 5e6)
    begins = [event["id"] for event in events if event["ph"] == "b"]
    assert sorted(begins) == sorted(event["id"] for event in events if event["ph"] == "e")


def test_arrows_lead_from_what_makes_a_message_to_what_takes_it():
    trace = simulate_plan(small_plan(num_samples=3), small_profile(), small_cluster())
    rows = json.loads(chrome_trace([("predicted", trace), ("measured", trace)]))["traceEvents"]
    slices = [row for row in rows if row["ph"] == "X"]
    leaving = {row["id"]: row for row in rows if row["ph"] == "s"}
    coming = {row["id"]: row for row in rows if row["ph"] == "f"}
    assert leaving.keys() == coming.keys()
    assert len(leaving) == 2 * 2 * 3  # two processes, two passes, three microbatches

    def slice_at(row: dict[str, Any]) -> dict[str, Any]:
        where = row["pid"], row["tid"]
        return next(
            each
            for each in slices
            if (each["pid"], each["tid"]) == where and each["ts"] <= row["ts"] < each["ts"] + each["dur"]
        )

    for name, row in leaving.items():
        giver, taker = slice_at(row)["args"], slice_at(coming[name])["args"]
        assert (giver["pass"], giver["microbatch"]) == (taker["pass"], taker["microbatch"])
        assert taker["stage"] - giver["stage"] == (1 if giver["pass"] == "forward" else -1)
        assert coming[name]["ts"] >= row["ts"]
        assert coming[name]["ts"] == slice_at(coming[name])["ts"]


def test_writing_fails_with_the_path_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    folder = RunFolder(tmp_path / "file")
    with pytest.raises(InputError, match=r"plan\.json: cannot be written"):
        folder.write(folder.plan, "{}")
