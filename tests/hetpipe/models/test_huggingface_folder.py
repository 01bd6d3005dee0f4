"""Models from Hugging Face folders: the weights that transformers reads, or one clear line."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from cost_model.cluster import CPU
from cost_model.errors import InputError
from cost_model.profile import profile_text
from folders import MODELS, model_class, save_model, tiny_model
from hetpipe import cli
from hetpipe.data.task import model_notes, prepare_data, registered_task
from hetpipe.data.texts import read_corpus
from hetpipe.data.vocabulary import load_vocabulary
from hetpipe.models import pretrained_weights
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.loss import loss_sum
from hetpipe.models.names import model_entry
from hetpipe.profiling.profile_cache import cache_key
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.training.resumption import find_checkpoint
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, made_up_profile, run
from small_case import CLUSTER_TOML as CLUSTER


def chain_of(folder: Path) -> ChainModel:
    return ChainModel.from_spec(model_spec(str(folder)))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Set tensors of model.safetensors, or leave out those that are None; two underscores are a dot."""
    path = folder / "model.safetensors"
    edited = load_file(path) | {key.replace("__", "."): value for key, value in changes.items()}
    save_file({key: value for key, value in edited.items() if value is not None}, path, {"format": "pt"})


@pytest.mark.parametrize("architecture", MODELS)
def test_every_layer_has_the_weights_that_were_saved(tmp_path, architecture):
    model = save_model(tmp_path / "mine", architecture)
    chain = chain_of(tmp_path / "mine")
    saved = dict(model.named_parameters())
    found = {}
    for layer in range(chain.num_layers):
        found |= chain.materialise([layer], seed=0).owned_parameters()
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def settings_of(folder: Path, steps: int, **options: object) -> Settings:
    entry = model_entry(str(folder))
    return Settings(steps=steps, model_folder=entry.place, **{"save": False, **options})


def task_settings_of(folder: Path) -> TaskSettings:
    return TaskSettings(model_entry(str(folder)).name, 32, run=settings_of(folder, 1))


def profile_of(folder: Path):
    profile = made_up_profile(str(folder))
    return replace(profile, model=model_entry(str(folder)).name, sequence_length=32)


def two_pipelines(model: str) -> Plan:
    cut = Pipeline(2, 10, (Stage(("here/0",), (0, 2), 2), Stage(("here/1",), (2, 5), 1)))
    return Plan("manual", model, 16, (cut, Pipeline(3, 6, (Stage(("here/2",), (0, 5), 1),))))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "GPT2LMHeadModel", "Qwen3ForCausalLM"])
def test_the_first_loss_is_that_of_the_unsplit_model_of_transformers(tmp_path, architecture):
    folder = tmp_path / "mine"
    save_model(folder, architecture)
    settings, profile = settings_of(folder, 1), profile_of(folder)
    name = profile.model
    plans = {
        "one": chain_plan(name, [0, 5], 8),
        "two pipelines": two_pipelines(name),
    }
    losses = {key: run(tmp_path / key, plan, settings, profile)[1][0] for key, plan in plans.items()}

    whole = model_class(architecture).from_pretrained(folder).train()
    task = registered_task(RunFolder(tmp_path / "one" / "run"), task_settings_of(folder))
    inputs, labels = task.batch(0, 16)
    with torch.no_grad():
        expected = whole(**inputs, labels=labels, use_cache=False).loss.item()
        random = (
            tiny_model(architecture, seed=8).train()(**inputs, labels=labels, use_cache=False).loss.item()
        )
    assert abs(random - expected) > 1e-3  # the loss tells weights apart
    for key, loss in losses.items():
        assert loss == pytest.approx(expected, rel=1e-6), key


def test_a_rank_reads_its_own_tensors_only_and_a_tied_one_once(tmp_path, monkeypatch):
    model = save_model(tmp_path / "mine", "GPT2LMHeadModel")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    read: list[str] = []
    real = pretrained_weights.safe_open

    class Spy:
        def __init__(self, path: str, framework: str) -> None:
            self.file = real(path, framework=framework)

        def __enter__(self) -> "Spy":
            self.file.__enter__()
            return self

        def __exit__(self, *_: object) -> None:
            self.file.__exit__(*_)

        def get_tensor(self, key: str) -> torch.Tensor:
            read.append(key)
            return self.file.get_tensor(key)

    monkeypatch.setattr(pretrained_weights, "safe_open", Spy)
    for folder in ("mine", "shards"):
        chain = chain_of(tmp_path / folder)
        assert read == []  # headers only
        chain.materialise([2], seed=0)
        assert len(read) == 12 and all(key.startswith("transformer.h.1.") for key in read)
        read.clear()
        owned = chain.materialise([0, 4], seed=0).owned_parameters()
        assert sorted(read) == sorted(owned) and read.count("transformer.wte.weight") == 1
        read.clear()


def test_weights_of_16_bits_are_trained_in_32(tmp_path):
    model = tiny_model("LlamaForCausalLM").bfloat16()
    model.save_pretrained(tmp_path / "mine")
    found = chain_of(tmp_path / "mine").materialise([1], seed=0).owned_parameters()
    for name, value in found.items():
        assert value.dtype == torch.float32 and torch.equal(value, model.get_parameter(name).float())


def test_a_tied_tensor_may_have_either_name_and_old_names_are_read(tmp_path):
    folder = tmp_path / "mine"
    model = save_model(folder, "BertForMaskedLM")
    stored = load_file(folder / "model.safetensors")
    renamed = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in stored.items()
    }
    embedding = renamed.pop("bert.embeddings.word_embeddings.weight")
    renamed["cls.predictions.decoder.weight"] = embedding
    renamed["bert.pooler.dense.weight"] = torch.ones(32, 32)
    renamed["bert.embeddings.position_ids"] = torch.arange(512, dtype=torch.float32)[None]
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    chain = chain_of(folder)
    assert chain.weights.notes() == [
        f"{chain.name}: BertForMaskedLM has no use for 'bert.pooler.dense.weight'"
    ]
    found = chain.materialise(range(5), seed=0).owned_parameters()
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in found.items())


def test_a_head_that_the_folder_lacks_begins_at_random_and_is_said(tmp_path):
    folder = tmp_path / "mine"
    model = save_model(folder, "BertForMaskedLM")
    model.bert.save_pretrained(folder)  # names without "bert.", no head
    edit_config(folder, architectures=["BertForMaskedLM"])
    entry = model_entry(str(folder))
    new, vocabulary = model_notes(entry.name, entry.place)
    assert "lacks 'cls.predictions.bias', 'cls.predictions.transform.LayerNorm.bias', " in new
    assert "and 2 more; they begin at random" in new
    assert "holds no tokenizer.json" in vocabulary
    chain = chain_of(folder)
    one, other = (chain.materialise([4], seed).owned_parameters() for seed in (1, 2))
    dense = "cls.predictions.transform.dense.weight"
    assert not torch.equal(one[dense], other[dense])
    tied = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(one[tied], model.get_parameter(tied)) and torch.equal(other[tied], one[tied])


def without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def pickled(folder: Path) -> None:
    without(folder, "model.safetensors")
    torch.save({}, folder / "pytorch_model.bin")


def in_another_format(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "tf_model.h5")


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def sharded_without_one(folder: Path) -> None:
    tiny_model("GPT2LMHeadModel").save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    next(iter(sorted(folder.glob("model-0000*.safetensors")))).unlink()


BLOCK = "transformer__h__1__mlp__c_fc__weight"

WRONG = [
    (lambda folder: without(folder, "config.json"), "holds no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json: not JSON"),
    (lambda folder: (folder / "config.json").write_text("[]"), "is no JSON object"),
    (
        lambda folder: edit_config(folder, architectures=["T5Model"]),
        "T5Model is for no task that is trained here",
    ),
    (
        lambda folder: edit_config(folder, architectures=["BertForMultipleChoice"]),
        "BertForMultipleChoice is for no task that is trained here",
    ),
    (
        lambda folder: edit_config(folder, architectures=["MixtralForCausalLM"]),
        "has no MixtralForCausalLM of model type 'gpt2'",
    ),
    (lambda folder: edit_config(folder, architectures=None), "architectures names no class"),
    (lambda folder: edit_config(folder, n_layer=10**7), "n_layer is 1.00e+7; at most 2000 blocks are taken"),
    (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quant_method 'gptq', and weights in 4 or 8 bits are taken by bitsandbytes alone",
    ),
    (
        lambda folder: edit_config(folder, quantization_config={"load_in_4bit": True}),
        "weights in 4 bits cannot be trained, only adapters beside them",
    ),
    (
        lambda folder: (folder / "model.safetensors").rename(folder / "weights.safetensors"),
        "weights.safetensors: weights are read from model.safetensors (or by model.safetensors.index.json)",
    ),
    (in_another_format, "tf_model.h5: weights are read from model.safetensors"),
    (pickled, "pytorch_model.bin: is a pickle, which can run any code when it is read"),
    (sharded_without_one, "and model.safetensors.index.json names it"),
]
WRONG_TENSORS = [
    (cut_off, "damaged (it ends before its last tensor)"),
    (lambda folder: edit_weights(folder, **{BLOCK: None}), "lacks 'transformer.h.1.mlp.c_fc.weight'"),
    (
        lambda folder: edit_weights(folder, **{BLOCK: torch.ones(32, 8)}),
        "has shape [32, 8], by config.json [32, 128]",
    ),
    (
        lambda folder: edit_weights(folder, adapter=torch.ones(2)),
        "holds 'adapter', which GPT2LMHeadModel does not",
    ),
    (lambda folder: edit_weights(folder, **{BLOCK: torch.ones(32, 128).char()}), "is stored as I8"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_model(tmp_path / "mine", "GPT2LMHeadModel")
    (tmp_path / "cluster.toml").write_text(CLUSTER.replace('"fast"', '"cpu"').replace('"slow"', '"cpu"'))
    return tmp_path / "mine"


def refused(capsys, line: str, message: str) -> None:
    capsys.readouterr()
    assert cli.main(line.split()) == 2, line
    out, err = capsys.readouterr()
    assert message in err and err.startswith("error: ") and err.count("\n") == 1 and out == "", (line, err)


@pytest.mark.parametrize(("spoil", "message"), WRONG)
def test_every_verb_refuses_a_wrong_folder_in_one_line(folder, capsys, spoil, message):
    spoil(folder)
    for verb in ("profile", "plan", "compare", "run"):
        refused(capsys, f"{verb} --model ./mine --cluster cluster.toml", message)
    refused(capsys, "check --model mine", message)


@pytest.mark.parametrize(("spoil", "message"), WRONG_TENSORS)
def test_a_tensor_that_is_not_the_models_is_refused_by_name(folder, capsys, spoil, message):
    spoil(folder)
    refused(capsys, "profile --model ./mine --cluster cluster.toml", message)
    with pytest.raises(InputError):
        prepare_data(RunFolder(folder.parent / "run"), task_settings_of(folder))
    assert not (folder.parent / "run").exists()


def test_a_folder_that_is_not_there_is_refused(folder, capsys):
    refused(
        capsys, "plan --model ./mien --cluster cluster.toml", "./mien: no such folder; give one that holds"
    )
    refused(capsys, "check --model mine@12345678", "comes from a folder; give it with --model FOLDER")


@pytest.mark.slow
def test_a_configuration_alone_is_planned_and_trained_from_the_seed(folder, capsys):
    stored = chain_of(folder).materialise([1], seed=0)
    without(folder, "model.safetensors")
    chain = chain_of(folder)
    assert chain.weights is None and chain.name == task_settings_of(folder).model
    name = "transformer.h.0.attn.c_attn.weight"
    drawn, again, other = (
        dict(chain.materialise([1], seed=seed).model.named_parameters())[name] for seed in (0, 0, 1)
    )
    assert torch.equal(drawn, again) and not torch.equal(drawn, other)
    assert not torch.equal(drawn, dict(stored.model.named_parameters())[name])
    (folder.parent / "p.json").write_text(profile_text(profile_of(folder)))
    said = f"note: {chain.name}: the folder holds no weights; all are drawn from the seed, nothing is pre"
    (folder.parent / "one.toml").write_text(
        'name = "one"\n[network]\nbandwidth = "1 GB/s"\nlatency = "0 s"\n[[nodes]]\nname = "here"\n'
        'devices = [{ kind = "cpu", memory = "1 GiB" }]\n'
    )
    given = "--model ./mine --cluster one.toml --profile p.json"
    for line in (f"plan {given}", f"run {given} --global-batch-size 2 --steps 1 --no-save -q"):
        capsys.readouterr()
        assert cli.main(line.split()) == 0
        assert capsys.readouterr().err.count(said) == 1
    metrics = (next(Path("runs").iterdir()) / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in metrics]
    assert losses == [pytest.approx(math.log(512), abs=0.3)]  # it knows nothing yet


def test_tied_names_with_two_values_are_refused(folder):
    edit_weights(folder, lm_head__weight=torch.zeros(512, 32))
    chain = chain_of(folder)
    chain.materialise([1], seed=0)
    with pytest.raises(
        InputError, match=r"'transformer.wte.weight' differs from 'lm_head.weight', and config"
    ):
        chain.materialise([4], seed=0)


def test_a_model_is_known_by_its_configuration_and_not_by_its_path(folder):
    def known(path: Path) -> tuple[str, str]:
        settings = task_settings_of(path)
        return settings.model, cache_key(settings, {CPU: 1}, (1,), "")

    shutil.copytree(folder, folder.parent / "elsewhere" / "mine")
    before = known(folder)
    assert known(folder.parent / "elsewhere" / "mine") == before
    settings = task_settings_of(folder)
    edit_config(folder, activation_function="relu")
    assert known(folder)[0] != before[0] and known(folder)[1] != before[1]
    with pytest.raises(InputError, match="its configuration is that of 'mine@"):
        registered_task(RunFolder(folder), settings)


def test_a_name_of_the_table_is_no_folder(folder, monkeypatch):
    folder.rename(folder.parent / "gpt2-tiny")
    assert model_entry("gpt2-tiny").folder is None
    assert model_entry("./gpt2-tiny").folder is not None


def test_the_tokenizer_of_the_folder_is_used(tmp_path):
    folder, run_folder = tmp_path / "mine", RunFolder(tmp_path / "run")
    save_model(folder, "BertForMaskedLM")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(read_corpus(), trainer)
    tokenizer.add_special_tokens(["[UNK]", "[MASK]", "[SEP]", "[CLS]"])  # 300 to 303
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = task_settings_of(folder)
    run_folder.path.mkdir()
    prepare_data(run_folder, settings)
    assert load_vocabulary(run_folder.vocabulary).get_vocab() == tokenizer.get_vocab()
    inputs, labels = registered_task(run_folder, settings).batch(0, 64)
    ids, hidden = inputs["input_ids"], labels >= 0
    assert (ids[:, 0] == 303).all() and (ids[:, -1] == 302).all()
    assert (labels[hidden] < 300).all()  # special tokens are no words to guess
    kept = ids[hidden] != 301
    assert 0.1 < kept.float().mean() < 0.3 and (ids[hidden][kept] < 300).all()
    assert not model_notes(settings.model, settings.model_folder)
    tiny_model("BertForMaskedLM", vocab_size=302).save_pretrained(folder)
    with pytest.raises(InputError, match=r"tokenizer.json: has ids up to 303, the model 302 entries"):
        prepare_data(run_folder, task_settings_of(folder))


@pytest.mark.slow
def test_training_resumes_and_its_result_is_a_folder_again(folder, capsys):
    settings, profile = settings_of(folder, 4, learning_rate=1e-3), profile_of(folder)
    name, root = profile.model, folder.parent
    _, expected = run(root / "straight", chain_plan(name, [0, 5], 8), settings, profile)
    first = replace(settings, steps=2, total_steps=4, save=True)
    run(root / "two", chain_plan(name, [0, 2, 5], 4), first, profile)
    run_folder = RunFolder(root / "two" / "run")
    source = find_checkpoint("auto", run_folder, root, name)
    second = replace(settings, resume_from=str(source), save=True)
    _, losses = run(root / "two", chain_plan(name, [0, 1, 3, 5], 4), second, profile)
    assert losses == pytest.approx(expected, rel=1e-6)

    shutil.rmtree(folder)  # the run knows its model
    assert cli.main(["export", str(run_folder.path), "-o", str(root / "exported")]) == 0
    again = model_class("GPT2LMHeadModel").from_pretrained(root / "exported")
    task = registered_task(run_folder, task_settings_of(root / "exported"))
    inputs, labels = task.batch(64, 16)
    with torch.no_grad():
        loss = loss_sum(task_of(root / "exported"), again(**inputs).logits, labels).item()
    assert loss / task.num_loss_tokens(16) < expected[0]
    further = settings_of(root / "exported", 1)
    plan = chain_plan(model_entry(str(root / "exported")).name, [0, 3, 5], 8)
    _, (beginning,) = run(root / "further", plan, further, profile_of(root / "exported"))
    assert beginning < expected[0] - 0.01


def task_of(folder: Path):
    return model_spec(str(folder)).task
