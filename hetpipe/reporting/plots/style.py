"""Axes and legends that all pictures share."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from textwrap import wrap

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hetpipe.reporting.colours import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from hetpipe.reporting.plots.picture import CONTINUES, Picture

STAGE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW)
MIB, GIB = 2**20, 2**30
ROW, BAR = 1.0, 0.76
TEXT_WIDTH = 0.011
"""Share of the axis that a microbatch number of one digit needs."""
LONGEST_LABEL, LONGEST_TITLE, LONGEST_LEGEND = 44, 112, 105
"""Characters of a line of a row's name, of a title, and of the entries of a legend beside each other."""
TITLE_LINES, TITLE_LINE = 2, 0.17
"""Lines of a title that any picture has room for; inches that it grows by for each more."""
DPI, MOST_PIXELS = 160, 2**15
"""Dots an inch of a PNG, less where one side would have more pixels than this: few programs open it then."""


@contextmanager
def _written() -> Iterator[None]:
    """Leave out matplotlib's warning of a picture too small for its texts, which its reader cannot change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        yield


@_written()
def save(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Write a figure as PNG and SVG beside each other, whatever the suffix of path; return both paths.

    Text in the SVG is text, which can be searched and edited; the same figure gives the same file.
    """
    png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
    dpi = min(DPI, MOST_PIXELS / max(figure.get_size_inches()))
    figure.savefig(png, dpi=dpi, bbox_inches="tight", facecolor="white")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hetpipe"}):
        figure.savefig(svg, bbox_inches="tight", facecolor="white", metadata={"Date": None})
    return png, svg


@_written()
def as_png(figure: Figure, dpi: int = 100) -> bytes:
    """Return a figure as a PNG, with nothing cut off at its edges."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", facecolor="white")
    return buffer.getvalue()


@_written()
def save_pages(figures: Iterable[Figure], path: Path) -> None:
    """Write figures into one PDF, a page each, with text that can be searched and edited."""
    with rc_context({"pdf.fonttype": 42}), PdfPages(path) as pages:
        for figure in figures:
            pages.savefig(figure, bbox_inches="tight", facecolor="white")


def title(ax: Axes, text: str) -> Axes:
    """Write a line above a whole picture, and above what stands there already; return the axes given.

    What is longer than a picture is wide goes on in the next line, after CONTINUES. The picture grows by what
    many lines take, or nothing would be left for what it shows.
    """
    figure = figure_of(ax)
    above = figure.get_suptitle()
    text = CONTINUES.join(wrap(text, LONGEST_TITLE, break_on_hyphens=False, break_long_words=False))
    text = f"{text}\n{above}" if above else text
    figure.suptitle(text, fontsize=10, x=0.01, ha="left")
    grown = _lines_to_grow_by(text) - _lines_to_grow_by(above)
    figure.set_figheight(figure.get_figheight() + TITLE_LINE * grown)
    return ax


def _lines_to_grow_by(text: str) -> int:
    return max(0, text.count("\n") + 1 - TITLE_LINES)


def figure_of(ax: Axes) -> Figure:
    """Return the figure that axes are on."""
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure


def new_axes(width: float = 9.0, height: float = 3.0) -> Axes:
    """Return axes of a new figure that no window knows of (works without a display, leaks nothing)."""
    return Picture(figsize=(width, height), layout="constrained").add_subplot()


def label_rows(ax: Axes, labels: Sequence[str]) -> None:
    """Name the rows of a picture, from the top down; lines too long for it lose their middle."""
    names = ["\n".join(map(shortened, label.split("\n"))) for label in labels]
    ax.set_yticks([row * ROW for row in range(len(names))], names, fontsize=8)
    ax.set_ylim((len(labels) - 0.4) * ROW, -0.6 * ROW)
    ax.tick_params(axis="y", length=0)
    strip(ax)


def shortened(text: str, most: int = LONGEST_LABEL) -> str:
    """Return a text of at most so many characters, without its middle where it has more.

    >>> shortened("encoder.layer.11.attention", 11)
    'encod…ntion'
    """
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[len(text) - end :]}"


def strip(ax: Axes) -> None:
    """Take away the frame at the top and on the right."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def legend_above(
    ax: Axes,
    labelled_colours: Sequence[tuple[str, str]],
    num_columns: int | None = None,
    *,
    more: Sequence[Artist] = (),
) -> None:
    """Put a legend of (colour, label) above a picture; more: entries that are no patches.

    It has fewer columns than are asked for, or than entries, where these would be wider than the picture.
    """
    handles = [*_patches(labelled_colours), *more]
    labels = [shortened(str(handle.get_label())) for handle in handles]
    ax.legend(
        handles=handles,
        labels=labels,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=_num_columns(labels, num_columns or len(labels)),
        frameon=False,
        fontsize=8,
        borderaxespad=0.2,
        handlelength=1.2,
    )


def _num_columns(labels: Sequence[str], most: int) -> int:
    """Return into how many columns entries fit beside each other; they are filled from the top down."""
    for count in range(most, 1, -1):
        rows = -(-len(labels) // count)
        columns = (labels[start : start + rows] for start in range(0, len(labels), rows))
        if sum(6 + max(map(len, column)) for column in columns) <= LONGEST_LEGEND:
            return count
    return 1


def legend_below(figure: Figure, labelled_colours: Sequence[tuple[str, str]]) -> None:
    """Put one legend of (colour, label) below all pictures of a figure."""
    figure.legend(
        handles=_patches(labelled_colours),
        loc="outside lower left",
        ncols=len(labelled_colours),
        frameon=False,
        fontsize=8,
        handlelength=1.2,
    )


def _patches(labelled_colours: Sequence[tuple[str, str]]) -> list[Artist]:
    return [Patch(facecolor=colour, label=label) for colour, label in labelled_colours]


def line_entry(colour: str, label: str) -> Line2D:
    """Return what a legend says of an upright line."""
    return Line2D([], [], color=colour, label=label, linestyle="none", marker="|", markersize=9, mew=1.5)


def dot_entry(colour: str, label: str, *, face: str | None = None) -> Line2D:
    """Return what a legend says of a dot; face: what it is filled with, where not with its colour."""
    filled = face or colour
    return Line2D(
        [], [], color=colour, label=label, linestyle="none", marker="o", markersize=5, markerfacecolor=filled
    )
