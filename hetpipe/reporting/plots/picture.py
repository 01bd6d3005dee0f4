"""A figure that says in words what it shows, for those who cannot see it."""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

MOST_ROWS = 12
CONTINUES = " \n"
"""Between lines of a title that are one."""


class Picture(Figure):
    """A figure that a notebook stores with an alternative text, which screen readers and nbconvert take."""

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give the text beside the PNG, which IPython draws by itself."""
        return {}, {"image/png": {"alt": alternative_text(self)}}


def alternative_text(figure: Figure) -> str:
    """Return what a figure says in words: its title, and of each picture on it rows, axes and legend."""
    parts = figure.get_suptitle().replace(CONTINUES, " ").splitlines()
    for ax in figure.axes:
        parts += _said(ax)
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return ". ".join([*parts, *_listed("legend", legends)])


def _said(ax: Axes) -> Iterator[str]:
    if heading := ax.get_title(loc="left") or ax.get_title():
        yield " ".join(heading.split())
    if isinstance(ax.yaxis.get_major_locator(), FixedLocator):
        names = [label.get_text() for label in ax.get_yticklabels()]
        yield from _listed("rows", [" ".join(name.split()) for name in names])
    for axis, label in (("upwards", ax.get_ylabel()), ("to the right", ax.get_xlabel())):
        if label:
            yield f"{axis}: {label}"
    legend = ax.get_legend()
    if legend is not None:
        yield from _listed("legend", [text.get_text() for text in legend.get_texts()])


def _listed(what: str, names: Sequence[str]) -> list[str]:
    """Return a list in words, or nothing of none; the names beyond a dozen are counted."""
    more = [f"{len(names) - MOST_ROWS} more"] if len(names) > MOST_ROWS else []
    return [f"{what}: {', '.join([*names[:MOST_ROWS], *more])}"] if names else []
