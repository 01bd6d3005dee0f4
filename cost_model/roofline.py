"""Layer times of a kind of device that is not at hand, from those of one that is, by a roofline.

A layer is matrix multiplications, then passes over its activations:

    time       = max(compute, weight_bytes / (bandwidth * eta)) + other_bytes / (bandwidth * eta) + overhead
    compute    = (clock^4 + power^4)^(1/4)          the slower of two roofs, rounded where they meet
    clock      = flops / (peak * efficiency * flops / (flops + half))
    power      = flops * joules_per_flop(year) / watts

max(compute, traffic) is the roofline of Williams, Waterman and Patterson (CACM 2009); the roof of power is
that of Choi et al. (IPDPS 2013), without which a 72 W card is trusted with the peak rate of a 300 W one.
Departures: the passes over activations are other kernels than the multiplications, so their times add up
instead of overlapping, and joules fall by a constant factor a year. Absolute times depend on the software
that was measured; the ratio of two devices hardly does, and only ratios are used (`estimate_kind`).
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_model.catalogue import Accelerator, accelerator
from cost_model.dtypes import check_estimable, is_lowered, multiplied_in
from cost_model.errors import InputError
from cost_model.known_errors import far_off
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile

Floats = NDArray[np.float64]

ELEMENT_BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
ENERGY_YEAR = 2018
ITERATIONS = 30
LAUNCH_BOUND_SHARE = 0.5
"""Times that grow less than this share of what the samples grow are bound by launches."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one forward or backward of a layer does, whatever the device.

    frozen_bytes: those of weight_bytes that have no gradient.
    """

    flops: float
    weight_bytes: float
    activation_bytes: float
    dtype: str
    backward: bool = False
    frozen_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise InputError(f"dtype {self.dtype!r} has no roofline; known: {', '.join(ELEMENT_BYTES)}")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured seconds of some work on a device."""

    device: Accelerator
    work: Work
    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise InputError(f"a measurement of {self.seconds} s; give more than zero")


@dataclass(frozen=True, slots=True)
class Roofline:
    """The fitted parameters, all above zero.

    float32_efficiency, tensor_efficiency: share of the peak that large multiplications reach, in (0, 1] but
        for what the fit absorbs. float32_joules, tensor_joules: energy of one FLOP in ENERGY_YEAR, of 16 bit
        on tensor cores (tf32 takes twice that). energy_decay: joules fall by exp(-energy_decay) a year.
    half_flops: work at which half of the efficiency is reached. bandwidth_efficiency: share of the bandwidth.
    gradient_traffic: bytes moved in a backward for each byte of weights (gradients, casts, accumulation).
    """

    float32_efficiency: float = 0.75
    tensor_efficiency: float = 0.5
    float32_joules: float = 20e-12
    tensor_joules: float = 2e-12
    energy_decay: float = 0.2
    half_flops: float = 1e9
    bandwidth_efficiency: float = 0.75
    gradient_traffic: float = 5.0
    overhead_s: float = 2e-4

    def seconds(self, work: Work, device: Accelerator) -> float:
        """Return seconds of the work on the device; of use as a ratio between devices."""
        return float(math.exp(_log_seconds(_logs(self), _columns([(device, work)]))[0]))


PRIOR = Roofline()
PRIOR_WEIGHTS = np.array([1, 1, 1, 1, 1, 0.3, 1, 1, 0.3])
"""How hard the fit is held to PRIOR: less for the two parameters that could be anything."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """The works and devices as arrays, one element each."""

    flops: Floats
    weight_bytes: Floats
    activation_bytes: Floats
    gradient_bytes: Floats
    peak_flops: Floats
    tensor_cores: NDArray[np.bool_]
    element_bytes: Floats
    bandwidth: Floats
    watts: Floats
    year: Floats


def _columns(pairs: Sequence[tuple[Accelerator, Work]]) -> _Columns:
    peaks = [device.peak(work.dtype) for device, work in pairs]
    return _Columns(
        flops=np.array([work.flops for _, work in pairs], dtype=float),
        weight_bytes=np.array([work.weight_bytes for _, work in pairs], dtype=float),
        activation_bytes=np.array([work.activation_bytes for _, work in pairs], dtype=float),
        gradient_bytes=np.array(
            [work.backward * (work.weight_bytes - work.frozen_bytes) for _, work in pairs], dtype=float
        ),
        peak_flops=np.array([peak for peak, _ in peaks]),
        tensor_cores=np.array([tensor for _, tensor in peaks]),
        element_bytes=np.array([ELEMENT_BYTES[work.dtype] for _, work in pairs], dtype=float),
        bandwidth=np.array([device.memory_bandwidth_bytes_per_s for device, _ in pairs]),
        watts=np.array([device.watts for device, _ in pairs]),
        year=np.array([device.year for device, _ in pairs], dtype=float),
    )


def _logs(roofline: Roofline) -> Floats:
    result: Floats = np.log(np.array(dataclasses.astuple(roofline), dtype=float))
    return result


def _log_seconds(parameters: Floats, work: _Columns) -> Floats:
    p = Roofline(*np.exp(parameters).tolist())
    efficiency = np.where(work.tensor_cores, p.tensor_efficiency, p.float32_efficiency)
    joules = np.where(work.tensor_cores, p.tensor_joules * work.element_bytes / 2, p.float32_joules)
    joules = joules * np.exp(-p.energy_decay * (work.year - ENERGY_YEAR))
    # flops / (peak * efficiency * flops / (flops + half)), written so that no flops take no time
    clock = np.where(work.flops > 0, work.flops + p.half_flops, 0.0) / (work.peak_flops * efficiency)
    power = work.flops * joules / work.watts
    compute = (clock**4 + power**4) ** 0.25
    bandwidth = work.bandwidth * p.bandwidth_efficiency
    multiplications = np.maximum(compute, np.where(work.flops > 0, work.weight_bytes, 0.0) / bandwidth)
    other_bytes = work.activation_bytes + p.gradient_traffic * work.gradient_bytes
    result: Floats = np.log(multiplications + other_bytes / bandwidth + p.overhead_s)
    return result


def fit(measurements: Sequence[Measurement]) -> Roofline:
    """Fit the roofline nearest to measurements, in relative error; every kind of device weighs the same.

    Levenberg-Marquardt (Marquardt, SIAM J. 1963) on the logarithms of times and parameters, with a loss that
    grows linearly beyond 30 % (outliers) and a weak pull to PRIOR (parameters that the data leave open).

    Raises: InputError if there is nothing to fit to.
    """
    if not measurements:
        raise InputError("no measurements to fit a roofline to; give some")
    columns = _columns([(measured.device, measured.work) for measured in measurements])
    target = np.log([measured.seconds for measured in measurements])
    counts = Counter(measured.device.name for measured in measurements)
    mean = len(measurements) / len(counts)
    weights = np.sqrt([mean / counts[measured.device.name] for measured in measurements])
    prior = _logs(PRIOR)

    def residuals(parameters: Floats) -> Floats:
        raw = (_log_seconds(parameters, columns) - target) * weights / 0.3
        robust = np.sign(raw) * np.sqrt(2 * (np.sqrt(1 + raw**2) - 1)) * 0.3
        return np.concatenate([robust, (parameters - prior) * PRIOR_WEIGHTS])

    parameters, damping = prior, 1e-2
    current = residuals(parameters)
    for _ in range(ITERATIONS):
        steps = 1e-5 * np.eye(len(parameters))
        jacobian = np.stack([(residuals(parameters + step) - current) / 1e-5 for step in steps], axis=1)
        damped = np.vstack([jacobian, math.sqrt(damping) * np.eye(len(parameters))])
        move = np.linalg.lstsq(damped, np.concatenate([-current, np.zeros(len(parameters))]), rcond=None)[0]
        after = residuals(parameters + move)
        better = bool(after @ after < current @ current)
        damping *= 1 / 3 if better else 5.0
        if better:
            parameters, current = parameters + move, after
    return Roofline(*np.exp(parameters).tolist())


FITTED = Roofline(
    float32_efficiency=0.9843,
    tensor_efficiency=0.9079,
    float32_joules=1.928e-11,
    tensor_joules=2.205e-12,
    energy_decay=0.1681,
    half_flops=3.4e10,
    bandwidth_efficiency=0.3978,
    gradient_traffic=3.858,
    overhead_s=0.0003164,
)
"""Fitted to all measurements of examples/benchmarks/roofline, which prints it anew."""


def nearest_kind(profile: ModelProfile, target: Accelerator, dtype: str | None = None) -> str:
    """Return the measured kind to estimate another from: the one whose peak rate is nearest, as a ratio.

    One of which estimates are known to be far off is taken only where there is no other. dtype: of the
    target, None for that of the kind that it is estimated from; one of as many bits is taken if there is one.

    Raises: InputError if no measured kind is in the catalogue.
    """
    distances = {}
    for kind, profiled in profile.kinds.items():
        if profiled.source == "measured":
            with contextlib.suppress(InputError):
                own = profile.dtype_of(kind)
                peak = accelerator(kind).peak(multiplied_in(own))[0]
                distance = abs(math.log(peak / target.peak(multiplied_in(dtype or own))[0]))
                distances[kind] = (is_lowered(own) != is_lowered(dtype or own), far_off(kind), distance)
    if not any(profiled.source == "measured" for profiled in profile.kinds.values()):
        raise InputError(
            f"there is no measured kind to estimate {target.name} from: its kinds are estimated themselves "
            f"({', '.join(profile.kinds)}); name all in one `hetpipe profile --estimate ...` of the model"
        )
    if not distances:
        raise InputError(
            f"no measured kind ({', '.join(profile.kinds)}) is in the catalogue to estimate {target.name} "
            "from; profile on a GPU that is"
        )
    return min(distances, key=lambda kind: distances[kind])


def layers_in(profile: ModelProfile, dtype: str) -> tuple[LayerProfile, ...]:
    """Return the layers with their bytes in a precision: those on a kind that computes in as many bits.

    Raises: InputError if the profile has none.
    """
    for kind, own in profile.dtypes.items():
        if is_lowered(own) == is_lowered(dtype):
            return profile.on(kind).layers
    known = ", ".join(dict.fromkeys(profile.dtypes.values()))
    raise InputError(
        f"the profile has no bytes of layers in {dtype}, only in {known}; "
        f"profile any device in {dtype}, an emulated one too, and join the two (hetpipe profile --merge)"
    )


def launch_bound(measured: KindProfile) -> str | None:
    """Return how little the times of all layers grow with the microbatch, in words; None if they do.

    Twice the time in work that grew fourfold is mostly what the host needs to launch kernels, which another
    card does not change; no table that the roofline is fitted to holds such work.
    """
    sizes = measured.microbatch_sizes
    first, last = (
        sum(layer.forward_s[place] + layer.backward_s[place] for layer in measured.layers)
        for place in (0, -1)
    )
    if len(sizes) == 1 or last * sizes[0] >= LAUNCH_BOUND_SHARE * first * sizes[-1]:
        return None
    return f"x {last / first:.1f} from {sizes[0]} to {sizes[-1]} samples"


def layer_work(
    layer: LayerProfile,
    profile: ModelProfile,
    samples: int,
    *,
    backward: bool,
    multiplies: bool = True,
    dtype: str | None = None,
) -> Work:
    """Return a layer's work: each parameter multiplies each token once forward, twice backward.

    Attention multiplies as the profile says; scores that it keeps are among the bytes that the layer saves.
    Quantized weights are read as they are stored; each pass writes what it dequantizes, and reads that.

    multiplies: False for a layer that looks its parameters up, such as an embedding. dtype: None for the
    profile's.
    """
    passes = 2 if backward else 1
    known, width = layer.num_parameters, ELEMENT_BYTES.get(profile.dtype, 4)
    count = layer.parameter_bytes / width if known is None else known
    tokens = samples * profile.sequence_length
    attention = layer.attention_backward_flops_per_sample if backward else layer.attention_flops_per_sample
    return Work(
        flops=(2.0 * passes * tokens * count if multiplies else 0.0) + samples * attention,
        weight_bytes=layer.parameter_bytes,
        activation_bytes=passes * samples * (layer.saved_bytes_per_sample + layer.output_bytes_per_sample)
        + 2 * layer.dequantized_bytes,
        dtype=multiplied_in(dtype or profile.dtype),
        backward=backward,
    )


def estimate_kind(
    profile: ModelProfile,
    measured_kind: str,
    target: Accelerator,
    *,
    roofline: Roofline = FITTED,
    allow_slow: bool = False,
    dtype: str | None = None,
) -> KindProfile:
    """Estimate times of another kind: those measured, times the ratio of the two devices' rooflines.

    A layer whose forward was measured faster than the peak would multiply by all its parameters is one that
    looks them up; it is scaled by its traffic alone.
    allow_slow: price a kind that has no units for its dtype at its float32 rate. dtype: in which the target
        computes; None for that of the measured kind.

    Raises: InputError if the kind was not measured or is not in the catalogue, or one of the two has no units
        for the dtype, or the profile no bytes of layers in it.
    """
    measured = profile.kind(measured_kind)
    if measured.source != "measured":
        raise InputError(f"the times of {measured_kind!r} are estimated; estimate from a measured kind")
    own = profile.dtype_of(measured_kind)
    dtype = dtype or own
    if not allow_slow:
        check_estimable({target.name: dtype, measured_kind: own})
    source = accelerator(measured_kind)
    sizes = measured.microbatch_sizes
    held = measured.held if is_lowered(own) == is_lowered(dtype) else layers_in(profile, dtype)

    def scaled(layer: LayerProfile, in_dtype: LayerProfile, times: LayerTimes) -> LayerTimes:
        whole = layer_work(layer, profile, sizes[-1], backward=False, dtype=own)
        multiplies = whole.flops / source.peak(multiplied_in(own))[0] <= times.forward_s[-1]

        def ratio(samples: int, backward: bool) -> float:
            here = layer_work(layer, profile, samples, backward=backward, multiplies=multiplies, dtype=own)
            there = layer_work(
                in_dtype, profile, samples, backward=backward, multiplies=multiplies, dtype=dtype
            )
            return roofline.seconds(there, target) / roofline.seconds(here, source)

        return LayerTimes(
            forward_s=tuple(s * ratio(b, False) for b, s in zip(sizes, times.forward_s, strict=True)),
            backward_s=tuple(s * ratio(b, True) for b, s in zip(sizes, times.backward_s, strict=True)),
        )

    rows = profile.on(measured_kind).layers
    bandwidths = source.memory_bandwidth_bytes_per_s / target.memory_bandwidth_bytes_per_s
    return KindProfile(
        source="estimated",
        microbatch_sizes=sizes,
        layers=tuple(scaled(*each) for each in zip(rows, held or rows, measured.layers, strict=True)),
        optimizer_s_per_byte=measured.optimizer_s_per_byte * bandwidths,
        held=held,
    )
