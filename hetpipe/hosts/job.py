"""What the leader sends of a run that is planned, and the folder that a member makes of it."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile, read_profile
from cost_model.strict_files import read_text
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.program_text import parse_program
from hetpipe.runs.identity import identity_of
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings, read_settings, settings_text
from hetpipe.trust.channel import Address
from partition.plan_file import read_plan

MANIFEST_FILE = "manifest.json"
_FILES = ("cluster", "profile", "plan", "program", "config", "vocabulary")


@dataclass(frozen=True, slots=True)
class Job:
    """A run as the leader has planned it: the texts of its folder, and how its ranks meet.

    folder: of the leader, as it is called. files: texts by the names of `RunFolder`. tokens_sha256: of the
    texts that are trained on, as numbers. first: the rank that reports. port: of the leader's store.
    attempt: counted from 0. manifest: of the checkpoint that the run goes on from, "" at its beginning.
    """

    folder: str
    files: dict[str, str]
    tokens_sha256: str
    first: int
    port: int
    attempt: int
    manifest: str

    @classmethod
    def of(cls, folder: RunFolder, address: Address, first: int, attempt: int = 0) -> "Job":
        """Return the job of a run folder that is filled."""
        files = {name: read_text(getattr(folder, name)) for name in _FILES}
        source = read_settings(folder.config).resume_from
        manifest = "" if source is None else read_text(Path(source) / MANIFEST_FILE)
        tokens = tokens_sha256(folder)
        return cls(str(folder.path), files, tokens, first, address[1], attempt, manifest)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> "Job":
        """Return the job of a message."""
        return _ADAPTER.validate_python({key: data[key] for key in cls.__slots__})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_ADAPTER = TypeAdapter(Job)


def tokens_sha256(folder: RunFolder) -> str:
    """Return the hash of the tokens in a run folder, and of the held-out ones."""
    from hetpipe.data.kinds import written_sha256

    held_out = [folder.held_out] if read_settings(folder.config).eval_data else []
    return "".join(map(written_sha256, [folder.path, *held_out]))


@contextmanager
def member_folder(job: Job, node: str) -> Iterator[RunFolder]:
    """Give the folder of a member, locked: that of the run if it is here, else a free one.

    A free one is called as the leader's, with its node's name where that is taken: by another run, or in use,
    as by the leader where hosts share a file system.

    Raises: InputError if it cannot be made, or that of the run is in use here.
    """
    config, folders = json.loads(job.files["config"]), folders_here(Path(job.folder), node)
    begins = job.attempt == 0 and config.get("resume_from") is None  # what has its id by now is the leader's
    run_id = None if begins else config.get("run_id")
    own = [folder for folder in reversed(folders) if identity_of(folder) == run_id]
    with ExitStack() as held:
        for folder in (*own, *_free(folders, node)):
            try:
                held.enter_context(folder.locked())
            except InputError:
                if folder.path.exists() and (folder == folders[0] or folder not in own):
                    continue  # another run has it, or the leader
                raise
            yield folder
            return
        raise InputError(f"{job.folder}: other runs begin there at the same time; start again")


def folders_here(path: Path, node: str) -> tuple[RunFolder, ...]:
    """Return the folders in which a member may have runs that its leader has under a name: at least one.

    The first is called as the leader's; it need not exist.
    """
    found = [RunFolder(path)]
    while (later := _next_name(path, node, len(found))).exists():
        found.append(RunFolder(later))
    return tuple(found)


def _next_name(path: Path, node: str, index: int) -> Path:
    """Return the name for the run that comes after so many others that have it here."""
    return path.with_name(f"{path.name}-{node}{f'-{index}' if index > 1 else ''}")


def _free(folders: Sequence[RunFolder], node: str) -> Iterator[RunFolder]:
    """Yield folders in which nothing of another run is lost; the last does not exist yet."""
    first, *others = folders
    if not any(own.exists() for own in (first.plan, first.config, first.checkpoints)):
        yield first
    yield from (folder for folder in others if not folder.checkpoints.exists())
    yield RunFolder(_next_name(first.path, node, len(folders)))


@dataclass(frozen=True, slots=True)
class FilledFolder:
    """The folder of a member: what its task is made from, and what its program costs."""

    settings: TaskSettings
    costs: ProgramCosts
    profile: ModelProfile


def go_on_from(folder: RunFolder, source: Path) -> None:
    """Name, in the folder's settings, where the checkpoint is on this host."""
    settings = dataclasses.replace(read_settings(folder.config), resume_from=str(source))
    folder.write(folder.config, settings_text(settings))


def fill_folder(folder: RunFolder, job: Job, own: Settings) -> FilledFolder:
    """Fill the folder of a member.

    own: settings with the places of model, texts and adapters on this host.

    Raises: InputError if the texts here give other tokens.
    """
    from hetpipe.data.task import prepare_data

    folder.job.unlink(missing_ok=True)  # of a run that this host had alone
    for name in _FILES:
        folder.write(getattr(folder, name), job.files[name])
    settings = dataclasses.replace(
        read_settings(folder.config),
        model_folder=own.model_folder,
        adapter=own.adapter,
    )
    if own.data:
        settings = dataclasses.replace(settings, data=own.data)
    if own.eval_data:
        settings = dataclasses.replace(settings, eval_data=own.eval_data)
    folder.write(folder.config, settings_text(settings))
    profile = read_profile(folder.profile)
    task_settings = TaskSettings.of(profile, settings)
    prepare_data(folder, task_settings, folder.vocabulary)
    if tokens_sha256(folder) != job.tokens_sha256:
        raise InputError(
            "the texts of --data or --eval-data are read into other tokens here than on the leader's host; "
            "copy the same texts to all hosts"
        )
    program = parse_program(job.files["program"], read_plan(folder.plan))
    costs = ProgramCosts(program, profile, read_cluster(folder.cluster))
    return FilledFolder(task_settings, costs, profile)
