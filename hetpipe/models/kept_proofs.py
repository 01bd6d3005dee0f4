"""Splits that were found exact, kept, so that an architecture is proven once and not at each run."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from cost_model.errors import CheckFailedError, InputError
from hetpipe.models.huggingface import ModelSpec
from hetpipe.models.packed_inputs import check_takes_positions
from hetpipe.models.split_check import check_split
from hetpipe.runs.cache import proofs_folder

PROVEN_BY = ("torch", "transformers")
"""What else decides whether a split is exact: other versions of these are other models."""


def require_split(spec: ModelSpec) -> None:
    """Run `check_split` of a registered model, or know that it passed, and go on only if it does.

    What is known is a file named after the tiny copy that was split, the versions of `PROVEN_BY` and the code
    that splits. A failure is not kept.

    Raises: CheckFailedError if the split model does not compute what the whole one does; names what differs.
    InputError where that is of rows in which samples are packed.
    """
    path = proofs_folder() / f"{_key(spec)}.json" if spec.proof else None
    if path is not None and path.exists():
        return
    if spec.inputs.packed:
        check_takes_positions(spec)
    with _said_once():
        report = check_split(spec)
    if not report.passed and spec.inputs.packed:
        raise InputError(f"{report.model} cannot take packed samples: {report.reason}; leave out --pack")
    if not report.passed:
        raise CheckFailedError(f"{report.model}: {report.reason}")
    if path is not None:
        _keep(path, spec)


@contextmanager
def _said_once() -> Iterator[None]:
    """Let transformers say each of its warnings once: the check builds a model some twenty times."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        known = text in said
        said.add(text)
        return not known

    handlers = list(logging.getLogger("transformers").handlers)
    for handler in handlers:
        handler.addFilter(is_new)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_new)


def _key(spec: ModelSpec) -> str:
    """Return the hash of what decides the proof."""
    code = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    text = json.dumps([spec.proof, {name: version(name) for name in PROVEN_BY}]).encode()
    return hashlib.sha256(b"".join([text, *code])).hexdigest()


def _keep(path: Path, spec: ModelSpec) -> None:
    """Write the file of a proof, whole or not at all; where it cannot be written it is proven again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"model": spec.name, "copy": json.loads(spec.proof)}, file, indent=1)
        Path(name).replace(path)
