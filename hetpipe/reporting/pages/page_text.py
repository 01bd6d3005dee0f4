"""The page of a run as one text: style, script and data inside, nothing else is loaded."""

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from hetpipe.reporting import colours
from hetpipe.reporting.pages.page_data import page_data
from hetpipe.runs.run_folder import RunFolder

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<main id="page"><noscript>This page draws a run with a script, which is off.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>
{script}
</script>
</body>
</html>
"""
NO_REPORT = (
    "no report.json: the run goes on, ended before its time, or has its results on the host that leads it"
)
_ALONE = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src {}"
)
_COLOURS = {
    "forward": colours.FORWARD,
    "backward": colours.BACKWARD,
    "optimizer": colours.OPTIMIZER,
    "sync": colours.SYNC,
    "idle": colours.IDLE,
    "ink": colours.INK,
    "frozen": colours.FROZEN,
    "trained": colours.BLUE,
    "state": colours.ORANGE,
    "activation": colours.SKY,
    "workspace": colours.GREEN,
    "driver": colours.PURPLE,
    "alarm": colours.VERMILION,
}


def page_text(data: Mapping[str, Any], *, live: bool = False) -> str:
    """Return a page of `page_data`; live: one that asks its server each second for what is new."""
    variables = "".join(f"--{name}: {colour}; " for name, colour in _COLOURS.items())
    text = json.dumps({**data, "live": live}, separators=(",", ":"), allow_nan=False)
    return _PAGE.format(
        policy=_ALONE.format("'self'" if live else "'none'"),
        title=html.escape(f"{data['name']}: {data['title']}"),
        style=f":root {{ {variables}}}\n{_asset('page.css')}",
        data=text.replace("<", "\\u003c"),  # no end of the script within a name
        script=_asset("page.js"),
    )


def write_page(run: RunFolder, path: Path | None = None) -> Path:
    """Write the page of a run, to report.html of its folder if no path is given; return the path.

    Raises: InputError if it is no run folder, one of its files is damaged, or the page cannot be written.
    """
    path, data = path or run.page, page_data(run)
    state = NO_REPORT if data["report"] is None else ""
    RunFolder(path.parent).write(path, page_text({**data, "state": state}))
    return path


def _asset(name: str) -> str:
    try:
        return (files(__package__) / name).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{name}: is missing in this installation ({error.strerror}); install again"
        ) from None
