from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from short_searches import short_searches


@pytest.fixture(autouse=True, scope="module")
def _searched_shortly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Search shortly: what is asked here is what is done with plans; of partition, how good they are."""
    whole = request.node.get_closest_marker("whole_search") is not None
    with nullcontext() if whole else short_searches():
        yield
