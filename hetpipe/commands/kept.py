"""What a run keeps: the checkpoint at its end, and what it takes over from the run that it goes on from."""

import shlex
from pathlib import Path

from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, read_settings


def kept_settings(source: Path | None) -> Settings | None:
    """Return the settings of the run of a checkpoint; None where its folder is not there."""
    config = None if source is None else RunFolder(source.parent.parent).config
    return read_settings(config) if config is not None and config.exists() else None


def kept_checkpoint(folder: RunFolder) -> Path | None:
    """Return the newest checkpoint of a run that has ended; None where it wrote none."""
    from hetpipe.training import checkpoint

    return checkpoint.latest(folder.checkpoints)


def kept_sentences(folder: RunFolder, source: Path | None, steps: int) -> list[str]:
    """Say where the model is and what makes a Hugging Face folder of it, or that there is none."""
    if source is None:
        return ["model: not kept (--no-save)"]
    from hetpipe.training import checkpoint

    done = checkpoint.read_manifest(source).step
    return [
        f"model: {source}{'' if done == steps else f' (step {done} of {steps}: --no-save)'}",
        f"next: hetpipe export {shlex.quote(str(folder.path))} -o my-model",
    ]
