"""watch: a page on this host of a run that goes on."""

import os
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from cost_model.errors import InputError
from cost_model.profile import read_profile
from hetpipe.commands.options import JsonOption, with_options
from hetpipe.commands.output import print_json
from hetpipe.commands.training import RUNS
from hetpipe.reporting.pages import live_data, page_data, page_text, tokens_of_sample
from hetpipe.reporting.tables import show
from hetpipe.runs.growing_metrics import GrowingMetrics
from hetpipe.runs.run_folder import RunFolder
from partition.plan_file import read_plan

LOOPBACK = "127.0.0.1"
_HTML, _JSON = "text/html; charset=utf-8", "application/json"


@with_options
def watch_command(
    path: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run folder; else the newest in runs/.")
    ] = None,
    port: Annotated[
        int,
        typer.Option("--port", help="Of the page, on loopback; 0 for any that is free.", min=0, max=65535),
    ] = 0,
    json: JsonOption = False,
) -> None:
    """Show a run in a browser while it goes on: losses, tokens/s, what each device does."""
    folder = RunFolder(path) if path is not None else newest_run(RUNS)
    page_data(folder)  # refuses what is no run folder
    with server_of(folder, port) as server:
        url = f"http://{LOOPBACK}:{server.server_port}/"
        try:
            if json:
                print_json({"run_folder": str(folder.path), "url": url})
                sys.stdout.flush()
            else:
                show([f"{url} shows {folder.path} while it goes on; Ctrl-C ends it"])
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            typer.echo("", err=True)


def newest_run(root: Path) -> RunFolder:
    """Return the run folder whose plan is the newest.

    Raises: InputError if there is none.
    """
    found = [RunFolder(path) for path in root.iterdir()] if root.is_dir() else []
    found = [folder for folder in found if folder.plan.exists()]
    if not found:
        raise InputError(f"{root}: holds no run; give the folder of one")
    return max(found, key=lambda folder: folder.plan.stat().st_mtime_ns)


def server_of(folder: RunFolder, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the pages of a run, on loopback alone; it begins with `serve_forever`.

    Raises: InputError if the port is taken.
    """

    class Handler(_Pages):
        watched = Watched(folder)

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        raise InputError(f"--port {port}: cannot be listened on ({error.strerror}); give another") from None
    server.daemon_threads = True
    return server


class Watched:
    """A run that goes on, as its page asks for it; owns what was read of it.

    Each question comes in a thread of its own.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run, self._metrics, self._lock = run, GrowingMetrics(run), threading.Lock()
        self._version, self._tokens = "", 0
        self._devices: tuple[str, ...] = ()

    def page(self) -> str:
        """Return the page as it is now."""
        version = _version(self._run)  # before it is read: what changes meanwhile is drawn by the next
        return page_text({"version": version, "state": _state(self._run), **page_data(self._run)}, live=True)

    def live(self) -> str:
        """Return what the page is to be told each second, as JSON."""
        version = _version(self._run)
        with self._lock:
            if version != self._version:
                plan, profile = read_plan(self._run.plan), read_profile(self._run.profile)
                self._devices, self._tokens = plan.device_names, tokens_of_sample(self._run, profile)
                self._version = version
            new = live_data(self._metrics.read(), self._devices, self._tokens)
        return dumps({**new, "version": version, "state": _state(self._run)}, allow_nan=False)


class _Pages(BaseHTTPRequestHandler):
    """Answers with the page and with what is new; to nobody who calls this host by another name."""

    watched: Watched

    def do_GET(self) -> None:  # the name that http.server calls
        """Answer one question."""
        assert isinstance(self.server, ThreadingHTTPServer)
        port = self.server.server_port
        if self.headers.get("Host") not in {f"{LOOPBACK}:{port}", f"localhost:{port}"}:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this page is for this host alone")
            return
        pages: dict[str, tuple[str, Callable[[], str]]] = {
            "/": (_HTML, self.watched.page),
            "/live.json": (_JSON, self.watched.live),
        }
        kind, text = pages.get(self.path, (None, None))
        if kind is None or text is None:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "no such page")
            return
        try:
            self._answer(HTTPStatus.OK, kind, text())
        except InputError as error:  # the run plans again, and writes; a browser asks again by itself
            said = f"{error}; this page is loaded again in a second"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", said, ("Refresh", "1"))

    def _answer(self, status: HTTPStatus, kind: str, text: str, *more: tuple[str, str]) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in (
            *more,
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # the base's name
        """Say nothing of questions."""


def _version(run: RunFolder) -> str:
    """Return what changes when the page is to be drawn anew: another plan, or the end of the run."""
    files = (run.plan, run.trace, run.report)
    return "-".join(str(file.stat().st_mtime_ns if file.exists() else 0) for file in files)


def _state(run: RunFolder) -> str:
    """Say whether a run writes there, as far as the locks of this host tell."""
    held = _is_locked(run.path)
    if held is None:
        return ""
    return f"running on {socket.gethostname()}" if held else "no run is writing there now"


def _is_locked(path: Path) -> bool | None:
    """Return whether a process has a lock of a folder, without trying it; None where nobody can tell."""
    try:
        found = path.stat()
        rows = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    mark = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any(row[1] == "FLOCK" and mark in row for row in rows)
