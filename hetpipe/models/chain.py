"""Models as chains of layers: described without weights, materialised layer by layer."""

import copy
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.adapter_folder import AdapterFolder
from hetpipe.models.adapters import has_adapters, packings_of
from hetpipe.models.block_structure import BlockStructure, Inputs, ParameterInfo, refused_on_error
from hetpipe.models.cut_refusals import refuse_uncuttable
from hetpipe.models.description import Description, describe, reached_by
from hetpipe.models.families import build_keyed, keyed_attention
from hetpipe.models.found_structure import what_crosses
from hetpipe.models.frozen_weights import cast_where_used
from hetpipe.models.huggingface import ModelSpec
from hetpipe.models.initialization import Template, parameters_on_meta, private_random_stream
from hetpipe.models.lowered_weights import lower_where_used
from hetpipe.models.owned_weights import begin_weights, held_beside, take_weights
from hetpipe.models.partial_model import BlockLayers, LayerModel, SequentialLayers
from hetpipe.models.placement import place
from hetpipe.models.pretrained_weights import FolderWeights
from hetpipe.models.quantized_modules import matrices_in
from hetpipe.models.quantized_weights import QuantizedParameter
from hetpipe.models.sequential import let_inputs_be, run_through
from hetpipe.models.splittable import splittable
from hetpipe.models.unpacked import keep_unpacked
from hetpipe.models.weight_bytes import WeightBytes

__all__ = ["ChainModel", "LayerModel", "ParameterInfo", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that travels between layers, for one sample; a floating one in the dtype of the model."""

    shape_per_sample: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class ChainModel:
    """A model as a chain of layers, without weights.

    Around a list of blocks: layer 0 is all before them, layers 1 to n the blocks, layer n + 1 all after; of
    an encoder and a decoder, what is between their blocks is a layer as well. Of an nn.Sequential each child
    is a layer.
    """

    name: str
    build: Callable[[], nn.Module]
    structure: BlockStructure | None  # None: nn.Sequential
    layer_names: tuple[str, ...]
    layer_parameters: tuple[tuple[ParameterInfo, ...], ...]
    example: Inputs  # of one sample
    has_rule: bool  # whether weights can be initialised module by module
    given: Path | Mapping[str, Tensor] | None = None  # initial weights; None: drawn from the seed
    weights: FolderWeights | None = None  # of a Hugging Face folder: what begins with stored weights
    adapter: AdapterFolder | None = None  # of a PEFT folder: what its adapters begin with
    base: frozenset[str] = frozenset()  # frozen beside adapters: names of what no checkpoint holds

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> "ChainModel":
        """Describe a registered model: sizes from the meta device, structure from its shrunken copy.

        Raises: InputError if the model cannot be split, or its folder's weights are not its own; says why.
        """
        weights = FolderWeights.of(spec)
        ids = torch.arange(24).reshape(2, 12) % max(1, spec.shrunken_vocabulary_size)
        inputs = spec.shrunken_inputs.inputs(ids)
        example = spec.inputs.inputs(torch.zeros(1, 12, dtype=torch.long))
        found = describe(spec.name, spec.build, spec.build_shrunk, inputs, example)
        chain = cls._of(spec.name, spec.build, example, found)
        stored = {} if weights is None else weights.dtypes()
        packed = packings_of(spec)
        if weights is not None:
            weights.check_scales(packed)
        layer_parameters = tuple(
            tuple(replace(info, given=stored.get(info.name, info.given)) for info in infos)
            for infos in chain.layer_parameters
        )
        return replace(chain, weights=weights, layer_parameters=held_beside(layer_parameters, packed))

    @classmethod
    def from_module(
        cls,
        factory: Callable[[], nn.Module] | nn.Module,
        example: Inputs | Tensor | tuple[Tensor, ...],
        *,
        shrunk: Callable[[], nn.Module] | None = None,
        more: Callable[[], Inputs] | None = None,
        name: str | None = None,
    ) -> "ChainModel":
        """Describe any module with a list of blocks, or an nn.Sequential, as a chain.

        factory: builds the module; or the module itself, whose weights are then the initial ones.
        example: inputs of one sample, by name of the forward's arguments; for an nn.Sequential also plain
        tensors.
        shrunk: the same class made small; without it the structure is read off the full model, on the CPU.
        more: gives inputs of further samples, to look at which parameters they reach that the example does
        not, as experts of a mixture; the example's where it gives none.

        Raises: InputError if the model cannot be split; says why.
        """
        if isinstance(example, Tensor):
            example = (example,)
        if isinstance(example, tuple):
            example = {f"input{index}": tensor for index, tensor in enumerate(example)}
        inputs = {key: torch.cat([tensor, tensor]) for key, tensor in example.items()}
        given: dict[str, nn.Parameter] | None = None
        build: Callable[[], nn.Module]
        matrices = matrices_in(factory) if isinstance(factory, nn.Module) else {}
        if isinstance(factory, nn.Module):
            factory = keyed_attention(factory)
            name = name or type(factory).__name__
            with refused_on_error(f"{name} cannot be split: it cannot be copied"):
                build = template = Template(factory)
                splittable(template.module)
            refuse_uncuttable(factory)  # of which a copy may have lost what it refuses
            given = dict(factory.named_parameters())
            if matrices and not has_adapters(factory):
                raise InputError(
                    f"{name} is quantized, and what is trained are adapters; give peft.get_peft_model of it"
                )
            given |= {key: QuantizedParameter(matrix) for key, matrix in matrices.items()}
            small = shrunk or (template if matrices else lambda: splittable(copy.deepcopy(factory)))
        else:
            name = name or _name_of(factory)
            build = partial(build_keyed, factory)
            small = build if shrunk is None else partial(build_keyed, shrunk)
        found = describe(name, build, small, inputs, example, given)
        if found.unreached and shrunk is None and not matrices:  # small is the model itself
            found = found.reaching(reached_by(small, more or (lambda: inputs)))
        chain = cls._of(name, build, example, found)
        if given is None:  # NOTE: the model's rule knows nothing of what peft put into it
            return replace(chain, has_rule=chain.has_rule and not chain.base)
        packed = {key: matrix.packing for key, matrix in matrices.items()}
        layer_parameters = held_beside(chain.layer_parameters, packed)
        return replace(chain, has_rule=False, given=given, layer_parameters=layer_parameters)

    @classmethod
    def _of(
        cls, name: str, build: Callable[[], nn.Module], example: Inputs, found: Description
    ) -> "ChainModel":
        if not found.trains:
            raise InputError(
                f"{name} has nothing to train: no parameter that its output depends on has requires_grad; "
                "leave some unfrozen"
            )
        return cls(
            name=name,
            build=build,
            structure=found.structure,
            layer_names=found.layer_names,
            layer_parameters=found.layer_parameters,
            example=example,
            has_rule=found.has_rule,
            base=found.base,
        )

    @property
    def num_layers(self) -> int:
        """Return how many layers the chain has."""
        return len(self.layer_names)

    def parameters(self, layer: int) -> tuple[ParameterInfo, ...]:
        """Return the parameters of a layer; a tied one is listed by each of its layers."""
        return self.layer_parameters[layer]

    @property
    def first_trained(self) -> int:
        """Return the first layer that trains a parameter: no gradient is needed before it."""
        return min(
            layer for layer, infos in enumerate(self.layer_parameters) if any(info.reached for info in infos)
        )

    def weight_bytes(self, dtype: torch.dtype, lowered: torch.dtype | None = None) -> tuple[WeightBytes, ...]:
        """Return the bytes of each layer's weights.

        dtype: of trained weights; lowered: what autocast computes in, None for no autocast.
        """
        return tuple(WeightBytes.of(infos, dtype, lowered) for infos in self.layer_parameters)

    def initial_weights(self, layer: int, names: Collection[str], seed: int) -> dict[str, Tensor]:
        """Return the weights with which parameters of a layer begin, in the dtype in which they are given."""
        given = {info.name: info.given for info in self.layer_parameters[layer]}
        infos = {info.name: info for info in self.layer_parameters[layer]}
        with torch.device("cpu"):
            _, found = self._build_owned(frozenset({layer}), infos, seed, given)
        return {name: value.detach().to(given[name]) for value, name in found.items() if name in names}

    def boundary(self, layer: int, sequence_length: int | None = None) -> tuple[TensorSpec, ...]:
        """Return what travels from layer - 1 to layer for one sample.

        sequence_length: None takes the example's.
        """
        shapes = [
            (sequence_length,)
            if sequence_length is not None and tensor.dim() == 2 and not tensor.is_floating_point()
            else tuple(tensor.shape[1:])
            for tensor in self.example.values()
        ]
        return self._crossing(layer, tuple(shapes))

    def boundary_for(self, layer: int, inputs: Inputs) -> tuple[TensorSpec, ...]:
        """Return what travels for samples with the shapes of these inputs, each [samples, ...]."""
        if self.structure is None:  # takes its inputs by position
            given = list(inputs.values())
        else:
            given = [inputs.get(key, tensor) for key, tensor in self.example.items()]
        return self._crossing(layer, tuple(tuple(tensor.shape[1:]) for tensor in given))

    def know_boundaries(self, inputs: Inputs) -> None:
        """Work out what travels for the shapes of these inputs, so that `boundary_for` then takes no time."""
        if self.num_layers > 1:
            self.boundary_for(1, inputs)

    def _crossing(self, layer: int, shapes: tuple[tuple[int, ...], ...]) -> tuple[TensorSpec, ...]:
        if not 0 < layer < self.num_layers:
            raise ValueError(f"boundaries of {self.name} are 1 to {self.num_layers - 1}, not {layer}")
        return _boundaries(self, shapes)[layer - 1]

    def materialise(
        self,
        layers: Collection[int],
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        lowered: torch.dtype | None = None,
        *,
        compiled: bool = False,
        absent: Collection[str] = (),
        on_host: Collection[str] = (),
    ) -> LayerModel:
        """Build these layers with real weights; all others cost nothing.

        Weights are those given, or are drawn in float32 on the CPU and do not depend on which layers are
        asked for. A Hugging Face model draws its layers alone, by the model's rule for each module, but for
        what its folder holds; any other, without a rule, is built in full on the CPU and keeps what is owned.

        lowered: what autocast computes in, on weights of dtype; see hetpipe.models.mixed_precision. Frozen
        weights are kept in their own bytes (hetpipe.models.frozen_weights). compiled: whether blocks are, one
        graph each, in which autocast lowers weights itself. absent: names of parameters that are not here
        until somebody puts them there; on_host: of those that stay on the host.

        Raises: InputError if they cannot be.
        """
        owned = frozenset(layers)
        if not owned <= set(range(self.num_layers)):
            raise ValueError(f"{self.name} has layers 0 to {self.num_layers - 1}, not {sorted(owned)}")
        every = (info for layer in owned for info in self.layer_parameters[layer])
        infos = {info.name: info for info in every if info.name not in absent}
        kept = {name: info.kept_dtype(dtype, lowered) for name, info in infos.items()}
        with torch.device("cpu"):
            model, names = self._build_owned(owned, infos, seed, kept)
        names = place(model, names, infos, dtype, torch.device(device), kept, on_host)
        frozen = {parameter: name for parameter, name in names.items() if name in infos and infos[name].keeps}
        cast_where_used(model, frozen, dtype, lowered)
        if lowered is not None:
            around = () if self.structure is None else self.structure.around
            ends = {info.name for layer in around for info in self.layer_parameters[layer]}
            trained = {
                name for name, info in infos.items() if info.reached and (name in ends or not compiled)
            }
            lower_where_used(model, {value for value, name in names.items() if name in trained}, lowered)
        made = {name: parameter for parameter, name in names.items()}
        by_layer = {
            i: {info.name: made[info.name] for info in self.layer_parameters[i]} for i in sorted(owned)
        }
        layered: LayerModel
        if self.structure is None:
            layered = SequentialLayers(model, self.num_layers, by_layer)
        else:
            keep_unpacked(model)
            layered = BlockLayers(model, by_layer, self.structure)
        layered.device_type, layered.lowered = torch.device(device).type, lowered
        layered.first_trained = self.first_trained
        layered.absent, layered.on_host = frozenset(absent), frozenset(on_host)
        if compiled:
            layered.compile_blocks()
        return layered

    def _build_owned(
        self,
        layers: frozenset[int],
        infos: Mapping[str, ParameterInfo],
        seed: int,
        kept: Mapping[str, torch.dtype],
    ) -> tuple[nn.Module, dict[nn.Parameter, str]]:
        """Return the model on the CPU with its owned weights alone, and the names of its parameters.

        Other blocks are empty. kept: dtypes of what is read from a folder.
        """
        with private_random_stream(seed), parameters_on_meta() if self.has_rule else nullcontext():
            model = self.build()
        names = {parameter: name for name, parameter in model.named_parameters()}
        if isinstance(model, nn.Sequential):
            calls = dict(enumerate(model))
            for child in model:
                let_inputs_be(child)
        else:
            assert self.structure is not None
            calls = {
                layer: model.get_submodule(f"{blocks.path}.{block}")
                for layer, (blocks, block) in self.structure.calls.items()
            }
        mine = {id(block) for layer, block in calls.items() if layer in layers}
        drawn = set(infos)
        for block in (block for block in calls.values() if id(block) not in mine):
            held = {names[value] for value in block.parameters()}
            if not held.isdisjoint(infos):
                drawn |= held  # a weight that blocks share is drawn where it is listed first, with all others
            elif self.structure is None or not self.structure.keeps_blocks:
                for members in (block._modules, block._parameters, block._buffers):
                    members.clear()
        if self.has_rule:
            names = begin_weights(model, names, infos, kept, seed, drawn=drawn, build=self.build,
                                  weights=self.weights, adapter=self.adapter)  # fmt: skip
        elif self.given is not None:
            names = take_weights(model, names, infos, self.given)
        return model, names


def _name_of(factory: Callable[[], nn.Module]) -> str:
    return getattr(factory, "__name__", type(factory).__name__)


@lru_cache(maxsize=1024)
def _boundaries(chain: ChainModel, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[TensorSpec, ...], ...]:
    """Return the tensors that cross at each boundary.

    shapes: of one sample of each input, in the order of the example.
    """
    example = {
        key: tensor if tuple(tensor.shape[1:]) == shape else torch.zeros(1, *shape, dtype=tensor.dtype)
        for (key, tensor), shape in zip(chain.example.items(), shapes, strict=True)
    }
    with torch.no_grad():
        if chain.structure is None:
            crossing = run_through(chain.build, example)[1][:-1]
        else:
            crossing = what_crosses(chain.structure, chain.materialise((), seed=0), example)
    return tuple(
        tuple(TensorSpec(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors) for tensors in crossing
    )
