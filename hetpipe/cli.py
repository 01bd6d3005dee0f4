"""The command line: verbs, each loaded when it is called, and what a failure prints and exits with."""

import errno
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from cost_model.errors import CheckFailedError, InfeasibleError, InputError

BAD_INPUT, INFEASIBLE, CHECK_FAILED, WORKER_LOST, INTERRUPTED = 2, 3, 4, 5, 130


@dataclass(frozen=True, slots=True)
class Verb:
    """A function of a module of its own, and the line that `hetpipe --help` says of it: its docstring's."""

    name: str
    help: str

    def load(self) -> Callable[..., None]:
        """Import the module of the verb and return its function."""
        module = importlib.import_module(f"hetpipe.commands.{self.name}")
        return cast(Callable[..., None], getattr(module, f"{self.name}_command"))


_LINES = {
    "demo": "Plan, train and draw on three unequal devices that this host plays; under two minutes.",
    "init": "Look at this host and write a cluster.toml to start from.",
    "profile": (
        "Measure a model's layers on each kind of device of the cluster, or merge or correct profiles."
    ),
    "plan": "Decide who holds which layers, and show it beside the plain alternatives.",
    "explain": ("Say where the speed goes, why each stage has its layers, what left-out devices would add."),
    "simulate": "Run a plan on a virtual clock: step time, bubble, memory, and what the step waits for.",
    "compare": "All strategies side by side.",
    "check": "Prove that the split model computes what the whole one does: loss and every gradient.",
    "run": (
        "Train a model over the devices of a cluster file; torchrun may start it too, a process per device."
    ),
    "plot": "Draw a run or a plan: step, memory, layers, speed-ups, losses; or several runs, side by side.",
    "watch": "Show a run in a browser while it goes on: losses, tokens/s, what each device does.",
    "export": "Write a checkpoint as a folder that transformers loads, adapters as one that peft loads.",
    "models": "List the models by name, and the architectures of Hugging Face folders that are taken.",
    "clusters": "List the clusters that --cluster takes by name, or print the file of one, to start from.",
    "cache": "List the profiles, links, proven splits and tokens of texts that are kept, or remove them.",
    "env": "Versions and hardware, for bug reports; no names of users or folders.",
}
VERBS: Mapping[str, Verb] = {name: Verb(name, line) for name, line in _LINES.items()}


class _Verbs(TyperGroup):
    """The verbs by name; none is imported before it is called, or its own help asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {verb.name: TyperCommand(verb.name, help=verb.help) for verb in VERBS.values()}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a verb and return it as a command; None for an unknown name."""
        if cmd_name not in VERBS:
            return None
        from hetpipe.commands.help_pages import VerbCommand

        one_verb = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        one_verb.command(cmd_name, cls=VerbCommand)(VERBS[cmd_name].load())
        return typer.main.get_command(one_verb)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table of the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb.name, verb.help) for verb in VERBS.values()])


app = typer.Typer(
    name="hetpipe",
    cls=_Verbs,
    help="Train one model over unequal devices. Exit codes: 0 ok, 2 bad input, 3 infeasible, 4 check failed, "
    "5 a worker was lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"hetpipe {version('hetpipe')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before the verb."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit code. A failure of the user's input is one line on stderr."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who called us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        code = app(args=arguments, prog_name="hetpipe", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        message = error.format_message().replace("Value error, ", "")
        if message.startswith("No such option"):  # what is near by letters alone may be anything
            message = message.replace(", --help)", ")").replace(" (Possible options: --help)", "; see --help")
        return _fail(message, error.exit_code) if message else error.exit_code
    except InputError as error:
        return _fail(str(error), BAD_INPUT)
    except InfeasibleError as error:
        from hetpipe.reporting.tables import in_units

        return _fail(in_units(str(error)), INFEASIBLE)
    except CheckFailedError as error:
        return _fail(str(error), CHECK_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as in `hetpipe env | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename is None:
            return _fail(f"a file cannot be written ({error.strerror}); make room there", BAD_INPUT)
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}; give another place, or make room there", BAD_INPUT)
    except RuntimeError as error:
        if not _is_lost_worker(error):
            raise
        return _fail(str(error), WORKER_LOST)


def _is_lost_worker(error: RuntimeError) -> bool:
    """Return whether the launcher raised it; if nothing has loaded the launcher, it did not."""
    launch = sys.modules.get("hetpipe.runtime.processes")
    return launch is not None and isinstance(error, launch.WorkerLostError)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {_in_one_line(message)}\n")
    return code


def _in_one_line(message: str) -> str:
    """Return a message without what a terminal may take for a command, which names of files may hold."""
    text = " ".join(line.strip() for line in message.splitlines())
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
