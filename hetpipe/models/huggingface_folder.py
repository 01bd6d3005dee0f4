"""Hugging Face folders, as far as they are read without torch: configuration, weight headers."""

import difflib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from cost_model.strict_files import canonical_sha256, read_json
from hetpipe.models.tasks import HEADS, Task
from hetpipe.runs.lora import ADAPTER_CONFIG_FILE
from hetpipe.runs.quantization import Quantization, read_quantization

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
OTHER_WEIGHTS = ("*.safetensors", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ckpt.*", "adapter_model.*")
TRAINABLE_DTYPES = ("F64", "F32", "F16", "BF16")

ARCHITECTURES = {
    "BertForMaskedLM": ("bert", Task.MASKED_LM),
    "BertForPreTraining": ("bert", Task.MASKED_LM),
    "GPT2LMHeadModel": ("gpt2", Task.CAUSAL_LM),
    "GPTNeoXForCausalLM": ("gpt_neox", Task.CAUSAL_LM),
    "LlamaForCausalLM": ("llama", Task.CAUSAL_LM),
    "MistralForCausalLM": ("mistral", Task.CAUSAL_LM),
    "Qwen2ForCausalLM": ("qwen2", Task.CAUSAL_LM),
    "Qwen3ForCausalLM": ("qwen3", Task.CAUSAL_LM),
}
"""Classes that a folder may name, with family (of transformers.models) and task; tests prove their splits."""

ALSO_TESTED = (
    *("AlbertForMaskedLM", "MPNetForMaskedLM"),
    *("ArceeForCausalLM", "BertLMHeadModel", "BioGptForCausalLM", "BloomForCausalLM", "CamembertForMaskedLM"),
    *("CodeGenForCausalLM", "CohereForCausalLM", "DebertaV2ForMaskedLM", "DistilBertForMaskedLM"),
    *("ElectraForMaskedLM", "ErnieForMaskedLM", "FalconForCausalLM", "GPTBigCodeForCausalLM"),
    *("GPTJForCausalLM", "GPTNeoForCausalLM", "Gemma2ForCausalLM", "GemmaForCausalLM", "GlmForCausalLM"),
    *("GraniteForCausalLM", "HeliumForCausalLM", "MambaForCausalLM", "ModernBertForMaskedLM"),
    *("MptForCausalLM", "NemotronForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM", "OlmoForCausalLM"),
    *("PersimmonForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM", "RobertaForMaskedLM"),
    *("SmolLM3ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "XLMRobertaForMaskedLM"),
)
"""More of which the tests do. The split of these, and of any other of a task, is proven when a run begins."""

CLASSIFIERS_TESTED = (
    *("BertForSequenceClassification", "DebertaV2ForSequenceClassification"),
    *("DistilBertForSequenceClassification", "GPT2ForSequenceClassification"),
    *("LlamaForSequenceClassification", "RobertaForSequenceClassification"),
    *("BertForTokenClassification", "DistilBertForTokenClassification", "RobertaForTokenClassification"),
    *("ConvNextForImageClassification", "DeiTForImageClassification", "ViTForImageClassification"),
    *("BertForQuestionAnswering", "DebertaV2ForQuestionAnswering", "DistilBertForQuestionAnswering"),
    *("ElectraForQuestionAnswering", "GPT2ForQuestionAnswering", "RobertaForQuestionAnswering"),
)
"""The same, of classifiers, and of what finds answers."""

TRANSLATORS_TESTED = (
    *("BartForConditionalGeneration", "BlenderbotForConditionalGeneration", "M2M100ForConditionalGeneration"),
    *("MBartForConditionalGeneration", "MT5ForConditionalGeneration", "MarianMTModel"),
    *("PLBartForConditionalGeneration", "PegasusForConditionalGeneration", "T5ForConditionalGeneration"),
    "UMT5ForConditionalGeneration",
)
"""The same, of encoder-decoders."""

TESTED = (*ARCHITECTURES, *ALSO_TESTED, *CLASSIFIERS_TESTED, *TRANSLATORS_TESTED)
_ALIKE = 0.9
"""How alike a class of these is to one that a folder names, for a question whether it is meant; 1: equal."""

MOST_BLOCKS = 2000
"""A configuration with more is refused before it is built: the deepest Transformers published have 1,000
(Wang et al., DeepNet, 2022)."""

_MODEL_TYPE = re.compile("[a-z][a-z0-9_-]*")

_BLOCKS = ("num_hidden_layers", "n_layer")
"""Keys of config.json that hold the number of blocks."""

_BLOCKS_OF_SIDES = ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
"""The same of encoder and decoder. Other models have some of them for a side that they lack."""

_VOLATILE = ("transformers_version", "_name_or_path")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file, from its header; dtype as the format spells it ("F32")."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that transformers' save_pretrained wrote, or one that holds a config.json alone.

    name: of the folder, with a hash of its configuration: "my-gpt2@1f2e3d4c". The same wherever the folder
        lies; another as soon as the configuration changes.
    config: the content of config.json.
    """

    path: Path
    name: str
    architecture: str
    config: Mapping[str, Any]

    @property
    def family(self) -> str:
        """Return the folder of transformers.models that its class is in."""
        known = ARCHITECTURES.get(self.architecture)
        return str(self.config["model_type"]).replace("-", "_") if known is None else known[0]

    @property
    def task(self) -> Task:
        """Return what it is trained to predict, by the name of its class."""
        found = task_of(self.architecture)
        assert found is not None, self.architecture  # checked by `described`
        return found

    @property
    def quantization(self) -> Quantization | None:
        """Return how the folder's matrices are quantized; None: they are not."""
        return read_quantization(self.path / CONFIG_FILE, self.config)

    @property
    def tokenizer(self) -> Path | None:
        """Return the vocabulary that the weights were trained with, None where it is missing."""
        path = self.path / TOKENIZER_FILE
        return path if path.is_file() else None

    @property
    def has_weights(self) -> bool:
        """Return whether the folder holds weights; without them all are drawn from the seed.

        Raises: InputError as `weight_files`.
        """
        return bool(weight_files(self.path))

    def notes(self) -> list[str]:
        """Return what a user should know before anything is measured or trained; [] if weights are there."""
        if self.has_weights:
            return []
        return [
            f"{self.name}: the folder holds no weights; all are drawn from the seed, nothing is pretrained"
        ]

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the headers of all tensors of the weight files, by the names that they have there.

        Raises: InputError if a file is missing or damaged, or holds what cannot be trained.
        """
        found: dict[str, StoredTensor] = {}
        for path in weight_files(self.path):
            for name, tensor in header(path).items():
                if tensor.dtype not in TRAINABLE_DTYPES and self.quantization is None:
                    raise InputError(
                        f"{path}: {name!r} is stored as {tensor.dtype}, which cannot be trained; save the "
                        "model as float32, float16 or bfloat16"
                    )
                found[name] = tensor
        return found


def names_folder(text: str) -> bool:
    """Return whether a --model that is no built-in name means a folder."""
    return "/" in text or "\\" in text or (text != "" and Path(text).is_dir())


def read_model_folder(text: str | Path) -> ModelFolder:
    """Return the model of a folder, after checks of its configuration and of the names of weight files.

    Raises: InputError naming what is missing or not supported, and the remedy.
    """
    folder = Path(text)
    if not folder.is_dir():
        raise InputError(
            f"{text}: no such folder; give one that holds {CONFIG_FILE} and, unless you begin from scratch, "
            f"{WEIGHTS_FILE}; or a model's name"
        )
    if not (folder / CONFIG_FILE).is_file():
        if (folder / ADAPTER_CONFIG_FILE).is_file():
            raise InputError(f"{text}: is a PEFT folder; give its base by --model, and it by --adapter")
        raise InputError(
            f"{text}: holds no {CONFIG_FILE}; give a folder that transformers' save_pretrained wrote"
        )
    weight_files(folder)
    path = folder.resolve()
    return described(path, path.name, read_json(folder / CONFIG_FILE))


def task_of(architecture: str) -> Task | None:
    """Return what a class is trained to predict; None where it is none of the tasks.

    >>> [task and str(task) for task in map(task_of, ("OPTForCausalLM", "RobertaForMaskedLM", "T5Model"))]
    ['causal-lm', 'masked-lm', None]
    """
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture][1]
    return next((task for end, task in HEADS.items() if architecture.endswith(end)), None)


def described(path: Path, base_name: str, config: object) -> ModelFolder:
    """Return a folder's model by the content of its config.json.

    Raises: InputError if this model cannot be trained; names architecture and remedy.
    """
    where = path / CONFIG_FILE
    if not isinstance(config, dict):
        raise InputError(f"{where}: is no JSON object; give a folder that save_pretrained wrote")
    architecture = _architecture(where, config)
    _check_blocks(where, config, task_of(architecture))
    _check_vocabularies(path, task_of(architecture))
    read_quantization(where, config)
    content = {key: value for key, value in config.items() if key not in _VOLATILE}
    name = f"{base_name}@{canonical_sha256(content)[:8]}"
    return ModelFolder(path, name, architecture, config)


def _check_vocabularies(path: Path, task: Task | None) -> None:
    """Check that a translator has one tokenizer for both sides, be its vocabularies of one size.

    Raises: InputError if its own says that it has two.
    """
    where = path / TOKENIZER_CONFIG_FILE
    if task is None or not task.translates or not where.is_file():
        return
    content = read_json(where)
    if isinstance(content, dict) and content.get("separate_vocabs") is True:
        raise InputError(
            f"{where}: separate_vocabs is true, and one vocabulary for both sides is taken here; train it "
            "from Python: hetpipe.Trainer"
        )


def _check_blocks(where: Path, config: Mapping[str, Any], task: Task | None) -> None:
    """Check the numbers of blocks.

    Raises: InputError naming one that is none that could be built, or divided.
    """
    counted = (*_BLOCKS, *(_BLOCKS_OF_SIDES if task is not None and task.translates else ()))
    for key in (*_BLOCKS, *_BLOCKS_OF_SIDES):
        num_blocks = config.get(key)
        if not isinstance(num_blocks, int):
            continue
        if num_blocks > MOST_BLOCKS:
            raise InputError(
                f"{where}: {key} is {Decimal(num_blocks):.3g}; at most {MOST_BLOCKS} blocks are taken"
            )
        if num_blocks < (1 if key in counted else 0):
            raise InputError(f"{where}: {key} is {num_blocks}; give the number of blocks, 1 or more")


def _architecture(where: Path, config: Mapping[str, Any]) -> str:
    """Return the class that a configuration names.

    Raises: InputError if it is for none of the tasks, or has an encoder beside its decoder and does not
    translate, or the other way round.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise InputError(
            f"{where}: architectures names no class; name the one that the weights are of, such as "
            "GPT2LMHeadModel"
        )
    name = architectures[0]
    kind = config.get("model_type")
    if name in ARCHITECTURES:
        family = ARCHITECTURES[name][0]
        if kind not in (None, family):
            raise InputError(
                f"{where}: {name} is of model type {family!r}, and model_type is {kind!r}; make them agree"
            )
        return name
    if task_of(name) is None:
        near = difflib.get_close_matches(name, TESTED, n=1, cutoff=_ALIKE)
        remedy = f"did you mean {near[0]}?" if near else "train it from Python: hetpipe.Trainer"
        raise InputError(
            f"{where}: {name} is for no task that is trained here ({', '.join(Task)}; see hetpipe models); "
            f"{remedy}"
        )
    translates, has_both = task_of(name) is Task.TRANSLATION, config.get("is_encoder_decoder") is True
    if has_both and not translates:
        raise InputError(
            f"{where}: {name} has an encoder and a decoder, which are trained for {Task.TRANSLATION} alone "
            "(...ForConditionalGeneration, ...MTModel); train it from Python: hetpipe.Trainer"
        )
    if translates and not has_both:
        raise InputError(
            f"{where}: {name} is trained for {Task.TRANSLATION}, by an encoder and a decoder, and "
            "is_encoder_decoder is not true there; set it if the model has both, else train it from Python: "
            "hetpipe.Trainer"
        )
    if not isinstance(kind, str) or not _MODEL_TYPE.fullmatch(kind):
        raise InputError(f"{where}: model_type {kind!r} names no model of transformers; save the model again")
    return name


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files that hold a folder's weights, in the order of their names; () for none.

    Raises: InputError if there are weights in other files only, or a file of the index is missing.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        return (single,)
    if index.is_file():
        content = read_json(index)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise InputError(f"{index}: has no weight_map of file names; save the model again")
        files = tuple(folder / Path(name).name for name in sorted(set(places.values())))
        for path in files:
            if not path.is_file():
                raise InputError(f"{path}: no such file, and {INDEX_FILE} names it; copy the whole folder")
        return files
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickled:
        raise InputError(
            f"{folder / pickled[0]}: is a pickle, which can run any code when it is read, and is never read "
            "here; load it where you trust it and save_pretrained(folder, safe_serialization=True)"
        )
    others = sorted(path.name for pattern in OTHER_WEIGHTS for path in folder.glob(pattern))
    if others:
        raise InputError(
            f"{folder / others[0]}: weights are read from {WEIGHTS_FILE} (or by {INDEX_FILE}) alone; "
            "save_pretrained(folder, safe_serialization=True), or take the file away to begin from scratch"
        )
    return ()


def header(path: Path) -> dict[str, StoredTensor]:
    """Return the header of a safetensors file: 8 bytes of length, then JSON.

    Raises: InputError if the file is damaged.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            available = path.stat().st_size - 8 - length
            if available < 0:
                raise ValueError("it is shorter than its header")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        if max((tensor["data_offsets"][1] for tensor in header.values()), default=0) > available:
            raise ValueError("it ends before its last tensor")
        return {
            name: StoredTensor(path, tuple(tensor["shape"]), tensor["dtype"])
            for name, tensor in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InputError(f"{path}: is no safetensors file, or damaged ({error}); copy it again") from None
