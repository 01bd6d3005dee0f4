"""JSON lines as documents: texts, or chats in a form of their own; equal lines give equal documents."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cost_model.errors import InputError

SUFFIX = ".jsonl"
ROLES = ("system", "user", "assistant")
ANSWERS = "assistant"
CONTINUES = "causal-lm"
"""The task of a model that continues a text."""
_SHARED = {"human": "user", "gpt": "assistant", "system": "system"}
_FORMS = '"messages", "conversations", "prompt" and "completion", or "text"'


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says; role: of `ROLES`."""

    role: str
    content: str


Chat = tuple[Turn, ...]


def read_json_lines(path: Path, content: str) -> list[str]:
    """Return a document of each line: its text, or its chat as JSON of one form.

    Raises: InputError naming the line that is neither, or of another kind than the first.
    """
    found: list[str] = []
    chats: bool | None = None
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"data file {path}, line {number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{place}: not JSON ({error}); give an object a line, or call texts .txt"
            ) from None
        if not isinstance(data, dict):
            raise InputError(f"{place}: a {type(data).__name__}; give an object with {_FORMS}")
        is_chat = _is_chat(data)
        if chats is None:
            chats = is_chat
        elif chats != is_chat:
            kinds = ("a chat, and the first line a text", "a text, and the first line a chat")
            raise InputError(f"{place}: {kinds[chats]}; give files of one kind of line")
        found.append(_document(_chat(data, place)) if is_chat else _text(data["text"], place))
    return found


def holds_chats(paths: Sequence[Path]) -> bool:
    """Return whether the files, which `read_json_lines` has taken, hold chats.

    Raises: InputError if some do and others do not.
    """
    kinds = {path: _begins_with_chat(path) for path in paths}
    if len(set(kinds.values())) > 1:
        chats = next(path for path, is_chat in kinds.items() if is_chat)
        texts = next(path for path, is_chat in kinds.items() if not is_chat)
        raise InputError(f"{chats} holds chats and {texts} text; give one kind in a run")
    return any(kinds.values())


def check_kind(paths: Sequence[Path], model: str, task: str) -> bool:
    """Return whether the files hold chats, as `holds_chats`.

    Raises: InputError if they do, and the model continues no text.
    """
    chats = holds_chats(paths)
    if chats and task != CONTINUES:
        raise InputError(
            f"{paths[0]} holds chats, and {model} learns {task}; give a {CONTINUES} model or text"
        )
    return chats


def chat_of(document: str) -> Chat:
    """Return the chat that a document of `read_json_lines` holds."""
    return tuple(Turn(**turn) for turn in json.loads(document))


def _document(chat: Chat) -> str:
    return json.dumps([asdict(turn) for turn in chat], ensure_ascii=False)


def _begins_with_chat(path: Path) -> bool:
    if path.suffix.lower() != SUFFIX:
        return False
    with path.open(encoding="utf-8-sig") as file:
        first = next((line for line in file if line.strip()), "{}")
    return _is_chat(json.loads(first))


def _is_chat(data: Mapping[str, Any]) -> bool:
    return "text" not in data or any(key in data for key in ("messages", "conversations", "prompt"))


def _text(value: object, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f'{place}: "text" is {_shown(value)}; give a text')
    return value


def _chat(data: Mapping[str, Any], place: str) -> Chat:
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
            Turn(role, _text_of(data, key, place))
            for role, key in (("user", "prompt"), (ANSWERS, "completion"))
        )
    else:
        raise InputError(f"{place}: has {_shown(sorted(data))}; give an object with {_FORMS}")
    if all(turn.role != ANSWERS for turn in turns):
        raise InputError(f"{place}: nothing in it is said by the {ANSWERS}, so there is nothing to learn")
    return turns


def _turns(value: object, role: str, content: str, roles: Mapping[str, str], place: str) -> Chat:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise InputError(f'{place}: {_shown(value)} is no list of turns; give [{{"{role}": ..., ...}}]')
    for turn in value:
        if turn.get(role) not in roles:
            raise InputError(f'{place}: "{role}" is {_shown(turn.get(role))}; known are {", ".join(roles)}')
        if more := sorted(key for key in turn if key not in (role, content) and turn[key] is not None):
            raise InputError(
                f'{place}: a turn has "{more[0]}", which is not trained on; leave it out of the file'
            )
    return tuple(Turn(roles[turn[role]], _text_of(turn, content, place)) for turn in value)


def _text_of(data: Mapping[str, Any], key: str, place: str) -> str:
    if not isinstance(data.get(key), str):
        raise InputError(f'{place}: "{key}" is {_shown(data.get(key))}; give a text')
    return str(data[key])


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
