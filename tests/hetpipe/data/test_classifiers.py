"""Sequence, token and image classification: what is read and refused; losses are those of transformers."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from cost_model.errors import InputError
from hetpipe import cli
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.figures import figures_of, spans_of
from hetpipe.data.image_files import read_images
from hetpipe.data.kinds import read_data
from hetpipe.data.task import prepare_data, registered_task
from hetpipe.models.huggingface import model_spec
from hetpipe.models.huggingface_folder import CLASSIFIERS_TESTED
from hetpipe.models.names import model_entry
from hetpipe.models.split_check import check_split
from hetpipe.models.tasks import Task
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import CLASSIFIERS, save_other
from runs import EMULATED_CLUSTER, chain_plan, cluster_file, made_up_profile, run

TEXTS = [
    {"text": "The ship sails far away.", "label": 0},
    {
        "text": "A long day at sea, and a longer night; no sleep.",
        "text_pair": "Who?",
        "label": "LABEL_2",
    },
    {"text": "Grey.", "label": 1},
] * 6
TAGGED = [
    {"tokens": ["The", "ship", "sails"], "tags": [0, 1, 2]},
    {"tokens": ["Grey", "unending", "waters", "everywhere", "around"], "tags": ["LABEL_1", 2, 0, 0, 1]},
] * 8
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
NO_DROPOUT = {
    "bert": dict.fromkeys(DROPOUTS, 0.0),
    "roberta": dict.fromkeys(DROPOUTS, 0.0),
    "deberta-v2": dict.fromkeys(DROPOUTS, 0.0),
    "distilbert": {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
LENGTH = 12


def lines_file(path: Path, lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def data_file(folder: Path, task: Task, shape=(8, 8)) -> Path:
    if task is not Task.IMAGE_CLASSIFICATION:
        return lines_file(folder / "data.jsonl", TEXTS if task is Task.SEQUENCE_CLASSIFICATION else TAGGED)
    draws = np.random.default_rng(3)
    images = draws.integers(0, 256, (18, *shape), np.uint8)
    np.savez(folder / "data.npz", images=images, labels=draws.integers(0, 10, 18))
    return folder / "data.npz"


def saved(folder: Path, architecture: str):
    return save_other(folder, architecture, **NO_DROPOUT.get(CLASSIFIERS[architecture][0], {}))


def test_the_command_line_lists_the_classifiers_that_are_tested_here():
    assert sorted(CLASSIFIERS_TESTED) == sorted(CLASSIFIERS)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_the_split_of_a_classifier_is_exact(tmp_path, architecture):
    save_other(tmp_path / "mine", architecture)
    report = check_split(model_spec(str(tmp_path / "mine")))
    assert report.passed, report.reason


def test_a_model_of_stages_is_checked_by_a_narrow_copy_with_as_many(tmp_path):
    sizes = {"hidden_sizes": [96, 192, 384], "depths": [1, 3, 9], "num_stages": 3}
    save_other(tmp_path / "mine", "ConvNextForImageClassification", **sizes)
    spec = model_spec(str(tmp_path / "mine"))
    small = spec.build_shrunk()
    assert [len(stage.layers) for stage in small.convnext.encoder.stages] == [1, 2, 2]
    assert sum(parameter.numel() for parameter in small.parameters()) < 10**5
    assert check_split(spec).passed


ALIKE = (
    "DistilBertForSequenceClassification",
    "DebertaV2ForSequenceClassification",
    "LlamaForSequenceClassification",
)
"""Learned as those below are; that their split is exact and their mask hides what fills up is shown above."""
TRAINED = (
    "BertForSequenceClassification",
    "GPT2ForSequenceClassification",
    "RobertaForTokenClassification",
    "ViTForImageClassification",
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ALIKE),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(filling|longer than|images of)")
@pytest.mark.parametrize("architecture", TRAINED)
def test_losses_and_figures_are_those_of_transformers_under_any_plan(tmp_path, architecture):
    """Of a batch the loss that the model itself gives; held out, of each sample alone, without padding."""
    model = saved(tmp_path / "mine", architecture)
    entry = model_entry(str(tmp_path / "mine"))
    data = str(data_file(tmp_path, entry.task))
    settings = Settings(
        steps=2, learning_rate=1e-3, model_folder=entry.place, data=(data,), eval_data=(data,), eval_every=1,
        best="accuracy",
    )  # fmt: skip
    profile = replace(made_up_profile(str(tmp_path / "mine")), model=entry.name, sequence_length=LENGTH)
    plans = {"whole": chain_plan(entry.name, [0, 5], 16), "cut": chain_plan(entry.name, [0, 2, 5], 3)}
    losses = {name: run(tmp_path / name, plan, settings, profile)[1] for name, plan in plans.items()}

    done = RunFolder(tmp_path / "whole" / "run")
    task = registered_task(done, TaskSettings(entry.name, LENGTH, run=settings))
    inputs, labels = task.batch(0, 16)
    with torch.no_grad():
        expected = model.train()(**inputs, labels=labels).loss.item()
    assert losses["whole"][0] == pytest.approx(expected, rel=1e-6)
    assert losses["cut"] == pytest.approx(losses["whole"], rel=2e-6)
    rows = {name: RunFolder(tmp_path / name / "run").read_metrics()[-1] for name in plans}
    assert rows["cut"]["eval_loss"] == pytest.approx(rows["whole"]["eval_loss"], rel=2e-6)
    assert rows["cut"]["eval_accuracy"] == rows["whole"]["eval_accuracy"]

    exported = tmp_path / "exported"
    assert cli.main(["export", str(done.path), "-o", str(exported)]) == 0
    trained = type(model).from_pretrained(exported).eval()
    right = every = total = 0.0
    for sample in range(task.held_out.num_samples):
        inputs, labels = task.held_out.batch(sample, 1)
        if "attention_mask" in inputs:
            count = int(inputs.pop("attention_mask").sum())
            inputs = {name: value[:, :count] for name, value in inputs.items()}
            labels = labels[:, :count] if labels.dim() == 2 else labels
        with torch.no_grad():
            found = trained(**inputs, labels=labels)
        counted = int((labels != IGNORE_LABEL).sum())
        total += float(found.loss) * counted
        every += counted
        right += int((found.logits.argmax(-1) == labels).sum())
    assert rows["whole"]["eval_loss"] == pytest.approx(total / every, rel=1e-5)
    assert rows["whole"]["eval_accuracy"] == pytest.approx(right / every)


def test_a_text_becomes_what_transformers_makes_of_it(tmp_path):
    """Ids, mask and types of the exported tokenizer, pairs and what is cut included."""
    save_other(tmp_path / "mine", "BertForSequenceClassification")
    entry = model_entry(str(tmp_path / "mine"))
    settings = TaskSettings(
        entry.name,
        LENGTH,
        run=Settings(steps=1, model_folder=entry.place, data=(str(data_file(tmp_path, entry.task)),)),
    )
    folder = RunFolder(tmp_path / "run")
    told = prepare_data(folder, settings)
    assert any("6 of 18 texts are longer than 12 tokens" in said for said in told)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder.vocabulary),
        pad_token="[PAD]",
        model_input_names=["input_ids", "attention_mask", "token_type_ids"],
    )
    inputs, labels = registered_task(folder, settings).batch(0, 18)
    padded = {"truncation": True, "max_length": LENGTH, "padding": "max_length"}
    expected = [
        theirs(TEXTS[0]["text"], **padded),
        theirs(TEXTS[2]["text"], **padded),
        theirs(TEXTS[1]["text"], TEXTS[1]["text_pair"], **padded),
    ]
    for row, label in enumerate(labels.tolist()):
        assert all(inputs[name][row].tolist() == expected[label][name] for name in inputs), row


def test_entities_are_counted_by_hand():
    names = ("O", "B-who", "I-who", "B-where", "I-where")
    assert list(spans_of(["I-who", "B-who", "O", "B-where", "I-who"])) == [
        ("who", 0, 1), ("who", 1, 2), ("where", 3, 4), ("who", 4, 5),
    ]  # fmt: skip
    figures = figures_of(Task.TOKEN_CLASSIFICATION, names)
    # there: who [0, 2), where [3, 4). told: who [0, 2), where [3, 5), so one of two is right, of two told
    labels = torch.tensor([[IGNORE_LABEL, 1, 2, 0, 3, 0]])
    told = torch.tensor([[4, 1, 2, 0, 3, 4]])
    outputs = torch.nn.functional.one_hot(told, 5).float()
    counts = figures.joined([figures.count(outputs, labels), (0.0,) * 5])
    assert counts == [1, 2, 2, 4, 5]
    assert figures.of(counts) == {"f1": 0.5, "accuracy": 0.8}
    plain = figures_of(Task.TOKEN_CLASSIFICATION, ("O", "name", "word", "x", "y"))
    assert plain.count(outputs, labels)[:3] == (3.0, 4.0, 3.0)  # each word is one, but those that are "O"


def idx(array: np.ndarray) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    return head + array.tobytes()


def test_mnist_is_read_by_the_path_of_its_images(tmp_path):
    images = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([7, 2], np.uint8)))
    found, labels = read_images(tmp_path / "train-images-idx3-ubyte.gz")
    assert (found == images).all() and labels.tolist() == [7, 2]
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([7, 2], np.uint8))[:-1])
    with pytest.raises(InputError, match="has 1 bytes of data, and its head says 2; copy it again"):
        read_images(tmp_path / "train-images-idx3-ubyte.gz")
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(InputError, match=r"its labels are not beside it; put train-labels-idx1-ubyte.gz"):
        read_images(tmp_path / "train-images-idx3-ubyte.gz")


def test_images_are_normalised_as_the_exported_processor_does_and_resized_by_a_rule(tmp_path):
    save_other(tmp_path / "mine", "ViTForImageClassification")
    entry = model_entry(str(tmp_path / "mine"))
    data = data_file(tmp_path, entry.task)
    settings = TaskSettings(entry.name, run=Settings(steps=1, model_folder=entry.place, data=(str(data),)))
    folder = RunFolder(tmp_path / "run")
    assert prepare_data(folder, settings)[-1].startswith("18 images of")
    inputs, _ = registered_task(folder, settings).batch(0, 18)
    images = np.load(data)["images"]
    expected = (images[:, None] / 255 - 0.5) / 0.5
    order = sorted(range(18), key=lambda row: inputs["pixel_values"][row].tolist())
    theirs = sorted(expected.astype(np.float32).tolist())
    assert np.allclose([inputs["pixel_values"][row].numpy() for row in order], theirs, atol=1e-6)
    kept = json.loads(folder.image_processor.read_text())
    assert kept["size"] == {"height": 8, "width": 8} and kept["image_mean"] == [0.5]

    large = data_file(tmp_path, entry.task, (16, 16))
    assert "images are resized from 16 x 16 to 8 x 8 (bilinear)" in prepare_data(folder, settings)
    assert large == data
    data_file(tmp_path, entry.task, (8, 16))
    with pytest.raises(InputError, match=r"images are 8 x 16, .* takes 8 x 8, which is of another shape"):
        prepare_data(folder, settings)


@pytest.mark.parametrize(
    ("architecture", "line", "reason"),
    [
        ("BertForSequenceClassification", '{"text": "a", "label": 3}', "3 is no label of the model"),
        ("BertForSequenceClassification", '{"text": "a", "label": "b"}', r"has 0 to 2 \(LABEL_0, LABEL_1"),
        ("BertForSequenceClassification", '{"text": "a", "label": true}', "true is no label"),
        ("BertForSequenceClassification", '{"text": " ", "label": 0}', '"text" is empty'),
        ("BertForSequenceClassification", '{"text": "a"}', "holds text, and .* learns sequence-cla"),
        ("BertForTokenClassification", '{"tokens": ["a"], "tags": [0, 1]}', "has 1 words and 2 tags"),
        ("BertForTokenClassification", '{"tokens": [3], "tags": [0]}', "3 is no word"),
        ("BertForTokenClassification", '{"tokens": "a", "tags": [0]}', "lists of one length"),
        ("BertForTokenClassification", '{"words": ["a"]}', r'has \["words"\]; give JSON lines with "tokens"'),
        ("ViTForImageClassification", '{"text": "a"}', "learns image-classification; give an .npz"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_learned_is_one_clear_line(tmp_path, architecture, line, reason):
    save_other(tmp_path / "mine", architecture)
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=reason) as error:
        read_data([path], model_entry(str(tmp_path / "mine")))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"images": np.zeros((2, 8, 8), np.uint8)}, "holds images and no 'labels'"),
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([1])}, "2 images, and labels"),
        ({"images": np.full((1, 8, 8), 2.0), "labels": np.array([1])}, "values beyond 0 to 1"),
        ({"images": np.zeros((1, 8), np.uint8), "labels": np.array([1])}, r"images are \[1, 8\]"),
        ({"images": np.zeros((1, 8, 8), np.uint8), "labels": np.array([10])}, "label 10 is none of the"),
        ({"images": np.array([None]), "labels": np.array([10])}, "is no whole .npz of plain arrays"),
    ],
)  # fmt: skip
def test_images_that_cannot_be_used_are_one_clear_line(tmp_path, arrays, reason):
    save_other(tmp_path / "mine", "ViTForImageClassification")
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(InputError, match=reason):
        read_data([tmp_path / "data.npz"], model_entry(str(tmp_path / "mine")))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pad_token_id": None}, "names no pad_token_id, the token that shorter texts are filled up with"),
        ({"problem_type": "regression", "num_labels": 1}, "problem_type is 'regression', and one label"),
        ({"num_labels": 1}, r"id2label has the numbers \[0\]; give two or more"),
    ],
)  # fmt: skip
def test_a_configuration_without_what_a_classifier_needs_is_refused(tmp_path, changes, reason):
    save_other(tmp_path / "mine", "GPT2ForSequenceClassification", **changes)
    with pytest.raises(InputError, match=reason):
        model_spec(str(tmp_path / "mine"))


def test_batch_normalisation_is_refused_in_a_true_sentence(tmp_path):
    save_other(tmp_path / "mine", "?ResNetForImageClassification")
    with pytest.raises(InputError, match=r"BatchNorm2d, whose result depends on the microbatch; ResNetFor"):
        model_spec(str(tmp_path / "mine"))


def test_a_run_without_data_or_with_a_figure_that_is_not_there_is_one_line(tmp_path, capsys):
    save_other(tmp_path / "mine", "BertForSequenceClassification")
    data = str(data_file(tmp_path, Task.SEQUENCE_CLASSIFICATION))
    run_it = ["run", "--model", str(tmp_path / "mine"), "--cluster", "none.toml"]
    run_it[-1] = str(cluster_file(tmp_path, EMULATED_CLUSTER))
    assert cli.main(run_it) == 2
    assert "learns sequence-classification; give --data: JSON lines" in capsys.readouterr().err
    assert cli.main([*run_it, "--data", data, "--eval-data", data, "--best", "f1"]) == 2
    assert "--best is 'f1', and of held-out data there is loss or accuracy" in capsys.readouterr().err
