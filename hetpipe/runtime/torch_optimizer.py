"""Optimizers of torch in the place of ours: their steps, and their states in checkpoints."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.data.task import OptimizerFactory, TrainingTask
from hetpipe.runs.settings import Settings
from hetpipe.runtime.bucket_parameters import parts_in
from hetpipe.runtime.host_states import NOTHING, HostStates, Offloaded
from hetpipe.runtime.host_steps import HostSteps
from hetpipe.runtime.named_optimizers import factory_of
from hetpipe.runtime.optimizer import Optimizer
from partition.plan import OPTIMIZER_STATES

_NUMBERS = {"bool": bool, "int": int, "float": float}


class TorchOptimizer(Optimizer):
    """An optimizer of torch over the named parameters of one rank, or none; it owns the states.

    rate: the learning rate of the settings, in proportion to which `step` changes the rates of all groups;
    None leaves them to the user. The states of a parameter are saved as "name.state", numbers as
    "name.state:int", so that a checkpoint can be read under any plan.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        counted: Collection[str],
        *,
        rate: float | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.num_steps = 0
        self.name = optimizer_name(optimizer)
        self.optimizer = optimizer
        self._counted = [value for name, value in self.parameters.items() if name in counted]
        self._rate = rate
        groups = optimizer.param_groups if optimizer is not None else []
        self._rates = [float(group.get("lr", 0.0)) for group in groups]
        self._begun_with = _options(groups)

    def zero_grad(self) -> None:
        for value in self.parameters.values():
            value.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float, scale: float, loss_scale: float = 1.0) -> None:
        """Make one step with all gradients multiplied by scale; they are those of losses times loss_scale.

        Without an optimizer, leave the gradients to the user, those of the losses themselves.
        """
        if self.optimizer is None:
            self._multiply_gradients(1.0 / loss_scale)
            return
        self._multiply_gradients(scale / loss_scale)
        if self._rate is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * learning_rate / self._rate
        self.optimizer.step()
        self.num_steps += 1

    def _state(self, name: str) -> dict[str, Any]:
        if self.optimizer is None or name not in self.parameters:
            return {}
        return dict(self.optimizer.state.get(self.parameters[name], {}))

    def state_tensors(self) -> list[Tensor]:
        states = [state for name in self.parameters for state in self._state(name).values()]
        return [state for state in states if isinstance(state, Tensor)]

    def states(self, name: str) -> dict[str, Tensor]:
        """Return the states of a parameter as "name.state", numbers as "name.state:type".

        Raises: InputError if the optimizer keeps what a checkpoint cannot hold.
        """
        changed = _changed(self._begun_with, _options(self.optimizer.param_groups if self.optimizer else []))
        if changed:
            raise InputError(
                f"no checkpoint can be written with {self.name}: it keeps {changed!r} for a whole group of "
                "parameters, and only what it keeps for each one is saved; train with save=False and every=0"
            )
        saved = {}
        for key, state in self._state(name).items():
            kind = type(state).__name__
            if isinstance(state, Tensor):
                saved[f"{name}.{key}"] = state
            elif kind in _NUMBERS:
                dtype = torch.float64 if kind == "float" else torch.int64
                saved[f"{name}.{key}:{kind}"] = torch.tensor(state, dtype=dtype)
            elif state is not None:
                raise InputError(
                    f"no checkpoint can be written with {self.name}: its state {key!r} is a {kind}; only "
                    "tensors and numbers can be saved; train with save=False and every=0"
                )
        return saved

    def load_states(self, name: str, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        self.num_steps = num_steps
        if self.optimizer is None or name not in self.parameters:
            return
        value = self.parameters[name]
        state: dict[str, Any] = {}
        for key, tensor in tensors.items():
            if key.startswith(f"{name}."):
                short, _, kind = key.removeprefix(f"{name}.").partition(":")
                # as torch does: what has the shape of the parameter lives where it lives
                on_device = tensor.shape == value.shape or self._counts_on_device(value)
                placed = tensor.to(value.device) if on_device else tensor
                state[short] = _NUMBERS[kind](tensor.item()) if kind else placed
        if state:
            begun = self._begun_states(value)
            added = {key: torch.zeros_like(value) for key in begun if key not in state}
            self.optimizer.state[value] = {**state, **added}

    def _begun_states(self, value: nn.Parameter) -> set[str]:
        """Return the names of the states of a parameter's shape that these options ask for.

        Those of an optimizer of torch, which makes them as zeros, and none later on: RMSprop resumed with
        momentum, Adam with amsgrad. (SGD makes its buffer whenever there is none.)
        """
        kind: Any = type(self.optimizer)
        if kind not in BY_NUMBER or kind is torch.optim.SGD:
            return set()
        sample = nn.Parameter(torch.zeros(2))
        sample.grad = torch.zeros(2)
        options = self._group_of(value)
        plain = dict.fromkeys(options.keys() & {"fused", "capturable", "foreach"}, False)
        made = kind([{**options, **plain, "params": [sample]}])
        made.step()
        states = made.state[sample].items()
        return {key for key, state in states if isinstance(state, Tensor) and state.shape == sample.shape}

    def _counts_on_device(self, value: nn.Parameter) -> bool:
        """Return whether the optimizer keeps the number of steps where the parameter is, too."""
        group = self._group_of(value)
        return bool(group.get("fused") or group.get("capturable"))

    def _group_of(self, value: nn.Parameter) -> dict[str, Any]:
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        return next(group for group in groups if any(member is value for member in group["params"]))


def optimizer_of(
    task: TrainingTask,
    parameters: Mapping[str, nn.Parameter],
    counted: Collection[str],
    settings: Settings,
    offloaded: Offloaded = NOTHING,
) -> Optimizer:
    """Return the optimizer of a run on one rank: what the task makes, or that of the settings.

    offloaded: the parameters whose states the host keeps.

    Raises: InputError if it keeps any of an optimizer of the user's own.
    """
    make = task.make_optimizer or factory_of(settings)
    if make is None:
        kept = HostSteps if offloaded.by_host else HostStates
        of_layers = partial(kept, offloaded=offloaded.names) if offloaded else Optimizer
        return of_layers(
            parameters, counted, settings.weight_decay, betas=settings.betas, epsilon=settings.epsilon
        )
    refuse_offload(offloaded)
    made = make_checked(make, list(parameters.values()))
    _check_parts(make, made, parameters, task)
    return TorchOptimizer(made, parameters, counted, rate=settings.learning_rate)


def refuse_offload(offloaded: Offloaded) -> None:
    """Refuse a plan that keeps states on the host where the optimizer is not hetpipe's AdamW.

    Raises: InputError if there is one.
    """
    if offloaded:
        raise InputError(
            "the plan keeps optimizer states in the host's memory, which only hetpipe's own AdamW can; take "
            "that, or leave host_memory out of the cluster file (of a plan that you give: "
            f'"{OPTIMIZER_STATES}" out of its offload)'
        )


BY_NUMBER: frozenset[type[torch.optim.Optimizer]] = frozenset(
    (
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
        torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop,
        torch.optim.ASGD,
    )
)  # fmt: skip
"""Torch's optimizers that step each number of a parameter by itself, whatever the others are."""


def steps_by_number(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to step a part of a parameter as it steps all of it.

    One with hooks around its step is not: they may look at whole parameters.
    """
    hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    return type(optimizer) in BY_NUMBER and not hooks


def takes_parts(make: OptimizerFactory) -> bool:
    """Return whether the factory's optimizer is known to step parts of parameters as it steps whole ones.

    It does not where vectors, or matrices, get other options by their size.
    """
    if not steps_by_number(made_of_samples(make)):
        return False
    samples = [nn.Parameter(torch.zeros(shape)) for shapes in _UNLIKE for shape in shapes]
    options = iter(_grouped(make_checked(make, samples), samples))
    return all(len({repr(next(options)) for _ in shapes}) == 1 for shapes in _UNLIKE)


_UNLIKE = (
    ((1,), (64,), (2**10,), (2**20,)),
    ((1, 1), (64, 64), (2**10, 2**10), (2**16, 4), (4, 2**16), (2**20, 1)),
)
"""Shapes of as many dimensions, for each number of them: small and large, as layers have them."""


def _check_parts(
    make: OptimizerFactory,
    made: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    task: TrainingTask,
) -> None:
    """Check that parts of parameters get the steps that the whole ones would.

    Raises: InputError if the optimizer may look at all of a parameter, or its factory at the shape.
    """
    parts = parts_in(parameters)
    if not parts:
        return
    first, remedy = next(iter(parts.values())), "give a plan without owner_ranges, or take hetpipe's AdamW"
    cut = f"owner_ranges of the plan cuts {first.name!r} between devices"
    if not steps_by_number(made):
        raise InputError(
            f"{cut}, and {optimizer_name(made)} is not known to step each number by itself; {remedy}"
        )
    infos = (info for layer in range(task.chain.num_layers) for info in task.chain.parameters(layer))
    shapes = {info.name: info.shape for info in infos}
    whole = [
        nn.Parameter(torch.empty(shapes[parts[key].name], dtype=value.dtype)) if key in parts else value
        for key, value in parameters.items()
    ]
    if _grouped(make_checked(make, whole), whole) != _grouped(made, list(parameters.values())):
        raise InputError(
            f"{cut}, and the optimizer factory groups parameters by their shapes; group them by dimensions "
            f"alone, or {remedy}"
        )


def _grouped(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the options of each parameter's group."""
    options = _options(optimizer.param_groups, ("params",))
    groups = zip(optimizer.param_groups, options, strict=True)
    of = {id(value): chosen for group, chosen in groups for value in group["params"]}
    return [of.get(id(value), {}) for value in parameters]


def make_checked(make: OptimizerFactory, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that the factory makes of the parameters of a rank.

    Raises: InputError if it gives no optimizer, one without a learning rate, or one of other parameters.
    """
    # NOTE: torch refuses an empty list, which a stage without parameters has (nn.ReLU, nn.Flatten)
    made = make(parameters or [nn.Parameter(torch.zeros(1))])
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(
            f"the optimizer factory gives a {type(made).__name__}; it must give a torch.optim.Optimizer of "
            "the parameters that it gets"
        )
    known = {id(value) for value in parameters}
    held = {id(value) for group in made.param_groups for value in group["params"]}
    if parameters and not held <= known:
        raise InputError(
            f"the optimizer factory gives a {type(made).__name__} of other parameters than it gets; each "
            "rank has parameters of its own"
        )
    if not all(float(group.get("lr", 0.0)) > 0 for group in made.param_groups):
        raise InputError(
            f"the optimizer factory gives a {type(made).__name__} whose groups do not all have a learning "
            'rate above zero ("lr"), of which the schedule gives multiples'
        )
    return made


def made_of_samples(make: OptimizerFactory) -> torch.optim.Optimizer:
    """Return what the factory makes of a vector and a matrix; errors as `make_checked`."""
    return make_checked(make, [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 1))])


def options_of(make: OptimizerFactory) -> list[JsonValue]:
    """Return the options of each group that the factory makes of a vector and a matrix, as far as JSON can.

    They are the same under every plan; the groups of a rank are not.
    """
    groups = _options(made_of_samples(make).param_groups, ("params", "initial_lr"))
    return [{key: _as_json(option) for key, option in group.items() if _is_plain(option)} for group in groups]


def _as_json(option: Any) -> JsonValue:
    return list(option) if isinstance(option, tuple) else option


def _is_plain(option: object) -> bool:
    if isinstance(option, list | tuple):
        return all(map(_is_plain, option))
    return option is None or isinstance(option, bool | int | float | str)


def optimizer_name(optimizer: torch.optim.Optimizer | None) -> str:
    """Return what a checkpoint calls the optimizer."""
    kind = type(optimizer)
    return "" if optimizer is None else f"{kind.__module__}.{kind.__qualname__}"


def _options(
    groups: list[dict[str, Any]], left_out: Collection[str] = ("params", "lr", "initial_lr")
) -> list[dict[str, Any]]:
    """Return what the groups hold besides parameters and learning rates, or what else is left out."""
    return [
        {
            key: option.tolist() if isinstance(option, Tensor) else option
            for key, option in group.items()
            if key not in left_out
        }
        for group in groups
    ]


def _changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Return the first option that differs, "" if none does."""
    for old, new in zip(before, after, strict=True):
        for key in old.keys() | new.keys():
            if old.get(key) != new.get(key):
                return key
    return ""
