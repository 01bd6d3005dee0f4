"""Tables in terminals that are too narrow for them: no word is broken, and one column takes what is left."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table


def narrow(table: Table, console: Console) -> None:
    """Give a table that is wider than the console the least of space and lines to its titles.

    All columns get the width of what may not be broken, but for the one with the most text. What is left of
    the console keeps cells in one line, of as many columns as it can; the rest is that one's.
    """
    wide = console.options.update(width=10_000)
    if console.measure(table, options=wide).maximum <= console.width:
        return
    table.padding, table.show_edge = (0, 1, 0, 0), False
    most = max(table.columns, key=_natural)
    widths = [_least(column) for column in table.columns]
    _set_widths(table, widths)
    left = console.width - console.measure(table, options=wide).maximum
    wanted = [
        max(0, _widest_cell(column) - width) for column, width in zip(table.columns, widths, strict=True)
    ]
    for place in sorted(range(len(widths)), key=wanted.__getitem__):
        if table.columns[place] is not most and wanted[place] <= left:
            left -= wanted[place]
            widths[place] += wanted[place]
    _set_widths(table, widths)
    most.width = None


def _set_widths(table: Table, widths: Sequence[int]) -> None:
    for column, width in zip(table.columns, widths, strict=True):
        column.width, column.no_wrap = width, False


def _widest_cell(column: Column) -> int:
    return max((len(str(cell)) for cell in column.cells), default=0)


def _natural(column: Column) -> int:
    return max(len(str(text)) for text in (column.header, *column.cells))


def _least(column: Column) -> int:
    """Return the width at which only the title goes over several lines, and text that may."""
    cells = [str(cell) for cell in column.cells]
    parts = cells if column.no_wrap else [word for cell in cells for word in cell.split()]
    return max((len(part) for part in (*str(column.header).split(), *parts)), default=1)
