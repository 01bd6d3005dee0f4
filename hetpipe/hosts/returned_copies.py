"""Checkpoints that the leader's disk has lost and another host holds: brought back before a run goes on."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cost_model.errors import InputError
from hetpipe.hosts.conversation import Answer, Message
from hetpipe.runs.run_folder import RunFolder, numbered_runs

NEWEST, PIECE = "newest copy", "piece of a copy"
"""The questions that a member answers."""
PIECE_BYTES = 2**24


class Others(Protocol):
    """The other hosts, as the leader asks them."""

    @property
    def others(self) -> tuple[str, ...]:
        """Return the names of their nodes."""

    def ask(
        self, question: str, nodes: Sequence[str], meanwhile: Callable[[], None], **rest: Any
    ) -> tuple[None, dict[str, Answer]]:
        """Have nodes answer a question, as `Leader.ask`."""


class OwnCopies:
    """What a member holds: its newest whole checkpoint of a run, and the pieces of its files."""

    def __init__(self, root: Path, node: str) -> None:
        """root: of numbered run folders. node: of this host."""
        self._root, self._node = root, node
        self._offered: Path | None = None

    def newest(self, message: Message) -> Answer:
        """Answer with the newest whole checkpoint of a run folder here, else of the newest run of a model.

        Looked at is the folder of the leader's name, and the one that a member makes where that is taken.
        """
        from hetpipe.training.checkpoint import MANIFEST_FILE, read_manifest
        from hetpipe.training.checkpoint_damage import newest_whole

        named, model = message["folder"], str(message["model"])
        runs = numbered_runs(self._root, model) if named is None else (RunFolder(Path(str(named))),)
        for run in runs:
            found = []
            for folder in (run, RunFolder(run.path.with_name(f"{run.path.name}-{self._node}"))):
                newest = newest_whole(folder.checkpoints).folder
                manifest = None if newest is None else read_manifest(newest)
                if manifest is not None and manifest.model == model:
                    found.append((manifest.step, str(newest)))
            if found:
                step, path = max(found)
                self._offered = Path(path)
                text = (self._offered / MANIFEST_FILE).read_text(encoding="utf-8")
                return {"step": step, "run": run.path.name, "manifest": text}, b""
        return {}, b""

    def piece(self, message: Message) -> Answer:
        """Answer with bytes of a file of the checkpoint that was offered; none where it ends."""
        name, start = str(message["file"]), int(message["start"])
        if self._offered is None or Path(name).name != name:
            raise InputError(f"the leader asks for {name!r}, which was not offered")
        try:
            with open(self._offered / name, "rb") as file:
                file.seek(start)
                return {}, file.read(PIECE_BYTES)
        except OSError as error:
            raise InputError(f"{self._offered / name}: cannot be read ({error.strerror})") from None

    @property
    def answers(self) -> Mapping[str, Callable[[Message], Answer]]:
        """Return what answers each question."""
        return {NEWEST: self.newest, PIECE: self.piece}


@dataclass(frozen=True, slots=True)
class _Copy:
    """A checkpoint on another host: its step, the name of its run there, and the text of its manifest."""

    node: str
    step: int
    run: str
    manifest: str


def bring_back(
    others: Others, resume: str, folder: RunFolder | None, root: Path, model: str, tell: Callable[[str], None]
) -> None:
    """Bring the newest checkpoint of a run here where this host has lost it and another holds it whole.

    resume: as given: "auto", a run folder or a checkpoint; what is named and there is taken as it is. A
    checkpoint that is here and damaged is replaced by one with the same manifest alone, one of a run of which
    nothing is left here by any of its name. tell: takes a sentence for what is brought.

    Raises: InputError if it cannot be written, or arrives otherwise than it was.
    """
    from hetpipe.training.checkpoint import MANIFEST_FILE, holds_run, written
    from hetpipe.training.resumption import is_best

    if is_best(resume):
        return  # of what is here
    if resume != "auto":
        if (Path(resume) / MANIFEST_FILE).exists():
            return
        path = Path(resume)
        if path.exists() and not holds_run(path) and any(path.iterdir()):
            return  # what is no run is refused later
        folder = RunFolder(path)
    if folder is None and any(written(run.checkpoints) for run in numbered_runs(root, model)):
        folder = next(run for run in numbered_runs(root, model) if written(run.checkpoints))
    copy = _newest(others, folder, model)
    if copy is None:
        return
    run = folder or RunFolder(root / copy.run)
    with run.locked():
        if _is_wanted(run, copy):
            path = _fetch(others, copy, run, model)
            tell(f"{path} is brought back from {copy.node}, which holds a copy; it was lost here")


def _newest(others: Others, folder: RunFolder | None, model: str) -> _Copy | None:
    """Return the newest checkpoint that the others offer."""
    named = None if folder is None else str(folder.path)
    _, answers = others.ask(NEWEST, others.others, lambda: None, folder=named, model=model)
    found = [
        _Copy(node, int(answer["step"]), str(answer["run"]), str(answer["manifest"]))
        for node, (answer, _) in answers.items()
        if "manifest" in answer
    ]
    for copy in found:
        if folder is None and not copy.run.removeprefix(f"{model}-").isdecimal():
            raise InputError(f"{copy.node} offers a run called {copy.run!r}; start again")
    return max(found, key=lambda copy: copy.step, default=None)


def _is_wanted(run: RunFolder, copy: _Copy) -> bool:
    """Return whether a copy is of a checkpoint that this host has lost."""
    from hetpipe.training.checkpoint import MANIFEST_FILE, written
    from hetpipe.training.checkpoint_damage import damage_of

    here = written(run.checkpoints)
    if not here:
        return True
    step, newest = here[0]
    try:
        same = (newest / MANIFEST_FILE).read_text(encoding="utf-8") == copy.manifest
    except (OSError, UnicodeDecodeError):
        return False
    return same and step == copy.step and damage_of(newest) is not None


def _fetch(others: Others, copy: _Copy, run: RunFolder, model: str) -> Path:
    """Write a copy into the run folder here, whole or not at all; return its place."""
    from hetpipe.training import checkpoint
    from hetpipe.training.checkpoint_damage import damage_of, put_aside

    made: Path | None = None
    try:
        made = checkpoint.begin(run.checkpoints, copy.step)
        (made / checkpoint.MANIFEST_FILE).write_text(copy.manifest, encoding="utf-8")
        manifest = checkpoint.read_manifest(made)
        for file in (*manifest.layers, *manifest.others):
            with open(made / file.file, "wb") as here:
                while piece := _piece(others, copy.node, file.file, here.tell()):
                    here.write(piece)
                here.flush()
                os.fsync(here.fileno())
        if manifest.step != copy.step or manifest.model != model:
            raise InputError(f"{copy.node} sent another checkpoint than it offered; start again")
        if damage := damage_of(made):
            raise InputError(f"{damage}, sent by {copy.node}; start again")
        target = run.checkpoints / f"step-{copy.step:06d}"
        if target.exists():
            put_aside(target)
        os.rename(made, target)
    except OSError as error:
        raise InputError(
            f"{run.checkpoints}: the copy of {copy.node} cannot be written ({error.strerror}); make room"
        ) from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    return target


def _piece(others: Others, node: str, name: str, start: int) -> bytes:
    _, answers = others.ask(PIECE, (node,), lambda: None, file=name, start=start)
    if node not in answers:
        raise InputError(f"{node} is lost; start again")
    return answers[node][1]
