"""What users get: a source distribution that holds all, and a wheel that runs without the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from places import ROOT
from terminal import COLUMNS, lines_in_terminal

pytestmark = pytest.mark.slow
BUILD = "from setuptools.build_meta import build_{0} as build; import sys; build(sys.argv[1])"
CHECKOUT = ("docs", "examples", "notebooks", "tests", "cost_model", "partition", "hetpipe", ".ci", ".github")


def built(kind: str, source: Path, target: Path) -> Path:
    """Build a distribution by the backend that pip calls; a warning of a wrong file list is an error."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind), str(target)],
        cwd=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warning: no files found" not in done.stderr.lower().replace("previously-included", "")
    (found,) = target.iterdir()
    return found


def plain_environment() -> dict[str, str]:
    """Return the variables of this process but those that would lead to the checkout."""
    return {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "HETPIPE"))}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution from a copy of the checkout, and unpack it."""
    copy, target = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("sdist")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in CHECKOUT:
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    with tarfile.open(built("sdist", copy, target)) as archive:
        archive.extractall(target / "unpacked", filter="data")
    (source,) = (target / "unpacked").iterdir()
    return source


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the source distribution."""
    return built("wheel", sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone into a new environment that sees the other packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, *install], env=plain_environment(), check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # NOTE: a line of a .pth file is a place to look in; .pth files there (editable installs) are not read
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def test_the_source_distribution_holds_what_the_repository_does(sdist: Path):
    wanted = {
        path.relative_to(ROOT)
        for name in CHECKOUT
        for path in (ROOT / name).rglob("*")
        if path.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & set(path.parts)
    }
    wanted |= {
        Path(name) for name in ("README.md", "constraints.txt", "mkdocs.yml", "LICENSE", "CITATION.cff")
    }
    missing = sorted(str(path) for path in wanted if not (sdist / path).is_file())
    assert missing == []


def test_the_wheel_says_what_it_is(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (place,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(place).decode().splitlines()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    for minor in (11, 12, 13):
        assert f"Classifier: Programming Language :: Python :: 3.{minor}" in lines
    assert "License: Apache-2.0" in lines and "Author: hetpipe contributors" in lines
    assert any(line.startswith("Keywords: ") for line in lines)


def test_the_solver_of_linear_programmes_prints_nothing_by_itself():
    """It would stand in the JSON of every verb that plans."""
    done = subprocess.run(
        [sys.executable, "-c", "import highspy; highspy.Highs()"], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


def test_the_installed_wheel_runs_the_demo_from_an_empty_folder(environment: Path, tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    variables = {**plain_environment(), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def printed(*words: str) -> str:
        done = subprocess.run(
            [environment / "bin" / words[0], *words[1:]],
            cwd=empty, env=variables, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert str(ROOT) not in done.stdout + done.stderr
        return done.stdout

    where = printed(
        "python", "-c", "import hetpipe, partition, cost_model as c; print(hetpipe, partition, c)"
    )
    assert where.count(str(environment)) == 3
    assert 'name = "four-unequal"' in printed("hetpipe", "clusters", "four-unequal")
    demo = [environment / "bin" / "hetpipe", "demo", "--steps", "2"]
    shown = lines_in_terminal(demo, empty, variables)
    assert [line for line in shown if len(line) > COLUMNS or "…" in line] == []
    text = "\n".join(shown)
    assert "pictures: hetpipe-demo/pictures" in text and str(ROOT) not in text
    pictures = {path.name for path in (empty / "hetpipe-demo" / "pictures").iterdir()}
    assert {"predicted-and-measured.png", "speed.svg"} <= pictures
