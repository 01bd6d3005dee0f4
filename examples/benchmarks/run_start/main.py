"""How long a run takes until its steps are over, with the code of two checkouts in turn. See README.md."""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[3]
WORDS = ["run", "--cluster", "four-unequal", "--steps", "3", "--no-save", "--quiet", "--model"]


def seconds(checkout: Path, model: str, folder: Path) -> float:
    """Return the seconds of a whole `hetpipe run` of the code of a checkout, by the clock on the wall."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(folder / "cache")}
    begun_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "hetpipe", *WORDS, model], cwd=folder, env=environment, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--model", default="bert-tiny")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    checkouts = (options.before.resolve(), HERE)
    with tempfile.TemporaryDirectory() as name:
        for checkout in checkouts:  # measures the model, and compiles
            seconds(checkout, options.model, Path(name))
        ratios = []
        print("| before | now | ratio |\n|---|---|---|")
        for _ in range(options.pairs):
            before_s, now_s = (seconds(checkout, options.model, Path(name)) for checkout in checkouts)
            ratios.append(now_s / before_s)
            print(f"| {before_s:.1f} s | {now_s:.1f} s | {ratios[-1]:.2f} |", flush=True)
    print(f"\nmedian of the ratios: {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
