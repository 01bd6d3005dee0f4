"""The folder that a run writes, and what reads it afterwards."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from cost_model.strict_files import read_json, read_text, write_atomically
from hetpipe.program.program_text import parse_instruction
from hetpipe.program.trace import Event, Trace

PREDICTED = "predicted"
MEASURED = "measured"
DEVICE_CLOCKS = "device clocks"
"""Names of traces; the last only where emulated devices have clocks of their own."""

MetricsRow = dict[str, Any]
"""What metrics.jsonl says of a step."""

_NUMBERED = re.compile(r"(?P<model>.+)-(?P<number>\d{3,})")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run by name; each property is a path, whether it exists or not.

    >>> RunFolder(Path("runs/bert-tiny-001")).plan.name
    'plan.json'
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def job(self) -> Path:
        """Return the path of a run file that repeats the run."""
        return self.path / "job.toml"

    @property
    def cluster(self) -> Path:
        """Return the path of a copy of the cluster file."""
        return self.path / "cluster.toml"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def program(self) -> Path:
        return self.path / "program.txt"

    @property
    def metrics(self) -> Path:
        """Return the path of metrics: a line per step, each a JSON object: step, loss, samples_per_s, ..."""
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        """Return the path of Chrome trace events of one step, predicted and measured as processes of it."""
        return self.path / "trace.json"

    @property
    def recoveries(self) -> Path:
        """Return the path of what was lost: a line per restart, an object: error, noticed, from_step, ..."""
        return self.path / "recoveries.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def page(self) -> Path:
        """Return the path of a page for a browser: plan, timeline, memory, losses."""
        return self.path / "report.html"

    @property
    def vocabulary(self) -> Path:
        return self.path / "vocabulary.json"

    @property
    def tokenizer_config(self) -> Path:
        """Return the path of the tokenizer_config.json of the model's folder; none where it brings none."""
        return self.path / "tokenizer_config.json"

    @property
    def chat_template(self) -> Path:
        """Return the path of how chats are written as text; none where there are no chats."""
        return self.path / "chat-template.json"

    @property
    def image_processor(self) -> Path:
        """Return the path of how images are normalised; none where there are no images."""
        return self.path / "preprocessor_config.json"

    @property
    def model_config(self) -> Path:
        """Return the path of the config.json of the model's folder; none for a model by name."""
        return self.path / "model-config.json"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens.bin"

    @property
    def held_out(self) -> Path:
        """Return the path of a folder with the tokens of --eval-data; none where there are no such texts."""
        return self.path / "held-out"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def is_run(self) -> bool:
        """Return whether a run began here: any folder may hold a plan, only that of a run its program."""
        return self.plan.exists() and self.program.exists()

    @classmethod
    def create(cls, root: Path, model: str) -> "RunFolder":
        """Make a new folder root/<model>-<number>, one above the highest; safe beside other processes.

        Raises: InputError if root cannot be written to.
        """
        number = max((number for number, _ in _numbered(root, model)), default=0)
        try:
            root.mkdir(parents=True, exist_ok=True)
            while True:
                number += 1
                path = root / f"{model}-{number:03d}"
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                return cls(path)
        except OSError as error:
            raise InputError(f"{root}: no run folder can be made there ({error.strerror})") from None

    def check_free(self) -> None:
        """Check, before anything slow is done, that a run can be written there.

        Raises: InputError if there is a file in the way, or other files than a run's would be replaced.
        """
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir():
            raise InputError(f"{self.path}: no run folder can be made there ({there} is no folder)")
        if any(own.exists() for own in (self.config, self.metrics, self.checkpoints)):
            return
        if found := next((own for own in (self.plan, self.profile, self.cluster) if own.exists()), None):
            raise InputError(
                f"{self.path}: holds no run, but {found.name}, which would be replaced; give a new folder"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of the folder, which is made; remove it if it is empty at the end.

        Raises: InputError if another run has it, or it cannot be made.
        """
        made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"{self.path}: no run folder can be made there ({error.strerror})") from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"{self.path}: another run is writing there; wait for it, or give another run folder"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(descriptor)
            if made:
                with suppress(OSError):
                    self.path.rmdir()

    def write(self, path: Path, text: str) -> None:
        """Write one of the folder's files, whole or not at all.

        Raises: InputError if the folder cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from None

    def begin_after(self, steps: int) -> None:
        """Leave the metrics of the first steps only: a run that was killed had gone on beyond its checkpoint.

        What it told of its plan and its last step goes: these are not those of the run that begins.

        Raises: InputError if the folder cannot be written to.
        """
        if self.metrics.exists():
            kept = [entry for entry in self.read_metrics() if entry["step"] <= steps]
            self.write(self.metrics, "".join(json.dumps(entry) + "\n" for entry in kept))
        for path in (self.report, self.trace, self.page):
            path.unlink(missing_ok=True)

    def read_metrics(self) -> tuple[MetricsRow, ...]:
        """Return the objects of metrics.jsonl, a step each, without a last line that a crash cut off."""
        if not self.metrics.exists():
            return ()
        lines = read_text(self.metrics).splitlines()
        rows = []
        for index, line in enumerate(lines):
            try:
                rows.append(metrics_row(line, f"{self.metrics}: line {index + 1}"))
            except CutOffError:
                if index < len(lines) - 1:
                    raise
        return tuple(rows)

    def read_traces(self) -> dict[str, Trace]:
        """Return the traces of trace.json by the name of their process; none if the run wrote none.

        Raises: InputError if it holds something else.
        """
        if not self.trace.exists():
            return {}
        data = read_json(self.trace)
        try:
            return parse_chrome_trace(data)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, InputError):
            raise InputError(f"{self.trace}: is no trace as a run writes it; take it away") from None


class CutOffError(InputError):
    """A line that is not JSON, as a crash leaves the last one."""


def metrics_row(line: str, where: str) -> MetricsRow:
    """Return the object of a line of metrics.jsonl; where: it, for errors.

    Raises: InputError if it is of no step; `CutOffError` if it is not JSON.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise CutOffError(f"{where} is not JSON") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise InputError(f"{where} is of no step; take it out")
    return row


def figure_text(name: str, value: float) -> str:
    """Return a figure of held-out samples for people: BLEU from 0 to 100 as it is, others as shares.

    >>> figure_text("bleu", 23.456), figure_text("f1", 0.5)
    ('23.46', '50.00%')
    """
    return f"{value:.2f}" if name == "bleu" else f"{value:.2%}"


def held_out_figures(row: MetricsRow) -> dict[str, float]:
    """Return the figures of held-out samples beside the loss, such as accuracy, that metrics have."""
    others = ("eval_loss", "eval_s")
    return {
        name.removeprefix("eval_"): value
        for name, value in row.items()
        if name.startswith("eval_") and name not in others and isinstance(value, float)
    }


def numbered_runs(root: Path, model: str) -> tuple[RunFolder, ...]:
    """Return the folders of root for a model, the highest number first."""
    return tuple(RunFolder(path) for _, path in sorted(_numbered(root, model), reverse=True))


def _numbered(root: Path, model: str) -> list[tuple[int, Path]]:
    folders = []
    for found in os.scandir(root) if root.is_dir() else ():
        match = _NUMBERED.fullmatch(found.name)
        if match and match["model"] == model and found.is_dir():
            folders.append((int(match["number"]), Path(found.path)))
    return folders


def parse_chrome_trace(data: dict[str, Any]) -> dict[str, Trace]:
    """Return traces by process name: the inverse of `hetpipe.program.trace.chrome_trace`."""
    rows = data["traceEvents"]
    named = [row for row in rows if row["ph"] == "M"]
    processes = {row["pid"]: row["args"]["name"] for row in named if row["name"] == "process_name"}
    lanes = {(row["pid"], row["tid"]): row["args"]["name"] for row in named if row["name"] == "thread_name"}
    traces = {}
    for pid, name in processes.items():
        begins: dict[str, float] = {}
        events = []
        for row in rows:
            if row["pid"] != pid or row["ph"] in ("M", "s", "f"):  # names and arrows
                continue
            start_s = row["ts"] / 1e6
            if row["ph"] == "b":
                begins[row["id"]] = start_s
                continue
            end_s = start_s + row.get("dur", 0.0) / 1e6
            if row["ph"] == "e":
                start_s, end_s = begins.pop(row["id"]), start_s
            events.append(Event(row["tid"] // 2, parse_instruction(row["name"]), start_s, end_s))
        events.sort(key=lambda event: (event.rank, event.start_s, event.end_s))
        devices = [lanes[key] for key in sorted(lanes) if key[0] == pid and key[1] % 2 == 0]
        traces[name] = Trace(tuple(devices), tuple(events))
    return traces


def check_empty(path: Path, remedy: str) -> None:
    """Check that a folder can be made there, or is empty; remedy: what to give else.

    Raises: InputError if not.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path}: exists and is not an empty folder; give {remedy}")
