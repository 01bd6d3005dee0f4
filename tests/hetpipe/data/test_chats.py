"""Chats of JSON lines: what is read, what is learned, what is refused; the loss is that of transformers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cost_model.errors import InputError
from hetpipe import cli
from hetpipe.data.chat_lines import Turn
from hetpipe.data.chat_template import PLAIN, ChatTemplate
from hetpipe.data.chats import CHATS as CHAT_KIND
from hetpipe.data.chats import ChatDataset, vocabulary_texts, write_chats
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.kinds import kind_of, read_data
from hetpipe.data.task import prepare_data, registered_task
from hetpipe.data.vocabulary import MIN_VOCABULARY, SEP_ID, train_vocabulary
from hetpipe.models.names import model_entry
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import save_other
from runs import chain_plan, made_up_profile, run

GPT2 = model_entry("gpt2-tiny")
ASKED = [Turn("user", "Who sails?"), Turn("assistant", "The ship sails.")]
LONG = (*ASKED, Turn("user", "Where?"), Turn("assistant", "Far away, over the grey sea."))
CHATS = [tuple(ASKED), LONG, (Turn("system", "Be brief."), *ASKED)] * 8
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def as_messages(chat):
    return [{"role": turn.role, "content": turn.content} for turn in chat]


def lines_file(path: Path, chats=CHATS) -> Path:
    path.write_text("".join(json.dumps({"messages": as_messages(chat)}) + "\n" for chat in chats))
    return path


def vocabulary_of(chats=CHATS) -> Tokenizer:
    found = train_vocabulary(vocabulary_texts(chats), MIN_VOCABULARY + 100)
    found.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return found


def dataset_of(folder, chats, template, vocabulary, *, length=64, seed=3) -> ChatDataset:
    folder.mkdir(exist_ok=True)
    write_chats(folder, chats, vocabulary, template)
    return ChatDataset.load(folder, vocabulary, length, seed, SEP_ID)


@pytest.mark.parametrize(
    "line",
    [
        {"messages": as_messages(ASKED), "id": 7},
        {
            "conversations": [
                {"from": "human", "value": "Who sails?"},
                {"from": "gpt", "value": ASKED[1].content},
            ]
        },
        {"prompt": "Who sails?", "completion": "The ship sails."},
    ],
)
def test_each_form_of_a_chat_is_read(tmp_path, line):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n" + json.dumps(line) + "\r\n\n")
    kind, content = read_data([path], GPT2)
    assert kind is CHAT_KIND and list(content.rows) == [tuple(ASKED)]


def test_lines_of_text_are_documents(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "One.\\nTwo."}\n{"text": "Three."}\n')
    kind, content = read_data([path], GPT2)
    assert kind is not CHAT_KIND and content.documents == ["One.\nTwo.", "Three."]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: a list; give an object"),
        ('{"text": "a"}\n{"prompt": "a", "completion": "b"}', "line 2: has .*, and the first line a text"),
        ('{"prompt": "a", "completion": "b"}\n{"text": "a"}', "line 2: a text, and the first line a chat"),
        ('{"text": 3}', '"text" is 3; give a text'),
        (
            '{"text": "\\ud83d\\ude00"}\n{"text": "a \\ud83d b"}',
            r"line 2: \\ud83d is half a character; take",
        ),
        ('{"instruction": "a"}', 'has \\["instruction"\\]; give JSON lines of chats'),
        ('{"messages": "hello"}', '"hello" is no list of turns'),
        ('{"messages": [{"role": "bot", "content": "a"}]}', '"role" is "bot"; known are system, user, assi'),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', '"role" is \\["user"\\]; known are system'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "nothing in it is said by the assistant"),
        ('{"messages": [{"role": "assistant", "content": [1]}]}', '"content" is \\[1\\]; give a text'),
        (
            '{"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}',
            'a turn has "tool_calls", which is not trained on',
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_one_clear_line(tmp_path, lines, reason):
    path = tmp_path / "chats.jsonl"
    path.write_text(lines)
    with pytest.raises(InputError, match=reason) as error:
        read_data([path], GPT2)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_chats_and_texts_are_not_mixed(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("Some text.")
    with pytest.raises(InputError, match=r"a\.txt holds text and .*chats\.jsonl chats"):
        kind_of([text, lines_file(tmp_path / "chats.jsonl")], GPT2)


@pytest.mark.parametrize("template", [PLAIN, CHATML, UNMARKED])
def test_what_the_assistant_says_is_learned_and_nothing_else(tmp_path, template):
    vocabulary = vocabulary_of()
    end = "[SEP]" if template == PLAIN else "<|im_end|>"
    dataset = dataset_of(tmp_path, [LONG], ChatTemplate(template, {"eos_token": "[SEP]"}), vocabulary)
    labels = dataset.batch(0, 1).labels[0]
    learned = vocabulary.decode(labels[labels != IGNORE_LABEL].tolist(), skip_special_tokens=False)
    after = "" if template == CHATML else "\n"  # marks say where an answer ends, a turn ends with its line
    before = " " if template == PLAIN else ""
    assert learned == "".join(
        f"{before}{turn.content}{end}{after}" for turn in LONG if turn.role == "assistant"
    )


def test_tokens_and_marks_are_those_of_transformers(tmp_path):
    vocabulary = vocabulary_of()
    dataset = dataset_of(tmp_path, CHATS[:3], ChatTemplate(CHATML, {}), vocabulary)
    vocabulary.encode_special_tokens = False
    theirs = PreTrainedTokenizerFast(tokenizer_object=vocabulary, chat_template=CHATML)
    data = dataset.batch(0, 3)
    for row, chat in enumerate(dataset.kept[np.argsort(dataset.kept)]):
        found = theirs.apply_chat_template(
            as_messages(CHATS[chat]), return_dict=True, return_assistant_tokens_mask=True
        )
        at = next(
            index
            for index in range(3)
            if data.input_ids[index, : len(found["input_ids"])].tolist() == found["input_ids"]
        )
        mask = np.array(found["assistant_masks"]) > 0
        assert ((data.labels[at, : len(mask)] != IGNORE_LABEL) == mask).all(), row
        assert (data.labels[at, len(mask) :] == IGNORE_LABEL).all()


def test_a_template_whose_turns_change_with_what_follows_is_refused(tmp_path):
    last = UNMARKED.replace(
        "{{ message.content }}", "{% if loop.last %}Well: {% endif %}{{ message.content }}"
    )
    with pytest.raises(InputError, match="chat 1: the chat template writes turns in another way"):
        dataset_of(tmp_path, [LONG], ChatTemplate(last, {}), vocabulary_of())


def test_what_a_template_refuses_is_one_line(tmp_path):
    template = ChatTemplate("{{ raise_exception('no system turn') }}", {})
    with pytest.raises(InputError, match="chat 1: the chat template refuses the turns \\(no system turn\\)"):
        dataset_of(tmp_path, [LONG], template, vocabulary_of())


def test_each_epoch_reads_each_chat_once_and_counts_what_is_learned(tmp_path):
    vocabulary, template = vocabulary_of(), ChatTemplate(PLAIN, {"eos_token": "[SEP]"})
    dataset = dataset_of(tmp_path, CHATS, template, vocabulary)
    whole = dataset.batch(0, len(CHATS))
    assert whole.num_loss_tokens == dataset.num_terms == (whole.labels[:, 1:] != IGNORE_LABEL).sum()
    parts = [dataset.batch(first, 5) for first in range(0, 20, 5)]
    assert (np.concatenate([part.input_ids for part in parts]) == whole.input_ids[:20]).all()
    again = dataset.batch(len(CHATS), len(CHATS))
    assert sorted(map(tuple, again.input_ids)) == sorted(map(tuple, whole.input_ids))
    assert (again.input_ids != whole.input_ids).any()


def test_chats_are_cut_and_those_without_an_answer_left_out(tmp_path):
    far = (Turn("user", "Who? " * 40), Turn("assistant", "The ship."))
    vocabulary, template = vocabulary_of(), ChatTemplate(PLAIN, {"eos_token": "[SEP]"})
    dataset = dataset_of(tmp_path, [*CHATS[:2], far], template, vocabulary, length=24)
    assert dataset.num_samples == 2
    assert any("2 of 3 chats are longer than 24 tokens" in said for said in dataset.notes())
    assert any("1 have no answer before it and are left out" in said for said in dataset.notes())
    with pytest.raises(InputError, match="no chat has an answer within 24 tokens; give a larger"):
        dataset_of(tmp_path / "far", [far], template, vocabulary, length=24)


def test_a_masked_model_refuses_chats(tmp_path):
    path = lines_file(tmp_path / "chats.jsonl")
    settings = TaskSettings("bert-tiny", 32, run=Settings(steps=1, data=(str(path),)))
    with pytest.raises(InputError, match=r"holds chats, and bert-tiny learns masked-lm; give .* or text"):
        prepare_data(RunFolder(tmp_path / "run"), settings)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*chats.*filling")
def test_the_loss_is_that_of_transformers_under_any_plan_and_the_template_is_exported(tmp_path, capsys):
    """A folder with a chat template: whole and cut, held out, gone on from; read back by transformers."""
    folder, length = tmp_path / "mine", 48
    model = save_other(folder, "OPTForCausalLM", dropout=0.0)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary_of(), eos_token="<|im_end|>", chat_template=CHATML
    )
    tokenizer.save_pretrained(folder)
    entry, data = model_entry(str(folder)), str(lines_file(tmp_path / "chats.jsonl"))
    settings = Settings(
        steps=4, learning_rate=1e-2, model_folder=entry.place, data=(data,), eval_data=(data,), every=2
    )
    profile = replace(made_up_profile(str(folder)), model=entry.name, sequence_length=length)
    plans = {"whole": chain_plan(entry.name, [0, 5], 4), "cut": chain_plan(entry.name, [0, 2, 5], 2)}
    losses = {name: run(tmp_path / name, plan, settings, profile)[1] for name, plan in plans.items()}

    done = RunFolder(tmp_path / "whole" / "run")
    inputs, labels = registered_task(done, TaskSettings(entry.name, length, run=settings)).batch(0, 16)
    with torch.no_grad():
        expected = model.train()(**inputs, labels=labels).loss.item()
    assert losses["whole"][0] == pytest.approx(expected, rel=1e-6)
    assert losses["cut"] == pytest.approx(losses["whole"], rel=2e-6)

    gone_on = replace(settings, resume_from=str(done.checkpoints / "step-000002"))
    assert run(tmp_path / "on", plans["cut"], gone_on, profile)[1] == pytest.approx(
        losses["whole"][2:], rel=2e-6
    )

    assert cli.main(["export", str(done.path), "-o", str(tmp_path / "exported")]) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert theirs.eos_token == "<|im_end|>" and theirs.chat_template == CHATML
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    tokens = count = 0.0
    for chat in CHATS:
        found = theirs.apply_chat_template(
            as_messages(chat), return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        ids, mask = found["input_ids"][:, :length], found["assistant_masks"][:, :length].bool()
        with torch.no_grad():
            loss = trained(input_ids=ids, labels=ids.masked_fill(~mask, IGNORE_LABEL)).loss
        tokens += float(loss) * int(mask[:, 1:].sum())
        count += int(mask[:, 1:].sum())
    held_out = [row["eval_loss"] for row in done.read_metrics() if "eval_loss" in row][-1]
    assert held_out == pytest.approx(tokens / count, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*chats")
@pytest.mark.filterwarnings("ignore:gpt2-tiny brings no chat template")
def test_the_example_of_chats_can_be_trained_on(tmp_path):
    script = Path(__file__).parents[3] / "examples" / "tasks" / "python_chats.py"
    files = [str(tmp_path / name) for name in ("train.jsonl", "held-out.jsonl")]
    subprocess.run([sys.executable, str(script), *files], check=True, capture_output=True)
    settings = Settings(steps=6, learning_rate=3e-3, data=(files[0],), eval_data=(files[1],), eval_every=3)
    profile = made_up_profile("gpt2-tiny")
    report, losses = run(tmp_path, chain_plan("gpt2-tiny", [0, 3, 6], 4), settings, profile)
    assert losses[-1] < losses[0] and report.eval_loss is not None

    assert cli.main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "exported")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "user: What?\nassistant:"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
