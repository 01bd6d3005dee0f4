"""How far off estimates of each kind of device are known to be, and what is said of them."""

from dataclasses import dataclass

from cost_model.catalogue import accelerator
from cost_model.dtypes import FLOAT32, lacks_units, multiplied_in
from cost_model.errors import InputError


@dataclass(frozen=True, slots=True)
class KnownError:
    """Errors of a kind's estimated speed, relative to other kinds that were measured on the same work.

    median: of the errors without their signs. bias: of the signed errors; above zero if the kind is estimated
        too fast.
    """

    median: float
    bias: float

    def __str__(self) -> str:
        direction = "too fast" if self.bias > 0 else "too slow"
        one_sided = abs(self.bias) > self.median / 2
        return f"median error {self.median:.0%}" + (f", {direction}," if one_sided else "")


BLOCKS = {
    "A100-SXM4-40GB": KnownError(0.096, -0.063),
    "A100-SXM4-80GB": KnownError(0.109, -0.074),
    "A10G": KnownError(0.089, 0.023),
    "A6000": KnownError(0.098, 0.028),
    "GH200": KnownError(0.342, 0.342),
    "H100-NVL": KnownError(0.094, 0.0),
    "L4": KnownError(0.142, -0.063),
    "L40S": KnownError(0.142, 0.078),
    "P100-PCIE": KnownError(0.095, 0.026),
    "P40": KnownError(0.128, 0.098),
    "RTX-2080-Ti": KnownError(0.178, -0.178),
    "RTX-3090": KnownError(0.128, -0.06),
    "T4": KnownError(0.18, 0.056),
    "Titan-RTX": KnownError(0.144, -0.144),
    "V100-PCIE-16GB": KnownError(0.149, -0.052),
    "V100-SXM2-16GB": KnownError(0.127, -0.036),
}
"""Of single blocks of transformers, the product itself left out of the fit."""

WHOLE_STEPS = {
    "A10": KnownError(0.244, 0.244),
    "A100-PCIE-40GB": KnownError(0.104, -0.037),
    "A100-PCIE-80GB": KnownError(0.096, -0.02),
    "A100-SXM4-80GB": KnownError(0.097, -0.021),
    "A6000": KnownError(0.139, 0.088),
    "GH200": KnownError(0.465, 0.465),
    "GTX-1080-Ti": KnownError(0.061, -0.038),
    "H100-PCIE": KnownError(0.109, -0.109),
    "H100-SXM5": KnownError(0.116, 0.077),
    "Quadro-RTX-6000": KnownError(0.056, 0.056),
    "Quadro-RTX-8000": KnownError(0.08, -0.047),
    "RTX-2080-Ti": KnownError(0.062, -0.038),
    "RTX-3090": KnownError(0.073, -0.064),
    "RTX-4090": KnownError(0.108, -0.108),
    "RTX-6000-Ada": KnownError(0.185, 0.185),
    "Titan-RTX": KnownError(0.051, 0.051),
    "V100-SXM2-16GB": KnownError(0.11, -0.11),
}
"""Of training steps of BERT, which the roofline was not fitted to; both from examples/benchmarks/roofline."""

TRUSTED_ERROR = 0.20


def known_error(kind: str) -> KnownError | None:
    """Return the larger of the known errors of a kind, by any of its names; None if it was never checked.

    Raises: InputError if the catalogue does not know the kind.
    """
    name = accelerator(kind).name
    found = [table[name] for table in (BLOCKS, WHOLE_STEPS) if name in table]
    return max(found, key=lambda error: error.median, default=None)


def far_off(kind: str) -> bool:
    """Return whether estimates of a kind, or from it, are known to be far off."""
    error = known_error(kind)
    return error is not None and error.median > TRUSTED_ERROR


def distrust(kind: str, dtype: str = FLOAT32) -> str | None:
    """Return why estimates of a kind, by name, are not to be trusted in a precision; None if they are."""
    if lacks_units(dtype, kind):
        return f"no units for {multiplied_in(dtype)}, priced at its float32 rate"
    try:
        error = known_error(kind)
    except InputError:
        return "not in the catalogue"
    if error is None:
        return "never checked against a measurement"
    return f"{error} where it was checked" if far_off(kind) else None
