"""The samples of the pipelines that one rank is in: nothing else is read, and on a GPU a step ahead."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from hetpipe.data.task import TrainingTask
from hetpipe.program.instructions import Program
from hetpipe.runtime.accelerators import pins
from hetpipe.runtime.rank_setup import Samples, first_samples


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of one step by pipeline, of those that the rank is in; weight: see `Microbatch`."""

    by_pipeline: Mapping[int, Samples]
    weight: float

    @property
    def any_inputs(self) -> Mapping[str, Tensor]:
        """Return the inputs of one pipeline, for their shapes."""
        return next(iter(self.by_pipeline.values()))[0]


class RankData:
    """What a rank reads of the data; owns the thread that reads ahead.

    On a GPU the samples of the next step are read while the device works on this one, and pinned, so that
    their copy waits for nothing. Elsewhere the computation needs the cores: they are read between steps, as
    they are where reading draws from torch's generator, which the layers are watched not to do.
    """

    def __init__(
        self, task: TrainingTask, program: Program, rank: int, place: torch.device, until: int
    ) -> None:
        """Read nothing yet; until: the sample before which the run ends."""
        plan, name = program.plan, program.device_names[rank]
        self._task, self._place, self._until = task, place, until
        self._count = plan.global_batch_size
        firsts = first_samples(plan)
        self._parts = {
            pipeline: (firsts[pipeline], plan.pipelines[pipeline].num_samples)
            for pipeline in sorted({pipeline for pipeline, _ in plan.places[name]})
        }
        self._reads_ahead: bool | None = None if place.type != "cpu" else False  # None: not yet known
        self._thread = ThreadPoolExecutor(1) if place.type != "cpu" else None
        self._next: tuple[int, Future[StepSamples]] | None = None

    def step(self, first_sample: int) -> StepSamples:
        """Return the samples of the step that begins with one of the run, on the device.

        Raises: InputError for data that cannot be used, or a step without loss.
        """
        found = self._taken(first_sample)
        following = first_sample + self._count
        if self._reads_ahead and self._thread is not None and following < self._until:
            self._next = following, self._thread.submit(self._read, following)
        return StepSamples(
            {
                pipeline: (
                    {name: value.to(self._place, non_blocking=True) for name, value in inputs.items()},
                    labels.to(self._place, non_blocking=True),
                )
                for pipeline, (inputs, labels) in found.by_pipeline.items()
            },
            found.weight,
        )

    def close(self) -> None:
        """End the thread; what it reads is not needed."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _taken(self, first_sample: int) -> StepSamples:
        if self._next is not None and self._next[0] == first_sample:
            return self._next[1].result()
        if self._reads_ahead is not None:
            return self._read(first_sample)
        before = torch.default_generator.get_state()
        found = self._read(first_sample)
        self._reads_ahead = torch.equal(before, torch.default_generator.get_state())
        return found

    def _read(self, first_sample: int) -> StepSamples:
        """Read the samples: all of the step where the user's function counts the terms of all, else ours."""
        task = self._task
        if task.count_terms is None:
            weight = task.step_weight(self._count)
            read = {
                pipeline: task.batch(first_sample + first, count)
                for pipeline, (first, count) in self._parts.items()
            }
        else:
            inputs, labels = task.batch(first_sample, self._count)
            weight = task.term_weight(labels)
            read = {
                pipeline: (
                    {name: value[first : first + count] for name, value in inputs.items()},
                    labels[first : first + count],
                )
                for pipeline, (first, count) in self._parts.items()
            }
        if pins(self._place):
            read = {
                pipeline: ({name: value.pin_memory() for name, value in inputs.items()}, labels.pin_memory())
                for pipeline, (inputs, labels) in read.items()
            }
        return StepSamples(read, weight)
