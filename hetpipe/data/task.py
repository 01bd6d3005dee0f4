"""The training task of a run: a chain of layers, its data and its loss."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import SupportsFloat, cast

import torch
from pydantic import JsonValue
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor, nn

from cost_model.errors import InputError
from cost_model.strict_files import read_json
from hetpipe.data.bleu import BLEU, References, has_sacrebleu, missing_note
from hetpipe.data.figures import Figures, check_best, figure_names, figures_of
from hetpipe.data.held_out import SEED as HELD_OUT_SEED
from hetpipe.data.held_out import HeldOut, as_tensors
from hetpipe.data.kind import Content, DataKind, Reading, Samples
from hetpipe.data.kinds import (
    check_given,
    check_grouped,
    check_packed,
    data_sha256,
    kind_of,
    load_data,
    read_data,
    write_data,
)
from hetpipe.data.length_groups import FilledSamples, LengthGroups
from hetpipe.data.padded_texts import mark_ends
from hetpipe.data.pairs import PAIRS, PairDataset, Pairs, mark_ends_of_pairs
from hetpipe.data.questions import check_windows
from hetpipe.data.special_tokens import adopt_vocabulary, cuts_left, own_end
from hetpipe.data.token_files import TokenFiles
from hetpipe.data.vocabulary import load_vocabulary, save_vocabulary, train_vocabulary, vocabulary_sha256
from hetpipe.models.adapter_folder import AdapterFolder
from hetpipe.models.adapters import task_spec
from hetpipe.models.chain import ChainModel
from hetpipe.models.chunked_loss import ChunkedLoss
from hetpipe.models.huggingface import ModelSpec, model_spec
from hetpipe.models.huggingface_folder import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from hetpipe.models.kept_proofs import require_split
from hetpipe.models.loss import Loss, loss_sum
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.pretrained_weights import FolderWeights
from hetpipe.models.tasks import Task
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from partition.plan import Plan
from partition.plan_file import read_plan

Batch = Callable[[int, int], tuple[Mapping[str, Tensor], Tensor]]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of the trained parameters of one rank."""


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """Everything that a rank needs to know of the model and its data; made anew on every rank.

    batch: (first sample of the run, number of samples) -> inputs by name and labels, each [samples, ...], a
    pure function of the two. num_loss_tokens: how many tokens of so many samples the loss counts;
    count_terms, where given, counts them in the labels of a whole step instead. measured: what layers are
    measured with, None for batch.
    make_optimizer: None for AdamW with the hyper-parameters of the settings. rate_schedule: the learning rate
    of each step, counted from 0, as a multiple of the settings'; None for their warm-up and decay.
    data_sha256: of the texts, "" where nobody knows. held_out: what --eval-data or eval_data gives.
    predicts: where the loss is `loss_sum` of logits, of which task; None for any other loss. figures: what is
    told of held-out samples beside the loss; references: what translations of them are compared with.
    order: what decides the order of data of a user's own, None where they are others.
    """

    chain: ChainModel
    loss: Loss
    batch: Batch
    num_loss_tokens: Callable[[int], int]
    vocabulary_sha256: str = ""
    data_sha256: str = ""
    held_out: HeldOut | None = None
    count_terms: Callable[[Tensor], int] | None = None
    make_optimizer: OptimizerFactory | None = None
    rate_schedule: Callable[[int], float] | None = None
    predicts: Task | None = None
    figures: Figures | None = None
    references: References | None = None
    measured: Batch | None = None
    order: Mapping[str, JsonValue] | None = None

    def batch_to_measure(self, num_samples: int) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the samples with which layers are measured, of the shapes of the chain's example."""
        return (self.measured or self.batch)(0, num_samples)

    def loss_of(self, model: LayerModel, num_chunks: int | None) -> Loss:
        """Return the loss for these layers of the model, in chunks unless num_chunks is None.

        It may be asked for once of a model that owns its last layer.

        Raises: InputError if it cannot be computed in chunks.
        """
        if num_chunks is None or model.num_layers - 1 not in model.layers:
            return self.loss
        if self.predicts is None:
            raise InputError(
                f"--loss-chunks is {num_chunks}, and the loss is one of your own, which only it can cut; "
                "leave it out"
            )
        return ChunkedLoss(self.predicts, model, num_chunks)

    def own_settings(self, step: int) -> dict[str, JsonValue]:
        """Return what a user's order of data and rates decide from a step on, counted from 0."""
        return {} if self.order is None else own_settings(self.order, self.rate_schedule, step)

    def check_best(self, by: str) -> None:
        """Check that the best can be found by this figure.

        Raises: InputError naming those that there are.
        """
        counted = () if self.figures is None else self.figures.names
        check_best(by, counted if self.references is None else (*counted, BLEU))

    def term_weight(self, labels: Tensor) -> float:
        """Return what a token's loss counts in a step with these labels: 1 / (loss tokens of the step).

        Raises: InputError if the step has none.
        """
        if self.count_terms is None:
            return self.step_weight(len(labels))
        return weight_of(self.count_terms(labels), "a step")

    def step_weight(self, num_samples: int) -> float:
        """Return the same for a step of so many samples, where the labels are not asked."""
        return weight_of(self.num_loss_tokens(num_samples), "a step")

    def learning_rate(self, settings: Settings, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        Raises: InputError if the function of rates gives none.
        """
        if self.rate_schedule is None:
            return settings.learning_rate_at(step)
        return settings.learning_rate * _multiple(self.rate_schedule, step)


def own_settings(
    order: Mapping[str, JsonValue], rates: Callable[[int], float] | None, step: int
) -> dict[str, JsonValue]:
    """Return what a resume compares: the order of data, whether rates are a function, and its next one."""
    found = {**order, "own_rates": rates is not None}
    if rates is not None:
        with suppress(Exception):  # a table of rates may end with the steps
            found["next_rate"] = _multiple(rates, step)
    return found


def _multiple(rates: Callable[[int], float], step: int) -> float:
    given = rates(step)
    multiple = _number(given)
    if not 0 <= multiple < math.inf:
        raise InputError(
            f"rate_schedule gives {given!r} for step {step}, counted from 0; give a multiple of the learning "
            "rate, 0 or more"
        )
    return multiple


def weight_of(terms: object, whose: str) -> float:
    """Return what each of so many terms counts in the loss of a step, or whose it is.

    Raises: InputError if they are no finite number above zero.
    """
    number = _number(terms)
    if not 0 < number < math.inf:
        raise InputError(f"the loss of {whose} has {terms!r} terms; {whose} needs labels that count")
    return 1 / number


def _number(given: object) -> float:
    """Return what a user's function gives as a number; NaN where it is none."""
    with suppress(ValueError, RuntimeError):  # a tensor of several numbers
        return float(given) if isinstance(given, SupportsFloat) else math.nan
    return math.nan


TaskFactory = Callable[[RunFolder, TaskSettings], TrainingTask]


def check_length(spec: ModelSpec, sequence_length: int) -> None:
    """Refuse sequences that are longer than the model takes.

    Raises: InputError naming the longest.
    """
    most = spec.max_sequence_length
    if sequence_length > most:
        raise InputError(
            f"sequence length {sequence_length} is above {most}, the most that {spec.name} takes; give a "
            "shorter one (--sequence-length)"
        )


def prepare_data(
    folder: RunFolder,
    settings: TaskSettings,
    vocabulary_from: Path | None = None,
    *,
    trains: bool = True,
    plan: Plan | None = None,
) -> list[str]:
    """Write vocabulary and data into the run folder, once, before the ranks start; return what to tell.

    The vocabulary is that of the model's folder, where it holds one; else it is trained on the texts.

    vocabulary_from: the vocabulary of the checkpoint that the run goes on from. trains: whether the data are
    learned, or stand for those that will be while layers are measured. plan: of the run, where it is known.

    Raises: InputError for data or a model's folder that cannot be used.
    """
    spec = task_spec(settings)
    check_length(spec, settings.sequence_length)
    if not spec.tested:
        require_split(spec)
    FolderWeights.of(spec)
    _adapter_of(spec, settings)
    if trains:
        check_given(settings.data, spec)
    if settings.run.pack:
        for files in filter(None, (settings.data, settings.run.eval_data)):
            check_packed(files, spec)
    if settings.run.group_by_length:
        check_grouped(settings.data, spec)
    if settings.run.doc_stride is not None:
        check_windows(spec)
    kind, content = read_data(settings.data, spec)
    held_out = _read_held_out(settings.run.eval_data, spec, content) if settings.run.eval_data else None
    if spec.folder is not None:
        folder.write(folder.model_config, json.dumps(dict(spec.folder.config), indent=1) + "\n")
    if spec.task.reads_text:
        save_vocabulary(_vocabulary(spec, content, vocabulary_from), folder.vocabulary)
        if (config := _tokenizer_config(spec, vocabulary_from)) is not None:
            folder.write(folder.tokenizer_config, json.dumps(read_json(config), indent=1) + "\n")
    folder.path.mkdir(parents=True, exist_ok=True)
    check_best(settings.run.best, figure_names(spec.task))
    told = write_data(folder.path, kind, content, _reading(folder, settings, spec))
    told += _samples(folder, settings, spec, plan).notes()
    if held_out is not None:
        write_data(folder.held_out, *held_out, _reading(folder, settings, spec, HELD_OUT_SEED))
        _held_out(folder, settings, spec)
        told += missing_note() if spec.task.translates else []
    return told


def _read_held_out(files: Sequence[str], spec: ModelSpec, content: Content) -> tuple[DataKind, Content]:
    """Return what held-out files hold; translations in the direction of those that are trained on."""
    if not isinstance(content, Pairs):
        return read_data(files, spec)
    places = [Path(file) for file in files]
    kind_of(places, spec)  # none but pairs
    return PAIRS, PAIRS.read(places, spec, content)


def _vocabulary(spec: ModelSpec, content: Content, vocabulary_from: Path | None) -> Tokenizer:
    if vocabulary_from is not None:
        return load_vocabulary(vocabulary_from)
    if spec.folder is not None and spec.folder.tokenizer is not None:
        return adopt_vocabulary(spec.folder.tokenizer, spec.task, spec.vocabulary_size, spec.folder)
    if isinstance(content, TokenFiles) and content.tokenizer is not None:
        return adopt_vocabulary(content.tokenizer, spec.task, spec.vocabulary_size)
    vocabulary = train_vocabulary(content.words, spec.vocabulary_size)
    if spec.task.translates:
        assert spec.folder is not None
        mark_ends_of_pairs(vocabulary, spec.inputs, spec.folder.path / CONFIG_FILE)
    elif spec.task.pads:
        mark_ends(vocabulary)
    return vocabulary


def _tokenizer_config(spec: ModelSpec, vocabulary_from: Path | None) -> Path | None:
    """Return the file that says how the tokenizer is to be loaded that a model's folder brings."""
    kept = None if vocabulary_from is None else vocabulary_from.parent / TOKENIZER_CONFIG_FILE
    if kept is not None and kept.exists():
        return kept
    if spec.folder is None or spec.folder.tokenizer is None:
        return None
    own = spec.folder.path / TOKENIZER_CONFIG_FILE
    return own if own.exists() else None


def registered_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    """Return the task of a registered model, or of a folder's, on the run folder's tokens.

    `prepare_data` has written those.
    """
    spec = task_spec(settings)
    plan = read_plan(folder.plan) if settings.run.group_by_length else None
    samples = _samples(folder, settings, spec, plan)
    held_out = _held_out(folder, settings, spec) if settings.run.eval_data else None
    references = None
    if isinstance(held_out, PairDataset) and has_sacrebleu():
        references = References.of(held_out, load_vocabulary(folder.vocabulary))
    adapter = _adapter_of(spec, settings)
    return TrainingTask(
        chain=chain_of(spec) if adapter is None else replace(chain_of(spec), adapter=adapter),
        loss=partial(loss_sum, spec.task),
        batch=partial(as_tensors, samples),
        num_loss_tokens=samples.num_loss_tokens,
        count_terms=samples.count_terms,
        vocabulary_sha256=vocabulary_sha256(load_vocabulary(folder.vocabulary))
        if spec.task.reads_text
        else "",
        data_sha256=data_sha256(folder.path),
        held_out=None if held_out is None else HeldOut.of(held_out, data_sha256(folder.held_out)),
        predicts=spec.task,
        figures=figures_of(spec.task, spec.labels, folder.held_out),
        references=references,
    )


def chain_of(spec: ModelSpec) -> ChainModel:
    """Return the chain of a model, the same each time where it does not come from a folder.

    Raises: InputError as `ChainModel.from_spec`.
    """
    return ChainModel.from_spec(spec) if spec.folder is not None else _described(spec)


@lru_cache(maxsize=8)
def _described(spec: ModelSpec) -> ChainModel:
    return ChainModel.from_spec(spec)


def _adapter_of(spec: ModelSpec, settings: TaskSettings) -> AdapterFolder | None:
    """Return the adapters that a run begins with; None where they are new, or those of a checkpoint.

    Raises: InputError if they are not of this model.
    """
    place = settings.run.adapter
    if place is None or settings.run.resume_from is not None:
        return None
    return AdapterFolder.find(Path(place), spec)


def _reading(folder: RunFolder, settings: TaskSettings, spec: ModelSpec, seed: int | None = None) -> Reading:
    """Return what the data of a run are read with; seed: None for that of the run."""
    vocabulary = load_vocabulary(folder.vocabulary) if spec.task.reads_text else Tokenizer(BPE())
    has_own = spec.folder is not None and spec.folder.tokenizer is not None
    return Reading(
        model=spec,
        inputs=spec.inputs,
        vocabulary=vocabulary,
        template=folder.chat_template,
        processor=folder.image_processor,
        sequence_length=settings.sequence_length,
        seed=settings.seed if seed is None else seed,
        overlap=settings.run.doc_stride,
        end=own_end(vocabulary, spec.folder if has_own else None, folder.tokenizer_config),
        cuts_left=cuts_left(folder.tokenizer_config),
    )


def _samples(folder: RunFolder, settings: TaskSettings, spec: ModelSpec, plan: Plan | None) -> Samples:
    found = load_data(folder.path, _reading(folder, settings, spec))
    if not settings.run.group_by_length or plan is None:
        return found
    return LengthGroups(cast(FilledSamples, found), plan.global_batch_size)  # as `check_grouped` has found


def _held_out(folder: RunFolder, settings: TaskSettings, spec: ModelSpec) -> Samples:
    """Return the samples of --eval-data.

    Raises: InputError if there is not one.
    """
    try:
        return load_data(folder.held_out, _reading(folder, settings, spec, HELD_OUT_SEED))
    except InputError as error:
        raise InputError(f"--eval-data: {error}") from None


def model_notes(model: str, model_folder: str | None) -> list[str]:
    """Return what a user should know of the folder that the model comes from; [] for a model by name."""
    weights = FolderWeights.of(model_spec(model, model_folder))
    if weights is None:
        return []
    notes = weights.notes()
    if weights.folder.task.reads_text and weights.folder.tokenizer is None:
        notes.append(
            f"{weights.folder.name}: the folder holds no {TOKENIZER_FILE}; a vocabulary is trained on the "
            "text (files of tokens bring theirs), whose ids are not those that the weights know"
        )
    return notes
