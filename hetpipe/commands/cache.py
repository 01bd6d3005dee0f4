"""cache: profiles and links that were measured, splits that were proven, tokens of long texts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cost_model.errors import InputError
from cost_model.units import format_bytes
from hetpipe.commands.options import JsonOption
from hetpipe.commands.output import print_json
from hetpipe.profiling.cached_profiles import CachedProfile, cached_profiles
from hetpipe.reporting.tables import new_table, show
from hetpipe.runs.cache import links_folder, profiles_folder, proofs_folder, texts_folder
from hetpipe.runs.kept_texts import KeptText, kept_hashes, kept_texts

_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def cache_command(
    model: Annotated[str | None, typer.Argument(help="Profiles of this model only.")] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove them, so that they are measured, proven and split anew.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """List the profiles, links, proven splits and tokens of texts that are kept, or remove them."""
    found = cached_profiles(model)
    proofs = sorted(proofs_folder().glob("*.json")) if model is None else []
    links = sorted(links_folder().glob("*.json")) if model is None else []
    texts = kept_texts() if model is None else ()
    skipped = [(text, text.problem) for text in texts if text.problem]
    left: dict[Path, str] = {}
    if model is not None and not found:
        known = sorted({entry.profile.model for entry in cached_profiles() if entry.profile is not None})
        raise InputError(
            f"the cache holds no profile of {model!r}; it holds {', '.join(known) or 'none at all'}"
        )
    if clear:
        hashes = kept_hashes() if model is None else []
        left = _not_removed([*(entry.path for entry in found), *proofs, *links, *hashes])
        found = tuple(entry for entry in found if entry.path not in left)
        proofs, links = ([path for path in paths if path not in left] for paths in (proofs, links))
        texts, skipped = _removed(texts)
    else:
        texts = tuple(text for text in texts if not text.problem)
    if json:
        print_json(
            {
                "folder": str(profiles_folder()),
                "removed": clear,
                "profiles": [entry.to_json() for entry in found],
                "proofs": [str(path) for path in proofs],
                "links": [str(path) for path in links],
                "texts": [text.to_json() for text in texts],
                "skipped": [text.to_json() | {"reason": reason} for text, reason in skipped]
                + [{"path": str(path), "reason": reason} for path, reason in left.items()],
            }
        )
        return
    what = "removed" if clear else "kept"
    total = format_bytes(sum(entry.num_bytes for entry in found))
    several = "profile" if len(found) == 1 else "profiles"
    lines = [f"{what}: {len(found)} {several}, {total} in {profiles_folder()}"]
    if proofs:
        lines.append(f"{what}: {len(proofs)} proof{'s' * (len(proofs) > 1)} of splits in {proofs_folder()}")
    if links:
        several = "measurement" if len(links) == 1 else "measurements"
        lines.append(f"{what}: {len(links)} {several} of links between hosts in {links_folder()}")
    if texts:
        total = format_bytes(sum(text.num_bytes for text in texts))
        lines.append(
            f"{what}: tokens of {len(texts)} text{'s' * (len(texts) > 1)}, {total} in {texts_folder()}"
        )
    for text, reason in skipped:
        lines.append(f"skipped: {_names(text)}, tokens of {format_bytes(text.num_bytes)}: {reason}")
    lines += [f"skipped: {path.name}: {reason}" for path, reason in left.items()]
    show([*([_table(found)] if found else []), *lines, *([_table_of_texts(texts)] if texts else [])])


def _not_removed(paths: Iterable[Path]) -> dict[Path, str]:
    """Remove files; return those that could not be, with the reason."""
    left = {}
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            left[path] = f"it cannot be removed ({error.strerror})"
    return left


def _removed(texts: tuple[KeptText, ...]) -> tuple[tuple[KeptText, ...], list[tuple[KeptText, str]]]:
    """Remove tokens of texts; return those that were, and those that were not, with the reason."""
    reasons = [(text, text.remove()) for text in texts]
    gone = tuple(text for text, reason in reasons if not reason)
    return gone, [(text, reason) for text, reason in reasons if reason]


def _table(found: tuple[CachedProfile, ...]) -> Table:
    table = new_table("model", "kinds")
    for title in ("length", "dtype", "precision", "age"):
        table.add_column(title, justify="right", no_wrap=True)
    for entry in found:
        if entry.profile is None:
            table.add_row(f"cannot be read: {entry.path.name}", "", "", "", "", age_text(entry.age_s))
            continue
        error = entry.standard_error
        table.add_row(
            entry.profile.model,
            ", ".join(entry.profile.kinds),
            str(entry.profile.sequence_length),
            entry.profile.dtype,
            "" if error is None else f"{100 * error:.1f} %",
            age_text(entry.age_s),
        )
    return table


def _table_of_texts(texts: tuple[KeptText, ...]) -> Table:
    table = new_table("text")
    for title in ("tokens", "taken"):
        table.add_column(title, justify="right", no_wrap=True)
    for text in texts:
        table.add_row(_names(text), format_bytes(text.num_bytes), f"{age_text(text.age_s)} ago")
    return table


def _names(text: KeptText) -> str:
    return ", ".join(Path(file).name for file in text.files) or f"unfinished: {text.path.name}"


def age_text(age_s: float) -> str:
    """Return an age in its largest whole unit.

    >>> age_text(7300.0), age_text(0.3)
    ('2 h', '0 s')
    """
    return next((f"{age_s // size:.0f} {unit}" for size, unit in _AGES if age_s >= size), "0 s")
