"""The precisions in which a model may be trained, by the name that profiles and settings use."""

import contextlib
from collections.abc import Collection, Iterable, Mapping

from cost_model.catalogue import accelerator
from cost_model.cluster import CPU, EMULATED, Device
from cost_model.errors import InputError
from cost_model.strict_files import did_you_mean
from cost_model.vendors import check_float64

FLOAT32, FLOAT64, TF32 = "float32", "float64", "tf32"
BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST = "bfloat16-autocast", "float16-autocast"
DTYPES = (FLOAT32, FLOAT64, TF32, BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST)
MIXED = "mixed"
"""The dtype of a profile whose kinds compute in several."""

GRADIENT_BF16 = "bf16"
GRADIENT_DTYPES = (FLOAT32, GRADIENT_BF16)
"""The dtypes in which gradients may travel where they are summed, float32 as they are made."""

AUTO_DTYPE = "auto"
_SHORT = {"bf16": BFLOAT16_AUTOCAST, "fp16": FLOAT16_AUTOCAST}
_MULTIPLIED_IN = {BFLOAT16_AUTOCAST: "bfloat16", FLOAT16_AUTOCAST: "float16"}
_NATIVE_FLOAT16 = ("P100-PCIE", "P100-PCIE-12GB", "P100-SXM2")
"""Kinds without tensor cores that the catalogue therefore gives no rate, but whose float16 is no slower."""


def parse_dtype(text: str) -> str:
    """Return the full name of a precision.

    >>> parse_dtype("bf16"), parse_dtype("float32")
    ('bfloat16-autocast', 'float32')

    Raises: InputError if there is no such precision.
    """
    name = _SHORT.get(text, text)
    if name not in DTYPES:
        known = (AUTO_DTYPE, FLOAT32, TF32, *_SHORT, FLOAT64)
        raise InputError(f"--dtype {text!r} is not supported; give {', '.join(known)}, or one for each kind")
    return name


def dtype_named(dtype: object) -> str:
    """Return the full name of a precision that a caller gave, by that name or as the command line has it.

    >>> dtype_named("fp16"), dtype_named("bfloat16-autocast")
    ('float16-autocast', 'bfloat16-autocast')

    Raises: InputError for anything else, a torch.dtype too: weights are in float32 beside autocast.
    """
    name = _SHORT.get(dtype, dtype) if isinstance(dtype, str) else ""
    if name not in (*DTYPES, MIXED):
        raise InputError(f"dtype is {dtype!r}; give {', '.join((FLOAT32, TF32, *_SHORT, FLOAT64))}")
    return name


def dtypes_of(text: str | None, kinds: Collection[str]) -> dict[str, str]:
    """Return the precision of each kind that a --dtype gives.

    One for all, or several for a kind each, of which one without a kind is for all others.

    >>> dtypes_of("bf16,V100=fp16", ["A100", "V100"])
    {'A100': 'bfloat16-autocast', 'V100': 'float16-autocast'}

    Raises: InputError for what is no precision, a kind that is not there, or one that is left out.
    """
    rest: str | None = FLOAT32 if text is None else None
    by_kind: dict[str, str] = {}
    for part in () if text is None else text.split(","):
        kind, has_kind, name = (word.strip() for word in part.rpartition("="))
        if name != AUTO_DTYPE:
            name = parse_dtype(name)
        if not has_kind and rest is not None:
            raise InputError(f"--dtype {text!r} gives two for all kinds; write one of them as KIND={name}")
        if has_kind and kind not in kinds:
            raise InputError(f"--dtype {text!r}: there is no kind {kind!r}; {did_you_mean(kind, kinds)}")
        if has_kind:
            by_kind[kind] = name
        else:
            rest = name
    for kind in kinds:
        if kind not in by_kind and rest is None:
            raise InputError(
                f"--dtype {text!r} says nothing of kind {kind!r}; add {kind}=..., or one for all"
            )
    chosen = {kind: by_kind.get(kind, rest or FLOAT32) for kind in kinds}
    return {kind: fastest(kind) if name == AUTO_DTYPE else name for kind, name in chosen.items()}


def fastest(kind: str) -> str:
    """Return the precision in which a kind multiplies fastest: bf16, else fp16, else float32.

    An emulated kind is taken for the card that it is named after ("emulated-V100"), without one for a CPU.

    Raises: InputError if the catalogue does not know the kind.
    """
    if kind in (CPU, EMULATED):
        return FLOAT32
    card = kind.removeprefix(f"{EMULATED}-")
    try:
        accelerator(card)
    except InputError as error:
        raise InputError(f"--dtype auto: {error}; or give {kind} its own: --dtype auto,{kind}=bf16") from None
    return next((each for each in _MULTIPLIED_IN if not lacks_units(each, card)), FLOAT32)


def common_dtype(dtypes: Mapping[str, str]) -> str:
    """Return the precision of a profile whose kinds have these: the one of all, or MIXED.

    Raises: InputError if they cannot train one model together, or a kind has no such numbers.
    """
    found = set(dtypes.values())
    if FLOAT64 in found:
        check_float64([kind for kind, dtype in dtypes.items() if dtype == FLOAT64])
    if len(found) == 1:
        return found.pop()
    if FLOAT64 in found:
        named = ", ".join(f"{dtype} on {kind}" for kind, dtype in sorted(dtypes.items()))
        raise InputError(
            f"{named}: these do not train one model together, since weights are in float64 or in float32; "
            f"give all kinds {FLOAT64}, or none (--dtype), or leave some out (--exclude)"
        )
    return MIXED


def check_dtypes(dtype: str, by_kind: Mapping[str, str | None]) -> None:
    """Check the precision of a profile and those that its kinds have of their own, None for none.

    Raises: InputError if one is unknown, or they do not go together.
    """
    if dtype not in (*DTYPES, MIXED):
        raise InputError(f"dtype {dtype!r} is unknown; known: {', '.join(DTYPES)}, {MIXED}")
    for kind, own in by_kind.items():
        if own is None and dtype == MIXED:
            raise InputError(f"kinds.{kind} has no dtype, and the profile is {MIXED}; give it one")
        if own is not None and own not in DTYPES:
            raise InputError(f"kinds.{kind}.dtype {own!r} is unknown; known: {', '.join(DTYPES)}")
        if own not in (None, dtype) and dtype != MIXED:
            raise InputError(f"kinds.{kind} is in {own}, the profile in {dtype}; make it {MIXED!r}")
    if by_kind:
        common_dtype({kind: own or dtype for kind, own in by_kind.items()})


def is_lowered(dtype: str) -> bool:
    """Return whether layers in a precision take, give and multiply 16 bits: half the bytes."""
    return dtype in _MULTIPLIED_IN


def multiplied_in(dtype: str) -> str:
    """Return the dtype that matrices are multiplied in, as the catalogue names it."""
    return _MULTIPLIED_IN.get(dtype, dtype)


def lowered_share(dtype: str) -> float:
    """Return bytes of a weight's lowered copy over its own, in [0, 1].

    Of weights that are multiplied: embeddings and norms are not lowered.
    """
    return 0.5 if dtype in _MULTIPLIED_IN else 0.0


def gradient_share(gradient_dtype: str) -> float:
    """Return bytes of gradients that travel in a dtype over those that are made, in [0, 1].

    >>> gradient_share("bf16"), gradient_share("float32")
    (0.5, 1.0)
    """
    return 0.5 if gradient_dtype == GRADIENT_BF16 else 1.0


def check_gradient_dtype(gradient_dtype: str, dtype: str = FLOAT32) -> None:
    """Check that gradients may travel in a dtype, in a model of the precision `dtype`.

    Raises: InputError if not.
    """
    if gradient_dtype not in GRADIENT_DTYPES:
        raise InputError(
            f"gradient_dtype {gradient_dtype!r} is unknown; {' and '.join(GRADIENT_DTYPES)} are known"
        )
    if gradient_dtype != FLOAT32 and dtype == FLOAT64:
        raise InputError(
            f"gradients of a model in {FLOAT64} would be rounded to {gradient_dtype}; leave out "
            f"--gradient-dtype, or train in {FLOAT32}"
        )


def scales_loss(dtypes: Iterable[str]) -> bool:
    """Return whether losses are scaled where ranks compute so: small gradients are zero in float16."""
    return FLOAT16_AUTOCAST in dtypes


def lacks_units(dtype: str, kind: str) -> bool:
    """Return whether a kind is known to have no units for the precision; False of kinds not catalogued."""
    if dtype in (FLOAT32, FLOAT64):
        return False
    with contextlib.suppress(InputError):
        found = accelerator(kind)
        native = dtype == FLOAT16_AUTOCAST and found.name in _NATIVE_FLOAT16
        return multiplied_in(dtype) not in found.peak_flops and not native
    return False


def check_fast(dtypes: Mapping[str, str], devices: Iterable[Device]) -> None:
    """Refuse devices that are known to have no units for the precision of their kind.

    Raises: InputError naming the first one, and the remedy.
    """
    for device in devices:
        dtype = dtypes.get(device.kind, FLOAT32)
        if lacks_units(dtype, device.kind):
            raise InputError(
                f"device {device.name!r} is a {device.kind}, which has no units for {multiplied_in(dtype)} "
                "and gains nothing; give its kind another precision (--dtype auto), leave it out (--exclude "
                f"{device.name}), or give --allow-slow"
            )


def check_estimable(dtypes: Mapping[str, str]) -> None:
    """Refuse to estimate a kind, or from a kind, that is known to have no units for its precision.

    Raises: InputError naming the first one, and the remedy.
    """
    for kind, dtype in dtypes.items():
        if lacks_units(dtype, kind):
            raise InputError(
                f"{kind} has no units for {multiplied_in(dtype)}, and would be estimated at its float32 "
                "rate; leave it out, give it another precision (--dtype auto), or give --allow-slow"
            )
