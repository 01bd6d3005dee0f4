"""Encoder-decoders on pairs of texts: what is read and refused; losses, tokens and BLEU are transformers'."""

import errno
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import polib
import pytest
import sacrebleu
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE

from cost_model.errors import InputError
from hetpipe import cli
from hetpipe.data import bleu
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.kind import Reading
from hetpipe.data.kinds import read_data
from hetpipe.data.padded_texts import cut_at
from hetpipe.data.pair_files import read_pairs
from hetpipe.data.task import prepare_data, registered_task
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.huggingface_folder import TRANSLATORS_TESTED
from hetpipe.models.names import model_entry
from hetpipe.models.split_check import check_split
from hetpipe.profiling.layer_estimates import estimated_profile
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import TRANSLATORS, save_other
from partition.plan import Pipeline, Plan, Stage
from runs import EMULATED_CLUSTER, chain_plan, cluster_file, made_up_profile, run

PAIRS = [
    ("The ship sails far away.", "Das Schiff segelt weit fort."),
    ("A long day at sea, and a longer night; no sleep.", "Ein langer Tag."),
    ("Grey.", "Grau."),
] * 6
NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "dropout_rate"), 0.0)
LENGTH = 14


def pairs_file(folder: Path, pairs=PAIRS) -> Path:
    lines = [json.dumps({"source": source, "target": target}) for source, target in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "pairs.jsonl"


def without_dropout(architecture):
    config = getattr(transformers, architecture).config_class()
    return {key: value for key, value in NO_DROPOUT.items() if hasattr(config, key)}


def saved_settings(folder: Path, architecture, **changes):
    """Write a model and pairs; return the model, its entry, and what a task for both is made of."""
    model = save_other(folder / "mine", architecture, **changes)
    entry = model_entry(str(folder / "mine"))
    settings = Settings(steps=1, model_folder=entry.place, data=(str(pairs_file(folder)),))
    return model, entry, TaskSettings(entry.name, LENGTH, run=settings)


def test_the_command_line_lists_the_encoder_decoders_that_are_tested_here():
    assert sorted(TRANSLATORS_TESTED) == sorted(TRANSLATORS)


@pytest.mark.parametrize("architecture", TRANSLATORS)
def test_the_split_is_exact_and_every_layer_has_the_weights_and_buffers_that_were_saved(
    tmp_path, architecture
):
    model = save_other(tmp_path / "mine", architecture)
    spec = model_spec(str(tmp_path / "mine"))
    report = check_split(spec)
    assert report.passed, report.reason
    chain = ChainModel.from_spec(spec)
    assert chain.weights.notes() == []  # nothing begins at random
    found = {}
    for layer in range(chain.num_layers):
        found |= chain.materialise([layer], seed=0).owned_parameters()
    saved = dict(model.named_parameters())
    saved |= {name: value for name, value in model.named_buffers() if name == "final_logits_bias"}
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.mark.parametrize("architecture", TRANSLATORS)
def test_the_decoder_is_given_what_transformers_gives_it(tmp_path, architecture):
    model, _, settings = saved_settings(tmp_path, architecture)
    told = prepare_data(RunFolder(tmp_path / "run"), settings)
    assert any("6 of 18 pairs have a side longer than 14 tokens" in said for said in told), told
    inputs, labels = registered_task(RunFolder(tmp_path / "run"), settings).batch(0, 18)
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None:  # of classes that call it in their forward alone
        shift = sys.modules[type(model).__module__].shift_tokens_right
        prepare = partial(shift, pad_token_id=0, decoder_start_token_id=model.config.decoder_start_token_id)
    expected = prepare(labels.clone())
    assert torch.equal(inputs["decoder_input_ids"], expected)
    assert ((labels != IGNORE_LABEL).sum(1) > 1).all()


TRAINED = ("MarianMTModel", "T5ForConditionalGeneration")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(filling|longer than)")
@pytest.mark.parametrize("architecture", TRAINED)
def test_losses_and_bleu_are_those_of_transformers_under_any_plan(tmp_path, architecture):
    """Of a batch the loss that the model itself gives; held out, of each pair alone, without padding."""
    model, entry, _ = saved_settings(tmp_path, architecture, **without_dropout(architecture))
    data = str(tmp_path / "pairs.jsonl")
    settings = Settings(
        steps=30, learning_rate=1e-2, decay="constant", model_folder=entry.place, data=(data,),
        eval_data=(data,), eval_every=15, best="bleu",
    )  # fmt: skip
    profile = replace(made_up_profile(str(tmp_path / "mine")), model=entry.name, sequence_length=LENGTH)
    last = profile.num_layers
    cut = Stage(("here/0",), (0, 4), 2), Stage(("here/1",), (4, last), 1)
    beside = Stage(("here/2",), (0, last), 1)
    pipelines = Pipeline(3, 10, cut), Pipeline(4, 6, (beside,))
    plans = {
        "whole": chain_plan(entry.name, [0, last], 16),
        "cut": Plan("manual", entry.name, 16, pipelines),
    }
    losses = {name: run(tmp_path / name, plan, settings, profile)[1] for name, plan in plans.items()}

    done = RunFolder(tmp_path / "whole" / "run")
    task = registered_task(done, TaskSettings(entry.name, LENGTH, run=settings))
    inputs, labels = task.batch(0, 16)
    with torch.no_grad():
        expected = model.train()(**inputs, labels=labels).loss.item()
    assert losses["whole"][0] == pytest.approx(expected, rel=1e-6)
    assert losses["cut"] == pytest.approx(losses["whole"], rel=2e-5)
    rows = {name: RunFolder(tmp_path / name / "run").read_metrics() for name in plans}
    evaluated = {
        name: [row["eval_loss"] for row in found if "eval_loss" in row] for name, found in rows.items()
    }
    assert evaluated["cut"] == pytest.approx(evaluated["whole"], rel=2e-5)
    assert rows["cut"][-1]["eval_bleu"] == pytest.approx(rows["whole"][-1]["eval_bleu"])
    assert [row["step"] for row in rows["whole"] if "eval_bleu" in row] == [15, 30]

    exported = tmp_path / "exported"
    assert cli.main(["export", str(done.path), "-o", str(exported)]) == 0
    trained, loading = type(model).from_pretrained(exported, output_loading_info=True)
    assert not any(loading.values()), loading
    trained = trained.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    total, terms, texts, references = 0.0, 0, [], []
    for sample in range(task.held_out.num_samples):
        inputs, labels = task.held_out.batch(sample, 1)
        size, learned = int(inputs["attention_mask"].sum()), int((labels != IGNORE_LABEL).sum())
        with torch.no_grad():
            found = trained(input_ids=inputs["input_ids"][:, :size], labels=labels[:, :learned])
            written = trained.generate(
                input_ids=inputs["input_ids"][:, :size], attention_mask=inputs["attention_mask"][:, :size],
                decoder_input_ids=inputs["decoder_input_ids"][:, :1], do_sample=False, num_beams=1,
                max_new_tokens=LENGTH, use_cache=False,
            )  # fmt: skip
        total, terms = total + float(found.loss) * learned, terms + learned
        texts.append(tokenizer.decode(written[0], skip_special_tokens=True))
        references += task.references.texts(sample, 1)
    assert rows["whole"][-1]["eval_loss"] == pytest.approx(total / terms, rel=1e-5)
    assert set(references) == {target for _, target in PAIRS}
    expected_bleu = sacrebleu.corpus_bleu(texts, [references]).score
    assert rows["whole"][-1]["eval_bleu"] == pytest.approx(expected_bleu)
    assert expected_bleu > 5  # it learned something to compare


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(filling|longer than)")
def test_bleu_is_the_same_where_the_loss_projects_in_chunks_and_is_told_at_the_end_alone(tmp_path):
    _, entry, _ = saved_settings(
        tmp_path, "T5ForConditionalGeneration", **without_dropout("T5ForConditionalGeneration")
    )
    data = str(tmp_path / "pairs.jsonl")
    settings = Settings(
        steps=4, learning_rate=1e-2, model_folder=entry.place, data=(data,), eval_data=(data,), eval_every=2
    )
    profile = replace(made_up_profile(str(tmp_path / "mine")), model=entry.name, sequence_length=LENGTH)
    plan = chain_plan(entry.name, [0, 3, profile.num_layers], 4)
    rows = []
    for chunks in (None, 3):
        run(tmp_path / str(chunks), plan, settings, replace(profile, loss_chunks=chunks))
        rows.append(RunFolder(tmp_path / str(chunks) / "run").read_metrics())
    assert [[row["step"] for row in found if "eval_bleu" in row] for found in rows] == [[4], [4]]
    assert rows[0][-1]["eval_bleu"] == pytest.approx(rows[1][-1]["eval_bleu"])
    assert rows[0][-1]["eval_loss"] == pytest.approx(rows[1][-1]["eval_loss"], rel=1e-5)


CATALOGUE = """
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Plural-Forms: nplurals=2; plural=(n > 1);\\n"

msgid "Log out"
msgstr "Déconnexion"

msgid "%(count)d day"
msgid_plural "%(count)d days"
msgstr[0] "%(count)d jour"
msgstr[1] "%(count)d jours"

#, fuzzy
msgid "Maybe"
msgstr "Peut-être"

msgid "Not yet"
msgstr ""

#~ msgid "Gone"
#~ msgstr "Parti"
"""
TRANSLATED = [
    ("%(count)d day", "%(count)d jour"),
    ("%(count)d days", "%(count)d jours"),
    ("Log out", "Déconnexion"),
]


def test_what_a_gettext_catalogue_translates_is_read_from_both_of_its_forms(tmp_path):
    (tmp_path / "fr.po").write_text(CATALOGUE, encoding="utf-8")
    polib.pofile(str(tmp_path / "fr.po")).save_as_mofile(str(tmp_path / "fr.mo"))
    assert sorted(read_pairs([tmp_path / "fr.po"])) == TRANSLATED
    assert sorted(read_pairs([tmp_path / "fr.mo"])) == TRANSLATED
    many = CATALOGUE.replace('msgstr[1] "%(count)d jours"', 'msgstr[1] "%(count)d jours"\nmsgstr[2] "x"')
    (tmp_path / "many.po").write_text(many, encoding="utf-8")
    assert sorted(read_pairs([tmp_path / "many.po"])) == [TRANSLATED[0], TRANSLATED[2]]


def test_other_forms_of_pairs_are_read(tmp_path):
    (tmp_path / "a.tsv").write_text("one\teins\n\ntwo\tzwei\n")
    (tmp_path / "b.en").write_text("three\n\nfour\n")
    (tmp_path / "b.de").write_text("drei\n\nvier\n")
    (tmp_path / "c.jsonl").write_text(
        '{"translation": {"en": "five", "de": "fünf"}}\n{"translation": {"de": "sechs", "en": "six"}}\n'
    )
    found = list(read_pairs([tmp_path / name for name in ("a.tsv", "b.en", "b.de", "c.jsonl")]))
    assert sorted(found) == sorted(
        [
            ("one", "eins"),
            ("two", "zwei"),
            ("three", "drei"),
            ("four", "vier"),
            ("five", "fünf"),
            ("six", "sechs"),
        ]
    )


def test_marks_within_a_line_end_none(tmp_path):
    """Two texts would be out of step, and equal in number, where U+2028 and others ended lines."""
    source, target = "one\u2028more\x0c", "eins\x85"
    (tmp_path / "a.en").write_text(f"{source}\r\ntwo\n", encoding="utf-8", newline="")
    (tmp_path / "a.de").write_text(f"{target}\nzwei", encoding="utf-8", newline="")
    (tmp_path / "a.tsv").write_text(f"{source}\t{target}\ntwo\tzwei\n", encoding="utf-8")
    expected = [(source, target), ("two", "zwei")]
    assert list(read_pairs([tmp_path / "a.en", tmp_path / "a.de"])) == expected
    assert list(read_pairs([tmp_path / "a.tsv"])) == expected


def test_targets_that_translations_are_compared_with_may_hold_any_mark(tmp_path):
    _, _, settings = saved_settings(tmp_path, "MarianMTModel")
    targets = [f"eins\u2028zwei\x85drei\u2029\x1c{number}" for number in range(4)]
    pairs = str(pairs_file(tmp_path, [("one", target) for target in targets]))
    settings = replace(settings, run=replace(settings.run, eval_data=(pairs,)))
    prepare_data(RunFolder(tmp_path / "run"), settings)
    references = registered_task(RunFolder(tmp_path / "run"), settings).references
    assert sorted(references.texts(0, 4)) == targets


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", '{"source": "a", "target": ""}', "line 1: one of the two texts is empty"),
        ("a.jsonl", '{"source": "a", "target": 3}', '"target" is 3; give a text'),
        ("a.jsonl", '{"text": "a"}', r'holds text, and .* learns translation; give JSON lines with "source"'),
        ("a.jsonl", '{"translation": {"en": "a"}}', "give texts in two languages"),
        ("a.jsonl", '{"source": "a", "target": "b"}\n{"source": "a"}', 'line 2: has .* and no "target"'),
        ("a.tsv", "a\tb\tc", "line 1: has 3 columns"),
        ("a.txt", "a", "has one side of a translation; give the file with the other after it"),
        ("a.po", "msgid", "is no gettext catalogue, or damaged"),
        ("a.mo", "x" * 40, "is no gettext catalogue, or damaged"),
        ("a.po", 'msgid "a"\nmsgstr ""', "nothing in it is translated"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_one_clear_line(tmp_path, name, content, reason):
    save_other(tmp_path / "mine", "MarianMTModel")
    (tmp_path / name).write_text(content + "\n")
    with pytest.raises(InputError, match=reason) as error:
        read_data([tmp_path / name], model_entry(str(tmp_path / "mine")))
    assert "\n" not in str(error.value)


def test_two_texts_out_of_step_and_two_directions_are_refused(tmp_path):
    (tmp_path / "b.en").write_text("three\nfour\n")
    (tmp_path / "b.de").write_text("drei\n")
    with pytest.raises(InputError, match=r"b.en has 2 lines and .*b.de 1; give two whose lines"):
        list(read_pairs([tmp_path / "b.en", tmp_path / "b.de"]))
    for name, languages in (("c", ("en", "de")), ("d", ("de", "en"))):
        line = json.dumps({"translation": dict.fromkeys(languages, "x")})
        (tmp_path / f"{name}.jsonl").write_text(line + "\n")
    with pytest.raises(InputError, match="is from de to en, another file from en to de"):
        list(read_pairs([tmp_path / "c.jsonl", tmp_path / "d.jsonl"]))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError("much")])
def test_a_full_disk_is_not_told_as_a_length_that_cannot_be_cut_to(tmp_path, error):
    """More tokens had been asked for."""
    spec = model_spec("gpt2-tiny")
    files = tmp_path / "template", tmp_path / "images"
    reading = Reading(spec, spec.inputs, Tokenizer(BPE()), *files, 8, 3)
    with pytest.raises(type(error), match=r"No space left|much"), cut_at(reading):
        raise error


def test_held_out_translations_are_read_in_the_direction_of_the_training_data(tmp_path):
    """Each file's first line had decided for itself: a model was tested on what it does not learn, unsaid."""
    _, _, settings = saved_settings(tmp_path, "MarianMTModel")
    files = {}
    for name, texts in (
        ("train", {"en": "one", "de": "eins"}),
        ("turned", {"de": "zwei", "en": "two"}),
        ("other", {"de": "zwei", "fr": "deux"}),
    ):
        files[name] = str(tmp_path / f"{name}.jsonl")
        Path(files[name]).write_text(4 * (json.dumps({"translation": texts}) + "\n"))

    def prepared(held_out):
        run = replace(settings.run, data=(files["train"],), eval_data=(files[held_out],))
        chosen = replace(settings, run=run)
        prepare_data(RunFolder(tmp_path / held_out), chosen)
        return registered_task(RunFolder(tmp_path / held_out), chosen)

    assert prepared("turned").references.texts(0, 4) == 4 * ["zwei"]
    with pytest.raises(InputError, match=r"other\.jsonl is from de to fr, and the training data from en"):
        prepared("other")


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("MarianMTModel", {"decoder_vocab_size": 600, "share_encoder_decoder_embeddings": False,
                           "tie_word_embeddings": False}, "decoder_vocab_size is 600, the other vocabulary"),
        ("M2M100ForConditionalGeneration", {"encoder_layerdrop": 0.1}, "encoder_layerdrop is 0.1, and"),
        ("BartForConditionalGeneration", {"decoder_start_token_id": None}, "decoder_start_token_id is None"),
        ("T5ForConditionalGeneration", {"pad_token_id": None}, "names no pad_token_id"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_not_trained_here_is_refused(tmp_path, architecture, changes, reason):
    save_other(tmp_path / "mine", architecture, **changes)
    with pytest.raises(InputError, match=reason):
        model_spec(str(tmp_path / "mine"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["MarianForCausalLM"]}, "has an encoder and a decoder, which are trained for tra"),
        ({"is_encoder_decoder": False}, "and is_encoder_decoder is not true there"),
        ({"encoder_layers": 3000}, "encoder_layers is 3.00e.3; at most 2000 blocks"),
    ],
)
def test_a_wrong_class_for_the_configuration_is_one_line(tmp_path, changes, reason):
    save_other(tmp_path / "mine", "MarianMTModel")
    path = tmp_path / "mine" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=reason):
        model_spec(str(tmp_path / "mine"))


def test_two_vocabularies_of_one_size_are_refused_by_what_the_tokenizer_says(tmp_path):
    apart = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    save_other(tmp_path / "mine", "MarianMTModel", **apart)
    assert model_spec(str(tmp_path / "mine")).task.translates  # two tables, which one tokenizer may serve
    (tmp_path / "mine" / "tokenizer_config.json").write_text('{"separate_vocabs": true}')
    with pytest.raises(InputError, match=r"tokenizer_config\.json: separate_vocabs is true, and one voc"):
        model_spec(str(tmp_path / "mine"))


def test_tokens_that_the_trained_vocabulary_has_otherwise_are_refused(tmp_path):
    _, _, settings = saved_settings(tmp_path, "MarianMTModel", eos_token_id=9)
    with pytest.raises(InputError, match=r"eos_token_id is 9, pad_token_id 0, .*: give 3, 0 and 0"):
        prepare_data(RunFolder(tmp_path / "run"), settings)


def test_a_run_without_data_or_with_what_cannot_be_told_is_one_line(tmp_path, capsys, monkeypatch):
    save_other(tmp_path / "mine", "MarianMTModel")
    data = str(pairs_file(tmp_path))
    cluster = str(cluster_file(tmp_path, EMULATED_CLUSTER))
    run_it = ["run", "--model", str(tmp_path / "mine"), "--cluster", cluster]
    assert cli.main(run_it) == 2
    assert "learns translation; give --data: JSON lines" in capsys.readouterr().err
    assert cli.main([*run_it, "--data", data, "--eval-data", data, "--best", "f1"]) == 2
    assert "--best is 'f1', and of held-out data there is loss or bleu" in capsys.readouterr().err
    assert cli.main([*run_it, "--data", data, "--lora", "r=4,alpha=8,targets=c_attn"]) == 2
    assert "LoRA target 'c_attn'" in capsys.readouterr().err
    assert (
        cli.main([*run_it, "--data", data, "--lora", "r=4,alpha=8,targets=q_proj", "--load-in", "8bit"]) == 2
    )
    assert "whose weights are not held in 4 or 8 bits here; leave --load-in out" in capsys.readouterr().err
    monkeypatch.setattr(bleu, "has_sacrebleu", lambda: False)
    assert cli.main([*run_it, "--data", data, "--eval-data", data, "--best", "bleu"]) == 2
    assert "sacrebleu computes, and it is not installed; pip install" in capsys.readouterr().err


def test_a_weight_of_three_layers_has_its_home_in_the_first_by_any_profile(tmp_path):
    """So that its gradients are summed among all three; measured profiles say it by the same code."""
    save_other(tmp_path / "mine", "MarianMTModel")
    entry = model_entry(str(tmp_path / "mine"))
    settings = TaskSettings(entry.name, LENGTH, run=Settings(steps=1, model_folder=entry.place))
    layers = estimated_profile(settings, ["V100"], sizes=(1, 2)).layers
    tied = {layer.name: layer.tied_to for layer in layers if layer.tied_to is not None}
    assert tied == {"decoder-embeddings": "embeddings", "head": "embeddings"}
    (tmp_path / "mine" / "model.safetensors").unlink()  # which says nothing of layers but how they begin
    assert estimated_profile(settings, ["V100"], sizes=(1, 2)).layers == layers
