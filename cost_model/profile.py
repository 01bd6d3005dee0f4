"""What one model costs on each kind of device, layer by layer: the content of profile.json."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, GetPydanticSchema, TypeAdapter
from pydantic_core.core_schema import no_info_after_validator_function

from cost_model.cluster import Link
from cost_model.dtypes import MIXED, check_dtypes, common_dtype, lowered_share
from cost_model.errors import InputError
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.measured_links import MeasuredAllReduce, MeasuredLink
from cost_model.strict_files import (
    STRICT,
    canonical_sha256,
    check_format,
    did_you_mean,
    json_text,
    read_json,
    validate,
)

FORMAT, OLD_FORMAT = "hetpipe.profile/2", "hetpipe.profile/1"

_LEFT_OUT_AT_ZERO = (
    "tied_bytes", "unreached_bytes", "lowered_bytes", "frozen_with_bytes", "dequantized_bytes",
    "attention_flops_per_sample", "attention_backward_flops_per_sample",
    "rounded_bytes", "prefix_bytes_per_sample",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KindProfile:
    """Times of all layers on one kind of device; source is "measured" or "estimated".

    standard_error: worst relative standard error of the measured medians, None where it is not known;
        standard_error_of names the layer, pass and microbatch size of it.
    dtype: the precision of the times, None for that of the profile. held: the layers' bytes in that
        precision, () for those of the profile.
    host_step_bytes_per_s: bytes of parameters for which the CPU of the host that it was measured on makes an
        AdamW step in a second; None where that was not measured.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    source: str
    microbatch_sizes: tuple[int, ...]
    layers: tuple[LayerTimes, ...]
    optimizer_s_per_byte: float = 0.0
    standard_error: float | None = None
    standard_error_of: str | None = None
    dtype: str | None = None
    held: tuple[LayerProfile, ...] = ()
    host_step_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        sizes = self.microbatch_sizes
        if self.source not in ("measured", "estimated"):
            raise InputError(f'source {self.source!r} is unknown; write "measured" or "estimated"')
        if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
            raise InputError(f"microbatch_sizes {list(sizes)} must be at least one size, rising, from 1 up")
        if self.optimizer_s_per_byte < 0:
            raise InputError(f"optimizer_s_per_byte is {self.optimizer_s_per_byte}; give zero or more")
        if self.standard_error is not None and self.standard_error < 0:
            raise InputError(f"standard_error is {self.standard_error}; give zero or more")
        if self.host_step_bytes_per_s is not None and not self.host_step_bytes_per_s > 0:
            raise InputError(
                f"host_step_bytes_per_s is {self.host_step_bytes_per_s}; give more than zero, or leave it out"
            )
        for index, layer in enumerate(self.layers):
            for name, values in (("forward_s", layer.forward_s), ("backward_s", layer.backward_s)):
                if len(values) != len(sizes):
                    raise InputError(
                        f"layers[{index}].{name} has {len(values)} entries for {len(sizes)} microbatch_sizes"
                    )


def _plain_without_sizes(link: MeasuredLink) -> Link:
    return link if link.message_bytes or link.calibrated else Link(link.latency_s, link.bandwidth_bytes_per_s)


_LinkInFile = Annotated[
    Link,
    GetPydanticSchema(
        lambda _, schema_of: no_info_after_validator_function(_plain_without_sizes, schema_of(MeasuredLink))
    ),
]
"""A link is read with the optional keys of a measured one, and is plain where they are left out."""


@dataclass(frozen=True)  # without slots, to keep what is asked of it again and again
class ModelProfile:
    """Everything that planning needs to know of a model: layers, and their times on each kind of device.

    layers: their bytes, on kinds that have none of their own (`on`).
    dtype: the precision of all kinds; MIXED where each has its own (`dtype_of`).
    links: measured channels by "kind>kind", used where they are slower than the cluster file says, or where
        a run has calibrated them;
        never for emulated devices, whose links behave as written in the file.
    all_reduces: measured between groups of real devices; each group appears once.
    loss_chunks: into how many chunks of tokens the loss of a microbatch is cut; None: it is not.
    compiled: whether blocks were compiled, and are in a run.
    whole_states: whether the optimizer needs all of a parameter to step it: no owner has a part of it then.
    resident_states: whether the optimizer has its states on the device alone: none are on a host then.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: str
    sequence_length: int
    dtype: str
    layers: tuple[LayerProfile, ...]
    kinds: Mapping[str, KindProfile]
    optimizer_bytes_per_parameter_byte: float = 2.0
    links: Mapping[str, _LinkInFile] = dataclasses.field(default_factory=dict)
    all_reduces: tuple[MeasuredAllReduce, ...] = ()
    loss_chunks: int | None = None
    compiled: bool = False
    whole_states: bool = False
    resident_states: bool = False

    def __post_init__(self) -> None:
        if self.loss_chunks is not None and self.loss_chunks < 1:
            raise InputError(f"loss_chunks is {self.loss_chunks}; give at least 1, or leave it out")
        check_dtypes(self.dtype, {kind: profile.dtype for kind, profile in self.kinds.items()})
        names = [layer.name for layer in self.layers]
        if not names:
            raise InputError(f"the profile of {self.model!r} has no layers")
        for index, layer in enumerate(self.layers):
            if names.count(layer.name) > 1:
                raise InputError(f"layers[{index}]: the name {layer.name!r} appears twice")
            for key, other in (("tied_to", layer.tied_to), ("frozen_with", layer.frozen_with)):
                if other is not None and other not in names[:index]:
                    near = did_you_mean(other, names[:index])
                    raise InputError(f"layers[{index}].{key} names {other!r}; {near}")
        groups = [sorted(all_reduce.kinds) for all_reduce in self.all_reduces]
        for index, group in enumerate(groups):
            if group in groups[:index]:
                raise InputError(f"all_reduces[{index}]: the group of kinds {group} appears twice")
        for kind, profile in self.kinds.items():
            if len(profile.layers) != len(names):
                raise InputError(
                    f"kinds.{kind} has {len(profile.layers)} layers, the model {len(names)}; profile it again"
                )
            if profile.held and list(map(_same_on_all, profile.held)) != list(map(_same_on_all, self.layers)):
                raise InputError(
                    f"kinds.{kind}.held are other layers than the profile's, or train other bytes; profile "
                    "it again"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dtypes(self) -> dict[str, str]:
        """The precision of each kind."""
        return {kind: profile.dtype or self.dtype for kind, profile in self.kinds.items()}

    def dtype_of(self, kind: str) -> str:
        """Return the precision in which a profiled kind computes."""
        return self.kind(kind).dtype or self.dtype

    @cached_property
    def first_trained(self) -> int:
        """Return the first layer with a trained weight, which a later one may share: no gradient comes below.

        0 where no layer has any.
        """
        trained = (index for index, layer in enumerate(self.layers) if layer.trained_bytes > 0)
        first = next(trained, 0)
        return (
            min((self.tied_home(index) for index in range(first, self.num_layers)), default=0) if first else 0
        )

    def kind(self, name: str) -> KindProfile:
        """Return what was measured or estimated for a kind.

        Raises: InputError if the kind was not profiled.
        """
        if name not in self.kinds:
            raise InputError(
                f"the profile of {self.model!r} has no kind {name!r}; {did_you_mean(name, self.kinds)}"
            )
        return self.kinds[name]

    def on(self, kind: str) -> "ModelProfile":
        """Return the profile with the bytes that layers have on a kind, itself if they have no others."""
        layers = self.kinds[kind].held if kind in self.kinds else ()
        if not layers or layers is self.layers:
            return self
        found = copy.copy(self)  # checked already
        found.__dict__.pop("untied_bytes", None)
        object.__setattr__(found, "layers", layers)
        return found

    def message_bytes_per_sample(self, layer: int, giver: str, taker: str) -> float:
        """Return bytes from layer - 1 on one kind to `layer` on another: those of the narrower precision."""
        return min(self.on(kind).layers[layer - 1].output_bytes_per_sample for kind in (giver, taker))

    def check_layers(self, names: Sequence[str]) -> None:
        """Check that a model at hand has these layers, by name.

        Raises: InputError if it has others.
        """
        mine = [layer.name for layer in self.layers]
        if len(mine) != len(names):
            raise InputError(
                f"the profile of {self.model!r} has {len(mine)} layers, the model {len(names)}; "
                "profile it again"
            )
        for index, (profiled, name) in enumerate(zip(mine, names, strict=True)):
            if profiled != name:
                raise InputError(
                    f"layers[{index}] of the profile of {self.model!r} is {profiled!r}, of the model "
                    f"{name!r}; profile it again"
                )

    def tied_bytes(self, layer: int) -> float:
        """Return bytes of the layer's parameters that are the same tensors as in the layer it is tied to."""
        tied = self.layers[layer]
        if tied.tied_to is None:
            return 0.0
        home = self.layers[self.tied_home(layer)]
        return tied.tied_bytes or min(tied.parameter_bytes, home.parameter_bytes)

    def tied_home(self, layer: int) -> int:
        """Return the index of the layer that this one is tied to; itself if it is tied to none."""
        return self._tied_homes[layer]

    @cached_property
    def _tied_homes(self) -> tuple[int, ...]:
        places = {layer.name: index for index, layer in enumerate(self.layers)}
        return tuple(
            index if layer.tied_to is None else places[layer.tied_to]
            for index, layer in enumerate(self.layers)
        )

    @cached_property
    def untied_bytes(self) -> tuple[float, ...]:
        """The bytes of each layer's trained weights but those that it shares with other layers."""
        lent = [0.0] * self.num_layers
        for layer, home in enumerate(self._tied_homes):
            if home != layer:
                lent[home] = max(lent[home], self.tied_bytes(layer))
        return tuple(
            held.trained_bytes - (lent[layer] + self.tied_bytes(layer))
            for layer, held in enumerate(self.layers)
        )

    @cached_property
    def shares_weights(self) -> bool:
        """Whether some layer has weights that an earlier one has, too, trained or frozen."""
        return any(layer.tied_to is not None or layer.frozen_with is not None for layer in self.layers)

    @cached_property
    def tied_groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers that hold the same trained weights, rising; the first of each group is their home."""
        return self._groups([self.tied_home(layer) for layer in range(self.num_layers)])

    @cached_property
    def _frozen_groups(self) -> tuple[tuple[int, ...], ...]:
        names = [layer.name for layer in self.layers]
        return self._groups(
            [
                index if layer.frozen_with is None else names.index(layer.frozen_with)
                for index, layer in enumerate(self.layers)
            ]
        )

    def shares_frozen(self, layer: int) -> bool:
        """Return whether a layer has frozen weights in common with another."""
        return any(layer in group for group in self._frozen_groups)

    @staticmethod
    def _groups(homes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        found: dict[int, list[int]] = {}
        for layer, home in enumerate(homes):
            found.setdefault(home, []).append(layer)
        return tuple(tuple(layers) for _, layers in sorted(found.items()) if len(layers) > 1)

    def shared_weight_bytes(
        self, layer: int, *, trained: bool | None = None
    ) -> tuple[tuple[tuple[int, ...], float], ...]:
        """Return the earlier layers that hold weights of a layer, and the bytes of these weights.

        A device that holds the layer and any of these holds the weights once: layers with as many bytes in
        common with one home have the same ones. trained: those of one kind alone.
        """
        shared: list[tuple[tuple[tuple[int, ...], ...], Callable[[int], float]]] = []
        if trained is not False:
            shared.append((self.tied_groups, self.tied_bytes))
        if trained is not True:
            shared.append((self._frozen_groups, lambda index: self.layers[index].frozen_with_bytes))
        found = []
        for groups, bytes_of in shared:
            group = next((group for group in groups if layer in group[1:]), None)
            if group is not None:
                num_bytes = bytes_of(layer)
                before = group[1 : group.index(layer)]
                same = tuple(other for other in before if bytes_of(other) == num_bytes)
                found.append(((group[0], *same), num_bytes))
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        for layer in chain(data["layers"], *(kind["held"] for kind in data["kinds"].values())):
            # by size where it was measured so, else the one number
            del layer["workspace_bytes" if layer["workspace_by_size"] else "workspace_by_size"]
            for key in _LEFT_OUT_AT_ZERO:
                if layer[key] == 0.0:
                    del layer[key]
            for key in ("num_parameters", "frozen_with"):
                if layer[key] is None:
                    del layer[key]
        for kind in data["kinds"].values():
            for key in ("standard_error", "standard_error_of", "dtype", "host_step_bytes_per_s"):
                if kind[key] is None:
                    del kind[key]
            if not kind["held"]:
                del kind["held"]
        for link in data["links"].values():
            if link.get("standard_error", 0.0) is None:
                del link["standard_error"]
            if not link.get("calibrated", True):
                del link["calibrated"]
        if not data["all_reduces"]:
            del data["all_reduces"]
        if data["loss_chunks"] is None:
            del data["loss_chunks"]
        for key in ("compiled", "whole_states", "resident_states"):
            if not data[key]:
                del data[key]
        return {"format": FORMAT, **data}

    def with_kinds(self, kinds: Mapping[str, KindProfile], dtypes: Mapping[str, str]) -> "ModelProfile":
        """Return the profile with these kinds, each in its precision.

        Raises: InputError if they cannot train one model together.
        """
        dtype = common_dtype({kind: dtypes[kind] for kind in kinds})
        if dtype == MIXED:
            mixed = {kind: dataclasses.replace(times, dtype=dtypes[kind]) for kind, times in kinds.items()}
            return dataclasses.replace(self, dtype=dtype, kinds=mixed)
        layers = next((times.held for times in kinds.values() if times.held), self.layers)
        plain = {kind: dataclasses.replace(times, dtype=None, held=()) for kind, times in kinds.items()}
        return dataclasses.replace(self, dtype=dtype, layers=layers, kinds=plain)

    @property
    def sha256(self) -> str:
        return canonical_sha256(self.to_json())


def _same_on_all(layer: LayerProfile) -> tuple[str, str | None, float, float]:
    """Return what a layer has in every precision: names, and what is summed and stepped, in float32."""
    return layer.name, layer.tied_to, round(layer.trained_bytes), round(layer.tied_bytes)


_ADAPTER = TypeAdapter(ModelProfile)


def profile_from_data(data: object, source: str) -> ModelProfile:
    """Return the profile in profile.json's data.

    Version 1 counts a lowered copy of every weight under autocast, at most half of its bytes.

    Raises: InputError naming file, key, value and remedy.
    """
    if isinstance(data, Mapping) and data.get("format") == OLD_FORMAT:
        profile = validate(_ADAPTER, check_format(data, OLD_FORMAT, source), source)
        share = lowered_share(profile.dtype)
        layers = (
            dataclasses.replace(layer, lowered_bytes=share * layer.parameter_bytes)
            for layer in profile.layers
        )
        return dataclasses.replace(profile, layers=tuple(layers))
    return validate(_ADAPTER, check_format(data, FORMAT, source), source)


def read_profile(path: Path | str) -> ModelProfile:
    """Read a profile.json.

    Raises: InputError naming file, key, value and remedy.
    """
    return profile_from_data(read_json(Path(path)), str(path))


def profile_text(profile: ModelProfile) -> str:
    """Return the text of a profile.json."""
    return json_text(profile.to_json())
