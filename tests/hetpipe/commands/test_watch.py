"""`hetpipe watch`: a page on loopback of a run that goes on."""

import http.client
import json
import os
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from cost_model.errors import InputError
from hetpipe import cli
from hetpipe.commands.watch import newest_run, server_of
from hetpipe.runs.run_folder import RunFolder
from run_folders import add_steps, made_up_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_up_run(tmp_path / "run", ended=False)


@pytest.fixture
def server(run: RunFolder) -> Iterator[ThreadingHTTPServer]:
    with server_of(run) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def asked(server: ThreadingHTTPServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_it_listens_on_loopback_alone_and_answers_this_host_alone(server: ThreadingHTTPServer):
    assert server.server_address[0] == "127.0.0.1"
    assert asked(server, "/")[0] == 200
    assert asked(server, "/", host="elsewhere.example")[0] == 403
    assert asked(server, "/../config.json")[0] == 404
    assert asked(server, "/config.json")[0] == 404


def test_new_steps_are_told_and_another_plan_or_the_end_makes_the_page_anew(
    run: RunFolder, server: ThreadingHTTPServer
):
    def live() -> dict[str, object]:
        status, text = asked(server, "/live.json")
        assert status == 200
        found: dict[str, object] = json.loads(text)
        return found

    assert live()["steps"] == []
    add_steps(run, 2)
    before = live()
    assert before["steps"] == [1, 2]
    add_steps(run, 1)
    assert live()["version"] == before["version"]
    made_up_run(run.path)
    assert live()["version"] != before["version"]


def test_it_says_whether_a_run_writes_there(run: RunFolder, server: ThreadingHTTPServer):
    if not Path("/proc/locks").exists():
        pytest.skip("no list of locks")
    assert "no run is writing there now" in asked(server, "/live.json")[1]
    with run.locked():
        assert '"state": "running on ' in asked(server, "/live.json")[1]


def test_files_that_are_being_written_are_asked_for_again(run: RunFolder, server: ThreadingHTTPServer):
    text = run.plan.read_text()
    run.plan.write_text("{")
    assert asked(server, "/live.json")[0] == asked(server, "/")[0] == 503
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", "/")
    assert connection.getresponse().getheader("Refresh") == "1"  # a browser asks again by itself
    connection.close()
    run.plan.write_text(text)
    assert asked(server, "/live.json")[0] == 200


def test_the_newest_run_is_watched_where_none_is_named(tmp_path: Path):
    with pytest.raises(InputError, match="holds no run; give the folder of one"):
        newest_run(tmp_path / "runs")
    for index, name in enumerate(("b-001", "a-001")):
        run = made_up_run(tmp_path / "runs" / name, ended=False)
        os.utime(run.plan, (index, index))
    (tmp_path / "runs" / "empty").mkdir()
    assert newest_run(tmp_path / "runs").path.name == "a-001"


def test_what_cannot_be_watched_is_refused(
    run: RunFolder, server: ThreadingHTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for line, words in (
        (["watch", str(tmp_path)], "no run folder"),
        (["watch", str(tmp_path / "nowhere")], "no run folder"),
        (["watch", str(run.path), "--port", str(server.server_port)], "give another"),
    ):
        assert cli.main(line) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error
