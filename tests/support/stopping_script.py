"""What the tests of signals start, by itself or under torchrun: it trains until it is stopped.

Its arguments: the folder of the run, and how many seconds a callback takes after step 3.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetpipe.training.trainer import Callback
from trainers import trainer


class Telling(Callback):
    """Prints the number of each step."""

    def on_step_end(self, metrics: Mapping[str, Any]) -> None:
        print(metrics["step"], flush=True)
        if metrics["step"] == 3:
            time.sleep(float(sys.argv[2]))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    # each rank writes a cluster file of its own: none reads one that another has only begun
    own = place / f"rank{os.environ.get('RANK', '')}"
    trainer(own, folder=place / "run", save=True, callbacks=[Telling()]).fit(10**6)
