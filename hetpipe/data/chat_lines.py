"""Chats in JSON lines: three forms that others write, read into one."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from hetpipe.data.json_lines import json_lines, shown, text_of

ROLES = ("system", "user", "assistant")
ANSWERS = "assistant"
FORMS = '"messages", "conversations", or "prompt" and "completion"'
_SHARED = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says; role: of `ROLES`."""

    role: str
    content: str


Chat = tuple[Turn, ...]


def chats_in(paths: Iterable[Path]) -> Iterator[Chat]:
    """Yield the chats of files, one a line.

    Raises: InputError naming the line that is none.
    """
    for path in paths:
        for place, data in json_lines(path, FORMS):
            if not is_chat(data):
                raise InputError(f"{place}: a text, and the first line a chat; give one kind of line")
            yield _chat(data, place)


def is_chat(data: Mapping[str, Any]) -> bool:
    """Return whether the object of a line seems to be a chat."""
    return any(key in data for key in ("messages", "conversations", "prompt"))


def document_of(chat: Chat) -> str:
    """Return a chat as JSON of one form."""
    return json.dumps([asdict(turn) for turn in chat], ensure_ascii=False)


def _chat(data: dict[str, Any], place: str) -> Chat:
    """Return the turns of a line.

    "messages" are the form of chat templates; "conversations" that of ShareGPT; a "prompt" with its
    "completion" is a question with its answer.
    """
    if "messages" in data:
        turns = _turns(data["messages"], "role", "content", {role: role for role in ROLES}, place)
    elif "conversations" in data:
        turns = _turns(data["conversations"], "from", "value", _SHARED, place)
    elif "prompt" in data and "completion" in data:
        turns = tuple(
            Turn(role, text_of(data, key, place))
            for role, key in (("user", "prompt"), (ANSWERS, "completion"))
        )
    else:
        raise InputError(f"{place}: has {shown(sorted(data))}; give an object with {FORMS}")
    if all(turn.role != ANSWERS for turn in turns):
        raise InputError(f"{place}: nothing in it is said by the {ANSWERS}, so there is nothing to learn")
    return turns


def _turns(value: object, role: str, content: str, roles: Mapping[str, str], place: str) -> Chat:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise InputError(f'{place}: {shown(value)} is no list of turns; give [{{"{role}": ..., ...}}]')
    for turn in value:
        if not isinstance(turn.get(role), str) or turn[role] not in roles:
            raise InputError(f'{place}: "{role}" is {shown(turn.get(role))}; known are {", ".join(roles)}')
        if more := sorted(key for key in turn if key not in (role, content) and turn[key] is not None):
            raise InputError(
                f'{place}: a turn has "{more[0]}", which is not trained on; leave it out of the file'
            )
    return tuple(Turn(roles[turn[role]], text_of(turn, content, place)) for turn in value)
