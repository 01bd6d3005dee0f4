"""What `run` does after planning: the settings of the run, the training with its progress, what it keeps."""

import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from cost_model.dtypes import FLOAT32
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.commands.given_data import given_place, readable_texts, warn_of_learned
from hetpipe.commands.given_times import checkpoint_times, timeout_seconds
from hetpipe.commands.job_file import job_text, leaving_job
from hetpipe.commands.learning import OPTIMIZER, TRAINING, LearningOptions, check_samples
from hetpipe.commands.output import note, warn
from hetpipe.commands.resuming import RunBefore, begins_anew, check_changes, decided_by, starts_again
from hetpipe.models.names import ModelEntry
from hetpipe.program.instructions import Schedule
from hetpipe.reporting.lost_reader import go_on_in
from hetpipe.reporting.progress import step_bar
from hetpipe.runs.metric_sinks import SinkKind, Sinks, check_installed, run_facts
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import LOSS, Clock, Settings

if TYPE_CHECKING:
    from hetpipe.runs.run_report import RunReport
    from hetpipe.simulation.prediction import Prediction
    from hetpipe.training.adaptation import Adapt
    from hetpipe.training.other_hosts import OtherHosts
    from hetpipe.training.recovery import Replan

RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How to train: everything of `run` that is neither model, cluster nor plan."""

    title: ClassVar[str] = TRAINING
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            parser=given_place,
            metavar="<Path>",
            help="Text, .jsonl, or what the task learns (Data); several times.",
        ),
    ] = None
    steps: Annotated[int, typer.Option("--steps", help="Steps to train for.")] = 100
    total_steps: Annotated[
        int | None,
        typer.Option("--total-steps", help="Length of the learning-rate schedule; --steps, or of --resume."),
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", help="0, or that of --resume.")] = None
    learning_rate: Annotated[
        float | None,
        typer.Option("--learning-rate", rich_help_panel=OPTIMIZER, help="1e-4, or that of --resume."),
    ] = None
    every: Annotated[
        str | None,
        typer.Option("--every", help='A checkpoint each "50" steps or "10min" too; 0, or as --resume.'),
    ] = None
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", help="Keep the newest so many checkpoints, and the best; 0: all, or as --resume."
        ),
    ] = None
    save: Annotated[
        bool,
        typer.Option("--save/--no-save", help="Keep the trained model: a checkpoint at the end, or none."),
    ] = True
    resume: Annotated[
        str | None,
        typer.Option("--resume", help='"auto", "best", a run folder or a checkpoint to go on from.'),
    ] = None
    clock: Annotated[
        Clock, typer.Option("--clock", help="What an emulated device charges: the profile's times, or CPU.")
    ] = Clock.NOMINAL
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout", help="How long a rank waits for a message, as 2min; 10min, or as --resume."
        ),
    ] = None
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", min=0, help="Go on after a loss; so often in a row without progress."),
    ] = 3
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Plan again when a device has become slow, if that gains time.")
    ] = False
    log: Annotated[
        list[SinkKind] | None,
        typer.Option("--log", help="Send the metrics of each step there too; give it several times."),
    ] = None
    run_folder: Annotated[
        Path | None, typer.Option("--run-folder", help="Where to write; else runs/<model>-<number>.")
    ] = None


@dataclass(frozen=True, slots=True)
class RunStart:
    """What a run begins with, checked before anything is measured.

    folder: None for a new numbered one. batch: samples a step of the run before, None if there is none.
    gradient_dtype: in which its gradients travelled. max_restarts: see `Recovery`. override: what it may have
    otherwise than the run before. log: where metrics are sent beside the run folder. starts_again: whether it
    is asked for by what starts the same command again and again.
    """

    entry: ModelEntry
    folder: RunFolder | None
    settings: Settings
    batch: int | None = None
    gradient_dtype: str = FLOAT32
    max_restarts: int = 0
    before: RunBefore = field(default_factory=RunBefore)
    override: frozenset[str] = frozenset()
    log: tuple[SinkKind, ...] = ()
    starts_again: bool = False

    @property
    def over(self) -> str:
        """Return in words that all steps are done, "" where there are some left, or none asks again."""
        if not self.starts_again or self.before.step != self.settings.steps:
            return ""
        steps = self.settings.steps
        done = f"{self.before.source}: step {steps} of {steps} is done"
        return f"{done}, nothing is left to do; raise --steps for more"


def run_start(
    entry: ModelEntry,
    options: TrainingOptions,
    schedule: Schedule | None,
    learning: LearningOptions,
    decided: Mapping[str, Any],
    *,
    dry_run: bool,
    several: bool = False,
) -> RunStart:
    """Find the texts, and unless it is a dry run the checkpoint to go on from.

    decided: settings that layers are measured with. several: whether other hosts take part, each with texts
    of its own place.

    Raises: InputError for a text that cannot be read, a setting that is none, or if there is nothing to
        resume.
    """
    folder = RunFolder(options.run_folder) if options.run_folder is not None else None
    if folder is not None and not dry_run:
        folder.check_free()
    given = {
        "seed": options.seed,
        "learning_rate": options.learning_rate,
        "total_steps": options.total_steps,
        "data": tuple(map(str, readable_texts(options.data, entry))) if options.data else None,
        **decided,
        **learning.given,
    }
    check_samples(given, entry, resumes=options.resume is not None)
    if not dry_run and not options.data and options.resume is None and entry.task.needs_data:
        from hetpipe.data.kinds import check_given

        check_given((), entry)
    log = tuple(dict.fromkeys(options.log or ()))
    for kind in log:
        check_installed(kind)
    override = _overridden(learning, options)
    before = RunBefore()
    if options.resume is not None and not dry_run and not begins_anew(options.resume, folder):
        before = RunBefore.find(options.resume, folder, RUNS, entry, options.steps)
        if given["data"] is None:
            if several:
                before.check_data_given("--data")
            readable_texts(map(Path, before.decided.get("data", ())), entry)
    decided = decided_by(before, given)
    earlier = before.settings
    every, every_s = earlier.every, earlier.every_s
    if options.every is not None:
        every, every_s = checkpoint_times(options.every)
    settings = Settings(
        steps=options.steps,
        **decided,
        **_evaluation(entry, learning, earlier, several=several),
        every=every,
        every_s=every_s,
        keep=earlier.keep if options.keep is None else options.keep,
        save=options.save,
        clock=options.clock,
        schedule=schedule or earlier.schedule,
        timeout_s=earlier.timeout_s if options.timeout is None else timeout_seconds(options.timeout),
        resume_from=None if before.source is None else str(before.source),
        **entry.in_settings,
    )
    warn_of_learned(settings.data, settings.eval_data)
    return RunStart(
        entry, folder, settings, before.batch, before.gradient_dtype, options.max_restarts, before, override,
        log, starts_again=starts_again(options.resume, folder),
    )  # fmt: skip


def _overridden(learning: LearningOptions, options: TrainingOptions) -> frozenset[str]:
    """Return what --override names.

    Raises: InputError for what is none, or where nothing is gone on from.
    """
    if not learning.override:
        return frozenset()
    if options.resume is None:
        raise InputError("--override is of what a run before had; give --resume with it, or leave it out")
    from hetpipe.training.resumed_settings import overridden

    return overridden(learning.override)


def _evaluation(
    entry: ModelEntry, learning: LearningOptions, earlier: Settings, *, several: bool
) -> dict[str, Any]:
    """Return the settings of held-out texts; what is not given is that of the run before.

    Raises: InputError for a text that cannot be read, or is on another host.
    """
    if learning.eval_data:
        texts = tuple(map(str, readable_texts(learning.eval_data, entry)))
    else:
        if several and earlier.eval_data:
            raise InputError(
                "the run before had --eval-data, whose place is each host's own; give it on each host"
            )
        texts = tuple(map(str, readable_texts(map(Path, earlier.eval_data), entry)))
    given = (
        ("--eval-every", learning.eval_every),
        ("--patience", learning.patience),
        ("--best", None if learning.best == LOSS else learning.best),
    )
    for option, value in given:
        if value and not texts:
            raise InputError(f"{option} is {value}, and there is no text for it; give --eval-data")
    if learning.best is not None:
        from hetpipe.data.figures import check_best, figure_names

        check_best(learning.best, figure_names(entry.task))
    return {
        "eval_data": texts,
        "eval_every": earlier.eval_every if learning.eval_every is None else learning.eval_every,
        "patience": earlier.patience if learning.patience is None else learning.patience,
        "best": earlier.best if learning.best is None else learning.best,
    }


def train_shown(
    start: RunStart,
    cluster_file: Path,
    profile: ModelProfile,
    prediction: "Prediction",
    *,
    replan: "Replan | None",
    adapt: "Adapt | None" = None,
    quiet: bool,
    hosts: "OtherHosts | None" = None,
) -> "tuple[RunReport, RunFolder]":
    """Train a verified program and show the progress; return the report, and the folder it is in.

    replan: what plans without the devices that were lost; None where the plan is the user's. adapt: what
    plans with slow ones; None where they are named alone.
    hosts: the others that take part, None where all devices are here.
    """
    from hetpipe.training.checkpoint_room import room_of
    from hetpipe.training.resumption import steps_done
    from hetpipe.training.run import train_predicted

    settings = start.settings
    check_changes(start.entry, settings, start.override, profile, prediction)
    folder, made = _folder_of(settings, profile.model, start.folder, anew=start.before.is_best)
    go_on_in(folder.path)
    if shortage := room_of(folder, settings, profile).shortage:
        warn(shortage)

    def say(told: str) -> None:
        note([told])

    def ending(name: str) -> None:
        kept = ", with a checkpoint" if settings.save else ""
        note([f"{name}: training ends after this step{kept}; Ctrl-C ends it at once"])

    def leave_job(on_event: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        text = job_text(folder, settings, profile, start.max_restarts, start.log)
        return leaving_job(on_event, folder, text if hosts is None else None)

    facts = run_facts(settings, prediction.plan, profile) if start.log else {}
    try:
        with (
            step_bar(settings.steps, steps_done(settings), quiet=quiet) as on_event,
            Sinks(start.log, folder, facts, warn) as sinks,
        ):
            report = train_predicted(
                settings, cluster_file, profile, prediction, folder,
                on_event=leave_job(sinks.of_events(_waits_told(on_event))), tell=say, notice=say,
                on_signal=ending, max_restarts=start.max_restarts, replan=replan, adapt=adapt, hosts=hosts,
            )  # fmt: skip
    except (KeyboardInterrupt, SystemExit):
        if newest := kept_checkpoint(folder):
            note([f"--resume {folder.path} goes on from {newest.name}"])
        raise
    finally:
        for empty in (folder.path, RUNS) if made else ():  # refused before anything was written
            with suppress(OSError):
                empty.rmdir()
    _warn_of_skipped_steps(folder)
    return report, folder


def _waits_told(on_event: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Say, once, that training waits while checkpoints are written, where it does."""
    said: list[str] = []

    def told(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint" and not event["in_background"] and not said:
            said.append("training waits while a checkpoint is written: host memory has no room for a copy")
            note(said)
        on_event(event)

    return told


def _folder_of(
    settings: Settings, model: str, folder: RunFolder | None, *, anew: bool
) -> tuple[RunFolder, bool]:
    """Return the folder to write, and whether it was made for the run; say what is in it.

    anew: whether that of the checkpoint is not gone on with.
    """
    if settings.resume_from is not None:
        checkpoints = Path(settings.resume_from).parent
        if folder is None and checkpoints.name == "checkpoints" and not anew:
            folder = RunFolder(checkpoints.parent)
        note([f"going on from {settings.resume_from}"])
    elif folder is not None and folder.plan.exists() and kept_checkpoint(folder) is None:
        warn(f"{folder.path} holds a run already; its files are replaced")
    return folder or RunFolder.create(RUNS, model), folder is None


def _warn_of_skipped_steps(folder: RunFolder) -> None:
    steps = folder.read_metrics()
    skipped = [step for step in steps if not step["finite"]]
    if not skipped:
        return
    text = f"{len(skipped)} of {len(steps)} steps changed nothing: their gradients were not finite"
    if "loss_scale" in skipped[-1]:
        note(
            [f"{text}, and the loss scale was halved each time, at last to {skipped[-1]['loss_scale'] / 2:g}"]
        )
    else:
        warn(f"{text}; lower --learning-rate")


def kept_checkpoint(folder: RunFolder) -> Path | None:
    """Return the newest checkpoint of a run that has ended; None where it wrote none."""
    from hetpipe.training import checkpoint

    return checkpoint.latest(folder.checkpoints)


def kept_sentences(folder: RunFolder, source: Path | None, steps: int) -> list[str]:
    """Say where the model is and what makes a Hugging Face folder of it, or that there is none."""
    if source is None:
        return ["model: not kept (--no-save)"]
    from hetpipe.training import checkpoint
    from hetpipe.training.resumption import BEST

    manifest = checkpoint.read_manifest(source)
    done, name = manifest.step, "my-model" if manifest.lora is None else "my-adapter"
    trained = folder.read_metrics()
    why = "" if trained and trained[-1]["step"] == done else ": --no-save"
    told = [
        f"model: {source}{'' if done == steps else f' (step {done} of {steps}{why})'}",
        f"next: hetpipe export {shlex.quote(str(folder.path))} -o {name}",
    ]
    best = checkpoint.best(folder.checkpoints)
    if best is not None and best != source:
        of = shlex.quote(str(folder.path / BEST))
        told.append(f"best when held out was {best.name}: hetpipe export {of} -o {name}")
    return told
