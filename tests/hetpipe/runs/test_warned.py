from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetpipe.runs.warned import warn_caller


def test_the_line_of_the_program_is_shown_however_deep_in_hetpipe_the_warning_is():
    ours: Any = ModuleType("hetpipe.training.deep")
    exec("def call(function):\n    function()\n", vars(ours))
    deep = partial(ours.call, partial(ours.call, partial(warn_caller, "look")))
    with pytest.warns(UserWarning, match="look") as told:
        deep()  # here
        ours.call(lambda: warn_caller("look"))  # a callback, which is the program's
    lines = Path(__file__).read_text().splitlines()
    assert [warning.filename for warning in told] == [__file__, __file__]
    assert [lines[warning.lineno - 1].rpartition("# ")[2] for warning in told] == [
        "here", "a callback, which is the program's"
    ]  # fmt: skip
