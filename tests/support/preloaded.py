"""What the server that forks ranks loads before the first of them, so that no rank of a test does by itself.

The server lives as long as the process that runs tests, and loads what the first run asks for. Ranks of later
tests that need more, such as a model of transformers or peft, would load it by themselves, each in seconds.
"""

import importlib.util
from collections.abc import Sequence
from multiprocessing import forkserver

MODULES = (
    "pytest",  # the main module of the process that runs tests, which each rank imports anew
    "hetpipe.training.rank",
    "hetpipe.profiling.layer_profiler",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("bert", "gpt2", "llama")),
    "warm_ranks",  # numba, too
    "hetpipe.reporting.pages.page_text",
    "hetpipe.reporting.run_tables",
    "peft",
)


def preload_for_all_tests() -> None:
    """Let whoever names modules for the server name these, too; it is started by the first that needs it."""
    there = [name for name in MODULES if importlib.util.find_spec(name.partition(".")[0]) is not None]
    asked = forkserver.set_forkserver_preload

    def set_forkserver_preload(modules_names: Sequence[str]) -> None:
        from hetpipe.models.adapters import peft_starts_cuda

        left_out = ("peft",) if peft_starts_cuda() else ()
        asked([name for name in dict.fromkeys([*there, *modules_names]) if name not in left_out])

    forkserver.set_forkserver_preload = set_forkserver_preload
