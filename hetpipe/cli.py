"""The command line: verbs, and what a failure prints and exits with."""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

from cost_model.errors import CheckFailedError, InfeasibleError, InputError
from hetpipe.commands.demo import demo_command
from hetpipe.commands.explaining import explain_command
from hetpipe.commands.hosts import env_command, init_command
from hetpipe.commands.models import check_command, export_command, profile_command
from hetpipe.commands.pictures import plot_command
from hetpipe.commands.planning import compare_command, plan_command, simulate_command
from hetpipe.commands.run import run_command

BAD_INPUT, INFEASIBLE, CHECK_FAILED, WORKER_LOST, INTERRUPTED = 2, 3, 4, 5, 130

app = typer.Typer(
    name="hetpipe",
    help="Train one model over unequal devices. Exit codes: 0 ok, 2 bad input, 3 infeasible, 4 check failed, "
    "5 a worker was lost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
VERBS: Mapping[str, Callable[..., None]] = {
    "demo": demo_command,
    "init": init_command,
    "profile": profile_command,
    "plan": plan_command,
    "explain": explain_command,
    "simulate": simulate_command,
    "compare": compare_command,
    "check": check_command,
    "run": run_command,
    "plot": plot_command,
    "export": export_command,
    "env": env_command,
}
for _name, _verb in VERBS.items():
    app.command(_name)(_verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hetpipe {importlib.metadata.version('hetpipe')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What stands before the verb."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; gives the exit code. A failure of the user's input is one line on stderr."""
    try:
        code = app(args=arguments, prog_name="hetpipe", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        message = error.format_message()
        return _fail(message, error.exit_code) if message else error.exit_code
    except InputError as error:
        return _fail(str(error), BAD_INPUT)
    except InfeasibleError as error:
        return _fail(str(error), INFEASIBLE)
    except CheckFailedError as error:
        return _fail(str(error), CHECK_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as in `hetpipe env | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}; give another place, or make room there", BAD_INPUT)
    except RuntimeError as error:
        if not _is_lost_worker(error):
            raise
        return _fail(str(error), WORKER_LOST)


def _is_lost_worker(error: RuntimeError) -> bool:
    """Whether the launcher raised it; if nothing has loaded the launcher, it did not."""
    launch = sys.modules.get("hetpipe.runtime.processes")
    return launch is not None and isinstance(error, launch.WorkerLostError)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {message}\n")
    return code
