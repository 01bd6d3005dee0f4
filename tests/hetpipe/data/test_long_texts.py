"""Texts and chats that are not held: the samples of held ones, in bounded memory, split once for all runs."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cost_model.errors import InputError
from cost_model.units import format_bytes
from hetpipe.data import long_texts
from hetpipe.data.data_file import read_text_file
from hetpipe.data.dataset import write_tokens
from hetpipe.data.file_states import FileStates
from hetpipe.data.kept_tokens import known_sha256
from hetpipe.data.kind import Reading
from hetpipe.data.kinds import read_data
from hetpipe.data.listened import listening
from hetpipe.data.long_texts import lines_in, pieces_in, text_lines
from hetpipe.data.padded_texts import mark_ends
from hetpipe.data.pairs import mark_ends_of_pairs
from hetpipe.data.task import prepare_data, registered_task
from hetpipe.data.texts import LongTexts, Texts, read_corpus
from hetpipe.data.vocabulary import train_vocabulary
from hetpipe.models.huggingface import model_spec
from hetpipe.models.names import model_entry
from hetpipe.runs.cache import texts_folder
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import save_other
from runs import chain_plan, made_up_profile, run

GPT2 = model_entry("gpt2-tiny")
HELD = "hetpipe.data.file_states.MOST_HELD_BYTES"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def nothing_is_held(monkeypatch):
    monkeypatch.setattr(HELD, 0)


def text_files(folder: Path) -> list[Path]:
    """A text with a mark, all ends of lines, and what is no end; and one of JSON lines."""
    (folder / "a.txt").write_bytes("\ufeffGrüße\r\nThe ship\u2028sails.\rFar \x0c away".encode() * 300)
    rows = [{"text": document, "from": "manual"} for document in read_corpus()[:5]]
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return [folder / "a.txt", folder / "b.jsonl"]


def prepared(folder: Path, files: list[Path], **settings) -> tuple[RunFolder, list[str]]:
    place = RunFolder(folder)
    folder.mkdir(exist_ok=True)
    run = Settings(steps=1, data=tuple(map(str, files)), **settings, **GPT2.in_settings)
    return place, prepare_data(place, TaskSettings("gpt2-tiny", 32, run=run))


@pytest.mark.parametrize(("cut", "limit"), [(lines_in, "LONGEST_LINE"), (pieces_in, "LONGEST_PIECE")])
@given(
    blocks=st.lists(st.text("ab \r\n\u2028é", max_size=12), max_size=8),
    longest=st.integers(2, 12),
)
@example(blocks=["a\n", "a", "a"], longest=2)
def test_a_text_is_cut_alike_wherever_its_blocks_begin(cut, limit, blocks, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_texts, limit, longest)
        whole = "".join(blocks)
        found = list(cut(blocks))
        assert found == list(cut([whole])) and "".join(found) == whole
        assert max(map(len, found), default=0) <= longest
        if cut is lines_in:
            patch.setattr(long_texts, limit, 1000)
            assert list(lines_in(blocks)) == whole.splitlines(keepends=True)


def test_a_long_line_is_cut_where_a_word_begins(monkeypatch):
    monkeypatch.setattr(long_texts, "LONGEST_LINE", 12)
    assert list(lines_in(["The ship sails far\n"])) == ["The ship", " sails far\n"]


def test_what_is_not_held_is_the_same(tmp_path, monkeypatch):
    files = text_files(tmp_path)
    held, told = prepared(tmp_path / "held", files)
    assert told == [] and isinstance(read_data(files, GPT2)[1], Texts) and not texts_folder().exists()
    monkeypatch.setattr(HELD, 0)
    monkeypatch.setattr(long_texts, "BLOCK_BYTES", 7)  # many begin within a character
    content = read_data(files, GPT2)[1]
    assert isinstance(content, LongTexts) and content.sha256 == Texts(read_corpus(files)).sha256
    long, told = prepared(tmp_path / "long", files)
    count = (long.path / "tokens.bin").stat().st_size // 2
    size = format_bytes(sum(path.stat().st_size for path in files))
    assert told == [f"{count:,} tokens of 2 files, {size}, kept in the cache (hetpipe cache)"]
    for name in ("tokens.bin", "tokens.json", "ends.bin", "vocabulary.json", "data.json"):
        assert (long.path / name).read_bytes() == (held.path / name).read_bytes(), name


MODELS = {
    "labels": "BertForSequenceClassification",
    "tags": "BertForTokenClassification",
    "pairs": "MarianMTModel",
}
"""What learns rows, by what they have."""


def row_files(place: Path) -> dict[str, list[Path]]:
    """Write files of rows, by what learns them: of many lengths, with marks, all ends of lines."""
    documents = read_corpus()[:40]
    texts = [f"{document[: 12 * index]} \u2028 Grüße" for index, document in enumerate(documents, 1)]
    lines = [" ".join(text.split()) for text in texts]
    rows = {
        "labels": [
            {"text": text, "label": at % 2} | ({"text_pair": text[::-1]} if at % 3 else {})
            for at, text in enumerate(texts)
        ],
        "tags": [
            {"tokens": line.split(), "tags": [len(word) % 2 for word in line.split()]} for line in lines
        ],
        "pairs": [{"source": text, "target": text[::-1]} for text in texts],
    }
    found = {}
    for name, written in rows.items():
        (place / f"{name}.jsonl").write_text("\ufeff" + "\n\n".join(map(json.dumps, written)))
        found[name] = [place / f"{name}.jsonl"]
    for end, side in (("en", lines), ("de", lines[::-1])):
        (place / f"a.{end}").write_bytes("\r\n".join([*side, ""]).encode())
    (place / "a.tsv").write_text("\n".join(f"{line}\t{line[::-1]}" for line in lines))
    found["pairs"] += [place / name for name in ("a.en", "a.de", "a.tsv")]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_are_not_held_are_the_same(tmp_path, monkeypatch, name):
    save_other(tmp_path / name, MODELS[name])
    spec, files = model_spec(str(tmp_path / name)), row_files(tmp_path)[name]
    vocabulary = train_vocabulary(read_corpus()[:5], 512)
    if name == "pairs":
        mark_ends_of_pairs(vocabulary, spec.inputs, name)
    else:
        mark_ends(vocabulary)
    told, content = {}, {}
    for place, held in (("held", 1 << 24), ("long", 0)):
        monkeypatch.setattr(HELD, held)
        (tmp_path / place).mkdir()
        others = tmp_path / "template", tmp_path / "images"
        kind, content[place] = read_data(files, spec)
        assert (content[place].rows.held is None) == (place == "long")
        reading = Reading(spec, spec.inputs, vocabulary, *others, 16, 3)
        told[place] = content[place].write(tmp_path / place, reading)
    assert content["held"].sha256 == content["long"].sha256
    assert list(content["held"].words) == list(content["long"].words)
    assert told["held"] == told["long"] and told["held"]
    for part in kind.files:
        written = (tmp_path / "long" / part).read_bytes()
        assert written and written == (tmp_path / "held" / part).read_bytes(), part
    with files[0].open("a") as file:
        file.write("\n")
    with pytest.raises(InputError, match="was changed while it was read; begin again"):
        content["long"].write(tmp_path / "long", reading)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", None, "does not exist; give the path of a file"),
        ("a.txt", b" \n\t\n", "is empty; give a file with data"),
        ("a.txt", b"abc\n" * 70_000 + b"d\xff", "is not UTF-8 at byte 280,001"),
        ("a.txt", b"abc\xe2\x82", "is not UTF-8 at byte 3; convert"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "is not UTF-8 at byte 24"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": 3}\n', 'line 3: "text" is 3; give a text'),
        ("a.jsonl", b'{"text": "a"}\n{"messages": []}', "line 2: has .*; give one kind"),
    ],
)
def test_what_is_no_text_is_refused_as_if_it_were_held(tmp_path, nothing_is_held, name, content, reason):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as error:
        LongTexts.read([path])
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    if content is not None:
        with pytest.raises(InputError, match=reason):
            read_corpus([path])


def test_a_text_is_split_once(tmp_path, nothing_is_held, monkeypatch):
    files = text_files(tmp_path)
    first, _ = prepared(tmp_path / "first", files)

    def split(*_):
        raise AssertionError("split again")

    monkeypatch.setattr("hetpipe.data.texts.write_tokens", split)
    second, told = prepared(tmp_path / "second", files)
    assert told[0].endswith("taken from the cache (hetpipe cache)")
    assert (first.path / "tokens.bin").samefile(second.path / "tokens.bin")
    prepared(tmp_path / "second", files)  # into the same folder again
    with files[0].open("a") as file:
        file.write("more")
    with pytest.raises(AssertionError, match="split again"):
        prepared(tmp_path / "third", files)
    assert not list(texts_folder().glob(".unfinished*"))


@pytest.mark.parametrize("gone", ["tokens.bin", "ends.bin", "tokens.json", "text.json"])
def test_what_is_kept_in_part_is_written_anew(tmp_path, nothing_is_held, gone):
    files = text_files(tmp_path)
    first, _ = prepared(tmp_path / "first", files)
    (kept,) = (found for found in texts_folder().iterdir() if found.is_dir())
    (kept / gone).unlink()
    second, told = prepared(tmp_path / "second", files)
    assert told[0].endswith("kept in the cache (hetpipe cache)")
    for name in ("tokens.bin", "tokens.json", "ends.bin"):
        assert (second.path / name).read_bytes() == (first.path / name).read_bytes()
    assert prepared(tmp_path / "third", files)[1][0].endswith("taken from the cache (hetpipe cache)")


def test_what_a_run_is_writing_is_not_removed(tmp_path, nothing_is_held, monkeypatch, hetpipe):
    files, cleared = text_files(tmp_path), []

    def split(*given):
        write_tokens(*given)
        (texts_folder() / ".unfinished-1").mkdir()  # of a run that was killed
        cleared.append(hetpipe("cache --clear"))

    monkeypatch.setattr("hetpipe.data.texts.write_tokens", split)
    assert prepared(tmp_path / "first", files)[1][0].endswith("kept in the cache (hetpipe cache)")
    (result,) = cleared
    assert result.code == 0 and "removed: tokens of 1 text," in result.out
    (said,) = " ".join(result.out.split()).split("skipped: ")[1:]
    assert said.startswith("unfinished: .unfinished-") and ": a run is writing it" in said
    assert [found.name[0] for found in texts_folder().iterdir() if found.is_dir()] != ["."]


def test_a_disk_that_does_not_give_what_it_holds_is_said_of_its_file(tmp_path, nothing_is_held):
    path = tmp_path / "a.txt"
    path.symlink_to("/proc/self/mem")  # opens, and its first page is not there: EIO
    reason = r"data file .*a\.txt cannot be read \(Input/output error\); check its disk"
    for read in (read_text_file, lambda path: list(text_lines(path)), lambda path: LongTexts.read([path])):
        with pytest.raises(InputError, match=reason):
            read(path)
    spec = model_spec("gpt2-tiny")
    vocabulary = train_vocabulary(["a b\n"], 300)
    reading = Reading(spec, spec.inputs, vocabulary, tmp_path / "template", tmp_path / "images", 16, 3)
    with pytest.raises(InputError, match=reason):
        LongTexts((path,), FileStates.of([path]), "0").write(tmp_path, reading)


def test_a_folder_on_another_file_system_has_copies(tmp_path, nothing_is_held, monkeypatch):
    files = text_files(tmp_path)
    first, _ = prepared(tmp_path / "first", files)
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    second, _ = prepared(tmp_path / "second", files)
    for name in ("tokens.bin", "tokens.json", "ends.bin"):
        assert (second.path / name).read_bytes() == (first.path / name).read_bytes()
        assert not (second.path / name).samefile(first.path / name)


def test_without_a_cache_to_write_tokens_are_in_the_run_folder(tmp_path, nothing_is_held, monkeypatch):
    (tmp_path / "no-folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-folder"))
    place, told = prepared(tmp_path / "run", text_files(tmp_path))
    assert told == [] and (place.path / "tokens.bin").stat().st_size > 10_000


def test_a_hash_is_known_of_the_same_file_alone_once_its_times_are_sure(tmp_path, monkeypatch):
    path = text_files(tmp_path)[0]
    monkeypatch.setattr("hetpipe.data.kept_tokens.SETTLED_S", 3600.0)
    found = LongTexts.read([path])
    assert known_sha256(FileStates.of([path])) is None  # it was written a moment ago
    monkeypatch.setattr("hetpipe.data.kept_tokens.SETTLED_S", -1.0)
    assert LongTexts.read([path]) == found and known_sha256(FileStates.of([path])) == found.sha256
    text = path.read_bytes()
    path.write_bytes(text[:-1] + b"!")
    assert known_sha256(FileStates.of([path])) is None
    assert LongTexts.read([path]).sha256 != found.sha256


def test_a_file_that_changes_meanwhile_is_refused(tmp_path, nothing_is_held):
    files = text_files(tmp_path)
    content = LongTexts.read(files)
    with files[0].open("a") as file:
        file.write("more")
    with pytest.raises(InputError, match=r"a\.txt was changed while it was read; begin again"):
        content.files.check_unchanged()


def test_a_listener_is_told_how_far_it_is(tmp_path, nothing_is_held):
    files = text_files(tmp_path)
    told: list[tuple[float, str]] = []
    with listening(lambda done, what: told.append((done, what))):
        prepared(tmp_path / "run", files)
    phases = list(dict.fromkeys(what for _, what in told))
    assert phases == [
        "reading the text",
        "training a vocabulary on the text",
        "splitting the text into tokens",
    ]
    for phase in phases:
        shares = [done for done, what in told if what == phase]
        assert shares[0] == 0.0 and shares == sorted(shares) and shares[-1] == 1.0 and shares[-2] > 0.9
    told.clear()
    LongTexts.read(files)
    assert not told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tokens of .*the cache")
def test_losses_are_those_of_held_texts_under_any_plan_and_on_resume(tmp_path, monkeypatch):
    files = tuple(map(str, text_files(tmp_path)))
    profile = made_up_profile("gpt2-tiny")
    settings = Settings(steps=4, learning_rate=1e-2, data=files, every=2, **GPT2.in_settings)
    whole, cut = chain_plan("gpt2-tiny", [0, 6], 4), chain_plan("gpt2-tiny", [0, 3, 6], 2)
    held = run(tmp_path / "held", whole, settings, profile)[1]
    monkeypatch.setattr(HELD, 0)
    assert run(tmp_path / "long", whole, settings, profile)[1] == held
    source = RunFolder(tmp_path / "long" / "run").checkpoints / "step-000002"
    for text in texts_folder().glob("*/*"):
        text.unlink()  # as hetpipe cache --clear does, while a run has it
    on = replace(settings, resume_from=str(source))
    assert run(tmp_path / "on", cut, on, profile)[1] == pytest.approx(held[2:], rel=2e-6)


def test_the_cache_is_listed_and_emptied(tmp_path, nothing_is_held, hetpipe):
    files = text_files(tmp_path)
    place, _ = prepared(tmp_path / "run", files)
    listed = hetpipe("cache --json").json["texts"]
    assert [text["files"] for text in listed] == [list(map(str, files))]
    kept = Path(listed[0]["path"])
    assert listed[0]["bytes"] == sum(path.stat().st_size for path in kept.iterdir())
    (texts_folder() / ".unfinished-1").mkdir()
    shown = hetpipe("cache").out
    assert "a.txt, b.jsonl" in shown and "unfinished: .unfinished-1" in shown
    assert "kept: tokens of 2 texts," in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if str(tmp_path) not in line)
    result = hetpipe("cache --clear")
    assert result.code == 0 and "removed: tokens of 2 texts," in result.out
    assert list(texts_folder().iterdir()) == []
    assert registered_task(place, TaskSettings("gpt2-tiny", 32, run=Settings(steps=1))).batch(0, 2)


def test_tokens_in_the_cache_that_cannot_be_read_are_skipped(tmp_path, hetpipe):
    """One folder of another user had ended the command, and nothing was listed or removed."""
    for name in ("one", "other"):
        (texts_folder() / name).mkdir(parents=True)
    (texts_folder() / "one" / "tokens.bin").symlink_to(tmp_path / "none")
    listed = hetpipe("cache")
    assert listed.code == 0 and "kept: tokens of 1 text," in listed.out
    assert "skipped: unfinished: one, tokens of 0 B: it cannot be read (No such" in listed.out
    assert hetpipe("cache --clear").code == 0 and list(texts_folder().iterdir()) == []


LIMITED = """
import resource, sys
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from hetpipe.data.kind import Reading
from hetpipe.data.kinds import kind_of
from hetpipe.models.huggingface import model_spec

vocabulary = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": 2}, unk_token="a"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
vocabulary.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
place = Path(sys.argv[1])

def read(spec, paths):
    reading = Reading(spec, spec.inputs, vocabulary, place / "template", place / "images", 16, 3)
    kind = kind_of(paths, spec)
    kind.read(paths, spec).write(place, reading)
    return kind.load(place, reading)

given = []
for argument in sys.argv[3:]:
    model, _, names = argument.partition("=")
    given.append((model_spec(model), [Path(name) for name in names.split(",")]))
for spec, paths in given:
    small = [path.with_name(f"small-{path.name}") for path in paths]
    read(spec, small)  # so that all modules and threads are there
used = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[2]),) * 2)
for spec, paths in given:
    samples = read(spec, paths)
    print(paths[0].name, samples.num_samples, samples.batch(10**6, 4).input_ids.shape, flush=True)
    try:
        paths[0].read_bytes()
    except MemoryError:
        print("too large to hold", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits what Linux limits")
def test_files_larger_than_memory_are_read_in_little(tmp_path):
    """27 MiB each in 24 MiB beside what the process has, in which the same file cannot even be read."""
    rest = " " * 4000
    lines = {
        "lines.txt": rest + "a b\n",
        "one-line.txt": rest + "a b",
        "rows.jsonl": json.dumps({"text": "a b", "more": rest}) + "\n",
        "chats.jsonl": json.dumps({"prompt": "a", "completion": "b", "more": rest}) + "\n",
        "labels.jsonl": json.dumps({"text": rest + "a b", "label": 1}) + "\n",
        "tags.jsonl": json.dumps({"tokens": [rest + "a", "b"], "tags": [0, 1]}) + "\n",
        "pairs.jsonl": json.dumps({"source": "a", "target": rest + "b"}) + "\n",
        "side.en": f"a{rest}\r\n",
        "side.de": f"b{rest}\n",
    }
    for name, line in lines.items():
        (tmp_path / name).write_text(line * 7_000)
        (tmp_path / f"small-{name}").write_text(line * 100)
        assert (tmp_path / name).stat().st_size > 26 << 20
    (tmp_path / "place").mkdir()
    for name, architecture in MODELS.items():
        save_other(tmp_path / name, architecture, **({"eos_token_id": 1} if name == "pairs" else {}))
    given = {name: [name] for name in lines if name != "side.de"}
    given["side.en"].append("side.de")
    model_of = {name: str(tmp_path / name) for name in MODELS} | {"side": str(tmp_path / "pairs")}
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            LIMITED,
            str(tmp_path / "place"),
            str(24 << 20),
            *(
                f"{model_of.get(Path(name).stem, 'gpt2-tiny')}="
                + ",".join(str(tmp_path / each) for each in names)
                for name, names in given.items()
            ),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    told = result.stdout.splitlines()
    assert told[1::2] == ["too large to hold"] * len(given)
    assert [line.split()[0] for line in told[::2]] == list(given)
    assert all(int(line.split()[1]) > 800 and line.endswith("(4, 16)") for line in told[::2])


def test_a_full_disk_is_said_in_one_line(tmp_path, nothing_is_held):
    path = tmp_path / "a.txt"
    path.write_text("a b\n" * 200_000)
    content, vocabulary = LongTexts.read([path]), train_vocabulary(["a b\n"], 300)
    spec = model_spec("gpt2-tiny")
    reading = Reading(spec, spec.inputs, vocabulary, tmp_path / "template", tmp_path / "images", 16, 3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(InputError, match="tokens of the texts cannot be written below") as error:
            content.write(tmp_path, reading)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "make room there (hetpipe cache --clear), or name a folder on another disk" in str(error.value)
    assert str(texts_folder()) in str(error.value) and "\n" not in str(error.value)
    assert not any(found.is_dir() for found in texts_folder().iterdir())
