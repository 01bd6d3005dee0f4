"""Mutate valid files, and read them: main.py [mutations of each reader].

Run with tests/support on PYTHONPATH.
"""

import sys
import tempfile
import time
from pathlib import Path

from fuzzed_readers import readers

SEED = 1


def main() -> None:
    """Print, for each reader, how many mutations gave a value and how many an error of one line."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    with tempfile.TemporaryDirectory(prefix="hetpipe-fuzz-") as name:
        for reader_name, reader in readers(Path(name)).items():
            begin_s = time.monotonic()
            values, errors = reader.survives(SEED, count)
            took_s = time.monotonic() - begin_s
            print(f"| {reader_name} | {values:,} | {errors:,} | {took_s:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
