"""Tables in terminals that are too narrow for them: no word is broken, and one column takes what is left."""

from rich.console import Console
from rich.table import Column, Table


def narrow(table: Table, console: Console) -> None:
    """Give a table that is wider than the console the least of space and lines to its titles.

    All columns get the width of what may not be broken, but for the one with the most text.
    """
    wide = console.options.update(width=10_000)
    if console.measure(table, options=wide).maximum <= console.width:
        return
    table.padding, table.show_edge = (0, 1, 0, 0), False
    most = max(table.columns, key=_natural)
    for column in table.columns:
        if column is not most:
            column.width = _least(column)
        column.no_wrap = False


def _natural(column: Column) -> int:
    return max(len(str(text)) for text in (column.header, *column.cells))


def _least(column: Column) -> int:
    """Return the width at which only the title goes over several lines, and text that may."""
    cells = [str(cell) for cell in column.cells]
    parts = cells if column.no_wrap else [word for cell in cells for word in cell.split()]
    return max((len(part) for part in (*str(column.header).split(), *parts)), default=1)
