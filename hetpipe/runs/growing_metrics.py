"""The metrics of a run that goes on, of which each line is read once."""

from hetpipe.runs.run_folder import MetricsRow, RunFolder, metrics_row


class GrowingMetrics:
    """The lines of metrics.jsonl so far; owns how far they have been read.

    A run that goes on from a checkpoint writes the file anew: then all are read again.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._rows: list[MetricsRow] = []
        self._offset, self._last_line = 0, b""

    def read(self) -> list[MetricsRow]:
        """Return the objects of all whole lines.

        Raises: InputError if one of them is no step's.
        """
        try:
            with open(self._folder.metrics, "rb") as file:
                file.seek(self._offset - len(self._last_line))
                if file.read(len(self._last_line)) != self._last_line:
                    self._rows, self._offset, self._last_line = [], 0, b""
                    file.seek(0)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        for line in (whole + end).splitlines(keepends=True):
            where = f"{self._folder.metrics}: line {len(self._rows) + 1}"
            self._rows.append(metrics_row(line.decode("utf-8", "replace"), where))
            self._offset, self._last_line = self._offset + len(line), line
        return self._rows
