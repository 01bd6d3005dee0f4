"""Where the parts of the checkout lie."""

import importlib.util
from pathlib import Path
from types import ModuleType

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
GOLDEN = ROOT / "tests" / "golden"
EXAMPLES = ROOT / "examples"
PACKAGES = ("cost_model", "partition", "hetpipe")


def modules() -> dict[str, Path]:
    """Return the file of every module of the three packages, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def load_benchmark(path: str) -> ModuleType:
    """Return a file of the benchmarks as a module, which no other test has."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), EXAMPLES / "benchmarks" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
