"""Where hetpipe keeps what it has found out once: profiles, links between hosts, proofs of splits, tokens."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of all of it: $XDG_CACHE_HOME/hetpipe, else ~/.cache/hetpipe."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetpipe"


def profiles_folder() -> Path:
    """Return where profiles are kept."""
    return cache_folder() / "profiles"


def links_folder() -> Path:
    """Return where measured links between hosts are kept, and sums over them."""
    return cache_folder() / "links"


def proofs_folder() -> Path:
    """Return where it is kept that a split was found exact, a file for each."""
    return cache_folder() / "proofs"


def texts_folder() -> Path:
    """Return where tokens of long texts are kept, a folder for each of them, and the hashes of files."""
    return cache_folder() / "texts"
