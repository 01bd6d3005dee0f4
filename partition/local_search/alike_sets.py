"""Which sets of pipelines are the same but for the names of devices, so that one may be simulated for all."""

from collections.abc import Sequence

from partition.estimates.device_classes import DeviceClasses
from partition.estimates.timed_pipeline import TimedPipeline


class AlikeSets:
    """Tells sets apart; those in which equal devices or equal nodes have changed places are alike.

    So are those in another order; in that of `ordered` all that are alike take as long, to the last bit: who
    is first where two are ready at the same time, and who gets a sample that is left over, depend on it.
    """

    def __init__(self, classes: DeviceClasses) -> None:
        self._class_of = classes.class_indices()

    def ordered(self, timed: Sequence[TimedPipeline]) -> tuple[object, tuple[TimedPipeline, ...]]:
        """Return (what sets share that are alike, the pipelines in order).

        No others share it; of those with many copies some that are alike may not. Each device serves one
        stage. Pipelines are put in order by what they and their nodes do, and by names where that is the
        same; then nodes are numbered as they come.
        """
        chains = [self._chain(pipeline) for pipeline in timed]
        nodes = [[device.node for device in pipeline.devices] for pipeline in timed]
        done: dict[str, list[object]] = {}
        for chain, names in sorted(zip(chains, nodes, strict=True)):
            for place, name in enumerate(names):
                done.setdefault(name, []).append((chain, place))
        copies = sorted(
            (chain, tuple(map(names.index, names)), [done[name] for name in names], names, index)
            for index, (chain, names) in enumerate(zip(chains, nodes, strict=True))
        )
        numbers: dict[str, int] = {}
        key = tuple(
            (chain, tuple(numbers.setdefault(name, len(numbers)) for name in names))
            for chain, _, _, names, _ in copies
        )
        return key, tuple(timed[index] for *_, index in copies)

    def _chain(self, pipeline: TimedPipeline) -> tuple[object, ...]:
        stages = tuple(
            (self._class_of[stage.device.name], stage.start, stage.stop, stage.recompute)
            for stage in pipeline.stages
        )
        return (pipeline.microbatch_size, stages)
