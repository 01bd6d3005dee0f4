"""Chats as text: by the template of the model's tokenizer, or a plain one, and which part is learned."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cost_model.errors import InputError
from cost_model.strict_files import read_json, write_atomically
from hetpipe.data.chat_lines import ANSWERS, Chat
from hetpipe.data.special_tokens import tokenizer_config_text
from hetpipe.models.huggingface_folder import TOKENIZER_CONFIG_FILE

PLAIN = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Of models that bring none: a line a turn, "user: ..."; after an answer the text ends."""
_MARKS = "generation"
Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template of transformers' kind; special_tokens: what it may name, as "eos_token"."""

    template: str
    special_tokens: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path | None, end: str) -> "ChatTemplate":
        """Return the template of the tokenizer in a model's folder, or `PLAIN` where it brings none.

        end: the token that ends a text.

        Raises: InputError if the tokenizer in the folder cannot be read.
        """
        if folder is not None and _brings_template(folder):
            from transformers import AutoTokenizer

            try:
                tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
                template = tokenizer.get_chat_template()
            except Exception as error:  # whatever code of a tokenizer's class raises
                reason = str(error).partition("\n")[0]
                raise InputError(f"{folder}: its chat template cannot be read ({reason})") from None
            special = {
                name: str(token)
                for name, token in tokenizer.special_tokens_map.items()
                if not isinstance(token, list)
            }
            return cls(template, special)
        return cls(PLAIN, {"eos_token": end})

    @property
    def is_plain(self) -> bool:
        """Return whether the model brought none of its own."""
        return self.template == PLAIN

    def text(self, chat: Chat) -> tuple[str, Spans]:
        """Return the text of a chat, and the characters [start, stop) of it that the assistant says.

        By the template's own marks where it has any; else an answer is what follows the text of the turns
        before it with the prompt for it, to the end of its turn.

        Raises: InputError if the template refuses the chat, or its text of some turns is not the beginning of
        the text of more.
        """
        if _has_marks(self.template):
            return self._marked(chat)
        whole, _ = self._rendered(chat)
        spans: Spans = []
        for index, turn in enumerate(chat):
            if turn.role != ANSWERS:
                continue
            before, _ = self._rendered(chat[:index], prompt=True)
            answered, _ = self._rendered(chat[: index + 1])
            if not (whole.startswith(answered) and answered.startswith(before)):
                raise InputError(
                    "the chat template writes turns in another way when others follow, so that answers "
                    "cannot be told from the rest; mark them in it by {% generation %}"
                )
            spans.append((len(before), len(answered)))
        return whole, spans

    def json_text(self) -> str:
        """Return the file from which `read_template` reads it."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    def _marked(self, chat: Chat) -> tuple[str, Spans]:
        whole, spans = self._rendered(chat, marks=True)
        return whole, [(int(start), int(stop)) for start, stop in spans]

    def _rendered(self, chat: Chat, *, prompt: bool = False, marks: bool = False) -> tuple[str, Any]:
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = [{"role": turn.role, "content": turn.content} for turn in chat]
        try:
            texts, spans = render_jinja_template(
                [turns],
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self.special_tokens,
            )
        except Exception as error:  # whatever a template raises
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"the chat template refuses the turns ({reason}); give such as it takes"
            ) from None
        return str(texts[0]), spans[0] if marks else ()


def read_template(path: Path) -> ChatTemplate:
    """Return the template that `ChatTemplate.json_text` wrote.

    Raises: InputError if there is none.
    """
    data = read_json(path)
    try:
        return ChatTemplate(str(data["template"]), dict(data["special_tokens"]))
    except (TypeError, KeyError, ValueError):
        raise InputError(f"{path}: holds no chat template; train again") from None


def write_for_transformers(template: ChatTemplate, folder: Path) -> None:
    """Write the template beside a tokenizer.json, so that transformers' tokenizer applies it.

    Where answers end with a token of hetpipe's choice, the model's `generate` is told to end there too.
    """
    write_atomically(folder / "chat_template.jinja", template.template)
    write_atomically(folder / TOKENIZER_CONFIG_FILE, tokenizer_config_text(template.special_tokens))
    generation = folder / "generation_config.json"
    if template.is_plain and generation.exists():
        vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
        end = vocabulary.token_to_id(template.special_tokens["eos_token"])
        data = {**read_json(generation), "eos_token_id": end}
        write_atomically(generation, json.dumps(data, indent=1) + "\n")


def _brings_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / TOKENIZER_CONFIG_FILE
    return config.is_file() and "chat_template" in (read_json(config) or {})


def _has_marks(template: str) -> bool:
    return any(f"{{%{dash} {_MARKS} " in template for dash in ("", "-"))
