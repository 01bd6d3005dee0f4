"""The training task of a run: a chain of layers, its data and its loss."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.data.chat_template import ChatTemplate
from hetpipe.data.chats import LEARNED_FILE, ChatDataset, num_learned, vocabulary_texts, write_chats
from hetpipe.data.dataset import Dataset, load_tokens, tokens_texts_sha256, write_tokens
from hetpipe.data.held_out import SEED as HELD_OUT_SEED
from hetpipe.data.held_out import HeldOut
from hetpipe.data.json_lines import chat_of, check_kind
from hetpipe.data.special_tokens import SpecialTokens, adopt_vocabulary
from hetpipe.data.vocabulary import (
    load_vocabulary,
    read_corpus,
    save_vocabulary,
    train_vocabulary,
    vocabulary_sha256,
)
from hetpipe.models.adapter_folder import AdapterFolder
from hetpipe.models.adapters import task_spec
from hetpipe.models.chain import ChainModel
from hetpipe.models.chunked_loss import ChunkedLoss
from hetpipe.models.huggingface import ModelSpec, model_spec
from hetpipe.models.huggingface_folder import TOKENIZER_FILE
from hetpipe.models.loss import Loss, loss_sum
from hetpipe.models.names import Task
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.pretrained_weights import FolderWeights
from hetpipe.models.split_check import require_split
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings

Batch = Callable[[int, int], tuple[Mapping[str, Tensor], Tensor]]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of the trained parameters of one rank."""


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """Everything that a rank needs to know of the model and its data; made anew on every rank.

    batch: (first sample of the run, number of samples) -> inputs by name and labels, each [samples, ...], a
    pure function of the two. num_loss_tokens: how many tokens of so many samples the loss counts;
    count_terms, where given, counts them in the labels of a whole step instead.
    make_optimizer: None for AdamW with the hyper-parameters of the settings. rate_schedule: the learning rate
    of each step, counted from 0, as a multiple of the settings'; None for their warm-up and decay.
    data_sha256: of the texts, "" where nobody knows. held_out: what --eval-data or eval_data gives.
    predicts: where the loss is `loss_sum` of logits, of which task; None for any other loss.
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

    def term_weight(self, labels: Tensor) -> float:
        """Return what a token's loss counts in a step with these labels: 1 / (loss tokens of the step).

        Raises: InputError if the step has none.
        """
        if self.count_terms is None:
            return self.step_weight(len(labels))
        return _weight_of(self.count_terms(labels))

    def step_weight(self, num_samples: int) -> float:
        """Return the same for a step of so many samples, where the labels are not asked."""
        return _weight_of(self.num_loss_tokens(num_samples))

    def learning_rate(self, settings: Settings, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if self.rate_schedule is None:
            return settings.learning_rate_at(step)
        return settings.learning_rate * self.rate_schedule(step)


def _weight_of(terms: int) -> float:
    if terms < 1:
        raise InputError(f"the loss of a step has {terms} terms; every step needs labels that count")
    return 1 / terms


TaskFactory = Callable[[RunFolder, TaskSettings], TrainingTask]


def check_length(spec: ModelSpec, sequence_length: int) -> None:
    """Refuse sequences that are longer than the model takes.

    Raises: InputError naming the longest.
    """
    most = spec.max_sequence_length
    if sequence_length > most:
        raise InputError(
            f"sequence length {sequence_length} is above {most}, the most that {spec.name} takes"
        )


def prepare_data(folder: RunFolder, settings: TaskSettings, vocabulary_from: Path | None = None) -> list[str]:
    """Write vocabulary and tokens into the run folder, once, before the ranks start; return what to tell.

    The vocabulary is that of the model's folder, where it holds one; else it is trained on the texts.

    vocabulary_from: the vocabulary of the checkpoint that the run goes on from.

    Raises: InputError for text or a model's folder that cannot be used.
    """
    spec = task_spec(settings)
    check_length(spec, settings.sequence_length)
    if not spec.tested:
        require_split(spec)
    FolderWeights.of(spec)
    _adapter_of(spec, settings)
    texts = _Texts.read(settings.data, spec)
    held_out = _Texts.read(settings.run.eval_data, spec) if settings.run.eval_data else None
    if vocabulary_from is not None:
        vocabulary = load_vocabulary(vocabulary_from)
    elif spec.folder is not None and spec.folder.tokenizer is not None:
        vocabulary = adopt_vocabulary(spec.folder.tokenizer, spec.task, spec.vocabulary_size)
    else:
        vocabulary = train_vocabulary(texts.words, spec.vocabulary_size)
    if spec.folder is not None:
        folder.write(folder.model_config, json.dumps(dict(spec.folder.config), indent=1) + "\n")
    save_vocabulary(vocabulary, folder.vocabulary)
    template = None
    if texts.has_chats or (held_out is not None and held_out.has_chats):
        template = ChatTemplate.of(None if spec.folder is None else spec.folder.path, vocabulary)
        folder.write(folder.chat_template, template.json_text())
    texts.write(folder.path, vocabulary, template)
    dataset = _dataset(folder, settings, spec)
    if held_out is not None:
        folder.held_out.mkdir(parents=True, exist_ok=True)
        held_out.write(folder.held_out, vocabulary, template)
        _held_out(folder, settings, spec)
    if not isinstance(dataset, ChatDataset):
        return []
    plain = template is not None and template.is_plain
    said = f"{spec.name} brings no chat template; turns are written as lines (user: ..., assistant: ...)"
    return [*([said] if plain else []), *dataset.notes()]


@dataclass(frozen=True, slots=True)
class _Texts:
    """What --data or --eval-data give: documents, and whether each is a chat."""

    documents: list[str]
    has_chats: bool

    @classmethod
    def read(cls, paths: tuple[str, ...], spec: ModelSpec) -> "_Texts":
        """Read the files.

        Raises: InputError if they cannot be used, or hold chats, and the model continues no text.
        """
        places = [Path(path) for path in paths]
        return cls(read_corpus(places), check_kind(places, spec.name, spec.task))

    @property
    def words(self) -> list[str]:
        """Return what a vocabulary is trained on."""
        return vocabulary_texts(list(map(chat_of, self.documents))) if self.has_chats else self.documents

    def write(self, folder: Path, vocabulary: Tokenizer, template: ChatTemplate | None) -> None:
        """Write the tokens; template: of chats."""
        (folder / LEARNED_FILE).unlink(missing_ok=True)  # of another run in the folder
        if self.has_chats:
            assert template is not None
            chats = list(map(chat_of, self.documents))
            write_chats(folder, self.documents, chats, vocabulary, template)
        else:
            write_tokens(folder, self.documents, vocabulary)


def registered_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    """Return the task of a registered model, or of a folder's, on the run folder's tokens.

    `prepare_data` has written those.
    """
    spec = task_spec(settings)
    dataset = _dataset(folder, settings, spec)

    def batch(first_sample: int, num_samples: int) -> tuple[Mapping[str, Tensor], Tensor]:
        data = dataset.batch(first_sample, num_samples)
        return {"input_ids": torch.from_numpy(data.input_ids)}, torch.from_numpy(data.labels)

    return TrainingTask(
        chain=replace(ChainModel.from_spec(spec), adapter=_adapter_of(spec, settings)),
        loss=partial(loss_sum, spec.task),
        batch=batch,
        num_loss_tokens=dataset.num_loss_tokens,
        count_terms=num_learned if isinstance(dataset, ChatDataset) else None,
        vocabulary_sha256=vocabulary_sha256(load_vocabulary(folder.vocabulary)),
        data_sha256=tokens_texts_sha256(folder.path),
        held_out=_held_out(folder, settings, spec) if settings.run.eval_data else None,
        predicts=spec.task,
    )


def _adapter_of(spec: ModelSpec, settings: TaskSettings) -> AdapterFolder | None:
    """Return the adapters that a run begins with; None where they are new, or those of a checkpoint.

    Raises: InputError if they are not of this model.
    """
    place = settings.run.adapter
    if place is None or settings.run.resume_from is not None:
        return None
    return AdapterFolder.find(Path(place), spec)


def _dataset(folder: RunFolder, settings: TaskSettings, spec: ModelSpec) -> Dataset | ChatDataset:
    return _dataset_in(folder.path, folder, settings, spec, settings.seed)


def _held_out(folder: RunFolder, settings: TaskSettings, spec: ModelSpec) -> HeldOut:
    """Return the samples of --eval-data.

    Raises: InputError if there is not one.
    """
    try:
        return HeldOut.of_texts(_dataset_in(folder.held_out, folder, settings, spec, HELD_OUT_SEED))
    except InputError as error:
        raise InputError(f"--eval-data: {error}") from None


def _dataset_in(
    place: Path, folder: RunFolder, settings: TaskSettings, spec: ModelSpec, seed: int
) -> Dataset | ChatDataset:
    """Return the data of the tokens in a folder, read with the vocabulary of the run."""
    vocabulary = load_vocabulary(folder.vocabulary)
    if (place / LEARNED_FILE).exists():
        return ChatDataset.load(place, vocabulary, settings.sequence_length, seed)
    return Dataset(
        tokens=load_tokens(place, vocabulary),
        task=spec.task,
        sequence_length=settings.sequence_length,
        vocabulary_size=vocabulary.get_vocab_size(),
        seed=seed,
        special=SpecialTokens.of(vocabulary),
    )


def model_notes(model: str, model_folder: str | None) -> list[str]:
    """Return what a user should know of the folder that the model comes from; [] for a model by name."""
    weights = FolderWeights.of(model_spec(model, model_folder))
    if weights is None:
        return []
    notes = weights.notes()
    if weights.folder.tokenizer is None:
        notes.append(
            f"{weights.folder.name}: the folder holds no {TOKENIZER_FILE}; a vocabulary is trained on the "
            "text, whose ids are not those that the weights know"
        )
    return notes
