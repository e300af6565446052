"""What the tokens of a cache were made of, as long as a replay may have to feed them again.

Kept pass by pass, vectors by reference, and dropped once they were replayed. Passes follow each other; after a gap (tokens
that came without ids, a step that was recorded) only what comes behind it is known, and what was taken back is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine.policies.retention import Replay
from kvengine.tokens import pack

Embed = Callable[[Tensor], Tensor]
MANY = 64  # passes of one token each that are put together, if all brought ids, or all vectors


@dataclass
class Piece:
    """Tokens of one pass: ids [seq, token] or vectors [seq, token, dim]; positions [axis, seq or 1, token]."""

    made_of: Tensor
    position: Int[Tensor, "axis #seq token"]
    fresh: Bool[Tensor, "seq token"] | None  # which of them are tokens that no replay has read; None: all

    @property
    def tokens(self) -> int:
        return self.made_of.shape[1]

    @property
    def unread(self) -> Bool[Tensor, "seq token"]:
        if self.fresh is None:
            return torch.ones(self.made_of.shape[:2], dtype=torch.bool, device=self.made_of.device)
        return self.fresh

    def sound(self) -> bool:
        """Whether its parts have shapes that fit."""
        made, place, fresh = self.made_of, self.position, self.fresh
        shape = tuple(made.shape[:2])
        placed = place.ndim == 3 and place.shape[1] in (1, shape[0]) and place.shape[2] == shape[1]
        vectors = made.is_floating_point()
        return (
            placed
            and made.ndim == 2 + vectors
            and (fresh is None or (fresh.dtype, tuple(fresh.shape)) == (torch.bool, shape))
        )

    def cut(self, tokens: int) -> Piece:
        """The first of them."""
        fresh = None if self.fresh is None else self.fresh[:, :tokens]
        return Piece(self.made_of[:, :tokens], self.position[..., :tokens], fresh)


class Again(NamedTuple):
    """What the layers of a cache are to know of a pass of a replay."""

    valid: Bool[Tensor, "seq token"]  # which of the fed tokens are tokens
    full: bool  # all are
    known: Int[Tensor, "seq"]  # how many of the tokens held, the last that no replay has read, are replayed in all
    start: Int[Tensor, "seq"]  # how many of these come before the chunk
    size: Int[Tensor, "seq"]  # how many are in it
    sinks: int

    def on(self, device: torch.device) -> Again:
        valid, known, start, size = (x.to(device) for x in (self.valid, self.known, self.start, self.size))
        return Again(valid, self.full, known, start, size, self.sinks)


class Fed(NamedTuple):
    """A pass of a replay: ids or vectors, their positions, and what the layers are to know."""

    made_of: Tensor
    position: Int[Tensor, "axis #seq token"]
    again: Again


@dataclass
class Text:
    """The passes since the last replay, up to the token before `end`, and the last mask [seq, so far], if there was one."""

    end: int = 0
    pieces: list[Piece] = field(default_factory=list)
    mask: Tensor | None = None

    def add(self, begin: int, made_of: Tensor, position: Tensor | None, mask: Tensor | None) -> None:
        """The pass that begins with token number `begin`. What is small is copied: it may be a view of all there is, and
        whoever gives ids in pieces may give each in the same memory."""
        if begin > self.end or (self.pieces and len(self.pieces[0].made_of) != len(made_of)):
            self.pieces.clear()
        while self.pieces and self.end > begin:
            last = self.pieces.pop()
            self.end -= last.tokens
            if self.end < begin:
                self.pieces.append(last.cut(begin - self.end))
        n = made_of.shape[1]
        if position is None:
            position = torch.arange(begin, begin + n, device=made_of.device)
        position = position.view(-1, *position.shape[-2:]) if position.ndim > 1 else position[None, None]
        fresh = None if mask is None else self.here(mask, begin, n)
        small = n == 1 or made_of.ndim == 2
        self.pieces.append(Piece(made_of.detach().clone() if small else made_of.detach(), position.clone(), fresh))
        self.end, self.mask = begin + n, mask
        newest = self.pieces[-MANY:]
        if len(self.pieces) > MANY and {(x.tokens, x.made_of.ndim) for x in newest} == {(1, made_of.ndim)}:
            self.pieces[-MANY:] = [joined(newest, None)]

    @property
    def nbytes(self) -> int:
        parts = [x for piece in self.pieces for x in (piece.made_of, piece.position, piece.fresh)]
        return sum(x.nbytes for x in (*parts, self.mask) if x is not None)

    @staticmethod
    def here(mask: Tensor, begin: int, n: int) -> Bool[Tensor, "seq token"]:
        """What a mask over all tokens says of these; of those that it does not reach, that they are tokens."""
        part = mask[:, begin : begin + n] != 0
        return torch.nn.functional.pad(part, (0, n - part.shape[1]), value=True)

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        """Become the given sequences."""
        for i, piece in enumerate(self.pieces):
            at = index.to(piece.made_of.device)
            position = piece.position if piece.position.shape[1] == 1 else piece.position[:, at]
            self.pieces[i] = Piece(piece.made_of[at], position, None if piece.fresh is None else piece.fresh[at])
        self.mask = None if self.mask is None else self.mask[index.to(self.mask.device)]

    def repeat(self, repeats: int) -> None:
        """Each sequence, `repeats` times."""
        if self.pieces:
            self.rows(torch.arange(len(self.pieces[0].made_of)).repeat_interleave(repeats))

    def state(self) -> dict[str, Any] | None:
        """What `of` makes the same from, as plain values and tensors; None where nothing is left to replay."""
        if not self.pieces:
            return None
        whole = joined(self.pieces, None) if len({p.made_of.ndim for p in self.pieces}) == 1 else None
        pieces = [vars(p) for p in ([whole] if whole is not None else self.pieces)]
        return {"end": self.end, "pieces": pieces, "mask": self.mask}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Text:
        """Raises ValueError for what is no text."""
        text = cls(state["end"], [Piece(**piece) for piece in state["pieces"]], state["mask"])
        if text.end < sum(p.tokens for p in text.pieces) or any(not p.sound() for p in text.pieces):
            raise ValueError("a text whose pieces do not fit together")
        return text

    def done(self, sequences: Bool[Tensor, "seq"]) -> None:
        """These sequences were replayed."""
        self.pieces = [replace(p, fresh=p.unread & ~sequences.to(p.made_of.device)[:, None]) for p in self.pieces]
        if not any(bool(p.unread.any()) for p in self.pieces):
            self.pieces, self.mask = [], None

    def plan(self, how: Replay, due: Bool[Tensor, "seq"], embed: Embed) -> Iterator[Fed]:
        """The passes of a replay of these sequences. `embed`: makes vectors of ids, where some of the text came as such."""
        whole = joined(self.pieces, embed)
        device, rows = whole.made_of.device, len(whole.made_of)
        unread = whole.unread & due.to(device)[:, None]
        if self.mask is not None:  # what was a token once may be hidden by now
            unread &= self.here(self.mask, self.end - whole.tokens, whole.tokens).to(device)
        slot, known = pack(unread), unread.sum(1)
        source, extra = whole.made_of, (how.prompt, how.suffix)
        for ids in extra:
            given = torch.tensor(ids, dtype=torch.long, device=device).expand(rows, -1)
            source = torch.cat([source, given if source.ndim == 2 else embed(given)], 1) if ids else source
        place = whole.position
        groups = [place] if len(place) != 4 else [place[:1], place[1:]]  # the first of four axes counts tokens
        for i in range(-(-int(known.max()) // how.chunk)):
            start = known.clamp(max=i * how.chunk)
            count = (known - start).clamp(max=how.chunk)
            carry = min(how.carry, i * how.chunk)
            valid, which = layout(how, slot, known, start, count, carry, whole.tokens)
            wide = which[..., None].expand(-1, -1, source.shape[-1]) if source.ndim == 3 else which
            position = torch.cat([places(how, axes, unread, valid, which, carry) for axes in groups])
            again = Again(valid, bool(valid.all()), known, start, count, how.sinks)
            yield Fed(source.gather(1, wide), position, again)


def joined(pieces: list[Piece], embed: Embed | None) -> Piece:
    """Passes as one; where some are vectors, ids are made vectors too."""
    made = [piece.made_of for piece in pieces]
    if embed is not None and len({x.ndim for x in made}) > 1:
        made = [embed(x) if x.ndim == 2 else x for x in made]
    rows, axes = len(made[0]), max(len(piece.position) for piece in pieces)
    position = torch.cat([on_axes(piece.position, axes).expand(axes, rows, -1) for piece in pieces], 2)
    every = all(piece.fresh is None for piece in pieces)
    fresh = None if every else torch.cat([piece.unread.to(made[0].device) for piece in pieces], 1)
    return Piece(torch.cat(made, 1), position.to(made[0].device), fresh)


def on_axes(place: Int[Tensor, "some #seq token"], axes: int) -> Int[Tensor, "axis #seq token"]:
    """The first of four axes counts tokens: `generate` gives it, and a pass whose model finds the positions itself does not."""
    return torch.cat([place.amax(0, keepdim=True), place]) if len(place) == 3 and axes == 4 else place


def layout(
    how: Replay,
    slot: Int[Tensor, "seq most"],
    known: Int[Tensor, "seq"],
    start: Int[Tensor, "seq"],
    count: Int[Tensor, "seq"],
    carry: int,
    tokens: int,
) -> tuple[Bool[Tensor, "seq fed"], Int[Tensor, "seq fed"]]:
    """Of each place of a pass whether something stands there, and what, as a column of [text | prompt | suffix].

    Padding comes last: nobody sees it then, be it a window or a state that reads.
    """
    p, s = len(how.prompt), len(how.suffix)
    width = torch.where(count > 0, p + carry + s + count, 0)
    at = torch.arange(int(width.max()), device=slot.device).expand(len(width), -1)
    behind = at - p - carry  # the suffix begins at 0
    number = start[:, None] + torch.where(behind < 0, behind, behind - s)
    which = slot.gather(1, (slot.shape[1] - known[:, None] + number).clamp(0, slot.shape[1] - 1)).clamp(min=0)
    which = torch.where(at < p, tokens + at, which)
    which = torch.where((behind >= 0) & (behind < s), tokens + p + behind, which)
    valid = at < width[:, None]
    return valid, which.masked_fill(~valid, 0)


def places(
    how: Replay,
    place: Int[Tensor, "axis seq token"],
    unread: Bool[Tensor, "seq token"],
    valid: Bool[Tensor, "seq fed"],
    which: Int[Tensor, "seq fed"],
    carry: int,
) -> Int[Tensor, "axis seq fed"]:
    """The positions of what is fed: they go on behind the text, and what is repeated has the distances it had there.

    The axes of a rotation go on together, as they do behind an image.
    """
    p, s = len(how.prompt), len(how.suffix)
    at = torch.arange(which.shape[1], device=which.device).expand_as(which)
    after = place.masked_fill(~unread, -1).amax((0, 2))[:, None] + 1
    behind = at - p - carry
    own = place.gather(2, which.clamp(max=place.shape[2] - 1).expand(len(place), -1, -1))

    def moved(part: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
        """What is repeated, from `to` on, and where it ends."""
        none = torch.iinfo(own.dtype).max
        first = own.masked_fill(~part, none).amin((0, 2))[:, None]
        there = (own - first + to).masked_fill(~part, 0)
        return there, torch.maximum(there.amax((0, 2))[:, None] + 1, to)

    early, end = moved(valid & (at >= p) & (behind < 0), after + p)
    late, _ = moved(valid & (behind >= s), end + s)
    asked = torch.where(at < p, after + at, end + behind)
    found = torch.where((at < p) | ((behind >= 0) & (behind < s)), asked, early + late)
    return found.masked_fill(~valid, 0)
