"""Run files: the options of a run in a TOML file, with a [lora] table for its adapters."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from pydantic import ConfigDict, TypeAdapter

from cost_model.errors import InputError
from cost_model.strict_files import STRICT, did_you_mean, read_toml, validate
from hetpipe.runs.lora import LoraSettings

LORA = "lora"
_NOT_OF_A_FILE = ("run_file", "help")


@dataclass(frozen=True, slots=True)
class _LoraTable:
    """The [lora] table: what --lora says, or the PEFT folder of --adapter, and --load-in."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    r: int | None = None
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] | str = ()
    rslora: bool = False
    adapter: str | None = None
    load_in: str | None = None

    def options(self, where: str) -> dict[str, str]:
        """Return the table as the options that say the same.

        Raises: InputError as LoraSettings, or if new adapters are described beside those of a folder.
        """
        held = {} if self.load_in is None else {"load_in": self.load_in}
        if self.adapter is not None:
            if self != _LoraTable(adapter=self.adapter, load_in=self.load_in):
                raise InputError(f"{where}: adapter is a folder, which has r and the others; leave those out")
            return {"adapter": self.adapter, **held}
        if self.r is None:
            raise InputError(f'{where}: key "r" is missing; give the rank, or the adapter to go on with')
        targets = (self.targets,) if isinstance(self.targets, str) else self.targets
        alpha = float(self.r) if self.alpha is None else self.alpha
        try:
            return {LORA: LoraSettings(self.r, alpha, targets, self.dropout, self.rslora).text, **held}
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


_TABLE = TypeAdapter(_LoraTable)


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Let the file answer for the options that are not given.

    Raises: InputError for what a run file cannot say, or if there are two.
    """
    if path is None:
        return path
    if context.default_map:
        raise InputError(f"{path} is a second run file; give one, by --run-file or without it")
    data = read_toml(path)
    tables = dict(data)
    values: dict[str, Any] = {}
    if LORA in tables:
        where = f"{path}, [{LORA}]"
        values |= validate(_TABLE, tables.pop(LORA), where).options(where)
    of_run, of_verb = _options(context, "run"), _options(context, None)
    for key, value in tables.items():
        if key not in of_run and key not in of_verb:
            known = sorted({*of_run, *of_verb, LORA} - {"adapter"})
            raise InputError(f"{path}: unknown key {key!r}; {did_you_mean(key, known)}")
        if isinstance(value, Mapping):
            raise InputError(f"{path}: {key} is a table; [{LORA}] is the only one")
        values[key] = value
    context.default_map = {
        of_verb[key].name: _given(path, key, value, several=of_verb[key].multiple)
        for key, value in values.items()
        if key in of_verb
    }
    return path


def _given(path: Path, key: str, value: Any, *, several: bool) -> str | list[str]:
    """Return a value as the words of the command line, whose types are checked there."""
    if isinstance(value, list) and not several:
        raise InputError(f"{path}: {key} is {value}; give one value")
    words = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    return words if several else words[0]


def _options(context: typer.Context, verb: str | None) -> dict[str, Any]:
    """Return the parameters of a verb by the names of its options, None: of the one that is called."""
    command: Any = context.command
    if verb is not None:
        assert context.parent is not None
        command = context.parent.command.get_command(context.parent, verb)  # type: ignore[attr-defined]
    names: dict[str, Any] = {}
    for parameter in command.params:
        for option in parameter.opts:
            name = option.removeprefix("--").replace("-", "_")
            if option.startswith("--") and name not in _NOT_OF_A_FILE:
                names[name] = parameter
    return names


JobArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="JOB.TOML", is_eager=True, callback=_read, help="A run file, as --run-file.",
        show_default=False,
    ),
]  # fmt: skip

RunFileOption = Annotated[
    Path | None,
    typer.Option(
        "--run-file", is_eager=True, callback=_read, help="A TOML file that gives options, [lora] too."
    ),
]
