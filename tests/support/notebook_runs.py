"""Notebooks, executed by this Python, whatever kernels are installed on the host.

    python tests/support/notebook_runs.py notebooks/03_prediction_vs_reality.ipynb

runs notebooks and stores them with their outputs; better on an idle computer.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

TIMEOUT_S = 180
SHORT_SEARCHES = """
from partition.bounds import best_bound
from partition.local_search import starts
from short_searches import little_effort
best_bound.PROOF_S = 1.0
starts.effort_for = little_effort
"""
"""A cell of tests: a bound holds whenever its proof ends, and what is shown is shown of every plan."""


def execute(book: nbformat.NotebookNode, place: Path, python: Sequence[str] = (sys.executable,)) -> None:
    """Run all cells in a folder by such a Python; raises what a cell raises."""
    client = NotebookClient(
        book, timeout=TIMEOUT_S, resources={"metadata": {"path": str(place)}}, record_timing=False
    )
    client.create_kernel_manager()
    client.km._kernel_spec = KernelSpec(
        argv=[*python, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
    )
    client.execute()


def store(path: Path) -> None:
    """Run a notebook and store it with what it printed and drew."""
    book = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    for cell in book.cells:
        cell.metadata.pop("execution", None)
    with tempfile.TemporaryDirectory() as place:
        execute(book, Path(place))
    nbformat.write(book, path)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    for given in sys.argv[1:]:
        store(Path(given))
