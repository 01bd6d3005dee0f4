"""Tables in a narrow terminal: titles go over several lines, words and figures stay whole."""

import pytest
from rich.console import Console
from rich.table import Table

from hetpipe.reporting.narrow_tables import narrow
from hetpipe.reporting.tables import new_table


def stages() -> Table:
    table = new_table("stage", "device", "kind", "layers")
    for title in ("samples", "in flight", "busy", "memory", "of"):
        table.add_column(title, justify="right", no_wrap=title != "samples")
    figures = ("11", "1", "100%", "5.42 MiB", "7.94 GiB")
    table.add_row("0.0", "host/0", "emulated x 0.6", "embeddings, block0-3, head", *figures)
    return table


def strategies(reason: str) -> Table:
    table = new_table()
    table.add_column("strategy", no_wrap=True)
    for title in ("predicted step", "samples/s", "speed-up of ours", "speed-up over single"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("fits")
    table.add_row("memory-proportional", "1.4 s", "11.43", "5.38", "0.26", "yes")
    table.add_row("ddp", "", "", "", "", reason)
    return table


@pytest.mark.parametrize("reason", ["yes", "no: the model does not fit on host/1: 12.4 MiB are missing"])
def test_a_table_too_wide_breaks_no_word_and_no_figure(reason):
    for table in (stages(), strategies(reason)):
        lines = narrowed(table, 80)
        text = "\n".join(lines)
        assert max(map(len, lines)) <= 80
        cells = {cell for column in table.columns for cell in map(str, column.cells)}
        whole = {cell for cell in cells if any(letter.isdigit() for letter in cell) and len(cell) < 9}
        words = {word for cell in cells - whole for word in cell.split()}
        titles = {word for column in table.columns for word in str(column.header).split()}
        for part in whole | words | titles:
            assert part in text, part


def test_a_table_that_fits_stays_as_it_is():
    assert narrowed(stages(), 160) == printed(stages(), 160)
    assert len(narrowed(stages(), 160)) == 5 < len(narrowed(stages(), 80))


def narrowed(table: Table, width: int) -> list[str]:
    narrow(table, Console(width=width))
    return printed(table, width)


def printed(table: Table, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def test_what_is_left_keeps_cells_in_one_line():
    table = new_table("stage", "device, emulated", "layers")
    table.add_column("memory of a device", justify="right")
    table.add_row("0", "small/0 x 0.25", "embeddings, block0-12", "3.51")
    assert "small/0 x 0.25" in "\n".join(narrowed(table, 50))
    table.columns[1].header = "device"
    assert max(map(len, narrowed(table, 50))) <= 50
