"""Labels of a line as the numbers that a classifier knows them by."""

import re
from collections.abc import Mapping

from cost_model.errors import InputError
from hetpipe.data.json_lines import shown
from hetpipe.data.kind import Learner
from hetpipe.data.table_files import FileLabel
from hetpipe.models.huggingface_folder import CONFIG_FILE
from hetpipe.models.labels import labels_of

_NO_NAME = re.compile(r"LABEL_\d+")


def model_labels(model: Learner) -> tuple[str, ...]:
    """Return the names of the labels that a model tells apart.

    Raises: InputError if its configuration has none that can be learned.
    """
    assert model.folder is not None, model.name  # no model of the table is a classifier
    return labels_of(model.folder.config, model.folder.path / CONFIG_FILE)


def label_numbers(names: tuple[str, ...]) -> Mapping[str, int]:
    """Return the number of each name."""
    return {name: number for number, name in enumerate(names)}


def number_of(label: object, numbers: Mapping[str, int], place: str) -> int:
    """Return the number of a label, which is one, or a name of the configuration.

    A label that has a name in a file is known by it, whatever its number there, unless the configuration
    has no names of its own (LABEL_0, ...).

    Raises: InputError if it is neither.
    """
    if isinstance(label, str) and label in numbers:
        return numbers[label]
    if isinstance(label, FileLabel) and all(map(_NO_NAME.fullmatch, numbers)):
        label = label.number
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(numbers):
        return label
    known = ", ".join(list(numbers)[:8]) + (", ..." if len(numbers) > 8 else "")
    raise InputError(
        f"{place}: {shown(label)} is no label of the model; its config.json has 0 to {len(numbers) - 1} "
        f"({known})"
    )
