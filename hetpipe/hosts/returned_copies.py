"""Checkpoints that the leader's disk has lost and another host holds: brought back before a run goes on."""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from cost_model.errors import InputError
from hetpipe.hosts.conversation import Answer, Message
from hetpipe.hosts.job import folders_here
from hetpipe.runs.identity import identity_of
from hetpipe.runs.run_folder import RunFolder, numbered_runs
from hetpipe.runs.settings import read_settings, settings_text

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
    """What a member holds: its newest whole checkpoints of runs, and the pieces of their files."""

    def __init__(self, root: Path, node: str) -> None:
        """root: of numbered run folders. node: of this host."""
        self._root, self._node = root, node
        self._offered: set[Path] = set()

    def newest(self, message: Message) -> Answer:
        """Answer with the newest whole checkpoint of each run that may be the one that is asked for.

        Looked at are the folders of the leader's name that are here; else those of the newest run of a model
        that a leader had, not this host alone. Where the leader knows the run, no other is offered.
        """
        named, model = message["folder"], str(message["model"])
        for path in self._paths(model) if named is None else (Path(str(named)),):
            folders = folders_here(path, self._node)
            if message["run"]:
                folders = tuple(each for each in folders if identity_of(each) == message["run"])
            found = [
                self._offer(each, path.name, model) for each in folders if named or not each.job.exists()
            ]
            if copies := [copy for copy in found if copy is not None]:
                self._offered = {Path(copy["path"]) for copy in copies}
                return {"copies": copies}, b""
        return {"copies": []}, b""

    def _paths(self, model: str) -> list[Path]:
        """Return where a leader has the runs of a model, of which this host has folders; the newest first."""
        runs = {run.path.name for run in numbered_runs(self._root, model)}
        pattern = re.compile(rf"({re.escape(model)}-\d{{3,}})-{re.escape(self._node)}(-\d+)?")
        names = [path.name for path in self._root.iterdir()] if self._root.is_dir() else []
        runs |= {match[1] for match in map(pattern.fullmatch, names) if match}
        return [self._root / name for name in sorted(runs, key=_number, reverse=True)]

    def _offer(self, folder: RunFolder, name: str, model: str) -> dict[str, Any] | None:
        """Return what is said of the newest whole checkpoint in a folder; None where there is none."""
        from hetpipe.training.checkpoint import MANIFEST_FILE, read_manifest
        from hetpipe.training.checkpoint_damage import newest_whole

        newest = newest_whole(folder.checkpoints).folder
        if newest is None or (manifest := read_manifest(newest)).model != model:
            return None
        run_id, config = identity_of(folder), ""
        if run_id:  # of a folder from before runs had one, too
            config = settings_text(replace(read_settings(folder.config), run_id=run_id))
        return {
            "step": manifest.step,
            "name": name,
            "path": str(newest),
            "run": run_id,
            "alone": folder.job.exists(),
            "manifest": (newest / MANIFEST_FILE).read_text(encoding="utf-8"),
            "config": config,
        }

    def piece(self, message: Message) -> Answer:
        """Answer with bytes of a file of the checkpoint that was offered; none where it ends."""
        name, start, offered = str(message["file"]), int(message["start"]), Path(str(message["path"]))
        if offered not in self._offered or Path(name).name != name:
            raise InputError(f"the leader asks for {name!r}, which was not offered")
        try:
            with open(offered / name, "rb") as file:
                file.seek(start)
                return {}, file.read(PIECE_BYTES)
        except OSError as error:
            raise InputError(f"{offered / name}: cannot be read ({error.strerror})") from None

    @property
    def answers(self) -> Mapping[str, Callable[[Message], Answer]]:
        """Return what answers each question."""
        return {NEWEST: self.newest, PIECE: self.piece}


@dataclass(frozen=True, slots=True)
class _Copy:
    """A checkpoint on another host: its step and place there, and the texts of its manifest and settings.

    name: of its run on the leader. run: its `identity_of`. alone: whether that host had the run alone.
    """

    node: str
    step: int
    name: str
    path: str
    run: str
    alone: bool
    manifest: str
    config: str

    @property
    def folder(self) -> Path:
        """Return the run folder there."""
        return Path(self.path).parent.parent


_OFFERED = TypeAdapter(_Copy)


def bring_back(
    others: Others, resume: str, folder: RunFolder | None, root: Path, model: str, tell: Callable[[str], None]
) -> None:
    """Bring the newest checkpoint of a run here where this host has lost it and another holds it whole.

    resume: as given: "auto", a run folder or a checkpoint; what is named and there is taken as it is. A
    checkpoint that is here and damaged is replaced by one with the same manifest alone, one of a run of which
    nothing is left here by the newest of that run. tell: takes a sentence for what is brought, and for what
    is later than all that is here.

    Raises: InputError if it cannot be written, or arrives otherwise than it was; if nothing is left here, and
    copies of several runs are there.
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
    found = _offered(others, folder, model)
    here = [] if folder is None else written(folder.checkpoints)
    copy = _same(found, here[0][1]) if here else _newest(found)
    if folder is not None and here and identity_of(folder):
        _tell_of_later(found, here[0][0], folder.checkpoints, tell)
    if copy is None:
        return
    run = folder or RunFolder(root / copy.name)
    with run.locked():
        path = _fetch(others, copy, run, model)
        if copy.config and not run.config.exists():  # says which run it is
            run.write(run.config, copy.config)
        tell(f"{path} is brought back from {copy.node}, which holds a copy; it was lost here")


def _offered(others: Others, folder: RunFolder | None, model: str) -> list[_Copy]:
    """Return the checkpoints that the others offer, of the run in a folder here where that is known."""
    named, run = (None, "") if folder is None else (str(folder.path), identity_of(folder))
    _, answers = others.ask(NEWEST, others.others, lambda: None, folder=named, model=model, run=run)
    found = [
        _OFFERED.validate_python({**said, "node": node})
        for node, (answer, _) in answers.items()
        for said in answer["copies"]
    ]
    for copy in found:
        if folder is None and not copy.name.removeprefix(f"{model}-").isdecimal():
            raise InputError(f"{copy.node} offers a run called {copy.name!r}; start again")
    if folder is None:
        newest = max((_number(copy.name) for copy in found), default=0)
        found = [copy for copy in found if _number(copy.name) == newest]
    return found


def _number(name: str) -> int:
    """Return the number of a run.

    >>> _number("bert-tiny-012")
    12
    """
    return int(name.rpartition("-")[2])


def _newest(found: Sequence[_Copy]) -> _Copy | None:
    """Return the newest copy of a run of which nothing is left here.

    Raises: InputError if they are of several runs.
    """
    found = [copy for copy in found if not copy.alone] or found  # a run of several hosts is asked for
    newest = {copy.run: copy for copy in sorted(found, key=lambda copy: copy.step)}
    if len(newest) > 1:
        said = " and ".join(f"{copy.folder} on {copy.node} (step {copy.step})" for copy in newest.values())
        raise InputError(
            f"nothing to resume here, and other hosts hold checkpoints of {len(newest)} runs: {said}; give "
            "--run-folder the name of the one to go on with, or move the others away"
        )
    return next(iter(newest.values()), None)


def _same(found: Sequence[_Copy], newest: Path) -> _Copy | None:
    """Return a copy of the newest checkpoint here where that is damaged, None if it is not or there is none.

    What is whole is not asked for.
    """
    from hetpipe.training.checkpoint import MANIFEST_FILE
    from hetpipe.training.checkpoint_damage import damage_of

    try:
        text = (newest / MANIFEST_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    copy = next((copy for copy in found if copy.manifest == text), None)
    return copy if copy is not None and damage_of(newest) is not None else None


def _tell_of_later(found: Sequence[_Copy], step: int, checkpoints: Path, tell: Callable[[str], None]) -> None:
    """Tell of a checkpoint that another host holds of the run here, later than all that is here."""
    latest = max(found, key=lambda copy: copy.step, default=None)
    if latest is not None and latest.step > step:
        tell(
            f"{latest.node} holds step {latest.step} of this run ({latest.path}), and the newest here is "
            f"step {step}, so the later steps are made anew; to go on from step {latest.step}, end this run "
            f"and copy that folder to {checkpoints}"
        )


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
                while piece := _piece(others, copy, file.file, here.tell()):
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


def _piece(others: Others, copy: _Copy, name: str, start: int) -> bytes:
    _, answers = others.ask(PIECE, (copy.node,), lambda: None, path=copy.path, file=name, start=start)
    if copy.node not in answers:
        raise InputError(f"{copy.node} is lost; start again")
    return answers[copy.node][1]
