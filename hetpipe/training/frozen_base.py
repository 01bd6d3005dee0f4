"""The base beside adapters: no checkpoint holds it, each knows its weights by their hashes."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cost_model.errors import InputError
from hetpipe.models.adapters import packings_of, task_spec
from hetpipe.models.chain import ChainModel
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.pretrained_weights import FolderWeights
from hetpipe.models.quantized_weights import matrix_held
from hetpipe.runs.settings import TaskSettings

_KNOWN: WeakKeyDictionary[LayerModel, dict[str, str]] = WeakKeyDictionary()


def base_hashes(chain: ChainModel, model: LayerModel, seed: int) -> dict[str, str]:
    """Return the hash of each parameter of the base here, by name; worked out once, since none changes.

    Hashed is what was given, also where the rank keeps it in a narrower dtype.
    """
    if model not in _KNOWN:
        held = {name: value for name, value in model.owned_parameters().items() if name in chain.base}
        found: dict[str, str] = {}
        for layer in range(chain.num_layers):
            given = weights_as_given(chain, layer, held, seed)
            found |= {name: weight_sha256(value) for name, value in given.items()}
        _KNOWN[model] = found
    return _KNOWN[model]


def weights_as_given(
    chain: ChainModel, layer: int, held: Mapping[str, Tensor], seed: int
) -> dict[str, Tensor]:
    """Return those of the held weights that a layer has; frozen ones that are rounded as they were given."""
    here = {info.name: info for info in chain.parameters(layer) if info.name in held}
    rounded = [name for name, info in here.items() if info.is_rounded(held[name].dtype)]
    given = chain.initial_weights(layer, rounded, seed) if rounded else {}
    return {name: given.get(name, held[name]) for name in here}


def weight_sha256(value: Tensor) -> str:
    """Return the hash of a weight's values in float32, so that it is the same in every wider dtype.

    Of a quantized one, of all that it is held as.
    """
    matrix = matrix_held(value)
    if matrix is not None:
        return matrix.sha256()
    here = value.detach().to("cpu", torch.float32).contiguous()
    return hashlib.sha256(here.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def check_base(theirs: Mapping[str, str], mine: Mapping[str, str], source: Path) -> None:
    """Check that adapters of a checkpoint meet the base that they were trained beside.

    Raises: InputError naming a weight that is another.
    """
    for name, sha256 in mine.items():
        if theirs.get(name) != sha256:
            raise InputError(
                f"{source}: its adapters were trained beside another base, {name!r} has other values there; "
                "give the base of that run"
            )


def check_stored_base(
    theirs: Mapping[str, str], settings: TaskSettings, source: Path, limit_bytes: float = 2**28
) -> None:
    """Check some weights of a base that lies in a folder, before anything is written; ranks check all.

    Raises: InputError as `check_base`.
    """
    if settings.lora is None:  # a model of the user's own has no other description
        return
    spec = task_spec(settings)
    weights = FolderWeights.of(spec)
    if weights is None:
        return
    chosen: list[str] = []
    packed = packings_of(spec)
    sizes = {name: places[0][1].shape for name, places in weights.places.items() if name in theirs}
    for name, shape in sorted(sizes.items(), key=lambda item: (len(item[1]) < 2, math.prod(item[1]))):
        limit_bytes -= 4 * math.prod(shape)
        if limit_bytes < 0:
            break
        chosen.append(name)
    plain = [name for name in chosen if name not in packed]
    mine = {name: weight_sha256(value) for name, value in weights.load(plain, weights.dtypes()).items()}
    mine |= {name: weights.load_quantized(name, packed[name]).sha256() for name in chosen if name in packed}
    check_base(theirs, mine, source)
