"""Do two versions of hetpipe give the same answers?

    python examples/benchmarks/same_answers/main.py write before.json [--full FOLDER] [--only 13 104 training]
    python examples/benchmarks/same_answers/main.py compare before.json after.json

`write` plans sixty problems and trains six times, and writes what came out; the CPU seconds of each go into
a file beside it, NAME.seconds.json. See README.md.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from answers import answers_of, digest
from cases import Case, all_cases
from trainings import TRAININGS, Training, losses_of

Digest = dict[str, Any]
Found = dict[str, dict[str, Digest]]
"""By problem and strategy the digest of an answer; a training run has one, "run"."""
PACKAGES = ("torch", "numpy", "numba", "highspy", "PuLP", "transformers")
SHOWN = ("shape", "refused", "losses")
HEADER = (
    "| problem | what differs | step before | after | change | CPU seconds before | after |\n"
    + "|---" * 7
    + "|"
)


def main() -> int:
    options = _options()
    if options.what == "write":
        write(options.path, full=options.full, only=options.only)
        return 0
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (options.before, options.after))
    seconds = [_read_seconds(path) for path in (options.before, options.after)]
    print("\n".join([HEADER, *table(before["answers"], after["answers"], seconds)]))
    names = {**before["answers"], **after["answers"]}
    differing = [name for name in names if before["answers"].get(name) != after["answers"].get(name)]
    if before["versions"] != after["versions"]:
        print(f"\nThe versions differ: {before['versions']} before, {after['versions']} after.")
    print(f"\n{len(differing)} of {len(names)} differ.")
    return 1 if differing else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="what", required=True)
    writing = verbs.add_parser("write")
    writing.add_argument("path", type=Path)
    writing.add_argument("--full", type=Path, help="folder for whole plans and programs, a file each")
    writing.add_argument("--only", nargs="*", default=[], help="these problems, as 13 104 training")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    return parser.parse_args()


def write(path: Path, *, full: Path | None = None, only: Sequence[str] = ()) -> None:
    """Answer all problems and train; writes the answers, and beside them the CPU seconds of each."""
    found: Found = {}
    seconds: dict[str, float] = {}
    for name, work in jobs(full):
        if only and name.split(":")[0] not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            begin = cpu_s()
            found[name] = work(Path(folder))
            seconds[name] = cpu_s() - begin
        print(f"{seconds[name]:6.1f} s  {name}", file=sys.stderr, flush=True)
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    path.write_text(_text({"versions": versions, "answers": found}), encoding="utf-8")
    _seconds_path(path).write_text(_text(seconds), encoding="utf-8")
    print(f"{sum(seconds.values()):6.1f} s  in all", file=sys.stderr)


def cpu_s() -> float:
    """Return the CPU seconds that this process and those that it has waited for have used so far."""
    return sum(os.times()[:4])


def jobs(full: Path | None) -> Iterator[tuple[str, Callable[[Path], dict[str, Digest]]]]:
    """Give the name of each problem and run, and what answers it in a folder of its own."""
    for case in all_cases():
        yield case.name, partial(_planned, case, full)
    for training in TRAININGS:
        yield f"training: {training.name}", partial(_trained, training)


def _planned(case: Case, full: Path | None, folder: Path) -> dict[str, Digest]:
    answers = answers_of(case, folder)
    if full is not None:
        full.mkdir(parents=True, exist_ok=True)
        (full / f"{case.name.split(':')[0]}.json").write_text(_text(answers), encoding="utf-8")
    return {strategy: digest(answer) for strategy, answer in answers.items()}


def _trained(training: Training, folder: Path) -> dict[str, Digest]:
    return {"run": {"losses": losses_of(training, folder)}}


def _text(data: object) -> str:
    return json.dumps(data, indent=1) + "\n"


def _seconds_path(path: Path) -> Path:
    return path.with_suffix(".seconds.json")


def _read_seconds(path: Path) -> dict[str, float]:
    """Return the seconds beside a file of answers; none where nobody kept them."""
    beside = _seconds_path(path)
    return json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}


def table(before: Found, after: Found, seconds: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Give a row for each problem: what differs, and the steps of its plan by `auto`, or the forced one."""
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name, {}), after.get(name, {})
        steps = [_step_s(old), _step_s(new)]
        shown = ["" if step_s is None else f"{step_s:.4g} s" for step_s in steps]
        change = f"{steps[1] / steps[0] - 1:+.2%}" if steps[0] and steps[1] else ""
        spent = [f"{entry[name]:.1f} s" if name in entry else "" for entry in seconds]
        found = "; ".join(differences(old, new)) or "-"
        yield f"| {' | '.join([name, found, *shown, change, *spent])} |"


def differences(old: Mapping[str, Digest], new: Mapping[str, Digest]) -> list[str]:
    """Return what differs, by strategy: the keys whose values do, and figures with both values."""
    found = []
    for strategy in [*old, *(name for name in new if name not in old)]:
        left, right = old.get(strategy), new.get(strategy)
        if left == right:
            continue
        if left is None or right is None:
            found.append(f"{strategy}: only {'after' if left is None else 'before'}")
            continue
        keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
        found.append(f"{strategy}: {', '.join(_difference(key, left, right) for key in keys)}")
    return found


def _difference(key: str, left: Digest, right: Digest) -> str:
    if key in ("step_s", "bound_s") and left.get(key) and right.get(key):
        return f"{key} {float(right[key]) / float(left[key]) - 1:+.1e}"
    if key in SHOWN:
        return f"{key} was {left.get(key)}, is {right.get(key)}"
    return key


def _step_s(answers: Mapping[str, Digest]) -> float | None:
    answer = answers.get("auto", answers.get("forced", {}))
    return float(answer["step_s"]) if "step_s" in answer else None


if __name__ == "__main__":
    sys.exit(main())
