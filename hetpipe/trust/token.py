"""The token of a run on several hosts: a secret that each of its processes proves to hold."""

import hashlib
import hmac
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path

from cost_model.errors import InputError
from cost_model.strict_files import read_text

TOKEN_VARIABLE = "HETPIPE_TOKEN"  # its name, no secret
LEAST_LENGTH = 16
MOST_LENGTH = 4096
MAKE_TOKEN = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex())' > token)"
"""A line that makes one, for messages."""


def run_token(file: Path | None) -> bytes:
    """Return the token in a file, else that of HETPIPE_TOKEN; the same one is needed on all hosts.

    file: "-" for a line of standard input.

    Raises: InputError if there is none, others may read the file, or it is too short.
    """
    if file is None:
        text, source = os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
        if not text.strip():
            raise InputError(
                "several hosts need a token that each proves to hold: give --token-file or set "
                f"{TOKEN_VARIABLE}; {MAKE_TOKEN} makes one, to be copied to each host"
            )
    elif str(file) == "-":
        text, source = sys.stdin.readline(MOST_LENGTH + 2), "standard input"
    else:
        text, source = read_text(file, MOST_LENGTH, pipe=True), str(file)  # as of <(...)
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise InputError(f"{file}: others than its owner may read it; chmod 600 {file}")
    token = text.strip()
    if not LEAST_LENGTH <= len(token) <= MOST_LENGTH or any(sign.isspace() for sign in token):
        raise InputError(
            f"the token of {source} has {len(token)} characters; it is to be {LEAST_LENGTH} at least, "
            f"without a space: {MAKE_TOKEN}"
        )
    return token.encode()


def token_for(*purpose: str) -> bytes:
    """Return a token that processes of one user agree on without saying it, for one purpose alone.

    Made of HETPIPE_TOKEN where that is set, else of a secret that is kept for the user in hetpipe's cache.

    Raises: InputError as `run_token`, or if no secret can be kept.
    """
    secret = run_token(None) if os.environ.get(TOKEN_VARIABLE, "").strip() else run_token(_kept_secret())
    return hmac.new(secret, "\0".join(purpose).encode(), hashlib.sha256).digest()


def _kept_secret() -> Path:
    """Return the file of the user's secret; made, whole or not at all, where there is none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetpipe"
    kept, made = folder / "secret", folder / f".secret-{secrets.token_hex(8)}"
    if not kept.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "w") as file:
                    file.write(secrets.token_hex() + "\n")
                with suppress(FileExistsError):  # another process was faster: its secret counts
                    os.link(made, kept)
            finally:
                made.unlink()
        except OSError as error:
            raise InputError(
                f"{kept}: cannot be made ({error.strerror}), and processes under torchrun need a secret; set "
                f"{TOKEN_VARIABLE}"
            ) from None
    return kept
