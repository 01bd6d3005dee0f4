"""Profiles of one model, of several kinds or hosts, joined into one."""

import dataclasses
from collections.abc import Sequence

from cost_model.errors import InputError
from cost_model.layer_profile import LayerProfile
from cost_model.profile import ModelProfile


def left_out(profile: ModelProfile, sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return, by kind, which wanted microbatch sizes did not fit; kinds where all did are not named."""
    missing = {
        kind: tuple(size for size in sizes if size not in times.microbatch_sizes)
        for kind, times in profile.kinds.items()
    }
    return {kind: too_large for kind, too_large in missing.items() if too_large}


def merge(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Join profiles of one model and length, layer by layer, into one with the kinds of all.

    Each kind keeps its dtype, as far as these train together, and where dtypes differ its bytes of layers.

    Raises: InputError naming what differs, or a kind that two of them hold with different times.
    """
    first = profiles[0]
    for other in profiles[1:]:
        for key in ("model", "sequence_length", "num_layers", "loss_chunks", "compiled"):
            mine, theirs = getattr(first, key), getattr(other, key)
            if mine != theirs:
                raise InputError(f"profiles of {key} {mine!r} and {theirs!r} cannot be joined")
        for index, (layer, other_layer) in enumerate(zip(first.layers, other.layers, strict=True)):
            if layer.name != other_layer.name:
                raise InputError(
                    f"profiles whose layers[{index}] is {layer.name!r} and {other_layer.name!r} "
                    "cannot be joined"
                )
        _check_same_model(first, other)
    for index, profile in enumerate(profiles):
        for other in profiles[:index]:
            for kind in profile.kinds.keys() & other.kinds.keys():
                if profile.kinds[kind] != other.kinds[kind]:
                    raise InputError(
                        f"two profiles hold kind {kind!r} with different times; give one of them"
                    )
    dtypes = {kind: dtype for profile in profiles for kind, dtype in profile.dtypes.items()}
    differ = len(set(dtypes.values())) > 1
    joined_layer = _with_most_bytes if differ else _with_larger_workspace
    layers = tuple(
        joined_layer([profile.layers[index] for profile in profiles]) for index in range(first.num_layers)
    )
    kinds = {kind: times for profile in profiles for kind, times in profile.kinds.items()}
    if differ:
        held = {kind: profile.on(kind).layers for profile in profiles for kind in profile.kinds}
        kinds = {kind: dataclasses.replace(times, held=held[kind]) for kind, times in kinds.items()}
    links = {pair: link for profile in profiles for pair, link in profile.links.items()}
    groups = {tuple(sorted(e.kinds)): e for profile in profiles for e in profile.all_reduces}
    joined = dataclasses.replace(first, layers=layers, links=links, all_reduces=tuple(groups.values()))
    return joined.with_kinds(kinds, dtypes)


def _check_same_model(first: ModelProfile, other: ModelProfile) -> None:
    """Refuse profiles of another model of this name, of other frozen weights, or of another optimizer.

    Bytes are compared where the dtypes are one.

    Raises: InputError naming what differs.
    """
    for key in ("optimizer_bytes_per_parameter_byte", "whole_states", "resident_states"):
        mine, theirs = getattr(first, key), getattr(other, key)
        if mine != theirs:
            raise InputError(
                f"profiles of {key} {mine} and {theirs} cannot be joined: they are of different optimizers"
            )
    alike = set(first.dtypes.values()) == set(other.dtypes.values())
    keys = ["num_parameters", "tied_to", "frozen_with"]
    if alike and len(set(first.dtypes.values())) == 1:
        keys += ["parameter_bytes", "output_bytes_per_sample", "tied_bytes", "unreached_bytes"]
    for layer, other_layer in zip(first.layers, other.layers, strict=True):
        for key in keys:
            mine, theirs = getattr(layer, key), getattr(other_layer, key)
            if mine != theirs:
                raise InputError(
                    f"profiles whose layer {layer.name!r} has {key} {_text(mine)} and {_text(theirs)} cannot "
                    "be joined: they are of different models, or freeze other weights"
                )


def _text(value: float | str | None) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def _with_most_bytes(layers: Sequence[LayerProfile]) -> LayerProfile:
    """Return a layer with the most bytes that it has in any of several dtypes; it trains as many in all."""
    most = max(layers, key=lambda layer: layer.parameter_bytes)
    return dataclasses.replace(
        _with_larger_workspace([most, *layers]),
        prefix_bytes_per_sample=max(layer.prefix_bytes_per_sample for layer in layers),
        output_bytes_per_sample=max(layer.output_bytes_per_sample for layer in layers),
        lowered_bytes=max(layer.lowered_bytes for layer in layers),
        dequantized_bytes=max(layer.dequantized_bytes for layer in layers),
    )


def _with_larger_workspace(layers: Sequence[LayerProfile]) -> LayerProfile:
    """Return the first of several profiles of a layer, with the most that is saved or worked in anywhere."""
    saved = max(layer.saved_bytes_per_sample for layer in layers)
    layers = [dataclasses.replace(layers[0], saved_bytes_per_sample=saved), *layers[1:]]
    sizes = sorted({size for layer in layers for size, _ in layer.workspace_by_size})
    if not sizes:
        return dataclasses.replace(layers[0], workspace_bytes=max(layer.workspace_bytes for layer in layers))
    by_size = tuple((size, max(layer.workspace_at(size) for layer in layers)) for size in sizes)
    return dataclasses.replace(layers[0], workspace_bytes=0.0, workspace_by_size=by_size)
