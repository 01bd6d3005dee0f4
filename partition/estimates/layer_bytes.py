"""The bytes of runs of layers, in tables by [start, stop]."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from cost_model.memory import StageShape, device_memory, passing_bytes_per_sample
from cost_model.profile import ModelProfile
from partition.estimates.arrays import Floats


def between(per_layer: Floats) -> Floats:
    """Return sums over layers [start, stop) by [start, stop]."""
    prefix = np.concatenate([[0.0], np.cumsum(per_layer)])
    return np.asarray(prefix[None, :] - prefix[:, None])


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """The bytes of layers [start, stop) by [start, stop]; saved and boundaries are per sample in flight.

    saved: `cost_model.memory.saved_bytes_per_sample`.

    passing: per sample, where there is no backward; else 0.
    weights, trained: parameters (with lowered copies), and those with a gradient, a tied pair inside
    counting once. Of classes of devices (`by_class`) all but trained are by [class, start, stop].
    """

    weights: Floats
    trained: Floats
    saved: Floats
    inputs: Floats
    outputs: Floats
    passing: Floats

    @classmethod
    def by_class(cls, profile: ModelProfile, kinds: Sequence[Collection[str]]) -> "LayerBytes":
        """Return the bytes by class, given the kinds of each; of several the least count.

        By [start, stop] alone where they are the same on all kinds.
        """
        views = {kind: profile.on(kind) for kind in set().union(*kinds)}
        if len({id(view.layers) for view in views.values()}) == 1:
            return cls.of(next(iter(views.values())))
        held = {kind: cls.of(view) for kind, view in views.items()}

        def stacked(of: Callable[["LayerBytes"], Floats]) -> Floats:
            return np.stack([np.min([of(held[kind]) for kind in each], axis=0) for each in kinds])

        return cls(
            stacked(lambda each: each.weights),
            next(iter(held.values())).trained,
            stacked(lambda each: each.saved),
            stacked(lambda each: each.inputs),
            stacked(lambda each: each.outputs),
            stacked(lambda each: each.passing),
        )

    @classmethod
    def of(cls, profile: ModelProfile) -> "LayerBytes":
        layers = range(profile.num_layers)
        alone = [device_memory(profile, [StageShape(layer, layer + 1, 0, 1)]) for layer in layers]
        weights = between(np.array([layer.parameter_bytes for layer in alone]))
        trained = between(np.array([layer.gradient_bytes for layer in alone]))
        for layer in layers:
            for before, shared in profile.shared_weight_bytes(layer):
                weights[: before[-1] + 1, layer + 1 :] -= shared
            for before, shared in profile.shared_weight_bytes(layer, trained=True):
                trained[: before[-1] + 1, layer + 1 :] -= shared
        outputs = np.array([0.0, *(layer.output_bytes_per_sample for layer in profile.layers[:-1]), 0.0])
        shape, passing = np.zeros_like(weights), np.zeros_like(weights)
        for start, stop in combinations(range(profile.first_trained + 1), 2):
            passing[start, stop] = passing_bytes_per_sample(profile, start, stop)
        return cls(
            weights,
            trained,
            _saved(profile),
            shape + outputs[:, None],
            shape + outputs[None, :],
            passing,
        )


def _saved(profile: ModelProfile) -> Floats:
    prefix = np.array([*(layer.prefix_bytes_per_sample for layer in profile.layers), 0.0])
    saved = between(np.array([layer.saved_bytes_per_sample for layer in profile.layers]))
    ends = np.arange(len(prefix))
    return np.asarray(saved + np.where(ends[None, :] > ends[:, None], prefix[:, None], 0.0))
