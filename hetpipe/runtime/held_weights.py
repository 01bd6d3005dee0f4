"""The weights and gradients of what a rank holds with others: whole while a layer works, and what it owns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hetpipe.program.instructions import Gather
from hetpipe.runtime.bucket_parameters import shaped_like


@dataclass(slots=True)
class Piece:
    """What one bucket moves: the numbers [start, stop) of a `Held`, laid end to end.

    parts: of a range that this rank owns, the parameters that it steps, and how many dimensions each has.
    weights, gradients: of the owner, where the range is by itself; None where it is a place in the whole.
    """

    start: int
    stop: int
    is_owner: bool
    parts: Sequence[tuple[nn.Parameter, int]] = ()
    weights: Tensor | None = None
    gradients: Tensor | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Return its place in memory of the whole; a number to meet over where it has none."""
        return whole[self.start : self.stop] if self.start < self.stop else whole.new_zeros(1)

    def _views(self, numbers: Tensor) -> list[Tensor]:
        split = torch.split(numbers, [value.numel() for value, _ in self.parts]) if self.parts else ()
        return [shaped_like(own, dims) for own, (_, dims) in zip(split, self.parts, strict=True)]

    def own_weights(self, numbers: Tensor) -> None:
        """Let the owned range be in this memory, as it is now."""
        self.weights = numbers
        for (value, _), own in zip(self.parts, self._views(numbers), strict=True):
            value.data = own

    def make_gradients(self) -> None:
        """Set the gradients of the owned range to zero."""
        assert self.weights is not None
        if self.gradients is None:
            self.gradients = torch.empty_like(self.weights)
        self.gradients.zero_()
        for (value, _), own in zip(self.parts, self._views(self.gradients), strict=True):
            value.grad = own


@dataclass(slots=True)
class Held:
    """The parameters of one bucket on this rank, or of all that are ranges of a layer, each in one memory.

    Of a bucket that is no range the owner has its weights and gradients here all the time. The owner of a
    range has that apart, and the whole, like all others, only while the layer works.

    pieces: what each bucket (its index) moves. weights: of the parameters, which are views of it; None while
    they are elsewhere. gradients: the same of their gradients.
    """

    members: list[nn.Parameter]
    shapes: list[torch.Size]
    pieces: Mapping[int, Piece]
    weights: Tensor | None = None
    gradients: Tensor | None = None
    _coming: Tensor | None = None  # memory of all ranges, into which the last ones are fetched
    _asked: set[int] = field(default_factory=set)  # the ranges that were fetched into it
    _fetched_into: dict[Gather, Tensor] = field(default_factory=dict)  # such memory, of what is under way
    _here: set[int] = field(default_factory=set)  # ranges that were fetched, and not dropped
    _given: set[int] = field(default_factory=set)  # whose gradients of this round are on their way

    @property
    def is_cut(self) -> bool:
        """Whether several ranks own a range of it."""
        return len(self.pieces) > 1

    @property
    def is_owner(self) -> bool:
        """Whether this rank owns all of it."""
        return not self.is_cut and all(piece.is_owner for piece in self.pieces.values())

    def views(self, whole: Tensor) -> list[Tensor]:
        """Return the members' places in memory for all of them."""
        if not self.members:
            return []
        sizes = [shape.numel() for shape in self.shapes]
        return [part.view(shape) for part, shape in zip(torch.split(whole, sizes), self.shapes, strict=True)]

    def empty(self, count: int | None = None) -> Tensor:
        """Return memory for so many numbers, or for all; of a layer without any, a number to meet over."""
        if not self.members:
            return torch.zeros(1)
        first, all_of_them = self.members[0], sum(shape.numel() for shape in self.shapes)
        return torch.empty(count or all_of_them, dtype=first.dtype, device=first.device)

    @torch.no_grad()
    def settle(self, *, is_sharded: bool) -> None:
        """Put the weights into one memory; where they are sharded, those that this rank owns alone."""
        if is_sharded and self.is_cut:
            for piece in self.pieces.values():
                if piece.is_owner:  # the parts are views of the whole until now
                    own = [value.detach().reshape(-1) for value, _ in piece.parts]
                    piece.own_weights(torch.cat(own) if own else self.empty().new_zeros(1))
        if is_sharded and not self.is_owner:
            self.let_go()
            return
        self.weights = self.empty()
        for value, part in zip(self.members, self.views(self.weights), strict=True):
            part.copy_(value)
            value.data = part
        for piece in self.pieces.values():
            if self.is_cut and piece.is_owner:
                piece.own_weights(piece.of(self.weights))

    def owned(self) -> Mapping[int, Tensor]:
        """Return the weights that this rank owns, by bucket."""
        found = {index: piece.weights for index, piece in self.pieces.items() if self.is_cut}
        if self.is_owner:
            found = dict.fromkeys(self.pieces, self.weights)
        return {index: weights for index, weights in found.items() if weights is not None}

    def resident(self) -> list[Tensor]:
        """Return what of gradients is there for the whole step, and weights of ranges, which no name has."""
        kept = [self.gradients] if self.is_owner else []
        kept += [each for piece in self.pieces.values() for each in (piece.weights, piece.gradients)]
        return [each for each in kept if each is not None]

    def attach(self) -> None:
        """Set the owned gradients to zero before a step, and let go of all others."""
        self._given.clear()
        if self.is_owner:
            self.make_gradients()
            return
        self.drop_gradients()
        for piece in self.pieces.values():
            if self.is_cut and piece.is_owner:
                piece.make_gradients()

    def make_gradients(self) -> None:
        """Make room for the gradients of all members, zeros."""
        if self.gradients is None:
            self.gradients = self.empty()
        self.gradients.zero_()
        for value, part in zip(self.members, self.views(self.gradients), strict=True):
            value.grad = part

    def drop_gradients(self) -> None:
        """Let go of the gradients of all members; of what moves the mover keeps what it needs."""
        self.gradients = None
        for value in self.members:
            value.grad = None

    @torch.no_grad()
    def to_sum(self, bucket: int) -> Tensor:
        """Return what this rank gives to a round of a bucket's sum, into which the owner gets the sum.

        None of the others' is left here then, and nothing of the whole once all ranges have gone.
        """
        piece, made = self.pieces[bucket], self.gradients
        if not self.is_cut:
            if not self.is_owner:
                self.drop_gradients()
            return self.empty().zero_() if made is None else made  # None: a round without a backward here
        self._given.add(bucket)
        if len(self._given) == len(self.pieces):
            self._given.clear()
            self.drop_gradients()
        if piece.is_owner:
            assert piece.gradients is not None
            if made is not None:
                piece.gradients += piece.of(made)
            return piece.gradients
        if made is None:  # memory of the range alone: those of all ranges are there at once
            return self.empty(max(1, piece.stop - piece.start)).zero_()
        return piece.of(made)

    @torch.no_grad()
    def to_fetch(self, entry: Gather) -> Tensor:
        """Return where the weights of a bucket come to, of the owner where they are.

        Ranges that are fetched one after the other come into one memory, in which owned ones are already.
        """
        if not self.is_cut:
            return self.weights if self.is_owner and self.weights is not None else self.empty()
        if self._coming is None or entry.bucket in self._asked:
            self._coming = self.empty()
            self._asked.clear()
            for piece in self.pieces.values():
                if piece.weights is not None and piece.start < piece.stop:
                    piece.of(self._coming).copy_(piece.weights)
        self._asked.add(entry.bucket)
        self._fetched_into[entry] = self._coming
        piece = self.pieces[entry.bucket]
        return piece.of(self._coming) if piece.weights is None else piece.weights

    def have(self, entry: Gather, fetched: Tensor) -> Tensor | None:
        """Let the parameters be what was fetched; return the memory of all, None where nothing changed."""
        if self.is_owner:
            return None
        self.weights = self._fetched_into.pop(entry) if self.is_cut else fetched
        self._here.add(entry.bucket)
        for value, part in zip(self.members, self.views(self.weights), strict=True):
            value.data = part
        return self.weights

    def may_drop(self, bucket: int) -> bool:
        """Return whether no other range of what a bucket fetched is in use."""
        self._here.discard(bucket)
        return not self._here and not self.is_owner

    def let_go(self) -> None:
        """Leave the parameters without numbers, but for what of them this rank owns apart."""
        if self._coming is self.weights:
            self._coming = None
        self.weights = None
        for value, shape in zip(self.members, self.shapes, strict=True):
            # no numbers, so that what would compute with them by mistake is not finite
            value.data = torch.full((), math.nan, dtype=value.dtype, device=value.device).expand(shape)
