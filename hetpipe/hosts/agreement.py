"""What has to be alike on all hosts before the first step, compared fact by fact."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model.cluster import Cluster, Node
from cost_model.errors import InputError

PIECE_BYTES = 2**22
TOLD_ONLY = ("python", "CUDA", "ROCm", "driver")
"""What may differ between hosts that compute the same; it is told."""
OF_LEADER = (
    "--steps", "--total-steps", "--learning-rate", "--warmup-steps", "--decay", "--weight-decay", "--betas",
    "--epsilon", "--rho", "--clip-norm", "--eval-every", "--patience", "--seed", "--every", "--keep",
)  # fmt: skip
"""Options that the leader's line decides; where another host's says otherwise, it is told."""
_COMPILED = "__pycache__"
_OF_GPUS = ("CUDA", "ROCm", "NCCL", "RCCL", "driver")
_REMEDIES = {
    "model": "copy the same folder to all hosts",
    "adapter": "copy the same folder to all hosts",
    "data": "copy the same texts to all hosts, and give them in the same order",
    "eval_data": "copy the same texts to all hosts, and give them in the same order",
    "cluster.toml": "copy the same file to all hosts",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a launcher says of its host: its node, its name, and what is to be alike, by what it is called."""

    node: str
    host: str
    alike: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"node": self.node, "host": self.host, "alike": dict(self.alike)}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> "Facts":
        """Return the facts of a message, each a text."""
        alike = {str(key): str(value) for key, value in dict(data["alike"]).items()}
        return cls(str(data["node"]), str(data["host"]), alike)


def facts_of(
    node: Node, cluster: Cluster, given: Mapping[str, Sequence[Path]], options: Mapping[str, object]
) -> Facts:
    """Return the facts of this host.

    given: files and folders that are read here, by what they are called. options: of the command line, by
    name, those that have to be the same; None for one that is not given.
    """
    alike = {
        "hetpipe": importlib.metadata.version("hetpipe"),
        "torch": importlib.metadata.version("torch").partition("+")[0],
        "python": platform.python_version(),
        "cluster.toml": cluster.sha256[:12],
        **{name: str(value) for name, value in options.items() if value is not None},
        **{name: contents_sha256(paths)[:12] for name, paths in given.items() if paths},
    }
    if any(device.is_gpu for device in node.devices):
        alike |= gpu_versions()
    return Facts(node.name, platform.node(), alike)


def options_of_leader(*groups: object) -> dict[str, object]:
    """Return, by name, those of the options of some groups that `OF_LEADER` has."""
    fields = {name: name.removeprefix("--").replace("-", "_") for name in OF_LEADER}
    return {
        name: getattr(group, field)
        for name, field in fields.items()
        for group in groups
        if hasattr(group, field)
    }


def gpu_versions() -> dict[str, str]:
    """Return the versions of what drives the GPUs of this host."""
    import torch

    is_rocm = torch.version.hip is not None
    found = {"ROCm" if is_rocm else "CUDA": str(torch.version.hip or torch.version.cuda)}
    if torch.distributed.is_nccl_available():
        version_of_sums = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["RCCL" if is_rocm else "NCCL"] = ".".join(map(str, version_of_sums))
    version = Path("/proc/driver/nvidia/version")
    if version.exists():
        words = version.read_text(errors="replace").split()
        found["driver"] = next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    return found


def contents_sha256(paths: Sequence[Path]) -> str:
    """Return the hash of files in their order, and of the files in folders by their names there.

    Of folders hidden files and those in hidden folders, or of compiled Python, are left out: what fetches
    models keeps times there (`.cache`, `.git`), so that they differ between folders that are alike.

    Raises: InputError if one cannot be read.
    """
    whole = hashlib.sha256()
    for path in paths:
        inside = path.rglob("*") if path.is_dir() else [path]
        for file in sorted(found for found in inside if found == path or _is_read(found, path)):
            name = file.relative_to(path).as_posix() if file != path else ""
            whole.update(f"{name}\0{_file_sha256(file)}\0".encode())
    return whole.hexdigest()


def _is_read(file: Path, folder: Path) -> bool:
    """Return whether a path in a folder is a file that something is read from."""
    names = file.relative_to(folder).parts
    return not any(name.startswith(".") or name == _COMPILED for name in names) and file.is_file()


def _file_sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            found = hashlib.sha256()
            while piece := file.read(PIECE_BYTES):
                found.update(piece)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return found.hexdigest()


def compare(hosts: Sequence[Facts]) -> list[str]:
    """Compare the facts of all hosts with those of the first; return what differs and may.

    Raises: InputError naming, in one line, all that differs and may not.
    """
    first, refused, told = hosts[0], [], []
    for other in hosts[1:]:
        for name in sorted(first.alike.keys() | other.alike.keys()):
            mine, theirs = first.alike.get(name), other.alike.get(name)
            if mine == theirs or (None in (mine, theirs) and name in _OF_GPUS):
                continue
            words = (
                f"{name} is {theirs or 'not given'} on {_named(other)} and {mine or 'not given'} on "
                f"{_named(first)}"
            )
            if name in TOLD_ONLY:
                told.append(words)
            elif name in OF_LEADER:
                told.append(f"{words}, whose line counts")
            else:
                refused.append((name, words))
    if refused:
        remedies = dict.fromkeys(
            "give the same line on all hosts"
            if name.startswith("--")
            else _REMEDIES.get(name, "install the same versions on all hosts")
            for name, _ in refused
        )
        raise InputError(f"{', '.join(words for _, words in refused)}; {'; '.join(remedies)}")
    return told


def _named(facts: Facts) -> str:
    return f"{facts.node} ({facts.host})" if facts.host != facts.node else facts.node
