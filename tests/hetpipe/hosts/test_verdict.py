"""What one host says of an error, as others hear it."""

import pytest

from cost_model.errors import DivergedError, InputError
from hetpipe.hosts.verdict import error_of, placed, verdict_of
from hetpipe.runtime.processes import WorkerLostError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InputError("run: the disk is full"), "on small: run: the disk is full"),
        (DivergedError("not finite"), "not finite"),
        (WorkerLostError("rank 1 (small/0) is lost"), "rank 1 (small/0) is lost"),
    ],
)
def test_what_may_be_so_on_one_host_alone_is_told_with_its_name(error, text):
    heard = error_of(placed(verdict_of(error), "small"))
    assert type(heard) is type(error) and str(heard) == text
