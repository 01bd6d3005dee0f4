"""The labels that a classifier tells apart, as its configuration names them."""

from collections.abc import Mapping
from typing import Any

from cost_model.errors import InputError

_PROBLEM = "problem_type"
_SINGLE = "single_label_classification"


def labels_of(config: Mapping[str, Any], where: object) -> tuple[str, ...]:
    """Return the names of the labels by their numbers; transformers' own where a configuration has none.

    where: the file, for errors.

    >>> labels_of({"id2label": {"0": "no", "1": "yes"}}, "config.json")
    ('no', 'yes')
    >>> labels_of({}, "config.json")
    ('LABEL_0', 'LABEL_1')

    Raises: InputError if there are fewer than two, or a sample may have several, or numbers as labels.
    """
    problem = config.get(_PROBLEM)
    if problem not in (None, _SINGLE):
        raise InputError(
            f"{where}: {_PROBLEM} is {problem!r}, and one label a sample is learned here; train it from "
            "Python: hetpipe.Trainer"
        )
    names = config.get("id2label")
    if names is None:
        count = config.get("num_labels", 2)
        names = {index: f"LABEL_{index}" for index in range(count if isinstance(count, int) else 0)}
    try:
        by_number = {int(key): str(name) for key, name in names.items()}
    except (AttributeError, TypeError, ValueError):
        raise InputError(f'{where}: id2label is no mapping of numbers to names, as {{"0": "no"}}') from None
    if len(by_number) < 2 or by_number.keys() != set(range(len(by_number))):
        raise InputError(
            f"{where}: id2label has the numbers {sorted(by_number)}; give two or more, from 0 on without gaps"
        )
    found = tuple(by_number[index] for index in range(len(by_number)))
    if len(set(found)) < len(found):
        raise InputError(f"{where}: id2label gives two numbers the same name; give each its own")
    return found
