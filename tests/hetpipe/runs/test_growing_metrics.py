"""The metrics of a run that goes on: what is read bit by bit is what the whole file says."""

from pathlib import Path

import pytest

from cost_model.errors import InputError
from hetpipe.runs.growing_metrics import GrowingMetrics
from hetpipe.runs.run_folder import RunFolder


def test_lines_are_read_as_they_come_and_half_ones_when_they_are_whole(tmp_path: Path):
    run = RunFolder(tmp_path)
    metrics = GrowingMetrics(run)
    assert metrics.read() == []
    text = "".join(f'{{"step": {step}, "loss": {step / 2}, "word": "\u00fc"}}\n' for step in range(1, 6))
    content = text.encode()
    for end in (1, 30, 31, 100, len(content) - 1, len(content)):
        with open(run.metrics, "ab") as file:
            file.write(content[run.metrics.stat().st_size if run.metrics.exists() else 0 : end])
        assert [row["step"] for row in metrics.read()] == list(range(1, content[:end].count(b"\n") + 1))
    assert tuple(metrics.read()) == run.read_metrics()


def test_a_run_that_goes_back_is_read_again(tmp_path: Path):
    run = RunFolder(tmp_path)
    metrics = GrowingMetrics(run)
    run.metrics.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n')
    assert [row["loss"] for row in metrics.read()] == [1.0, 2.0]
    run.write(run.metrics, '{"step": 1, "loss": 1.0}\n')  # as one that goes on from a checkpoint
    assert [row["loss"] for row in metrics.read()] == [1.0]
    run.write(run.metrics, '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 4.0}\n{"step": 3, "loss": 5.0}\n')
    assert [row["loss"] for row in metrics.read()] == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(("line", "words"), [("{", "line 2 is not JSON"), ("[]", "line 2 is of no step")])
def test_what_is_no_step_is_named(tmp_path: Path, line: str, words: str):
    run = RunFolder(tmp_path)
    run.metrics.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    metrics = GrowingMetrics(run)
    for _ in range(2):
        with pytest.raises(InputError, match=words):
            metrics.read()
