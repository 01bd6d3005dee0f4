import os
from pathlib import Path

import pytest

from places import SUPPORT
from shell import Shell

# NOTE: the server that forks ranks preloads the module of what they run, but in Python 3.11 it ignores the
# sys.path of its parent: without this each rank of a main in tests/support would load torch by itself.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))


@pytest.fixture
def hetpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Shell(tmp_path, capsys)
