"""Nothing that another process or a file says can run code: read from the sources."""

import ast
from pathlib import Path

import pytest

from places import MODULES

PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLES_TO_OWN_RANKS = ("hetpipe.data.main_module", "hetpipe.data.user_task")
"""A user's model, data and loss, with what they see of their script: the launcher hands them to the processes
that it has forked itself."""

PIPES_TO_OWN_RANKS = (
    "hetpipe.hosts.leader",  # to itself: a thread wakes the one that watches the ranks
    "hetpipe.hosts.member",
    "hetpipe.runtime.processes",
)
"""Pipes of multiprocessing, whose messages are pickled: between a launcher and what it has forked itself."""

OBJECT_COLLECTIVES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
    "scatter_object_list", "send_object_list",
}  # fmt: skip
NETWORK_PICKLES = {"BaseManager", "Client", "Listener", "SyncManager"}  # of multiprocessing


def faults(source: str, name: str = "") -> set[str]:
    """Return what of a source text reads pickles, or runs a text as code."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules = {node.module or ""}
            if (node.module or "").startswith("multiprocessing"):
                found |= {alias.name for alias in node.names} & NETWORK_PICKLES
            found |= {alias.name for alias in node.names} & OBJECT_COLLECTIVES
        else:
            modules = set()
        for module in modules & PICKLERS if name not in PICKLES_TO_OWN_RANKS else ():
            found.add(module)
        if "multiprocessing.connection" in modules and name not in PIPES_TO_OWN_RANKS:
            found.add("multiprocessing.connection")
        if isinstance(node, ast.Attribute):
            found |= {node.attr} & OBJECT_COLLECTIVES
        if isinstance(node, ast.Call):
            found |= _fault_of_call(node)
    return found


def _fault_of_call(node: ast.Call) -> set[str]:
    called = ast.unparse(node.func)
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if called == "torch.load" and given.get("weights_only") != "True":
        return {called}
    if called in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
        return {called}
    return {called} & {"eval", "exec", "__import__", "yaml.load", "torch.hub.load"}


@pytest.mark.parametrize("name", MODULES)
def test_no_source_reads_pickles_or_runs_texts(name: str):
    assert not faults(MODULES[name].read_text(encoding="utf-8"), name)


@pytest.mark.parametrize("name", PICKLES_TO_OWN_RANKS + PIPES_TO_OWN_RANKS)
def test_the_exceptions_are_needed(name: str):
    assert faults(MODULES[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from dill import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "dist.all_gather_object(found, mine)",
        "from torch.distributed import broadcast_object_list",
        "from multiprocessing.connection import Client",
        "from multiprocessing.managers import BaseManager",
        "eval(text)",
    ],
)
def test_what_it_looks_for_is_found(source: str):
    assert faults(source)


def test_torchs_own_files_are_read_as_tensors_alone():
    assert not faults("torch.load(path, weights_only=True)\nnp.load(path)\nmodel.eval()")


def test_all_sources_are_looked_at():
    assert {Path(path).suffix for path in MODULES.values()} == {".py"} and len(MODULES) > 200
