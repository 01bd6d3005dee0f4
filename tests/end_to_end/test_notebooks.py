"""Every notebook runs from top to bottom, in a kernel of its own, and is stored with its outputs."""

import json
import re
from base64 import b64decode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import nbformat
import pytest
from matplotlib.image import imread

from hetpipe.reporting.plan_explorer import NO_CONTROLS
from hetpipe.reporting.tables import WIDTH_IN_A_NOTEBOOK
from notebook_runs import SHORT_SEARCHES, execute
from places import ROOT
from warm_starts import warm_python

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHORTER: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"\bsteps=\d+": "steps=3",
    r"\bbudget_s=[\d.]+": "budget_s=1.0",
    r"\bcluster_file, 4, rounds=1\b": "cluster_file, 2, rounds=1",
    r"\bspeed = (0\.\d+)": lambda match: f"speed = {2.5 * float(match[1]):.2f}",  # in all below one
}
"""What cells of the notebooks say of steps, seconds to measure and speeds, and what they say in tests."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def run_quickly(book: nbformat.NotebookNode, place: Path) -> None:
    """Run all cells, with short proofs and searches, few steps of faster devices and little measuring."""
    for cell in book.cells:
        for long, short in SHORTER.items():
            cell.source = re.sub(long, short, cell.source)
    first = code_cell(SHORT_SEARCHES)
    book.cells.insert(0, first)
    execute(book, place, warm_python())
    book.cells.remove(first)


def code_cell(source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source)  # type: ignore[no-untyped-call]


def pictures_of(book: nbformat.NotebookNode) -> dict[str, int]:
    """Return how many pictures each cell has drawn."""
    return {
        cell.id: sum("image/png" in output.get("data", {}) for output in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    }


def all_have_alternative_text(book: nbformat.NotebookNode) -> bool:
    return all(
        output.metadata.get("image/png", {}).get("alt")
        for cell in book.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    )


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
    book = read(path)
    stored = pictures_of(book)
    run_quickly(book, tmp_path)
    assert not list(tmp_path.iterdir()), "the notebook wrote to the working directory"
    assert pictures_of(book) == stored
    assert all_have_alternative_text(book)


def test_stored_pictures_of_the_explorer_have_alternative_text():
    assert all_have_alternative_text(read(ROOT / "notebooks" / "01_partition_explorer.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_text_is_wider_than_a_cell(path):
    lines = []
    for cell in read(path).cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = output.get("text", "") if "text" in output else data.get("text/plain", "")
            lines += (
                []
                if "image/png" in data or output.get("name") == "stderr"
                else ANSI.sub("", text).splitlines()
            )
    assert lines and max(len(line.rstrip()) for line in lines) <= WIDTH_IN_A_NOTEBOOK


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_picture_is_cut_off_at_its_edge(path):
    for cell in read(path).cells:
        for output in cell.get("outputs", []):
            if picture := output.get("data", {}).get("image/png"):
                pixels = imread(BytesIO(b64decode(picture)), format="png")[..., :3]
                edges = pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]
                assert all((edge > 0.99).all() for edge in edges), cell.id


def explorer_part() -> nbformat.NotebookNode:
    """Return what the controls of notebook 01 need: the cell that imports and reads, and their own."""
    book = read(ROOT / "notebooks" / "01_partition_explorer.ipynb")
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    book.cells = [cells[0], *(cell for cell in cells if cell.source.startswith("explorer = "))]
    assert len(book.cells) == 2
    return book


@pytest.mark.slow
def test_the_controls_move_cuts_memory_and_bound(tmp_path):
    book = explorer_part()
    assert any("application/vnd.jupyter.widget-view+json" in out.data for out in book.cells[-1].outputs)
    book.cells.append(
        code_cell(
            """
import json

def seen():
    plan = explorer.row.plan
    cuts = [[stage.device, *stage.layers] for line in plan.pipelines for stage in line.stages]
    memory = {name: device.memory_bytes for name, device in plan.predicted.devices.items()}
    return cuts, memory, plan.predicted.bound_s, hash(explorer.picture)

found = {"today": seen()}
for name, change in [
    ("the network", "network 20 Mbit/s"),
    ("the network", ""),
    ("a card more", "add 1 emulated to big"),
    ("memory of big", "memory big 12 MiB"),
]:
    explorer.controls[name].value = change
    found[change or "back"] = seen()
print(json.dumps(found))
"""
        )
    )
    run_quickly(book, tmp_path)
    found = json.loads(book.cells[-1].outputs[-1].text)
    today = found.pop("today")
    assert found.pop("back") == today
    for change, (cuts, memory, _, picture) in found.items():
        assert cuts != today[0] and memory != today[1] and picture != today[3], change
    card = found["add 1 emulated to big"]
    assert card[2] < today[2] and "big/2" in card[1]
    assert (
        max(found["memory big 12 MiB"][1].get(name, 0) for name in ("big/0", "big/1", "big/2")) < 12 * 2**20
    )


@pytest.mark.slow
def test_without_ipywidgets_the_notebook_says_so_and_shows_pictures(tmp_path):
    book = explorer_part()
    book.cells.insert(0, code_cell('import sys\nsys.modules["ipywidgets"] = None'))
    book.cells.append(code_cell("show(['word ' * 60])"))
    run_quickly(book, tmp_path)
    *_, explorer, sentence = book.cells
    outputs = explorer.outputs
    said = "".join(
        ANSI.sub("", out.get("data", out).get("text/plain", out.get("text", ""))) for out in outputs
    )
    assert said.splitlines()[0].rstrip() == NO_CONTROLS
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert not any("application/vnd.jupyter.widget-view+json" in out.get("data", {}) for out in outputs)
    lines = sentence.outputs[0].data["text/plain"].splitlines()  # is wrapped at the width of a cell
    assert len(lines) > 2 and max(map(len, lines)) <= WIDTH_IN_A_NOTEBOOK
