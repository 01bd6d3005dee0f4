"""A model of transformers, from a configuration, with data of one's own: python examples/huggingface_model.py

Nothing is downloaded. The model is GPT-2's class with a size that the library does not know by name; its
blocks, what travels between them and its tied embedding are found. `hetpipe.solve` decides who holds which.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

import hetpipe

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 16, 20

CLUSTER = """
name = "two-unequal"
[network]
bandwidth = "200 Mbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [
  { kind = "emulated", speed = 0.6, memory = "512 MiB" },
  { kind = "emulated", speed = 0.2, memory = "256 MiB" },
]
"""


def build(num_blocks: int = 8) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=num_blocks, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Counting(torch.utils.data.Dataset):
    """Sequences that count up in steps of 1 to 8: the next token is easy to guess."""

    def __len__(self) -> int:
        return 8 * VOCABULARY

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        stride, first = 1 + index // VOCABULARY, index % VOCABULARY
        ids = (first + stride * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Summed over the tokens of a microbatch: logits [microbatch, seq, vocabulary], ids [microbatch, seq]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def num_tokens(ids: Tensor) -> int:
    """How many terms that sum has: ids [global batch, seq] of a whole step."""
    return ids[:, 1:].numel()


class Print(hetpipe.Callback):
    """Shows the loss, and ends training when it is low enough."""

    def on_step_end(self, metrics):
        print(f"step {metrics['step']}: loss {metrics['loss']:.3f}")
        return metrics["loss"] < 3.0

    def on_end(self, report):
        print(f"predicted {report.predicted_step_s:.3f} s, measured {report.measured_step_s:.3f} s a step")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        cluster_file = Path(name) / "cluster.toml"
        cluster_file.write_text(CLUSTER)
        cluster = hetpipe.read_cluster(cluster_file)
        shrunk = partial(build, num_blocks=2)  # its structure is read off this one
        task = hetpipe.own_task(build, Counting(), next_token_loss, shrunk=shrunk)
        profile = hetpipe.profile_model(
            "counting-gpt", cluster, task.sequence_length, budget_s=2.0, microbatch_sizes=(2, 4), task=task
        )
        plan = hetpipe.solve(hetpipe.problem_of(profile, cluster, BATCH), hetpipe.evaluator(profile, cluster))
        for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
            print(f"{stage.device}: layers [{stage.start}, {stage.stop})")
        trainer = hetpipe.Trainer(
            build,
            Counting(),
            hetpipe.AdamW(learning_rate=5e-3),
            next_token_loss,
            cluster=cluster_file,
            plan=plan,
            profile=profile,
            folder=Path(name) / "run",
            callbacks=[Print()],
            progress=False,  # that callback prints
            count_terms=num_tokens,
            shrunk=shrunk,
            save=True,
        )
        trainer.fit(STEPS)
        model = build()
        hetpipe.load_weights(trainer.checkpoint, model)  # an ordinary model of transformers again
        model.eval()
        ids = Counting()[5]["input_ids"][None]
        loss = next_token_loss(model(ids).logits, ids).item() / num_tokens(ids)
        print(f"the trained model's loss: {loss:.3f}")


if __name__ == "__main__":
    main()
