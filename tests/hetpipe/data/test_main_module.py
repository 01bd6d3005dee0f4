"""What functions of a script see there reaches the ranks as it is when the trainer is made."""

import argparse
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import trainers
import user_tasks
from hetpipe.data import main_module
from hetpipe.data.main_module import are_importable, globals_for_ranks, seen_in_main, set_globals
from hetpipe.data.own_code import own_code_sha256
from places import SUPPORT

SCRIPT = """
    import functools, math
    import argparse

    SCALE, UNUSED, LARGE = 1.0, 1.0, 1.0
    chosen = None

    class Powers:
        even = 2

        @property
        def twice(self):
            return 2 * self.even

    class Data:
        def __init__(self):
            self.length = 3

        def __len__(self):
            return self.length + len(names)

        @staticmethod
        def at(k):
            return LARGE

    names = ["one"]
    powers = Powers()

    class Cached:
        @functools.cached_property
        def twice(self):
            return 2 * UNUSED

    @functools.lru_cache
    def remembered():
        return SCALE

    def outer(x):
        return inner(x) * math.pi

    def inner(x):
        return [x * chosen.rate for _ in range(int(SCALE))] + [powers.twice]

    def shifted(by):
        class Own:
            factor = 3

        def shift(x):
            return x + by * UNUSED * Own.factor
        return shift
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a script anew: the main module of who trains, or of a rank that has imported it."""

    def made(file: str | None = "script.py", text: str = SCRIPT) -> Any:
        module = ModuleType("__main__")
        if file is not None:
            module.__file__ = file
        monkeypatch.setitem(sys.modules, "__main__", module)
        exec(textwrap.dedent(text), vars(module))
        return module

    return made


def test_what_functions_and_classes_of_a_script_see_is_found(script):
    main = script()
    assert set(seen_in_main([main.outer]).values) == {"inner", "chosen", "SCALE", "powers"}
    assert main.Powers in seen_in_main([main.outer]).code  # through an instance
    assert set(seen_in_main([main.Data]).values) == {"names", "LARGE"}
    assert set(seen_in_main([main.shifted(2)]).values) == {"UNUSED"}
    assert set(seen_in_main([main.Cached]).values) == {"UNUSED"}
    assert set(seen_in_main([main.remembered]).values) == {"SCALE"}
    assert seen_in_main([torch.nn.Linear, user_tasks.squared_error]).values == {}


def test_a_rank_sees_what_was_set_under_the_guard(script, monkeypatch):
    monkeypatch.setattr(main_module, "LARGEST_BYTES", 1000)
    main = script()
    main.SCALE, main.UNUSED, main.LARGE = 2.0, 5.0, torch.zeros(2000)
    main.chosen, main.Powers.even = argparse.Namespace(rate=3.0), 7
    main.names.append("two")
    packed = globals_for_ranks([main.outer, main.Data, main.shifted(2)])
    rank = script()
    set_globals(packed)
    assert rank.inner(1.0) == [3.0, 3.0, 14] and len(rank.Data()) == 5
    assert (rank.UNUSED, rank.LARGE) == (5.0, 1.0)  # one is too large
    assert rank.shifted(2)(1) == 31


def test_what_ranks_cannot_import_is_known(script, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT) + 'if __name__ == "__main__":\n    def late(x): return x\n')
    main = script(str(file), file.read_text())
    assert are_importable([main.outer, main.Data.at]) and are_importable([])
    assert not are_importable([main.outer, main.late])
    assert not are_importable([script(None).outer])


def test_a_cell_that_is_run_again_is_the_same_code(script):
    text = "from torch import nn\nclass Wave(nn.Module):\n    def forward(self, x): return bend(x) * RATE\n"
    text += "RATE = 2\ndef bend(x):\n    return x + 1\n"

    def key(text: str) -> str:
        return own_code_sha256(script(None, text).Wave(), user_tasks.squared_error)

    assert key(text) == key("\n\n" + text)
    changes = (("x + 1", "x + 2"), ("x + 1", "x - 1"), ("RATE = 2", "RATE = 3"), ("* RATE", "/ RATE"))
    assert len({key(text), *(key(text.replace(*change)) for change in changes)}) == 5


WHOLE = """
    import sys
    from pathlib import Path
    import torch
    from trainers import Recorder, trainer

    SCALE = 1.0

    class Power:
        of = 2

    def loss(outputs, labels):
        return (SCALE * (outputs - labels).abs() ** Power.of).sum()

    if __name__ == "__main__":
        SCALE, Power.of = float(sys.argv[1]), int(sys.argv[2])

        def doubled(outputs, labels):
            return 2 * loss(outputs, labels)

        recorder = Recorder()
        for name, chosen in (("it", loss), ("twice", doubled)):
            trainer(Path.cwd() / name, loss=chosen, callbacks=[recorder]).fit(1)
        print(*(metrics["loss"] for metrics in recorder.metrics))
"""


def run(
    folder: Path, text: str, *arguments: str, from_stdin: bool = False
) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, "-" if from_stdin else "script.py", *arguments],
        input=textwrap.dedent(text) if from_stdin else "",
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ["PYTHONPATH"]])},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize("from_stdin", [False, True])
def test_losses_of_a_script_train_with_its_arguments_also_one_that_is_under_its_guard(tmp_path, from_stdin):
    result = run(tmp_path, WHOLE, "3", "4", from_stdin=from_stdin)
    data, order = user_tasks.samples(), range(trainers.BATCH)
    chosen = [data[trainers.epoch_order(0, 0, len(data))[position]] for position in order]
    x, y = (torch.stack(parts) for parts in zip(*chosen, strict=True))
    expected = 3 * ((trainers.module()(x) - y).abs() ** 4).sum() / trainers.BATCH
    assert result.returncode == 0, result.stderr
    found = [float(word) for word in result.stdout.split()]
    assert found == pytest.approx([expected.item(), 2 * expected.item()])


@pytest.mark.slow
def test_a_script_that_trains_whenever_it_is_read_is_told_of_its_guard(tmp_path):
    text = "from pathlib import Path\nfrom trainers import trainer\ntrainer(Path.cwd() / 'it').fit(1)\n"
    result = run(tmp_path, text)
    assert "put what it does behind if __name__ == '__main__':" in result.stderr.splitlines()[-1], (
        result.stderr
    )
