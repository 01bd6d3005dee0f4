"""The command line, called in a folder with small files."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cost_model.profile import profile_text
from hetpipe import cli
from partition.plan_file import plan_text
from small_case import CLUSTER_TOML as CLUSTER
from small_case import small_plan, small_profile


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Calls the command line in a folder with a small cluster.toml, profile.json and plan.json."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.write("cluster.toml", CLUSTER)
        self.write("other.toml", CLUSTER.replace('"fast"', '"fats"'))
        self.write("profile.json", profile_text(small_profile()))
        self.write("plan.json", plan_text(small_plan()))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def __call__(self, line: str) -> Result:
        self.capsys.readouterr()
        code = cli.main(shlex.split(line))
        return Result(code, *self.capsys.readouterr())
