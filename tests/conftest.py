import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from hetpipe.data.dataset import write_tokens
from hetpipe.data.vocabulary import train_vocabulary
from places import EXAMPLES, SUPPORT
from preloaded import preload_for_all_tests
from same_texts import split_once, trained_once
from shell import Shell
from turns import new_room, turn

# NOTE: where this is set, each of the many processes that tests start compiles anew what it reads of hetpipe.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# NOTE: the server that forks ranks preloads the module of what they run, but in Python 3.11 it ignores the
# sys.path of its parent: without this each rank of a main in these folders would load it by itself.
MAINS = (SUPPORT, EXAMPLES / "benchmarks" / "stress")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*map(str, MAINS), os.environ.get("PYTHONPATH"))))
preload_for_all_tests()

# NOTE: threads of OpenMP wait for each other busily, also while others have their cores: a step of a rank of
# two threads took 10 CPU seconds beside ten other processes on 2 cores, and takes 0.1 so.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A busy machine is no failure: no test has a time limit for an example. Cases are drawn anew each time but in
# CI: there a change is not refused for what the draw of the day finds in what is older.
hypothesis.settings.register_profile("hetpipe", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("hetpipe")


def pytest_configure(config: pytest.Config) -> None:
    """Make the room in which the workers of `pytest -n` take turns, before they start; a thread for each."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        room = new_room()
        room.__enter__()
        config.add_cleanup(lambda: room.__exit__(None, None, None))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run those marked `alone` last, one after another: among others each would wait for one to end."""
    items.sort(key=_is_alone)


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test, with its fixtures, when it is its turn."""
    with turn(alone=_is_alone(item)):
        return (yield)


LONG_S, SHORT_PROOF_S, SHORT_MEASUREMENT_S = 3600.0, 1.0, 0.9


@pytest.fixture(autouse=True, scope="session")
def _patience() -> Iterator[None]:
    """Tell of what lasts long in those tests alone that ask for it, however busy the machine is.

    And prove and measure for a second where a test does not say how long: a bound holds whenever its proof
    ends, and what is trained does not depend on what was measured.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetpipe.commands.output.LONG_S", LONG_S)
        patch.setattr("hetpipe.runtime.rank_watch.SILENCE_S", LONG_S)
        patch.setattr("hetpipe.runtime.rank_watch.START_SILENCE_S", LONG_S)
        patch.setattr("partition.bounds.best_bound.PROOF_S", SHORT_PROOF_S)
        patch.setattr("hetpipe.training.own_planning.FOR_A_PLAN_S", SHORT_MEASUREMENT_S)
        patch.setattr("hetpipe.training.own_planning.FOR_A_REPORT_S", SHORT_MEASUREMENT_S)
        patch.setattr("hetpipe.data.task.train_vocabulary", trained_once(train_vocabulary))
        patch.setattr("hetpipe.data.texts.write_tokens", split_once(write_tokens))
        yield


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
