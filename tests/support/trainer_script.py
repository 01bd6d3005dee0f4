"""What torchrun starts on every rank: a script with a Trainer. Its argument is the folder of the run."""

import os
import sys
from pathlib import Path

from trainers import module, trainer, two_pipelines

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    # each rank writes a cluster file of its own: none reads one that another has only begun
    trainer(folder / f"rank{os.environ['RANK']}", two_pipelines(), module(), folder=folder / "run").fit(3)
    loaded = {"transformers", "numba", "peft"} & sys.modules.keys()  # seconds, which this model needs not
    print("rank 0 comes back with", *loaded)
