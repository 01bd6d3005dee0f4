"""The report of a run, as it went beside how it was predicted: report.json."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from cost_model.dtypes import FLOAT32
from cost_model.strict_files import STRICT, check_format, read_json, validate
from hetpipe.program.instructions import Schedule
from hetpipe.runs.settings import LOSS

FORMAT = "hetpipe.report/1"
OVERLOADED_SHARE = 0.02
OVERLOADED_CORES = 0.05
LARGE_BETWEEN = 0.02


@dataclass(frozen=True, slots=True)
class StageReport:
    """Seconds of forwards and backwards of one stage in a step, predicted and measured (median)."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    pipeline: int
    stage: int
    device: str
    predicted_busy_s: float
    measured_busy_s: float

    @property
    def error(self) -> float:
        """Return measured over predicted, less 1."""
        return self.measured_busy_s / self.predicted_busy_s - 1 if self.predicted_busy_s else 0.0


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """A device's memory at its peak in the first step, and how well the host kept up with it.

    peak_bytes: None where nothing was counted, or steps are grouped by length: the first may be a short one.
    over_budget: share of the busy time by which operations took longer than the emulated device
    may, 0 for a real one.
    Of a GPU that tells them also: reserved_bytes, of torch's allocator at its peak in that step, peak_bytes
    and what it keeps to give out again; driver_bytes, in use beside it before the first step: contexts,
    communicators, other processes. planned_driver_bytes: what the plan left for these.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    predicted_bytes: float
    peak_bytes: float | None
    usable_bytes: float
    memory_bytes: float
    over_budget: float
    reserved_bytes: float | None = None
    driver_bytes: float | None = None
    planned_driver_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """A loss after which the run went on by itself, or a host that was let in again (kind "joined").

    noticed_after_s: seconds since the last sign of life of what was lost; again_s: from then until a step was
    done. None where they are not known.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: str
    error: str
    noticed_after_s: float | None
    again_s: float | None
    after_step: int
    from_step: int
    where: str

    @property
    def steps_repeated(self) -> int:
        """Return how many steps were done once more."""
        return self.after_step - self.from_step


@dataclass(frozen=True, slots=True)
class RunReport:
    """The predicted and the measured figures of a run.

    Measured figures are medians of the timed steps, which leave out the first. Busy seconds and bubble are
    those of the last 100 of them. step_s_all: seconds of every step, the first included. foreign_cores: CPU
    cores that other processes of the host used in the timed steps.
    shared_parameters: how many have several owners; owners_agree: whether they are equal at the end, bit for
    bit, and to rounding between GPUs and CPUs. schedule: the one that ran, never auto.
    samples_per_s: of the timed steps by the wall clock, with all that lay between them (data, meetings,
    callbacks, checkpoints); between_steps: what that adds to the seconds of the steps, as a share of them.
    Both 0 in older reports, and global_batch_size too. gradient_dtype: in which gradients travelled.
    skipped_steps: those that changed nothing, since a gradient was not finite; loss_spikes: those whose loss
    stood out. slow_devices: sentences on devices that took longer than planned, and as long again.
    eval_loss: of held-out texts, the last; best_eval_loss, best_eval_step: of the best, and after which step;
    None without such texts, or where it is not finite. eval_figures, best_eval_figures: accuracy, f1, ... of
    the task, of the same steps. best_eval_by: what was best, the loss (the least) or a figure (the largest).
    recoveries: all in the run folder, of runs that this one went on from too.
    shared_step_s: predicted where messages share network cards (`hetpipe.simulation.shared_network`); of
    several hosts, None of others and of plans that go layer by layer.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: str
    strategy: str
    clock: str
    emulated: bool
    steps: int
    predicted_step_s: float
    measured_step_s: float
    step_s_all: tuple[float, ...]
    predicted_bubble: float
    measured_bubble: float
    foreign_cores: float
    stages: tuple[StageReport, ...]
    devices: dict[str, DeviceReport]
    shared_parameters: int = 0
    owners_agree: bool = True
    schedule: Schedule = Schedule.ONE_F_ONE_B
    global_batch_size: int = 0
    samples_per_s: float = 0.0
    between_steps: float = 0.0
    gradient_dtype: str = FLOAT32
    skipped_steps: int = 0
    loss_spikes: int = 0
    slow_devices: tuple[str, ...] = ()
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_eval_step: int = 0
    eval_figures: dict[str, float] = field(default_factory=dict)
    best_eval_figures: dict[str, float] = field(default_factory=dict)
    best_eval_by: str = LOSS
    recoveries: tuple[RecoveryReport, ...] = ()
    shared_step_s: float | None = None

    @property
    def predicted_samples_per_s(self) -> float:
        """Return the samples per second of the predicted step, as if nothing lay between two."""
        return self.global_batch_size / self.predicted_step_s if self.predicted_step_s else 0.0

    @property
    def step_error(self) -> float:
        """Return measured over predicted step time, less 1."""
        return self.measured_step_s / self.predicted_step_s - 1 if self.predicted_step_s else 0.0

    @property
    def shared_error(self) -> float:
        """Return measured over predicted step time where messages share the network, less 1; 0.0 of none."""
        return self.measured_step_s / self.shared_step_s - 1 if self.shared_step_s else 0.0

    @property
    def host_overloaded(self) -> bool:
        """Return whether the host disturbed the emulation, so that the times are not to be trusted."""
        late = any(device.over_budget > OVERLOADED_SHARE for device in self.devices.values())
        return self.emulated and (late or self.foreign_cores > OVERLOADED_CORES)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}


_ADAPTER = TypeAdapter(RunReport)


def read_report(path: Path) -> RunReport:
    """Read and check a report.

    Raises: InputError naming file, key, value and remedy.
    """
    return validate(_ADAPTER, check_format(read_json(path), FORMAT, str(path)), str(path))


def report_text(report: RunReport) -> str:
    """Return the text of a report.json."""
    return json.dumps(report.to_json(), indent=1) + "\n"


def read_recoveries(path: Path) -> tuple[RecoveryReport, ...]:
    """Return what a recoveries.jsonl says was lost and let in again; none if it cannot be read."""
    names = [entry.name for entry in dataclasses.fields(RecoveryReport)]
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return tuple(RecoveryReport(**{name: row.get(name) for name in names}) for row in rows)
    except (OSError, ValueError, AttributeError, RecursionError):
        return ()
