"""What the user decides of a plan: pins, numbers of pipelines and devices; read, checked, put in words."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from partition.problem import Forced, Pin, Problem

_PIN = re.compile(r"(?P<device>[^=]+)=(?P<first>\d+)(-(?P<last>\d+))?")


def parse_pin(text: str) -> Pin:
    """Return the pin that a text names, with both layers in it.

    >>> parse_pin("big/0=0-11")
    Pin(device='big/0', start=0, stop=12)

    Raises: InputError if it is none.
    """
    match = _PIN.fullmatch(text.strip())
    if match is None:
        raise InputError(f"the pin {text!r} names no device and layers; write for example big/0=0-11")
    first = int(match["first"])
    last = first if match["last"] is None else int(match["last"])
    if last < first:
        raise InputError(f"the pin {text}: the layers run backwards; write {match['device']}={last}-{first}")
    return Pin(match["device"], first, last + 1)


def forced_of(
    profile: ModelProfile,
    cluster: Cluster,
    pins: Sequence[Pin] = (),
    num_pipelines: int | None = None,
    max_devices: int | None = None,
) -> Forced:
    """Return what is forced, checked against model and cluster.

    Raises: InputError for an unknown device, layers that the model has not, or two pins of one device.
    """
    for pin in pins:
        cluster.device(pin.device)
        if pin.stop > profile.num_layers:
            raise InputError(
                f"the pin {pin_text(pin)}: {profile.model!r} has layers 0 to {profile.num_layers - 1}"
            )
    pins = tuple(dict.fromkeys(pins))
    names = [pin.device for pin in pins]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"the pins name {name!r} twice; a pinned device serves one stage")
    for what, number in (("pipelines", num_pipelines), ("max_devices", max_devices)):
        if number is not None and number < 1:
            raise InputError(f"{what} = {number}; give at least 1")
    return Forced(pins, num_pipelines, max_devices)


def pin_text(pin: Pin) -> str:
    """Return a pin as `parse_pin` reads it."""
    return f"{pin.device}={_range_text(pin.start, pin.stop)}"


def _range_text(start: int, stop: int) -> str:
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def check_forced(problem: Problem) -> None:
    """Refuse what contradicts itself, whatever memory there is.

    Raises: InputError with the two that cannot both be.
    """
    forced, count = problem.forced, len(problem.cluster.devices)
    most = min(count, forced.max_devices or count)
    what = f"max_devices = {most}" if most < count else f"the {count} devices of the cluster"
    if len(forced.pins) > most:
        raise InputError(f"{len(forced.pins)} devices are pinned, more than {what}; pin fewer")
    deepest = max(
        (
            (sum(other.start <= layer < other.stop for other in forced.pins), -layer)
            for layer in range(problem.profile.num_layers)
        ),
        default=(0, 0),
    )
    pipelines = forced.num_pipelines or max(1, deepest[0])
    if pipelines > most:
        raise InputError(f"{pipelines} pipelines need {pipelines} devices, more than {what}; ask for fewer")
    if pipelines > problem.global_batch_size:
        raise InputError(
            f"{pipelines} pipelines need a sample each, more than global_batch_size "
            f"= {problem.global_batch_size}; ask for fewer pipelines or more samples"
        )
    if deepest[0] > pipelines:
        raise InputError(
            f"layer {-deepest[1]} is pinned {deepest[0]} times, with pipelines = {pipelines} there is room "
            f"for {pipelines}; pin it less often, or ask for {deepest[0]} pipelines"
        )
    free = most - len(forced.pins)
    missing = list(_gaps(problem, pipelines))
    if len(missing) > free:
        gaps = " and ".join(dict.fromkeys(_range_text(*gap) for gap in missing))
        again = f" of {len(missing)} pipelines" if pipelines > 1 else ""
        raise InputError(
            f"the pins leave layers {gaps}{again} to {free or 'no'} free device{'s' * (free != 1)}, of "
            f"{what}; pin fewer devices, or pin them to more layers"
        )


def _gaps(problem: Problem, pipelines: int) -> Iterator[tuple[int, int]]:
    """Give runs of layers that need a device of their own besides the pinned ones.

    For one pipeline all that are not pinned, for several the layers that are pinned least.
    """
    layers = problem.profile.num_layers
    pinned = [sum(pin.start <= k < pin.stop for pin in problem.forced.pins) for k in range(layers)]
    if pipelines > 1:
        least = min(pinned)
        stretch = [k for k in range(layers) if pinned[k] == least]
        stop = next((k for k in range(stretch[0], layers) if pinned[k] != least), layers)
        yield from [(stretch[0], stop)] * (pipelines - least)
        return
    edges = [0, *(k for k in range(1, layers) if (pinned[k] > 0) != (pinned[k - 1] > 0)), layers]
    for start, stop in pairwise(edges):
        if not pinned[start]:
            yield start, stop


def describe(forced: Forced) -> str:
    """Return what is forced in words, empty where nothing is."""
    words = [f"the pin {pin_text(pin)}" for pin in forced.pins]
    if forced.num_pipelines is not None:
        words.append(f"pipelines = {forced.num_pipelines}")
    if forced.max_devices is not None:
        words.append(f"max_devices = {forced.max_devices}")
    return ", ".join(words)
