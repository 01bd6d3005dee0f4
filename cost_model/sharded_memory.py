"""The bytes of a device whose step goes layer by layer, since gradients, or weights too, are sharded."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from cost_model.memory import (
    DeviceMemory,
    StageShape,
    held_bytes,
    input_bytes_per_sample,
    saved_bytes_per_sample,
    stage_activation_bytes,
)
from cost_model.profile import ModelProfile
from cost_model.sharding import Sharding


class Piece(NamedTuple):
    """Trained weights that are summed and fetched at once: those of a layer, or what it is tied by.

    home: the layer that stores them. num_bytes: of them, and so of their gradients.
    """

    home: int
    tied: bool
    num_bytes: float


def pieces_of(profile: ModelProfile) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces that each layer uses: its own, then what it shares with others; none of no bytes."""
    homes = tuple(profile.tied_home(layer) for layer in range(profile.num_layers))
    tied = tuple(0.0 if home == layer else profile.tied_bytes(layer) for layer, home in enumerate(homes))
    return _pieces(tuple(layer.trained_bytes for layer in profile.layers), homes, tied)


@lru_cache(maxsize=64)
def _pieces(
    trained: tuple[float, ...], homes: tuple[int, ...], tied: tuple[float, ...]
) -> tuple[tuple[Piece, ...], ...]:
    """Return `pieces_of` layers by their bytes, homes, and bytes that they have of these; asked for often."""
    lent: dict[int, float] = {}
    for layer, home in enumerate(homes):
        if home != layer:
            lent[home] = max(lent.get(home, 0.0), tied[layer])
    found = []
    for layer, home in enumerate(homes):
        pieces = [Piece(layer, tied=False, num_bytes=trained[layer] - lent.get(layer, 0.0) - tied[layer])]
        if home in lent and (home != layer or layer in lent):
            pieces.append(Piece(home, tied=True, num_bytes=lent[home]))
        found.append(tuple(piece for piece in pieces if piece.num_bytes > 0))
    return tuple(found)


_Moment = tuple[float, float, float, float]
"""Weights, gradients, saved, workspace: what is there while one layer works, beyond what is all the time."""


def sharded_memory(
    profile: ModelProfile,
    stage: StageShape,
    sharding: Sharding,
    is_away: Callable[[Piece], bool],
    is_summed_once: Callable[[Piece], bool] = lambda _: False,
    is_shared: Callable[[Piece], bool] = lambda _: True,
    is_fetched: Callable[[Piece], bool] = lambda _: True,
    *,
    share_of: Callable[[Piece], float] = lambda _: 0.0,
    together: int = 0,
) -> DeviceMemory:
    """Return the bytes of a device with this stage, at the worst moment of its layers.

    Gradients of a piece whose owner is another device live from its backward until they are reduced, which
    the sum of the next layer waits for: two layers' at once, unless the device owns one of them. Weights of
    such a piece, where they are sharded, are fetched while the layer before it works: two layers', too.

    A piece of which the device owns a range is away like those of others: it is fetched, and its gradients
    are made, whole; the range is there beside that all the time.

    is_away: whether a piece is shared, and owned by another device, if only in part. share_of: how much of
    such a piece the device owns all the same, in [0, 1). is_summed_once: whether its gradients are
    summed at the end of the step alone, and are there until then. is_shared: whether any other device has it.
    is_fetched: whether its weights are sharded, where those of some are.
    together: the samples that pass each layer together; 0 where microbatches pass the stage one by one.
    """
    layers = range(stage.start, stage.stop)
    pieces = pieces_of(profile)
    here = dict.fromkeys(piece for layer in layers for piece in pieces[layer])
    mine = [piece for piece in here if not is_away(piece)]
    away = [piece for piece in here if is_away(piece)]
    kept = sum(piece.num_bytes for piece in mine) + sum(share_of(piece) * piece.num_bytes for piece in away)
    resident = held_bytes(profile, layers)
    fetched = [piece for piece in away if sharding is Sharding.WEIGHTS and is_fetched(piece)]
    resident -= sum((1 - share_of(piece)) * piece.num_bytes for piece in fetched)
    late = {piece for piece in here if is_summed_once(piece)}
    early = {piece for piece in away if piece not in late}
    made = {layer: [piece for piece in pieces[layer] if piece in early] for layer in layers}
    gathered = set(fetched)
    wanted = {layer: [piece for piece in pieces[layer] if piece in gathered] for layer in layers}
    shared = {piece for piece in here if piece not in late and is_shared(piece)}
    summed = {layer for layer in layers if any(piece in shared for piece in pieces[layer])}
    saved = _saved_together(profile, stage, together) if together else _saved_bytes(profile, stage)
    all_at_once = together > 0 and stage.num_microbatches == stage.in_flight
    once = stage.num_microbatches == 1 or all_at_once
    fewer = None
    if stage.in_flight > 1 and not together:
        fewer = _saved_bytes(profile, stage._replace(in_flight=stage.in_flight - 1))[-1]
    moments = _moments(profile, stage, wanted, made, summed, saved, fewer, once=once)
    weights, gradients, saved_now, workspace = max(moments, key=sum)
    return DeviceMemory(
        parameter_bytes=resident + weights,
        gradient_bytes=kept + sum(piece.num_bytes for piece in away if piece in late) + gradients,
        optimizer_bytes=profile.optimizer_bytes_per_parameter_byte * kept,
        saved_bytes=saved_now,
        boundary_bytes=stage_activation_bytes(profile, stage._replace(segment_layers=0))[1],
        workspace_bytes=workspace,
    )


def _moments(
    profile: ModelProfile,
    stage: StageShape,
    wanted: Mapping[int, Sequence[Piece]],
    made: Mapping[int, Sequence[Piece]],
    summed: Container[int],
    saved: Sequence[float],
    fewer: float | None,
    *,
    once: bool,
) -> Iterator[_Moment]:
    """Yield what is there while each layer works, in a forward and in a backward of the last in flight.

    Where microbatches in flight pass one by one forwards and backwards also follow their like: then the
    weights that come next are those of the other end. fewer: what is saved at the end of such a forward; None
    where there is none.

    wanted, made: by layer, what it fetches, and what gradients it makes for others. summed: the layers whose
    backward a sum follows, which waits for the sum before it. saved: by layer. once: whether the layers go
    back once in a step.
    """
    first = max(stage.start, profile.first_trained)
    passes = [(layer, False) for layer in range(stage.start, stage.stop)]
    passes += [(layer, True) for layer in reversed(range(first, stage.stop))]
    last: Sequence[Piece] = ()
    lowest = next((layer for layer in range(first, stage.stop) if layer in summed), None)
    if lowest is not None and not once:
        last = made[lowest][-1:]  # of the microbatch before
    for (layer, is_backward), (following, _) in pairwise([*passes, passes[0]]):
        gradients = _bytes(made[layer] if is_backward else (), last)
        workspace = profile.layers[layer].workspace_at(stage.microbatch_size)
        saved_now = saved[layer - stage.start]
        yield _bytes(wanted[layer], wanted[following]), gradients, saved_now, workspace
        if fewer is not None and is_backward and layer == first:
            yield _bytes(wanted[layer], wanted[stage.stop - 1]), gradients, saved_now, workspace
        if fewer is not None and not is_backward and layer + 1 == stage.stop:
            yield _bytes(wanted[layer], wanted[stage.start]), gradients, fewer, workspace
        if is_backward and layer in summed:
            last = made[layer][-1:]  # none of a layer of this device's own, whose sum takes no room


def _bytes(some: Sequence[Piece], others: Sequence[Piece]) -> float:
    """Return the bytes of pieces, those that are on both sides once."""
    total = 0.0
    for piece in some:
        total += piece.num_bytes
    for piece in others:
        if piece not in some:
            total += piece.num_bytes
    return total


def _saved_together(profile: ModelProfile, stage: StageShape, samples: int) -> list[float]:
    """Return what samples that pass each layer together have saved while each layer works for them.

    Among it what the layer hands on, or the gradients of that, of all microbatches but the one at work.
    """
    layers, size = range(stage.start, stage.stop), min(samples, stage.microbatch_size)
    if stage.recompute:
        kept = list(accumulate(input_bytes_per_sample(profile, layer) for layer in layers))
    else:
        saved = (profile.layers[layer].saved_bytes_per_sample for layer in layers)
        kept = list(accumulate(saved, initial=profile.layers[stage.start].prefix_bytes_per_sample))[1:]
    found = []
    for layer, so_far in zip(layers, kept, strict=True):
        handed = input_bytes_per_sample(profile, layer + 1) if layer + 1 < stage.stop else 0.0
        bytes_now = samples * so_far + (samples - size) * handed
        if stage.recompute:
            bytes_now += size * (saved_bytes_per_sample(profile, layer, layer + 1) + 2 * handed)
        found.append(bytes_now)
    return found


def _saved_bytes(profile: ModelProfile, stage: StageShape) -> list[float]:
    """Return what the microbatches in flight have saved while each layer works for the last of them."""
    samples, layers = stage.microbatch_size, range(stage.start, stage.stop)
    if not stage.recompute:
        prefix = profile.layers[stage.start].prefix_bytes_per_sample
        kept = list(accumulate(profile.layers[layer].saved_bytes_per_sample for layer in layers))
        whole = prefix + kept[-1]
        return [samples * ((stage.in_flight - 1) * whole + (prefix + so_far)) for so_far in kept]
    inputs = list(accumulate(input_bytes_per_sample(profile, layer) for layer in layers))
    found = []
    for layer, so_far in zip(layers, inputs, strict=True):
        after = 2 * input_bytes_per_sample(profile, layer + 1) if layer + 1 < stage.stop else 0.0
        now = saved_bytes_per_sample(profile, layer, layer + 1) + after
        found.append(samples * ((stage.in_flight - 1) * inputs[-1] + so_far + now))
    return found
