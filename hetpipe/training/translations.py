"""Translations of held-out samples, written token by token through the stages of any plan, and their BLEU.

Each token takes one forward of the samples over all stages, encoder included, with what was written so far;
the ranks with the last stage say what is most likely, and all go on with it (greedy decoding). No rank holds
the whole model, and nothing is kept between tokens: it costs as many evaluations as the longest translation
has tokens, and no memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetpipe.data.bleu import References, bleu_of
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.held_out import HeldOut
from hetpipe.models.task_inputs import DECODER
from hetpipe.runtime.forward_runner import ForwardRunner
from hetpipe.runtime.rank_setup import Samples
from hetpipe.runtime.stage_runner import Microbatch
from hetpipe.training.meeting import gather

Cut = Callable[[Mapping[int, Samples]], Callable[[int, int], Microbatch]]
"""Makes microbatches of the samples of each pipeline of this rank."""


@dataclass(frozen=True, slots=True)
class Translations:
    """Writes translations of held-out samples; all ranks call it together.

    count: samples of a step. parts: of each pipeline of this rank, its first sample and their number.
    """

    held_out: HeldOut
    references: References
    forwards: ForwardRunner
    cut: Cut
    place: torch.device
    parts: Mapping[int, tuple[int, int]]
    count: int

    def bleu(self, *, scores: bool) -> float:
        """Return the BLEU of all held-out samples, the same on all ranks.

        scores: whether this rank compares, as one of them does.
        """
        number = self.held_out.num_samples
        written = [
            tokens
            for first in range(0, number, self.count)
            for tokens in self.written(first, min(self.count, number - first))
        ]
        found: float | None = None
        if scores:
            texts = [self.references.text_of(tokens) for tokens in written]
            found = bleu_of(texts, self.references.texts(0, number))
        return next(float(score) for score in gather(found) if score is not None)

    def written(self, first_sample: int, num_samples: int) -> list[list[int]]:
        """Return the tokens of the translation of each of these samples, with the one that ends it.

        One that has not ended is as long as the samples are. num_samples: as many as a step has, or less.
        """
        inputs, labels = self.held_out.batch(first_sample, self.count)
        given = {name: value.to(self.place) for name, value in inputs.items() if name != DECODER}
        unlearned = torch.full_like(labels, IGNORE_LABEL).to(self.place)
        before = torch.full_like(inputs[DECODER], self.references.padding)
        before[:, 0] = inputs[DECODER][:, 0]
        length = before.shape[1]
        tokens: list[list[int]] = [[] for _ in range(num_samples)]
        unended = set(range(num_samples))
        for at in range(length):
            for sample, token in self._next_tokens(at, {**given, DECODER: before.to(self.place)}, unlearned):
                if sample not in unended:
                    continue
                tokens[sample].append(token)
                if token == self.references.end:
                    unended.remove(sample)
                elif at + 1 < length:
                    before[sample, at + 1] = token
            if not unended:
                break
        return tokens

    def _next_tokens(self, at: int, inputs: Mapping[str, Tensor], labels: Tensor) -> list[tuple[int, int]]:
        """Return the most likely token at a place of each sample of a step, on all ranks."""
        found: list[tuple[int, int]] = []

        def seen(outputs: Tensor, microbatch: Microbatch) -> None:
            likely = self.forwards.logits(outputs[:, at]).argmax(-1).tolist()
            found.extend(zip(microbatch.samples, likely, strict=True))

        mine = {
            pipeline: (
                {name: value[start : start + size] for name, value in inputs.items()},
                labels[start : start + size],
            )
            for pipeline, (start, size) in self.parts.items()
        }
        self.forwards.loss(self.cut(mine), seen)
        return [(sample, token) for rank in gather(found) for sample, token in rank]
