"""The examples of the library run as they are written, without a warning."""

import ast
import re
import subprocess
import sys

import pytest

import hetpipe
from places import EXAMPLES


def output_of(name: str) -> list[str]:
    """Lines that an example prints; ranks that it starts are read too."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    return [float(line.split("loss ")[1].split(",")[0]) for line in lines if line.startswith("step ")]


@pytest.mark.slow
def test_sequential():
    lines = output_of("sequential.py")
    assert len(losses(lines)) == 20
    assert sum(losses(lines)[-5:]) < sum(losses(lines)[:5])
    assert lines[-1].startswith("measured: ")


@pytest.mark.slow
def test_huggingface_model():
    lines = output_of("huggingface_model.py")
    assert any(line.startswith("here/1: layers [") for line in lines)
    found = losses(lines)
    assert 1 < len(found) < 20  # ended by its callback
    assert found[-1] < 3.0 < found[0]
    # the weights that come back are the trained ones
    assert float(lines[-1].partition(": ")[2]) < found[0] - 0.5


@pytest.mark.slow
def test_own_training_loop():
    lines = output_of("own_training_loop.py")
    found = losses(lines)
    assert len(found) == 3
    assert found[-1] < found[0]
    assert lines[-1].startswith("last step: ")


def test_the_docs_name_what_the_library_has():
    text = (EXAMPLES.parent / "docs" / "library.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bhetpipe\.([A-Za-z]\w*)", text))
    assert {"Trainer", "Callback", "execute"} <= named <= set(hetpipe.__all__)
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for block in blocks:
        ast.parse(block)
    assert len(blocks) > 3
