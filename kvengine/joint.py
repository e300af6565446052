"""Keys that a representation keeps once per sequence, for all its heads, rather than in each head's pages.

Addressed by position, so that the heads of a sequence may have sealed different tokens of it. Rows share it, and it
never changes: a state is remembered by keeping a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import page_answers
from kvengine.errors import UnsupportedPolicy
from kvengine.kernels.dispatch import chosen
from kvengine.kernels.lowrank_attention import fits, lowrank_attention
from kvengine.kernels.state import State
from kvengine.policies import name_of
from kvengine.policies.representation import Fields, Representation
from kvengine.rope import Rope
from kvengine.tokens import narrowed

PART = 1 << 10
"""Tokens that are turned back together: what that makes on the way is several times their keys."""


@dataclass(frozen=True)
class Joint:
    """What is kept of a prompt's keys.

    Attributes:
        representation: how.
        rope: the model's rotation; keys are kept unrotated.
        heads: rows of a sequence.
        dtype: of the keys.
        fields: named tensors, the sequence first; those with a token axis have it second.
        late: by how much each sequence's positions have grown since (padding came, which counts as before them).
    """

    representation: Representation
    rope: Rope
    heads: int
    dtype: torch.dtype
    fields: Fields
    late: Int[Tensor, "seq"] | None = None

    def home(self, position: Int[Tensor, "row token"]) -> Int[Tensor, "row token"]:
        """The positions that these tokens had when they were taken."""
        if self.late is None:
            return position
        by = self.late.repeat_interleave(self.heads)[:, None].to(position.dtype)
        return torch.where(position >= 0, position - by, position)

    def moved(self, by: Int[Tensor, "row"]) -> Joint:
        """Addressed by positions that have grown by so much in each row."""
        more = by[:: self.heads]
        return replace(self, late=more if self.late is None else self.late + more)

    def joined(self, other: Joint, new: Bool[Tensor, "seq"]) -> Joint:
        """With the sequences of `other` in place of the `new` ones."""
        fields = {}
        for name, x in self.fields.items():
            more = other.fields[name]
            fields[name] = torch.cat([x, x.new_zeros(len(x), more.shape[1] - x.shape[1], *x.shape[2:])], 1)
            fields[name][new] = more
        return replace(self, fields=fields, late=None if self.late is None else self.late.masked_fill(new, 0))

    def keys(self, position: Int[Tensor, "row token"]) -> Float[Tensor, "row token dim"]:
        """The keys at these positions, rotated; anything where the position is -1."""
        at = self.home(position).clamp(min=0).long()
        return narrowed(self.rope.turn(page_answers.keys(self.representation, self.fields, at), at), self.dtype)

    def reader(self) -> tuple[Callable[..., State], Fields] | None:
        """What attends on a GPU as `attend` does, and the tensors of ours that it reads; None where others would have to be made
        for that."""
        if self.representation.codec != "lowrank" or self.rope.interleaved or self.late is not None:
            return None
        u, basis, frequency = self.fields["u"], self.fields["basis"].flatten(0, 1), self.rope.frequency
        if frequency.device != u.device or chosen((u, basis), None, False) != "triton":
            return None

        def read(q: Tensor, v: Tensor, table: Tensor | None, position: Tensor, **more: Any) -> State:
            return lowrank_attention(q, u, v, basis, frequency, table, position, **more)

        return read, {"u": u, "basis": basis, "frequency": frequency}

    def attend(
        self,
        q: Float[Tensor, "row group query dim"],
        v: Float[Tensor, "v_pages page dim_v"],
        table: Int[Tensor, "row pages"] | None,
        position: Int[Tensor, "row slot"],
        **more: Any,
    ) -> Callable[[], State] | None:
        """Attention to the tokens at these positions, if a kernel rebuilds their keys as it reads them.

        `table`, `position` and `more`: see `lowrank_attention`.
        """
        if self.representation.codec != "lowrank" or self.rope.interleaved:
            return None
        u, basis, frequency = self.fields["u"], self.fields["basis"].flatten(0, 1), self.rope.frequency.to(q.device)
        if chosen((q, u, v, basis), None, fits(q, u, v, basis, frequency)) == "reference":
            return None
        return partial(lowrank_attention, q, u, v, basis, frequency, table, self.home(position), **more)

    def rows(self, index: Int[Tensor, "chosen"]) -> Joint:
        """Those of the given rows; whole sequences."""
        sequences = index[:: self.heads] // self.heads
        late = None if self.late is None else self.late[sequences]
        return replace(self, fields={name: x[sequences] for name, x in self.fields.items()}, late=late)

    def reads(self, chosen: int | None) -> int:
        """Bytes that are read for that many tokens of all rows together; None reads all tokens, once."""
        by_token = [] if chosen is None else self.representation.by_token
        rest = sum(x.nbytes for name, x in self.fields.items() if name not in by_token)
        return rest + sum((chosen or 0) * self.fields[name][0, 0].nbytes for name in by_token)


def join(
    representation: Representation,
    rope: Rope | None,
    heads: int,
    k: Float[Tensor, "row token dim"],
    position: Int[Tensor, "row token"],
    seen: int,
) -> Joint:
    """Take what a representation keeps of these keys (position -1: no token); `seen` positions are in use.

    Raises:
        UnsupportedPolicy: the model has no rotation that could be undone.
    """
    if rope is None:
        raise UnsupportedPolicy(
            f"{name_of(representation)!r} needs keys before their rotation, but this model has no rotary position "
            "embedding that the engine knows; use another representation"
        )
    # The heads of a token side by side, as `lowrank` reads them: it need not copy all of these floats.
    placed = k.new_zeros(len(k) // heads, seen + 1, heads, k.shape[2], dtype=torch.float32)
    for start in range(0, k.shape[1], PART):
        where = position[:, start : start + PART]
        flat = rope.turn(k[:, start : start + PART].float(), -where)
        at = torch.where(where >= 0, where, seen).long()[..., None].expand_as(flat)  # `seen` is cut off
        placed.scatter_(1, *(x.unflatten(0, (-1, heads)).transpose(1, 2) for x in (at, flat)))
    with torch.autocast(k.device.type, enabled=False):  # as with pages
        joined = page_answers.joined(representation, placed[:, :seen].transpose(1, 2))
    fields = {name: x.to(k.dtype) for name, x in joined.items()}
    rope = Rope(rope.frequency.to(k.device), rope.interleaved)  # for every step that turns: no recording copies it
    return Joint(representation, rope, heads, k.dtype, fields)
