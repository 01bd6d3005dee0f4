"""Question answering: what is read and refused; losses, places and figures are those of transformers."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from cost_model.errors import InputError
from hetpipe import cli
from hetpipe.data.answers import CONTEXTS_FILE, OFFSETS_FILE, AnswerScores, best_span, exact_match, word_f1
from hetpipe.data.kinds import read_data
from hetpipe.data.task import prepare_data, registered_task
from hetpipe.models.names import model_entry
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import save_other
from runs import EMULATED_CLUSTER, chain_plan, cluster_file, made_up_profile, run

CONTEXT = "Ada sailed to the Azores in May, and home in late June."
LONG = "Nothing of this is asked for, nor what follows it. " * 12 + "Zoe stayed."
BEGUN = "Ada came. " + LONG
LENGTH = 48
ASKED = [
    (CONTEXT, "Where to?", ["the Azores", "Azores"]),
    (CONTEXT, "Who?", ["Ada"]),
    (CONTEXT, "When home?", ["in late June"]),
    (LONG, "Who stayed?", ["Zoe"]),
]


ASKS = {"context": "a b", "question": "q"}


def line_of(context, question, texts):
    starts = [context.index(text) for text in texts]
    return {"context": context, "question": question, "answers": {"text": texts, "answer_start": starts}}


def lines_file(path: Path, asked=ASKED, times: int = 5) -> Path:
    path.write_text("".join(json.dumps(line_of(*each)) + "\n" for each in asked * times))
    return path


def no_dropout(folder: Path, architecture: str):
    keys = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout",
            "qa_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")  # fmt: skip
    known = getattr(transformers, architecture).config_class().to_dict()
    return save_other(folder, architecture, **{key: 0.0 for key in keys if key in known})


def test_a_file_of_squad_and_its_lines_are_read_alike(tmp_path):
    save_other(tmp_path / "mine", "BertForQuestionAnswering")
    model = model_entry(str(tmp_path / "mine"))
    asked = [
        {"question": question, "id": str(at), "answers": [{"text": text, "answer_start": context.index(text)}
                                                          for text in texts]}
        for at, (context, question, texts) in enumerate(ASKED)
    ]  # fmt: skip
    paragraphs = [{"context": CONTEXT, "qas": asked[:3]}, {"context": LONG, "qas": asked[3:]}]
    squad = tmp_path / "train.json"
    squad.write_text(json.dumps({"version": "1.1", "data": [{"title": "", "paragraphs": paragraphs}]}))
    found = [read_data([path], model)[1] for path in (squad, lines_file(tmp_path / "a.jsonl", times=1))]
    assert found[0].sha256 == found[1].sha256
    assert [row.answers for row in found[0].rows] == [row.answers for row in found[1].rows]
    assert found[0].rows[0].answers == (("the Azores", 14), ("Azores", 18))


@pytest.mark.parametrize("architecture", ["BertForQuestionAnswering", "GPT2ForQuestionAnswering"])
def test_tokens_are_those_of_transformers_and_the_labels_enclose_the_answer(tmp_path, architecture):
    save_other(tmp_path / "mine", architecture)
    entry = model_entry(str(tmp_path / "mine"))
    data = str(lines_file(tmp_path / "data.jsonl", [*ASKED, (CONTEXT, "Why?", [])], times=1))
    settings = TaskSettings(entry.name, LENGTH, run=Settings(steps=1, model_folder=entry.place, data=(data,)))
    folder = RunFolder(tmp_path / "run")
    told = prepare_data(folder, settings)
    assert any(said.startswith("1 of 5 answers lie beyond 48 tokens") for said in told)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder.vocabulary),
        pad_token="[PAD]",
        model_input_names=["input_ids", "attention_mask", "token_type_ids"],
    )
    asked = [*ASKED, (CONTEXT, "Why?", [])]
    inputs, labels = registered_task(folder, settings).batch(0, 4)
    assert sorted(labels[:, 2].tolist()) == [0, 1, 2, 4]
    for row, (first, last, question) in enumerate(labels.tolist()):
        context, text, answers = asked[question]
        expected = theirs(
            text, context, truncation="only_second", max_length=LENGTH, padding="max_length",
            return_offsets_mapping=True,
        )  # fmt: skip
        for name in inputs:
            assert inputs[name][row].tolist() == expected[name], name
        if not answers:
            assert (first, last) == (0, 0)
            continue
        offsets, parts = expected["offset_mapping"], expected.sequence_ids()
        assert parts[first] == parts[last] == 1
        begin, end = context.index(answers[0]), context.index(answers[0]) + len(answers[0])
        assert offsets[first][0] <= begin < offsets[first][1]
        assert offsets[last][0] < end <= offsets[last][1]


@pytest.mark.parametrize("length", [32, 14])
def test_an_answer_may_end_with_what_no_token_holds(tmp_path, length):
    """White space, an accent after its letter and a joiner, none of which BERT's rules keep."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "where",
        "?",
        "to",
        "the",
        "azores",
        "in",
        "cafe",
        "x",
    ]
    vocabulary = Tokenizer(WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    vocabulary.add_special_tokens(words[:5])
    vocabulary.normalizer, vocabulary.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    vocabulary.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    save_other(tmp_path / "mine", "BertForQuestionAnswering")
    vocabulary.save(str(tmp_path / "mine" / "tokenizer.json"))
    context = "To the Azores  in cafe\u0301 x\u200d to x x x x x x x x x x in"
    answers = ["Azores ", "cafe\u0301", "x\u200d", "x x x x x x x x x"]
    data = str(lines_file(tmp_path / "a.jsonl", [(context, "Where?", [text]) for text in answers], times=1))
    entry = model_entry(str(tmp_path / "mine"))
    settings = TaskSettings(entry.name, length, run=Settings(steps=1, model_folder=entry.place, data=(data,)))
    told = prepare_data(RunFolder(tmp_path / "run"), settings)
    is_cut = length == 14
    assert any("1 of 4 answers lie beyond 14" in said for said in told) == is_cut
    _, labels = registered_task(RunFolder(tmp_path / "run"), settings).batch(0, 3 if is_cut else 4)
    found = {question: (first, last) for first, last, question in labels.tolist()}
    # [CLS] where ? [SEP] to the azores in cafe x to x ...
    whole = {0: (6, 6), 1: (8, 8), 2: (9, 9), 3: (11, 19)}
    assert found == {key: value for key, value in whole.items() if key < 3 or not is_cut}


def plain_words(text: str) -> list[str]:
    """Return the words that count in these texts: theirs have no punctuation but commas and full stops."""
    return [word for word in re.findall(r"[a-z]+", text.lower()) if word not in ("a", "an", "the")]


def told_by_hand(logits, offsets, parts, context):
    """Return the best answer by trying all spans, as the task is defined."""
    inside = [at for at, part in enumerate(parts) if part == 1 and offsets[at][0] < offsets[at][1]]
    spans = [(logits[a, 0] + logits[b, 1], a, b) for a in inside for b in inside if 0 <= b - a < 30]
    _, first, last = max(spans, key=lambda span: span[0])
    return context[offsets[first][0] : offsets[last][1]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(filling|longer than|lie beyond|left out)")
@pytest.mark.parametrize(
    "architecture",
    [
        "BertForQuestionAnswering",
        "GPT2ForQuestionAnswering",
        pytest.param("DistilBertForQuestionAnswering", marks=pytest.mark.exhaustive),  # as BERT
    ],
)
def test_losses_and_figures_are_those_of_transformers_under_any_plan(tmp_path, architecture):
    """The loss of a batch is the model's own; held out, answers are found and compared by other code."""
    model = no_dropout(tmp_path / "mine", architecture)
    entry = model_entry(str(tmp_path / "mine"))
    data = str(lines_file(tmp_path / "data.jsonl"))
    settings = Settings(
        steps=3, learning_rate=3e-3, model_folder=entry.place, data=(data,), eval_data=(data,), eval_every=1,
        best="f1",
    )  # fmt: skip
    profile = replace(made_up_profile(str(tmp_path / "mine")), model=entry.name, sequence_length=LENGTH)
    plans = {"whole": chain_plan(entry.name, [0, 5], 16), "cut": chain_plan(entry.name, [0, 2, 5], 3)}
    losses = {name: run(tmp_path / name, plan, settings, profile)[1] for name, plan in plans.items()}

    done = RunFolder(tmp_path / "whole" / "run")
    task = registered_task(done, TaskSettings(entry.name, LENGTH, run=settings))
    inputs, labels = task.batch(0, 16)
    with torch.no_grad():
        expected = model.train()(**inputs, start_positions=labels[:, 0], end_positions=labels[:, 1]).loss
    assert losses["whole"][0] == pytest.approx(expected.item(), rel=1e-6)
    assert losses["cut"] == pytest.approx(losses["whole"], rel=2e-6)
    rows = {name: RunFolder(tmp_path / name / "run").read_metrics()[-1] for name in plans}
    assert rows["cut"]["eval_loss"] == pytest.approx(rows["whole"]["eval_loss"], rel=2e-6)
    for figure in ("eval_f1", "eval_exact_match"):
        assert rows["cut"][figure] == rows["whole"][figure]

    exported = tmp_path / "exported"
    assert cli.main(["export", str(done.path), "-o", str(exported)]) == 0
    trained = type(model).from_pretrained(exported).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(exported / "tokenizer.json"), pad_token="[PAD]",
        model_input_names=[*inputs],
    )  # fmt: skip
    exact = f1 = 0.0
    for context, question, answers in ASKED:
        if context == LONG:
            continue  # beyond the length: wrong
        read = tokenizer(
            question, context, truncation="only_second", max_length=LENGTH, padding="max_length",
            return_offsets_mapping=True, return_tensors="pt",
        )  # fmt: skip
        offsets, parts = read.pop("offset_mapping")[0].tolist(), read.sequence_ids(0)
        with torch.no_grad():
            out = trained(**read)
        logits = torch.stack((out.start_logits[0], out.end_logits[0]), -1).numpy()
        told = told_by_hand(logits, offsets, parts, context)
        words = [plain_words(text) for text in (told, *answers)]
        exact += max(words[0] == right for right in words[1:])
        f1 += max(
            2 * (Counter(words[0]) & Counter(right)).total() / (len(words[0]) + len(right))
            for right in words[1:]
        )
    assert rows["whole"]["eval_exact_match"] == pytest.approx(exact / 4)
    assert rows["whole"]["eval_f1"] == pytest.approx(f1 / 4)


@pytest.mark.parametrize(
    ("told", "answer", "exact", "f1"),
    [
        ("the Azores", "Azores", 1, 1),
        ("Azores in May", "the azores.", 0, 1 / 2),  # 1 of 3 words, 1 of 1: 2 / (3 + 1)
        ("", "", 1, 1),
        ("a", "", 1, 1),  # an article counts for nothing
        ("b", "", 0, 0),
        ("x y", "y y x", 0, 4 / 5),  # 2 of 2 words, 2 of 3
        ("U.S.", "us", 1, 1),
    ],
)
def test_answers_are_compared_as_squad_does(told: str, answer: str, exact: float, f1: float):
    assert exact_match(told, answer) == exact
    assert word_f1(told, answer) == pytest.approx(f1)


def test_an_answer_is_at_most_thirty_tokens_and_ends_after_it_begins():
    begin, end = np.zeros(40), np.zeros(40)
    begin[2], end[35], end[1], end[31] = 9.0, 9.0, 8.0, 2.0  # 2 to 35 is too long, 2 to 1 turns back
    assert best_span(begin, end) == (2, 31, 11.0)


def test_no_answer_is_told_where_the_first_token_is_likelier_and_some_have_none(tmp_path):
    for asked, expected in (([*ASKED[:2]], "Ada"), ([*ASKED[:2], (CONTEXT, "Why?", [])], "")):
        save_other(tmp_path / "mine", "BertForQuestionAnswering")
        entry = model_entry(str(tmp_path / "mine"))
        data = str(lines_file(tmp_path / "data.jsonl", asked, times=1))
        settings = TaskSettings(
            entry.name, LENGTH, run=Settings(steps=1, model_folder=entry.place, data=(data,))
        )
        folder = RunFolder(tmp_path / f"run{len(asked)}")
        prepare_data(folder, settings)
        _, labels = registered_task(folder, settings).batch(0, len(asked))
        (first, last, _) = next(row for row in labels.tolist() if row[2] == 1)
        logits = np.zeros((LENGTH, 2), np.float32)
        logits[first, 0] = logits[last, 1] = 1.0
        logits[0] = 3.0
        scores = AnswerScores(folder.path)
        assert scores.told(scores.found_in(1, logits)) == expected


def test_no_answer_begins_or_ends_with_a_token_without_a_place(tmp_path):
    """Of RoBERTa's tokens a second space is one, which is trimmed to nothing."""
    context = "the azores   are there"
    # <s> where </s> </s> the azores _ _ are there </s>
    offsets = [[-1, -1]] * 4 + [[0, 3], [4, 10], [-1, -1], [-1, -1], [13, 16], [17, 22], [-1, -1]]
    np.array(offsets, "<i4").tofile(tmp_path / OFFSETS_FILE)
    content = {"contexts": [context], "questions": [[0, ["azores"]]], "windows": [0], "ends": [len(offsets)]}
    (tmp_path / CONTEXTS_FILE).write_text(json.dumps(content))
    for first, last, expected in (
        ({5: 5.0}, {6: 5.0, 5: 1.0}, "azores"),
        ({7: 5.0, 8: 1.0}, {8: 5.0}, "are"),
    ):
        logits = np.zeros((len(offsets), 2), np.float32)
        for column, values in enumerate((first, last)):
            logits[list(values), column] = list(values.values())
        assert AnswerScores(tmp_path).found_in(0, logits).text == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({**ASKS, "answers": {"text": ["b"], "answer_start": [0]}},
         r'line 1: at 0 of "context" is "a" and not "b"; give the "answer_start"'),
        ({**ASKS, "answers": {"text": ["b"], "answer_start": [-1]}}, 'and not "b"'),
        ({**ASKS, "answers": {"text": ["b"], "answer_start": []}}, "of one length"),
        ({**ASKS, "answers": "b"}, '"answers" is "b"; give a list'),
        ({**ASKS, "answers": [{"text": "b", "answer_start": "2"}]}, "is no answer"),
        (ASKS, 'and no "answers"; give objects with'),
        ({"context": " ", "question": "q", "answers": []}, '"context" is empty'),
        ({"text": "a"}, "learns question-answering; give JSON lines with"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_learned_is_one_clear_line(tmp_path, line, reason):
    save_other(tmp_path / "mine", "BertForQuestionAnswering")
    (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match=reason) as error:
        read_data([tmp_path / "data.jsonl"], model_entry(str(tmp_path / "mine")))
    assert "\n" not in str(error.value)


def test_half_a_character_in_a_file_of_squad_is_one_line(tmp_path):
    save_other(tmp_path / "mine", "BertForQuestionAnswering")
    asked = {"question": "q \udc00", "answers": []}
    (tmp_path / "a.json").write_text(
        json.dumps({"data": [{"paragraphs": [{"context": "a", "qas": [asked]}]}]})
    )
    with pytest.raises(InputError, match=r"a\.json: \\udc00 is half a character"):
        read_data([tmp_path / "a.json"], model_entry(str(tmp_path / "mine")))


def test_a_question_without_room_for_its_context_is_named(tmp_path):
    save_other(tmp_path / "mine", "BertForQuestionAnswering")
    entry = model_entry(str(tmp_path / "mine"))
    data = str(lines_file(tmp_path / "data.jsonl", [(CONTEXT, "Which? " * 30, ["Ada"])]))
    settings = TaskSettings(entry.name, LENGTH, run=Settings(steps=1, model_folder=entry.place, data=(data,)))
    with pytest.raises(InputError, match=r"line 1: the question leaves no room|cannot be cut to 48 tokens"):
        prepare_data(RunFolder(tmp_path / "run"), settings)


def test_a_run_without_data_is_one_line(tmp_path, capsys):
    save_other(tmp_path / "mine", "BertForQuestionAnswering")
    cluster = str(cluster_file(tmp_path, EMULATED_CLUSTER))
    assert cli.main(["run", "--model", str(tmp_path / "mine"), "--cluster", cluster]) == 2
    assert "learns question-answering; give --data: JSON lines" in capsys.readouterr().err


def task_of(folder: Path, asked, length: int, stride: int | None, **settings):
    """Prepare these questions, trained on and held out; return the run folder, its task and what is told."""
    if not (folder / "mine").exists():
        save_other(folder / "mine", "BertForQuestionAnswering")
    entry, data = model_entry(str(folder / "mine")), str(lines_file(folder / "data.jsonl", asked, times=1))
    run_settings = Settings(
        steps=1, model_folder=entry.place, data=(data,), eval_data=(data,), doc_stride=stride, **settings
    )
    place = RunFolder(folder / f"run-{length}-{stride}")
    told = prepare_data(place, TaskSettings(entry.name, length, run=run_settings))
    return place, registered_task(place, TaskSettings(entry.name, length, run=run_settings)), told


@pytest.mark.parametrize("stride", [0, 9])
def test_windows_and_their_labels_are_those_of_the_example_of_transformers(tmp_path, stride):
    asked = [*ASKED, (BEGUN, "Who?", ["Ada"]), (LONG, "Why?", [])]
    place, task, told = task_of(tmp_path, asked, LENGTH, stride)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(place.vocabulary), pad_token="[PAD]",
        model_input_names=["input_ids", "attention_mask", "token_type_ids"],
    )  # fmt: skip
    expected = theirs(
        [question for _, question, _ in asked], [context for context, *_ in asked],
        truncation="only_second", max_length=LENGTH, padding="max_length", stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    owners = expected["overflow_to_sample_mapping"]
    count = len(owners)
    assert count > len(asked) + 2
    assert any(
        f"all are in {count} windows, neighbours with {stride} tokens in common" in said for said in told
    )
    inputs, labels = task.batch(0, count)
    assert sorted(labels[:, 2].tolist()) == list(range(count))
    answered = set()
    for row, (first, last, window) in enumerate(labels.tolist()):
        for name in inputs:
            assert inputs[name][row].tolist() == expected[name][window], name
        context, _, answers = asked[owners[window]]
        offsets, parts = expected["offset_mapping"][window], expected.sequence_ids(window)
        of_context = [at for at, part in enumerate(parts) if part == 1]
        begin = context.index(answers[0]) if answers else -1
        end = begin + len(answers[0]) if answers else -1
        inside = answers and offsets[of_context[0]][0] <= begin and offsets[of_context[-1]][1] >= end
        if not inside:
            assert (first, last) == (0, 0)
            continue
        answered.add(owners[window])
        assert offsets[first][0] <= begin < offsets[first][1] and offsets[last][0] < end <= offsets[last][1]
    if stride:
        assert answered == {at for at, (*_, answers) in enumerate(asked) if answers}


def test_the_answer_is_that_of_the_best_window_wherever_windows_are_computed(tmp_path):
    asked = [(BEGUN, "Who?", ["Ada"]), (CONTEXT, "Who sailed?", ["Ada"]), (CONTEXT, "Why?", [])]
    place, task, _ = task_of(tmp_path, asked, LENGTH, 9)
    _, labels = task.held_out.batch(0, task.held_out.num_samples)
    scores, figures = AnswerScores(place.held_out), task.figures
    windows = json.loads((place.held_out / CONTEXTS_FILE).read_text())["windows"]
    logits = torch.zeros(len(windows), LENGTH, 2)
    by_window = {window: row for row, window in enumerate(labels[:, 2].tolist())}
    logits[:, 0] = 3.5
    assert windows.count(0) > 3
    for place_of, (window, value, none) in enumerate([(0, 3.0, 9.0), (1, 5.0, 1.0), (2, 4.0, 8.0)]):
        first = int(np.flatnonzero(scores._offsets[window][:, 0] >= 0)[place_of])
        logits[by_window[window], first] = value / 2
        logits[by_window[window], 0] = none / 2
    counts = [figures.count(logits[row : row + 1], labels[row : row + 1]) for row in range(len(windows))]
    whole = figures.count(logits, labels)
    for parts in (counts, counts[::-1], [whole], [counts[0], figures.joined(counts[1:])]):
        assert list(figures.joined(json.loads(json.dumps(parts)))) == list(whole)
    best = next(each for each in whole if each.question == 0)
    second = scores._offsets[1]
    start, end = second[np.flatnonzero(second[:, 0] >= 0)[1]]
    assert (best.text, best.value, best.none) == (BEGUN[start:end], 5.0, 1.0)
    assert scores.told(best) == best.text
    assert set(figures.of(whole)) == {"exact_match", "f1"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
def test_figures_over_windows_are_those_by_hand_under_any_plan(tmp_path):
    model = no_dropout(tmp_path / "mine", "BertForQuestionAnswering")
    entry = model_entry(str(tmp_path / "mine"))
    asked = [*ASKED, (BEGUN, "Who?", ["Ada"])]
    data = str(lines_file(tmp_path / "data.jsonl", asked, times=1))
    settings = Settings(
        steps=3, learning_rate=3e-3, model_folder=entry.place, data=(data,), eval_data=(data,), doc_stride=9,
        best="f1",
    )  # fmt: skip
    profile = replace(made_up_profile(str(tmp_path / "mine")), model=entry.name, sequence_length=LENGTH)
    plans = {"whole": chain_plan(entry.name, [0, 5], 16), "cut": chain_plan(entry.name, [0, 2, 5], 3)}
    losses = {name: run(tmp_path / name, plan, settings, profile)[1] for name, plan in plans.items()}
    assert losses["cut"] == pytest.approx(losses["whole"], rel=2e-6)
    rows = {name: RunFolder(tmp_path / name / "run").read_metrics()[-1] for name in plans}
    exported = tmp_path / "exported"
    assert cli.main(["export", str(tmp_path / "whole" / "run"), "-o", str(exported)]) == 0
    trained = type(model).from_pretrained(exported).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(exported / "tokenizer.json"), pad_token="[PAD]",
        model_input_names=["input_ids", "attention_mask", "token_type_ids"],
    )  # fmt: skip
    exact = f1 = 0.0
    for context, question, answers in asked:
        read = tokenizer(
            question, context, truncation="only_second", max_length=LENGTH, padding="max_length", stride=9,
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        best = (-np.inf, "")
        for window in range(len(read["input_ids"])):
            given = {
                name: torch.tensor(read[name][window : window + 1]) for name in tokenizer.model_input_names
            }
            with torch.no_grad():
                out = trained(**given)
            logits = torch.stack((out.start_logits[0], out.end_logits[0]), -1).numpy()
            offsets, parts = read["offset_mapping"][window], read.sequence_ids(window)
            inside = [at for at, part in enumerate(parts) if part == 1 and offsets[at][0] < offsets[at][1]]
            value = max(logits[a, 0] + logits[b, 1] for a in inside for b in inside if 0 <= b - a < 30)
            best = max(best, (value, told_by_hand(logits, offsets, parts, context)))
        words = [plain_words(text) for text in (best[1], *answers)]
        exact += max(words[0] == right for right in words[1:])
        f1 += max(
            2 * (Counter(words[0]) & Counter(right)).total() / (len(words[0]) + len(right))
            for right in words[1:]
        )
    for metrics in rows.values():
        assert metrics["eval_exact_match"] == pytest.approx(exact / len(asked))
        assert metrics["eval_f1"] == pytest.approx(f1 / len(asked))


def test_windows_that_do_not_go_on_are_refused(tmp_path, hetpipe):
    with pytest.raises(
        InputError, match=r"line 4: the question leaves room for \d+ tokens of its context in 48"
    ):
        task_of(tmp_path, ASKED, LENGTH, 44)
    with pytest.raises(InputError, match="doc_stride is -1"):
        Settings(steps=1, doc_stride=-1)
    result = hetpipe("run --model gpt2-tiny --cluster cluster.toml --doc-stride 9 --steps 1")
    assert result.code == 2 and "--doc-stride is for the contexts of questions" in result.err
