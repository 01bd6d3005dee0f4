"""Which run a folder holds: two folders of one name, on two hosts, may be of two runs."""

import secrets
from pathlib import Path

from cost_model.errors import InputError
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import read_settings
from partition.plan_file import read_plan


def identity_of(folder: RunFolder) -> str:
    """Return what tells the run of a folder from all others, the same on all of its hosts; "": not known.

    Of folders from before runs had an id: model and seed, which a run that goes on never changes.
    """
    try:
        settings = read_settings(folder.config)
        return settings.run_id or f"{read_plan(folder.plan).model} with seed {settings.seed}"
    except InputError:
        return ""


def run_id_for(folder: RunFolder, source: Path | None) -> str:
    """Return the id of a run that trains in a folder: that of the run there if it goes on, else a new one.

    source: the checkpoint that it goes on from, None at the beginning.
    """
    goes_on = source is not None and source.parent.resolve() == folder.checkpoints.resolve()
    return (identity_of(folder) if goes_on else "") or secrets.token_hex(8)
