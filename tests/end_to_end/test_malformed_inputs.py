"""Whatever a hostile or clumsy user gives a verb ends in one line and exit code 2, and writes nothing."""

import gzip
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cost_model.profile import profile_text
from hetpipe.cli import VERBS, main
from partition.plan_file import plan_text
from runs import made_up_profile
from small_case import CLUSTER_TOML, small_plan, small_profile

KNOWN = "--cluster cluster.toml --profile profile.json"
TINY = "run --model bert-tiny --cluster cluster.toml"
HOST_LINK = 'host_link = { bandwidth = "1 GB/s", latency = "1 us" }'
CLUSTERS = {
    "speed.toml": ('kind = "fast"', 'kind = "fast", speed = "much"'),
    "unit.toml": ('memory = "10 kB"', "memory = 10"),
    "negative.toml": ("320 bit/s", "-320 bit/s"),
    "zero.toml": ("320 bit/s", "0 bit/s"),
    "nan.toml": ("0.25 s", "nan s"),
    "twice.toml": ('name = "b"', 'name = "a"'),
    "typo.toml": ("kind = ", "knid = "),
    "many.toml": ('kind = "fast"', 'kind = "fast", count = 10000000000'),
    "none.toml": ('kind = "fast"', 'kind = "fast", count = 0'),
    "host-memory.toml": ('name = "a"', 'name = "a"\nhost_memory = "1 GiB"'),
    "host-link.toml": ('name = "a"', f'name = "a"\n{HOST_LINK}'),
    "host-memory-word.toml": ('name = "a"', f'name = "a"\nhost_memory = "lots"\n{HOST_LINK}'),
    "host-memory-below.toml": ('name = "a"', f'name = "a"\nhost_memory = "-1 GiB"\n{HOST_LINK}'),
    "host-link-text.toml": ('name = "a"', 'name = "a"\nhost_memory = "1 GiB"\nhost_link = "12 GB/s"'),
    "memory.toml": ('"10 kB"', '"1e999 kB"'),
    "key-twice.toml": ('name = "a"', 'name = "a"\nname = "b"'),
    "half.toml": ('kind = "fast"', 'kind = "fast", count = 1.5'),
    "no-latency.toml": ("latency = ", "latencie = "),
    "slow.toml": ('kind = "fast"', 'kind = "fast", speed = 0'),
}
"""Cluster files with one mistake: what is replaced, and by what."""
ONE_EMULATED = """
[network]
bandwidth = "1 Gbit/s"
latency = "1 us"
[[nodes]]
name = "a"
devices = [{ kind = "emulated", memory = "2 GiB", driver_memory = "0 B" }]
"""
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "words": {"vocab_size": "x"},
    "deep": {"n_layer": 10**7},
    "heads": {"n_embd": 16, "n_head": 3},
    "other-type": {"model_type": "llama"},
}
"""What folders with a configuration of GPT-2 have otherwise."""
LINES = {
    "demo": """
        demo -o cluster.toml
        demo -o cluster.toml/pictures
        demo -o full
        demo --steps 1
        demo extra
    """,
    "init": """
        init
        init -o full
        init -o full --force
        init -o nowhere/new.toml
        init -o dangling
        init -o new.toml --emulate ''
        init -o new.toml --emulate nan
        init -o new.toml --emulate inf
        init -o new.toml --emulate 1e18
        init -o new.toml --emulate 0.5,,0.5
        init -o new.toml --emulate -1
    """,
    "profile": """
        profile
        profile --model bert-tiny
        profile --cluster cluster.toml
        profile --model bert-tiny --cluster cluster.toml --profile-budget nan
        profile --model bert-tiny --cluster cluster.toml --profile-budget -1
        profile --model bert-tiny --cluster cluster.toml --microbatch-sizes 1,,2
        profile --model bert-tiny --cluster cluster.toml --microbatch-sizes 1000000000000
        profile --model bert-tiny --cluster cluster.toml --sequence-length 0
        profile --model bert-tiny --cluster cluster.toml --sequence-length 100000000
        profile --model bert-tiny --cluster cluster.toml --wait never
        profile --model bert-tiny --cluster cluster.toml -o nowhere/profile.json
        profile --model bert-tiny --cluster cluster.toml -o cluster.toml
        profile --profile profile.json -o plan.json
        profile --profile profile.json --microbatch-sizes 4
        profile --profile profile.json --sequence-length 8
        profile --profile profile.json --estimate fats
        profile --profile latin
        profile --merge profile.json
        profile --merge profile.json empty
        profile --merge profile.json --from-run full
        profile profile.json
        profile --from-run nowhere
        profile --from-run broken-run
        profile --from-run full -o new.json
    """,
    "plan": f"""
        plan
        plan --cluster empty --profile profile.json
        plan --cluster full --profile profile.json
        plan --cluster utf16 --profile profile.json
        plan --cluster loop --profile profile.json
        plan --cluster dangling --profile profile.json
        plan --cluster /dev/zero --profile profile.json
        plan --cluster pipe --profile profile.json
        plan --cluster cluster.toml --profile pipe
        plan --cluster cluster.toml --profile list.json
        plan --cluster cluster.toml --profile null.json
        plan --cluster cluster.toml --profile plan.json
        plan --cluster cluster.toml --profile no-layers.json
        plan --cluster cluster.toml --profile negative.json
        plan --cluster cluster.toml --profile nan.json
        plan --cluster cluster.toml --profile tiny.json
        plan --cluster 'a\\x1b[31mb\\x0ac' --profile profile.json
        plan --cluster cluster.toml --cluster empty --profile profile.json
        plan --cluster --profile profile.json
        plan --cluster cluster.toml --model full
        plan --cluster cluster.toml --model ''
        plan --cluster cluster.toml --model bert-tiny --lora r=4,r=5,targets=query
        plan --cluster cluster.toml --model bert-tiny --lora r=4,alpha=nan,targets=query
        plan --cluster cluster.toml --model bert-tiny --lora r=99999999999,targets=query
        plan --cluster cluster.toml --model bert-tiny --load-in 4bit
        plan {KNOWN} --optimizer lion
        plan {KNOWN} --optimizer sgd --momentum 2
        plan {KNOWN} --optimizer sgd --momentum nan
        plan {KNOWN} --momentum 0.9
        plan {KNOWN} --loss-chunks 0
        plan {KNOWN} --loss-chunks 4
        plan {KNOWN} --compile
        plan {KNOWN} --gradient-dtype fp16
        plan {KNOWN} extra
        plan {KNOWN} --global-batch-size -3
        plan {KNOWN} --global-batch-size 1e3
        plan {KNOWN} --global-batch-size 99999999999999999999999999
        plan {KNOWN} --microbatch-size -1
        plan {KNOWN} --microbatch-size 17
        plan {KNOWN} --sequence-length 77
        plan {KNOWN} --profile-budget -1
        plan {KNOWN} --dtype float8
        plan {KNOWN} --pin a/0=3-1
        plan {KNOWN} --pin a/0=0 --pin a/0=1
        plan {KNOWN} --exclude ''
        plan {KNOWN} --pipelines 0
        plan {KNOWN} --max-devices 0
        plan {KNOWN} --proof-seconds nan
        plan {KNOWN} --no-proof --proof-seconds 3
        plan {KNOWN} --objective money
        plan {KNOWN} --deadline '-1 s'
        plan {KNOWN} --budget-per-hour nan
        plan {KNOWN} --schedule fifo
        plan {KNOWN} --run-file full
        plan {KNOWN} -o ''
        plan {KNOWN} -o full
        plan {KNOWN} -o nowhere/plan.json
        plan {KNOWN} -o cluster.toml
        plan {KNOWN} -o profile.json
        plan {KNOWN} -o /dev/null
        plan {KNOWN} --pin a/0=0-99
        plan {KNOWN} --exclude a --exclude b
        plan {KNOWN} --pipelines 9
        plan --cluster cluster.toml --profile cut.json
    """,
    "explain": f"""
        explain {KNOWN}
        explain empty {KNOWN}
        explain profile.json {KNOWN}
        explain other-device.json {KNOWN}
        explain plan.json {KNOWN} --sequence-length 77
        explain plan.json plan.json {KNOWN}
        explain pipe {KNOWN}
        explain plan.json --profile profile.json
        explain plan.json {KNOWN} --optimizer sgd --momentum 5
        explain plan.json {KNOWN} --model bert-tniy
        explain twice.json {KNOWN}
        explain plan.json --cluster one.toml --profile profile.json
    """,
    "simulate": f"""
        simulate full {KNOWN}
        simulate no-pipelines.json {KNOWN}
        simulate plan.json {KNOWN} --trace full
        simulate plan.json {KNOWN} --trace ''
        simulate plan.json {KNOWN} --trace plan.json
        simulate plan.json {KNOWN} --plot step.bmp
        simulate plan.json {KNOWN} --plot ''
        simulate plan.json {KNOWN} --plot empty/step.png
        simulate plan.json {KNOWN} --schedule ''
        simulate plan.json --cluster cluster.toml
        simulate plan.json {KNOWN} --model bert-tiny
        simulate plan.json --cluster cluster.toml --model bert-tniy
    """,
    "compare": f"""
        compare
        compare {KNOWN} --steps 0
        compare {KNOWN} --what-if 'fly to the moon'
        compare {KNOWN} --what-if 'add 1000000000 fast to a'
        compare {KNOWN} --what-if 'remove a' --measure
        compare {KNOWN} --pareto --what-if 'remove a'
        compare {KNOWN} --pareto
        compare {KNOWN} --plot front.png
        compare {KNOWN} --pareto --plot front.bmp
        compare {KNOWN} --estimate ''
    """,
    "check": """
        check
        check --model ''
        check --model bert-tniy
        check --model /dev/null
        check --model bert-tiny --lora targets=query
        check --model bert-tiny --adapter nowhere
        check --model bert-tiny --load-in 3bit --lora r=2,targets=query
        check --model bert-tiny --run-file strange.toml
        check --model ./words
        check --model ./deep
        check --model ./heads
        check --model ./no-config
        check --model ./other-type
    """,
    "run": f"""
        run
        {TINY} --data nowhere.txt
        {TINY} --data full
        {TINY} --data empty
        {TINY} --data latin
        {TINY} --steps 0
        {TINY} --steps 99999999999999999999999
        {TINY} --steps 5 --total-steps 3
        {TINY} --seed 99999999999999999999999
        {TINY} --learning-rate nan
        {TINY} --learning-rate -1
        {TINY} --every soon
        {TINY} --every '0 s'
        {TINY} --proof-seconds inf
        {TINY} --proof-seconds nan
        {TINY} --node a
        {TINY} --token-file token --trust-network
        {TINY} --rendezvous tcp://x:1 --ssh-config nowhere
        {TINY} --keep -1
        {TINY} --timeout '0.1 s'
        {TINY} --max-restarts -1
        {TINY} --clock sundial
        {TINY} --resume nowhere
        {TINY} --resume auto
        {TINY} --resume ''
        {TINY} --run-folder empty
        {TINY} --run-folder empty/run
        {TINY} --run-folder ''
        {TINY} --wait never
        {TINY} --rendezvous tcp://x:99999
        {TINY} --rendezvous tcp://x:1 --node a --token-file nowhere
        {TINY} --print-launch
        {TINY} --plan empty
        {TINY} --plan plan.json --adapt
        {TINY} --plan plan.json --strategy ddp
        {TINY} --plan plan.json --microbatch-size 2
        {TINY} --plan plan.json --global-batch-size 5
        {TINY} --profile profile.json
        {TINY} --adapt --no-save
        run --model bert-tiny --cluster one.toml --profile bert.json --data few-words.txt -q
        run strange.toml
        run nowhere.toml
        run empty
        run full
        run latin
        run table.toml
        run words.toml
        run numbers.toml
        run list.toml
        run rank.toml
        run huge.toml
        run strange.toml --run-file strange.toml
        run --run-file pipe
        {TINY} --log nowhere
        {TINY} --betas 0.9
        {TINY} --betas 2,3
        {TINY} --warmup-steps -1
        {TINY} --clip-norm -1
        {TINY} --weight-decay inf
        {TINY} --decay upward
        {TINY} --eval-data nowhere.txt
        {TINY} --eval-every 3
        {TINY} --patience 2
        {TINY} --max-restarts 1e9
        {TINY} --override learning-rate
        {TINY} --resume full
        {TINY} --resume empty
        {TINY} --resume broken-run
        {TINY} --gradient-dtype fp16
        {TINY} --optimizer lion
        {TINY} --optimizer adam --momentum 0.9
        {TINY} --optimizer rmsprop --rho 1.5
        {TINY} --optimizer sgd --betas 0.9,0.99
        {TINY} --epsilon nan
        {TINY} --tokens-per-step 0
        {TINY} --tokens-per-step 100
        {TINY} --tokens-per-step 64 --global-batch-size 1
        {TINY} --best speed
        {TINY} --best bleu --eval-data few-words.txt
        {TINY} --pack --data few-words.txt
        run --model bert-tiny --cluster hte
        run --model bert-tiny --cluster full
        {TINY} --data chats.jsonl
        {TINY} --data half.jsonl
        {TINY} --data few-words.txt --data chats.jsonl
        {TINY} --data few-words.txt --eval-data half.jsonl
        {TINY} --data packed.txt.gz
        {TINY} --data utf16
        {TINY} --data pipe
        {TINY} --data /dev/zero
        {TINY} --data /dev/null
        {TINY} --data empty-folder
        {TINY} --data ''
        {TINY} --data few-words.txt --eval-data ''
        {TINY} --data array.json
        {TINY} --data few-words.txt --eval-data pipe
        {TINY} --data few-words.txt --data few-words.txt --eval-data empty-folder
        {TINY} --seed -1
        {TINY} --every -5
        {TINY} --timeout 5
        {TINY} --best accuracy --eval-data few-words.txt
        {TINY} --run-folder /dev/null/run
        {TINY} --run-folder cluster.toml
        {TINY} --resume few-words.txt
        {TINY} --plan twice.json
        {TINY} --lora r=2,targets=query --adapter full
        run --model bert–tiny --cluster one.toml
        run twice.toml
        run marked.toml
        run numbers.toml words.toml
        run data.toml
    """,
    "plot": f"""
        plot
        plot nowhere
        plot full
        plot plan.json
        plot plan.json --cluster cluster.toml
        plot full --model bert-tiny
        plot full --optimizer sgd
        plot plan.json {KNOWN} -o empty
        plot plan.json {KNOWN} -o empty/picture
        plot full {KNOWN}
        plot full -o picture.png
        plot other-device.json {KNOWN}
        plot broken-run
        plot empty {KNOWN}
    """,
    "export": """
        export
        export nowhere -o out
        export full -o out
        export full -o full
        export full -o empty
        export empty -o out
        export full
        export broken-run -o out
    """,
    "watch": """
        watch
        watch nowhere
        watch empty
        watch plan.json
        watch full --port 99999
        watch full --port -1
        watch full --port http
        watch full empty
        watch full
    """,
    "models": """
        models bert-tiny
        models --jason
    """,
    "clusters": """
        clusters four-unequl
        clusters four-unequal hap
        clusters cluster.toml
        clusters -o new.toml
        clusters hap -o cluster.toml
        clusters hap -o nowhere/new.toml
    """,
    "cache": """
        cache bert-tiny
        cache bert-tiny --clear
        cache '' --clear
        cache .. --clear
        cache bert-tiny gpt2-tiny
        cache --clear=all
    """,
    "env": """
        env --jsn
        env extra
    """,
}
"""Lines that every verb refuses."""
TRIED = [line.strip() for lines in LINES.values() for line in lines.strip().splitlines()] + [
    f"plan --profile profile.json --cluster {name}" for name in CLUSTERS
]


def changed(tree: Any, change: Callable[[Any], object]) -> str:
    """Return the JSON of a copy of a tree after a change."""
    copy = json.loads(json.dumps(tree))
    change(copy)
    return json.dumps(copy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a folder with good files and bad ones, and go there."""
    place = tmp_path_factory.mktemp("malformed")
    profile, plan = json.loads(profile_text(small_profile())), json.loads(plan_text(small_plan()))
    texts = {
        "cluster.toml": CLUSTER_TOML,
        "profile.json": json.dumps(profile),
        "plan.json": json.dumps(plan),
        "bert.json": profile_text(made_up_profile("bert-tiny", kind="emulated")),
        "one.toml": ONE_EMULATED,
        "few-words.txt": "hello world",
        "array.json": '[{"text": "hello"}]',
        "cut.json": json.dumps(profile)[:300],
        "twice.json": json.dumps(plan).replace('"strategy"', '"strategy": "x", "strategy"', 1),
        "twice.toml": 'model = "bert-tiny"\nmodel = "gpt2"',
        "marked.toml": '\ufeffmodel = "bert-tiny"\ncluster = "cluster.toml"\nsteps = -1',
        "data.toml": 'model = "bert-tiny"\ncluster = "cluster.toml"\ndata = [1, 2]',
        "chats.jsonl": '{"prompt": "Who?", "completion": "The ship."}\n',
        "half.jsonl": '{"prompt": "Who?", "completion": "The ship."}\n{"prompt": "Whe',
        "empty": "",
        "list.json": "[]",
        "null.json": "null",
        "strange.toml": "modle = 1",
        "table.toml": "[model]\nname = 1",
        "words.toml": 'model = "bert-tiny"\ncluster = "cluster.toml"\nsteps = "many"',
        "numbers.toml": 'model = 3\ncluster = "cluster.toml"',
        "list.toml": 'model = ["a", "b"]\ncluster = "cluster.toml"',
        "rank.toml": 'model = "bert-tiny"\ncluster = "cluster.toml"\n[lora]\nr = "two"',
        "huge.toml": f'model = "bert-tiny"\ncluster = "cluster.toml"\nsteps = {"9" * 5000}',
        "no-layers.json": changed(profile, lambda tree: tree.update(layers=[])),
        "negative.json": changed(profile, lambda tree: times_of(tree).update(forward_s=[-1.0, 1.0])),
        "nan.json": changed(profile, lambda tree: times_of(tree).update(forward_s=[float("nan"), 1.0])),
        "tiny.json": changed(profile, lambda tree: times_of(tree).update(forward_s=[1e-300, 1e-300])),
        "no-pipelines.json": changed(plan, lambda tree: tree.update(pipelines=[])),
        "other-device.json": changed(
            plan, lambda tree: tree["pipelines"][0]["stages"][0].update(devices=["z/9"])
        ),
    }
    for name, text in texts.items():
        (place / name).write_text(text)
    for name, (old, new) in CLUSTERS.items():
        assert old in CLUSTER_TOML
        (place / name).write_text(CLUSTER_TOML.replace(old, new, 1))
    (place / "latin").write_bytes(b'{"name": "caf\xe9"}')
    (place / "utf16").write_bytes('name = "a"'.encode("utf-16"))
    for name, change in CONFIGURATIONS.items():
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(GPT2 | change))
    (place / "no-config" / "config.json").mkdir(parents=True)
    (place / "empty-folder").mkdir()
    (place / "packed.txt.gz").write_bytes(gzip.compress(b"hello world\n" * 999))
    os.mkfifo(place / "pipe")
    (place / "full").mkdir()
    (place / "full" / "mine.txt").write_text("mine")
    (place / "broken-run").mkdir()
    for name in ("plan.json", "config.json", "profile.json", "cluster.toml", "report.json", "trace.json"):
        (place / "broken-run" / name).write_text("{")
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("nowhere/x")
    before = Path.cwd()
    os.chdir(place)
    yield place
    os.chdir(before)
    shutil.rmtree(place)


def times_of(profile: Any) -> Any:
    """Return the times of the second layer on the first kind of a profile's tree."""
    return next(iter(profile["kinds"].values()))["layers"][1]


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return what is in a folder: each path with the time of its last change and its bytes."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def test_all_verbs_are_tried():
    assert set(LINES) == set(VERBS), "give each verb lines that it refuses"
    assert len(TRIED) == len(set(TRIED)) >= 60


@pytest.mark.parametrize("line", TRIED)
def test_a_line_is_refused_in_one_line(folder: Path, tmp_path: Path, line: str, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HETPIPE_TOKEN", raising=False)
    words = [word.replace("\\x1b", "\x1b").replace("\\x0a", "\n") for word in shlex.split(line)]
    before = state(folder)
    code = main(words)
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("error: ") and err.endswith("\n") and err[:-1].isprintable(), err
    assert len(err) < 1500, err
    assert state(folder) == before, "something was written"


def test_the_reason_is_in_the_line(folder: Path, capsys):
    for line, reason in (
        ("check --model ./words", "expected int, got str"),
        ("check --model ./deep", "at most 2000 blocks are taken"),
        (f"{TINY} --data '' --data few-words.txt", "Invalid value for '--data': is empty; give a path"),
        (f"plan {KNOWN} -o cluster.toml", "exists, and is no hetpipe.plan file"),
        ("plan --cluster loop --profile profile.json", "Too many levels of symbolic links"),
    ):
        assert main(shlex.split(line)) == 2
        assert reason in capsys.readouterr().err


def test_an_unknown_verb_is_refused_in_one_line(capsys):
    for words in (["paln"], ["-x"], ["plan\x1b[31m"]):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err[:-1].isprintable(), err
