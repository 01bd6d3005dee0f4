"""What torchrun starts on every rank: a script with a Trainer. Its argument is the folder of the run."""

import sys
from pathlib import Path

from test_trainer import module, trainer, two_pipelines

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer(folder, two_pipelines(), module()).fit(3)
    print("rank 0 comes back")
