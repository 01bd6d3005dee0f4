"""Every notebook runs from top to bottom, in a kernel of its own, and is stored with its outputs."""

from pathlib import Path

import nbformat
import pytest

from notebook_runs import execute
from places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def test_there_is_a_notebook():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_notebook_has_outputs_and_no_error(path):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(cell.execution_count for cell in cells), "a cell was not executed; run all and save"
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_from_any_working_directory(path, tmp_path):
    execute(read(path), tmp_path)
    assert not list(tmp_path.iterdir()), "the notebook wrote to the working directory"
