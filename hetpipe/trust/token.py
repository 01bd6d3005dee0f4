"""The token of a run on several hosts: a secret that each of its processes proves to hold."""

import os
import stat
import sys
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
        text, source = read_text(file, MOST_LENGTH), str(file)
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise InputError(f"{file}: others than its owner may read it; chmod 600 {file}")
    token = text.strip()
    if not LEAST_LENGTH <= len(token) <= MOST_LENGTH or any(sign.isspace() for sign in token):
        raise InputError(
            f"the token of {source} has {len(token)} characters; it is to be {LEAST_LENGTH} at least, "
            f"without a space: {MAKE_TOKEN}"
        )
    return token.encode()
