"""What the server that forks ranks loads before the first of them, so that no rank of a test does by itself.

The server lives as long as the process that runs tests, and loads what the first run asks for. Ranks of later
tests that need more, such as a model of transformers or peft, would load it by themselves, each in seconds.
"""

from collections.abc import Sequence
from multiprocessing import forkserver

from hetpipe.models.rank_modules import RANKS

MODULES = (
    "pytest",  # the main module of the process that runs tests, which each rank imports anew
    *RANKS,
    *(f"transformers.models.{family}.modeling_{family}" for family in ("bert", "gpt2", "llama")),
    "hetpipe.models.dropout_ahead",
    "warm_ranks",
    "hetpipe.reporting.pages.page_text",
    "hetpipe.reporting.run_tables",
    "hetpipe.models.peft_ahead",
)


def preload_for_all_tests() -> None:
    """Let whoever names modules for the server name these, too; it is started by the first that needs it."""
    asked = forkserver.set_forkserver_preload

    def set_forkserver_preload(modules_names: Sequence[str]) -> None:
        asked(list(dict.fromkeys([*MODULES, *modules_names])))

    forkserver.set_forkserver_preload = set_forkserver_preload
