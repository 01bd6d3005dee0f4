"""Every notebook runs from top to bottom, in a kernel of its own, and is stored with its outputs."""

import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

from places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT_S = 180


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
    place = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(read(path), timeout=TIMEOUT_S, resources=place)
    client.create_kernel_manager()
    client.km._kernel_spec = KernelSpec(  # this Python, whatever kernels are installed on the host
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
    )
    client.execute()
    assert not list(tmp_path.iterdir()), "the notebook wrote to the working directory"
