"""The loss on held-out texts beside training, computed by all ranks together, and what it decides."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hetpipe.data.bleu import BLEU
from hetpipe.data.figures import Figures
from hetpipe.data.held_out import HeldOut
from hetpipe.data.task import TrainingTask
from hetpipe.models.mixed_precision import kept_casts
from hetpipe.models.tasks import Task
from hetpipe.program.instructions import Program
from hetpipe.runs.settings import LOSS, Settings
from hetpipe.runtime.executor import Executor
from hetpipe.runtime.forward_runner import ForwardRunner
from hetpipe.runtime.heartbeats import within_step
from hetpipe.runtime.processes import Emit
from hetpipe.runtime.rank_setup import first_samples, microbatches
from hetpipe.runtime.stage_runner import Microbatch
from hetpipe.training.evaluated import Evaluated
from hetpipe.training.meeting import gather
from hetpipe.training.translations import Translations


class _Counted:
    """Counts of the figures of a task, joined on a rank; None where it has seen none."""

    def __init__(self, figures: Figures | None) -> None:
        self._figures = figures
        self._seen: list[Sequence[Any]] = []

    @property
    def counts(self) -> Sequence[Any] | None:
        """Return what all microbatches seen so far come to."""
        return self._figures.joined(self._seen) if self._figures is not None and self._seen else None

    def seen(self, outputs: Tensor, microbatch: Microbatch) -> None:
        """Add the counts of a microbatch."""
        if self._figures is not None:
            self._seen.append(self._figures.count(outputs, microbatch.labels))

    def figures_of(self, by_rank: Iterable[Sequence[Any] | None]) -> dict[str, float]:
        """Return the figures of the counts of all ranks."""
        if self._figures is None:
            return {}
        return self._figures.of(self._figures.joined([counts for counts in by_rank if counts is not None]))


@dataclass(slots=True)
class Evaluation:
    """Computes the held-out loss on a rank; all ranks call `run` together.

    translations: writes those whose BLEU is told; None: none is. scores: whether this rank computes it.
    """

    task: TrainingTask
    held_out: HeldOut
    program: Program
    place: torch.device
    forwards: ForwardRunner
    parts: Mapping[int, tuple[int, int]]
    by: str = LOSS
    evaluated: Evaluated | None = None
    translations: Translations | None = None
    scores: bool = False

    @classmethod
    def of(
        cls,
        task: TrainingTask,
        program: Program,
        rank: int,
        place: torch.device,
        executor: Executor,
        by: str = LOSS,
    ) -> "Evaluation | None":
        """Return what computes it; None where there are no held-out texts. by: what decides which is best.

        Raises: InputError if the task has no such figure.
        """
        if task.held_out is None:
            return None
        task.check_best(by)
        plan, firsts = program.plan, first_samples(program.plan)
        parts = {
            pipeline: (firsts[pipeline], plan.pipelines[pipeline].num_samples)
            for pipeline in sorted({pipeline for pipeline, _ in plan.places[program.device_names[rank]]})
        }
        forwards = executor.forwards()
        found = cls(task, task.held_out, program, place, forwards, parts, by, scores=rank == 0)
        # all ranks write together, or none does
        if task.predicts is Task.TRANSLATION and all(gather(task.references is not None)):
            assert task.references is not None
            found.translations = Translations(
                task.held_out,
                task.references,
                forwards,
                partial(microbatches, program, 0, weight=1.0),
                place,
                parts,
                plan.global_batch_size,
            )
        return found

    def go_on(self, before: Evaluated | None, emit: Emit | None) -> None:
        """Go on from what the figures said before a checkpoint; emit: told if they are of other data."""
        self.evaluated = before
        if (
            before is not None
            and emit is not None
            and (told := before.compared_otherwise(self.held_out.sha256, self.by))
        ):
            emit({"event": "told", "text": told})

    def is_due(self, settings: Settings, step: int) -> bool:
        """Return whether it is to be computed after so many steps."""
        every = settings.eval_every
        return step == settings.steps or (every > 0 and step % every == 0)

    def ending(self, settings: Settings) -> list[dict[str, Any]]:
        """Return what tells that training is to end, since the loss has not fallen for too long; else []."""
        found = self.evaluated
        if found is None or not 0 < settings.patience <= found.worse or found.step == settings.steps:
            return []
        best = "none was finite"
        if found.best_loss is not None:
            best = f"that was {found.best_text} after step {found.best_step}"
        told = "losses in a row were not below" if found.by == LOSS else f"{found.by} in a row was not above"
        text = (
            f"training ends after step {found.step}: {found.worse} held-out {told} the best "
            f"(--patience {settings.patience}); {best}"
        )
        return [{"event": "told", "text": text, "ends": True}]  # whatever else follows the step

    def run(self, step: int, settings: Settings) -> dict[str, float]:
        """Compute the mean loss of the held-out terms after a step; weights and random numbers stay.

        Return it, the figures of the task, the seconds that it took, and whether it is the best so far, as
        metrics. BLEU is among the figures where the best is found by it, and at the end.
        """
        begun_s = time.monotonic()
        num_loss_tokens, count = self.held_out.num_loss_tokens, self.program.plan.global_batch_size
        mine, counted = [], _Counted(self.task.figures)
        with kept_casts(), within_step(first=True):
            for first in range(0, self.held_out.num_samples, count):
                read = {
                    pipeline: self._placed(first + start, number)
                    for pipeline, (start, number) in self.parts.items()
                }
                self.task.chain.know_boundaries(next(iter(read.values()))[0])
                microbatch = microbatches(self.program, 0, read, 1 / num_loss_tokens)
                mine.append(self.forwards.loss(microbatch, counted.seen))
        losses, counts = zip(*gather([math.fsum(mine), counted.counts]), strict=True)
        loss, figures = math.fsum(losses), counted.figures_of(counts)
        before = self.evaluated
        if self.by == BLEU or step == settings.steps:
            figures |= self._bleu()
        self.evaluated = Evaluated.after(before, step, loss, figures, self.by, of=self.held_out.sha256)
        if BLEU not in figures and self.ending(settings):
            figures |= self._bleu()
            self.evaluated = Evaluated.after(before, step, loss, figures, self.by, of=self.held_out.sha256)
        return {
            "eval_loss": loss,
            **{f"eval_{name}": value for name, value in figures.items()},
            "eval_s": time.monotonic() - begun_s,
            "best": self.evaluated.is_best,
        }

    def _bleu(self) -> dict[str, float]:
        if self.translations is None:
            return {}
        with kept_casts(), within_step(first=True):
            return {BLEU: self.translations.bleu(scores=self.scores)}

    def _placed(self, first_sample: int, num_samples: int) -> Any:
        inputs, labels = self.held_out.batch(first_sample, num_samples)
        return {name: value.to(self.place) for name, value in inputs.items()}, labels.to(self.place)
