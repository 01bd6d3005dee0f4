import os
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from places import SUPPORT
from shell import Shell
from turns import new_room, turn

# NOTE: the server that forks ranks preloads the module of what they run, but in Python 3.11 it ignores the
# sys.path of its parent: without this each rank of a main in tests/support would load torch by itself.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))

# A busy machine is no failure: no test has a time limit for an example.
hypothesis.settings.register_profile("hetpipe", deadline=None)
hypothesis.settings.load_profile("hetpipe")


def pytest_configure(config: pytest.Config) -> None:
    """Make the room in which the workers of `pytest -n` take turns, before they start."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        room = new_room()
        room.__enter__()
        config.add_cleanup(lambda: room.__exit__(None, None, None))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test, with its fixtures, when it is its turn."""
    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Begin without the width of a terminal, and put back what was changed, as torch's process groups do."""
    before = dict(os.environ)
    os.environ.pop("COLUMNS", None)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def hetpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Shell(tmp_path, capsys)
