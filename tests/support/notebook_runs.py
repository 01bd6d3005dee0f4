"""Notebooks, executed by this Python, whatever kernels are installed on the host."""

import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

TIMEOUT_S = 180


def execute(book: nbformat.NotebookNode, place: Path) -> None:
    """Run all cells in a folder; raises what a cell raises."""
    client = NotebookClient(book, timeout=TIMEOUT_S, resources={"metadata": {"path": str(place)}})
    client.create_kernel_manager()
    client.km._kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
    )
    client.execute()
