"""Cluster files that come with hetpipe, by name: an emulated one, and those of published papers."""

from pathlib import Path

from cost_model.errors import InputError
from cost_model.strict_files import did_you_mean

FOLDER = Path(__file__).parent / "clusters"


def known_clusters() -> dict[str, Path]:
    """Return the cluster files by name, in the order of their names."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def cluster_path(given: Path | str) -> Path:
    """Return a cluster file that was given by its path, or by name; a file of that name comes first.

    Raises: InputError for a word that is neither.
    """
    path = Path(given)
    if path.exists() or path.is_symlink() or path.suffix or str(given) != path.name or not path.name:
        return path
    known = known_clusters()
    if path.name not in known:
        raise InputError(
            f"{given}: no such file, and no cluster of that name; {did_you_mean(path.name, known)}"
        )
    return known[path.name]


def source_of(path: Path) -> str:
    """Return what the first lines of a cluster file say of it, in one line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = [line[1:].strip() for line in lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")]]
    return " ".join(head)
