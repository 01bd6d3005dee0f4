"""Keys that are twice in an object of a data file: the parser would take the last, without a word."""

import json
from pathlib import Path

import pytest

from cost_model.errors import InputError
from hetpipe.data.json_lines import json_lines
from hetpipe.data.questions import _in_squad


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a", "text": "b"}',
        '{"prompt": "a", "text": "b", "text": "c"}',
        '{"messages": [{"role": "user", "text": "a", "text": "b"}]}',
    ],
)
def test_a_key_with_two_values_is_refused_with_its_line(tmp_path: Path, line: str):
    (path := tmp_path / "data.jsonl").write_text(f'{{"text": "a"}}\n\n{line}\n')
    with pytest.raises(InputError) as error:
        list(json_lines(path, "text"))
    assert str(error.value) == f"data file {path}, line 3: key 'text' is there twice; leave one of them out"


def test_a_key_that_says_the_same_twice_is_taken(tmp_path: Path):
    (path := tmp_path / "data.jsonl").write_text('{"text": "a", "text": "a"}\n')
    assert [data for _, data in json_lines(path, "text")] == [{"text": "a"}]


def test_a_key_with_two_values_in_squads_file_is_refused(tmp_path: Path):
    text = json.dumps({"data": [{"paragraphs": [{"context": "a", "qas": []}]}]})
    (path := tmp_path / "squad.json").write_text(
        text.replace('"context": "a"', '"context": "a", "context": "b"')
    )
    with pytest.raises(InputError, match=r"squad.json: key 'context' is there twice"):
        list(_in_squad(path))
