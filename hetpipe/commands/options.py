"""The options of the verbs, each once; groups of them that several verbs take are one frozen value."""

import dataclasses
import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import typer

from cost_model.errors import InputError
from cost_model.expenses import Objective
from cost_model.known_clusters import cluster_path, known_clusters
from hetpipe.commands.run_file import RunFileOption
from hetpipe.program.instructions import Schedule
from hetpipe.runs.lora import EXAMPLE as LORA_EXAMPLE
from hetpipe.runs.optimizers import OptimizerKind

AUTO = "auto"
MODEL_HELP = "A name of hetpipe models, such as bert-large, or a Hugging Face folder."


def _models(incomplete: str) -> list[str]:
    """Return the models by name that a word may become, and the folders; for completion in a shell."""
    from hetpipe.models.names import MODEL_ENTRIES

    names = [model.name for model in MODEL_ENTRIES if model.name.startswith(incomplete)]
    place = Path(incomplete[: incomplete.rfind("/") + 1] or ".")
    start = incomplete[: incomplete.rfind("/") + 1]
    found = sorted(place.glob("[!.]*/config.json")) if place.is_dir() else []
    folders = [f"{start or './'}{path.parent.name}" for path in found]
    return names + [folder for folder in folders if folder.startswith(incomplete or "./")]


_MODEL = typer.Option("--model", help=MODEL_HELP, autocompletion=_models)
ModelOption = Annotated[str | None, _MODEL]
RequiredModel = Annotated[str, _MODEL]


def _clusters(incomplete: str) -> list[str]:
    """Return the clusters by name that a word may become, and the cluster files here."""
    files = [path.name for path in sorted(Path().glob("*.toml"))]
    return [name for name in (*known_clusters(), *files) if name.startswith(incomplete)]


def _found(given: Path | None) -> Path | None:
    return None if given is None else cluster_path(given)


_CLUSTER = typer.Option(
    "--cluster", callback=_found, metavar="FILE", autocompletion=_clusters,
    help="The cluster.toml, or a name of hetpipe clusters.",
)  # fmt: skip
ClusterOption = Annotated[Path, _CLUSTER]
MaybeCluster = Annotated[Path | None, _CLUSTER]
BatchOption = Annotated[
    int, typer.Option("--global-batch-size", help="Samples a step, all devices together.")
]
SequenceOption = Annotated[
    int | None, typer.Option("--sequence-length", help="Tokens a sample; 64, on GPUs alone 512.")
]
ALL = "all"
WELL_KNOWN_NAMES = (
    "single, ddp, poplar, gpipe-even, torchgpipe, memory-proportional, speed-proportional, pipedream"
)
PUBLISHED_NAMES = (
    "poplar-0, poplar-1, poplar-2, poplar-3, heterog, hetpipe-np, hetpipe-ed, hetpipe-hd, whale-dp, "
    "whale-pp, hap, cephalo, hexiscale, zorse"
)
STRATEGY_NAMES = f"{WELL_KNOWN_NAMES}; or the rules of a published system: {PUBLISHED_NAMES}"


def _strategies(incomplete: str) -> list[str]:
    """Return the strategies that a word may become."""
    names = [AUTO, *f"{WELL_KNOWN_NAMES}, {PUBLISHED_NAMES}".split(", ")]
    return [name for name in names if name.startswith(incomplete)]


StrategyOption = Annotated[
    str,
    typer.Option(
        "--strategy",
        help=f"auto; or a plain plan space: {STRATEGY_NAMES}.",
        autocompletion=_strategies,
    ),
]
StrategiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        help=f"Beside auto: {STRATEGY_NAMES}; or {ALL}. Several times.",
        autocompletion=lambda incomplete: [
            *_strategies(incomplete),
            *([ALL] if ALL.startswith(incomplete) else []),
        ],
    ),
]
ScheduleOption = Annotated[
    Schedule | None,
    typer.Option("--schedule", help="Order of computations; auto: the fastest of all by simulation."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="float32 (on GPUs alone auto), tf32, bf16, fp16, or A100=bf16,V100=fp16."),
]
AllowSlowOption = Annotated[
    bool, typer.Option("--allow-slow", "--allow-slow-bf16", help="Also on devices without units for --dtype.")
]
BudgetOption = Annotated[
    float, typer.Option("--profile-budget", help="Seconds to spend on measuring.", min=0.0)
]
RemeasureOption = Annotated[bool, typer.Option("--remeasure", help="Measure anew, whatever the cache holds.")]
CompileOption = Annotated[
    bool,
    typer.Option("--compile", help="Compile each block (torch.compile); needs a C++ compiler or triton."),
]
LossChunksOption = Annotated[
    int | None,
    typer.Option("--loss-chunks", min=1, help="Compute the loss in so many chunks of tokens: less memory."),
]


def _checked_kinds(kinds: list[str] | None) -> list[str] | None:
    """Return the kinds; refuse an option, which is taken for one where `--estimate` has none."""
    for kind in kinds or ():
        if kind.startswith("-"):
            raise InputError(f"--estimate {kind} names an option, no kind; give one, as --estimate RTX-4090")
    return kinds


EstimateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--estimate",
        help="Add a kind that is not at hand, estimated; several times.",
        callback=_checked_kinds,
    ),
]
VerboseOption = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="Details too: which plans the bound speaks about, whole reasons."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """The adapters that are trained in place of the model."""

    title: ClassVar[str] = "Adapters and run files"
    lora: Annotated[
        str | None,
        typer.Option("--lora", help=f"Train adapters beside frozen weights, such as {LORA_EXAMPLE}."),
    ] = None
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Train on the adapters of this PEFT folder.")
    ] = None
    load_in: Annotated[
        str | None,
        typer.Option("--load-in", help="4bit or 8bit: hold the matrices beside adapters so (bitsandbytes)."),
    ] = None
    run_file: RunFileOption = None


@dataclass(frozen=True, slots=True)
class LearnedOptions(AdapterOptions):
    """What of a run decides what its layers cost: it is measured so, planned so, and trained so."""

    title: ClassVar[str] = "What is trained"
    pack: Annotated[
        bool | None,
        typer.Option("--pack/--no-pack", help="Several samples a row, none of which sees another; no."),
    ] = None

    optimizer: Annotated[
        OptimizerKind | None, typer.Option("--optimizer", help="What makes the steps; adamw.")
    ] = None
    momentum: Annotated[
        float | None, typer.Option("--momentum", help="Of sgd and rmsprop, in [0, 1); 0.")
    ] = None

    @property
    def decided(self) -> dict[str, Any]:
        """Return what is given, as arguments of `Settings`."""
        given = {"pack": self.pack, "optimizer": self.optimizer, "momentum": self.momentum}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ProfileOptions(LearnedOptions):
    """Where the profile of a model comes from: a file, or a measurement of this dtype within a budget."""

    title: ClassVar[str] = "What is measured"
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="A profile.json; without it the model is measured here.")
    ] = None
    dtype: DtypeOption = None
    loss_chunks: LossChunksOption = None
    compiled: CompileOption = False
    profile_budget_s: BudgetOption = 60.0
    remeasure: RemeasureOption = False


@dataclass(frozen=True, slots=True)
class PlanOptions(ProfileOptions):
    """What a planner is told beside model, batch and devices: the profile, what is forced, and the proof."""

    title: ClassVar[str] = "What the plan must be like"
    allow_slow_bf16: AllowSlowOption = False
    microbatch_size: Annotated[
        int | None, typer.Option("--microbatch-size", help="Force it; else the best of the profiled ones.")
    ] = None
    gradient_dtype: Annotated[
        str | None,
        typer.Option(
            "--gradient-dtype", help="bf16: gradients travel in half the bytes, rounded; else float32."
        ),
    ] = None
    pins: Annotated[
        list[str] | None,
        typer.Option(
            "--pin", help="Device and layers, as big/0=0-11; it serves these only. Give it several times."
        ),
    ] = None
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="A device or a node to leave out; several times.")
    ] = None
    num_pipelines: Annotated[int | None, typer.Option("--pipelines", help="Exactly so many pipelines.")] = (
        None
    )
    max_devices: Annotated[int | None, typer.Option("--max-devices", help="At most so many devices.")] = None
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="Search several times as long: on slow networks plans are better."),
    ] = False
    shared_network: Annotated[
        bool,
        typer.Option(
            "--shared-network",
            help="Plan for connections that share network cards, too: of all plans looked at the one that "
            "is best either way.",
        ),
    ] = False
    no_proof: Annotated[
        bool, typer.Option("--no-proof", help="Spend no time on a tighter bound; the plan is the same.")
    ] = False
    proof_s: Annotated[
        float | None,
        typer.Option(
            "--proof-seconds", help="CPU seconds the bound may take; more make it tighter.", min=0.0
        ),
    ] = None

    @property
    def forces_plan(self) -> bool:
        """Whether a part of the plan is decided by the user."""
        counts = (self.num_pipelines, self.max_devices)
        return bool(self.pins) or any(count is not None for count in counts)


@dataclass(frozen=True, slots=True)
class ObjectiveOptions:
    """What a plan is to have least of, and the limits that it has to keep."""

    title: ClassVar[str] = "What the plan is best in"
    objective: Annotated[Objective, typer.Option("--objective", help="What a step is to take least of.")] = (
        Objective.STEP
    )
    deadline: Annotated[
        str | None, typer.Option("--deadline", help='The longest step allowed, such as "2 s".')
    ] = None
    budget_per_hour: Annotated[
        float | None, typer.Option("--budget-per-hour", help="What the devices used may cost an hour.")
    ] = None

    @property
    def given(self) -> bool:
        """Whether something other than the fastest plan is asked for."""
        limits = (self.deadline, self.budget_per_hour)
        return self.objective is not Objective.STEP or any(limit is not None for limit in limits)


@dataclass(frozen=True, slots=True)
class WhatIfOptions:
    """Which other devices are compared, in place of strategies."""

    title: ClassVar[str] = "Other devices"
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if", help='A change, such as "add 2 RTX-4090 to desk"; several times: each, then all.'
        ),
    ] = None
    estimate: EstimateOption = None
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Which devices to use: step against money and energy.")
    ] = False
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw what --what-if, --pareto or --measure finds.")
    ] = None


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb, for each parameter that is a group of options, the options of the group.

    So typer sees them one by one, in the place of the group, and the verb gets one value.
    """
    hints = get_type_hints(verb)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        parameters += _of_group(groups[parameter.name]) if parameter.name in groups else [parameter]

    @wraps(verb)
    def with_groups(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(
                **{entry.name: values.pop(entry.name) for entry in dataclasses.fields(group)}
            )
        verb(**values)

    keyword_only = [entry.replace(kind=inspect.Parameter.KEYWORD_ONLY) for entry in parameters]
    with_groups.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {entry.name: entry.annotation for entry in keyword_only}
    return with_groups


def _of_group(group: Any) -> list[inspect.Parameter]:
    """Return a parameter for each field of a group; every field has a default.

    Help shows an option under the title of the class that it is a field of.
    """
    hints = get_type_hints(group, include_extras=True)
    for base in group.__mro__:
        for name in vars(base).get("__annotations__", {}).keys() & hints.keys():
            hints[name] = _under(hints[name], vars(base).get("title"))
    return [
        inspect.Parameter(
            entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default, annotation=hints[entry.name]
        )
        for entry in dataclasses.fields(group)
    ]


def _under(hint: Any, title: str | None) -> Any:
    """Return the annotation of an option with the title under which help shows it."""
    options = [copy(option) for option in getattr(hint, "__metadata__", ())]
    for option in options:
        option.rich_help_panel = option.rich_help_panel or title
    return Annotated[hint.__origin__, *options] if options else hint
