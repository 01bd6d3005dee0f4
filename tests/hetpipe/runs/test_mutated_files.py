"""Files that come from elsewhere, mutated: each is read, or refused in one line; 50,000 each in
examples/benchmarks/fuzz."""

import pytest

from fuzzed_readers import readers

COUNT = 150


@pytest.mark.parametrize("name", ["cluster", "profile", "plan", "manifest", "settings", "trace", "adapter"])
def test_a_mutated_file_is_read_or_refused_in_one_line(tmp_path, name):
    reader = readers(tmp_path)[name]
    reader.path.write_text(reader.text_of(reader.valid))
    reader.read()  # what is mutated is valid
    values, errors = reader.survives(seed=1, count=COUNT)
    assert values + errors == COUNT
    assert errors > COUNT // 10
