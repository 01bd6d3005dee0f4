"""What the host spends on a step without any message, and on an element of dropout. See README.md."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForPreTraining, LlamaConfig, LlamaForCausalLM

from hetpipe.models import philox
from hetpipe.models.block_structure import logits_of
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import ModelSpec
from hetpipe.models.keyed_dropout import KeyedDropout, stable_hash
from hetpipe.models.loss import loss_sum
from hetpipe.models.philox_torch import draw
from hetpipe.models.tasks import Task
from hetpipe.program.instructions import Compute, Pass, Program
from hetpipe.runtime.stage_runner import Microbatch, StageRunner
from partition.plan import Pipeline, Plan, Stage

BLOCKS, WIDTH, LENGTH, VOCABULARY = 24, 64, 16, 256
NARROW = {
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
KEEP = 0.9
Step = Callable[[int], Any]


class Watched(KeyedDropout):
    """Dropout that looks at every call of torch in every layer."""

    def at(self, step: int, samples: Sequence[int], layers: Any = None) -> None:
        super().at(step, samples)


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**NARROW, num_key_value_heads=4))


def bert(dropout: float) -> nn.Module:
    config = BertConfig(
        **NARROW,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="eager",
    )
    return BertForPreTraining(config)


def models() -> Iterator[tuple[str, ModelSpec]]:
    """Yield the models by name: narrow ones of 24 blocks, so that the host is all that takes time."""
    yield "Llama, no dropout", _spec(Task.CAUSAL_LM, llama)
    yield "BERT, no dropout", _spec(Task.MASKED_LM, lambda: bert(0.0))
    yield "BERT, dropout 0.1", _spec(Task.MASKED_LM, lambda: bert(1 - KEEP))


def _spec(task: Task, build: Callable[[], nn.Module]) -> ModelSpec:
    return ModelSpec("narrow", task, VOCABULARY, LENGTH, build, build)


def steps(spec: ModelSpec) -> dict[str, Step]:
    """Return what computes loss and gradients of a sample: torch's own loop, and ours in two ways."""
    chain = ChainModel.from_spec(spec)
    ids = torch.randint(1, VOCABULARY, (1, LENGTH))
    inputs = {"input_ids": ids}

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_sum(spec.task, logits, labels)

    model = spec.build().train()

    def eager(_: int) -> None:
        loss(logits_of(model(**inputs, return_dict=False)), ids).backward()

    stage = Stage(("a/0",), (0, chain.num_layers), 1)
    plan = Plan("one", "narrow", 1, (Pipeline(1, 1, (stage,)),))
    forward, backward = (Compute(way, 0, 0, 0) for way in (Pass.FORWARD, Pass.BACKWARD))

    def ours(dropout: KeyedDropout) -> Step:
        layers = chain.materialise(range(chain.num_layers), 0, torch.float32).train()
        runner = StageRunner(Program(plan, (), ()), layers, dropout, loss)

        def step(number: int) -> None:
            runner.forward(forward, Microbatch(number, (0,), inputs, ids, 1.0), ())
            runner.backward(backward, ())

        return step

    return {"torch": eager, "hetpipe": ours(KeyedDropout(0)), "watched": ours(Watched(0))}


def stages_of(spec: ModelSpec, num_stages: int) -> dict[str, Step]:
    """Return what computes all stages of a pipeline in turn, with the prefix once or each time."""
    chain = ChainModel.from_spec(spec)
    ids = torch.randint(1, VOCABULARY, (1, LENGTH))
    cuts = [stage * chain.num_layers // num_stages for stage in range(num_stages + 1)]
    ranges = list(pairwise(cuts))
    ranks = tuple(Stage((f"a/{index}",), cut, num_stages - index) for index, cut in enumerate(ranges))
    plan = Plan("several", "narrow", 1, (Pipeline(1, 1, ranks),))

    def step_of(*, keeps: bool) -> Step:
        runners = []
        for cut in ranges:
            layers = chain.materialise(range(*cut), 0, torch.float32).train()
            if not keeps:
                layers._arguments.may_record = lambda _: False  # as it was: the prefix in each forward
            dropout, loss = KeyedDropout(0), partial(loss_sum, spec.task)
            runners.append(StageRunner(Program(plan, (), ()), layers, dropout, loss))

        def step(number: int) -> None:
            data = Microbatch(number, (0,), {"input_ids": ids}, ids, 1.0)
            carried: tuple[Tensor, ...] = ()
            for stage, runner in enumerate(runners):
                carried = runner.forward(Compute(Pass.FORWARD, 0, stage, 0), data, carried)
                carried = tuple(tensor.detach() for tensor in carried)
            for stage, runner in reversed(list(enumerate(runners))):
                carried = runner.backward(Compute(Pass.BACKWARD, 0, stage, 0), carried)

        return step

    return {"each time": step_of(keeps=False), "once": step_of(keeps=True)}


def table_of_stages(rounds: int, num_stages: int = 6) -> Iterator[str]:
    yield f"| {num_stages} stages | prefix in each forward | once for each shape | ratio |"
    yield "|---|---|---|---|"
    for name, spec in models():
        found = milliseconds(stages_of(spec, num_stages), rounds)
        ratios = sorted(once / each for once, each in zip(found["once"], found["each time"], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        before, now = (statistics.median(found[way]) for way in ("each time", "once"))
        yield (
            f"| {name} | {before:.2f} ms | {now:.2f} ms | {statistics.median(ratios):.3f} "
            f"[{low:.3f}, {high:.3f}] |"
        )


def milliseconds(ways: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the CPU milliseconds of each way in each round, the ways in turn."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, step in ways.items():
            begin = time.process_time()
            step(number)
            if number >= 2:  # the first forwards are watched, and compile
                found[name].append(1e3 * (time.process_time() - begin))
    return found


def table_of_steps(rounds: int) -> Iterator[str]:
    yield "| model | torch's loop | hetpipe | ratio | every call watched | ratio |"
    yield "|---|---|---|---|---|---|"
    for name, spec in models():
        found = milliseconds(steps(spec), rounds)
        middle = {way: statistics.median(values) for way, values in found.items()}
        cells = [f"{middle['torch']:.2f} ms"]
        for way in ("hetpipe", "watched"):
            ratios = sorted(ours / torch for ours, torch in zip(found[way], found["torch"], strict=True))
            low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
            cells += [f"{middle[way]:.2f} ms", f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"]
        yield f"| {name} | {' | '.join(cells)} |"


def table_of_dropout(rounds: int) -> Iterator[str]:
    """Yield the nanoseconds of an element: a million of float32 in four samples."""
    x = torch.randn(4, 2**18)
    generator = torch.Generator()

    def with_generator(number: int) -> Tensor:
        masks = torch.empty(x.shape)
        for sample, mask in enumerate(masks):
            generator.manual_seed(stable_hash(f"0,{number},3,0,{sample}"))
            mask.bernoulli_(KEEP, generator=generator)
        masks /= KEEP
        return x * masks

    ways: dict[str, Step] = {
        "by a seeded generator for each sample, as before": with_generator,
        "Philox, masks alone": lambda number: philox.kept(draw(number, 0, range(4), KEEP), 2**18, x.device),
        "Philox, drawn and applied": lambda number: philox.dropped(x, draw(number, 0, range(4), KEEP)),
        "torch's own dropout": lambda _: functional.dropout(x, 1 - KEEP),
    }
    yield "| dropout of float32 | ns an element, median | quarters |"
    yield "|---|---|---|"
    for name, values in milliseconds(ways, rounds).items():
        each = sorted(1e6 * value / x.numel() for value in values)
        low, high = each[len(each) // 4], each[3 * len(each) // 4]
        yield f"| {name} | {statistics.median(each):.2f} | {low:.2f} to {high:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=("dropout", "steps", "stages"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = {"dropout": table_of_dropout, "steps": table_of_steps, "stages": table_of_stages}
    for table in [options.only] if options.only else tables:
        for line in (*tables[table](options.rounds), ""):
            print(line, flush=True)


if __name__ == "__main__":
    main()
