"""Lives of a cache on a model: a script of turns and decoded tokens, told plainly, with detours, or for one row.

The text is given, whatever the model says, so that one difference does not become many.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvengine import EngineCache, saved
from kvengine.errors import CacheError
from kvengine.hf.names import CACHE

TOKENS = 128


@dataclass(frozen=True)
class Part:
    """Some tokens [row, token] of every row; `mask` says which are tokens.

    `kind`: "prompt" (a turn to judge), "follow" (a question on what is there), "decode" (one by one).
    """

    kind: str
    ids: Tensor
    mask: Tensor

    @property
    def resumes(self) -> bool:
        """Whether a row has one token, and so goes on decoding beside the others' prompt: if that comes in one pass."""
        return self.kind == "prompt" and bool((self.mask.sum(1) == 1).any())

    def row(self, r: int) -> Part:
        """Of one row, without its padding."""
        real = self.mask[r].bool()
        return replace(self, ids=self.ids[r : r + 1, real], mask=self.mask[r : r + 1, real])


Script = list[Part]


def part(kind: str, rows: int, length: int, seed: int) -> Part:
    ids = torch.randint(2, TOKENS, (rows, length), generator=torch.Generator().manual_seed(seed))
    return Part(kind, ids, torch.ones_like(ids))


def alone(script: Script, r: int) -> Script:
    return [one for one in (p.row(r) for p in script) if one.ids.shape[1]]


class Batch:
    """A cache, or several that hold a row each, and the mask of what they have seen."""

    def __init__(self, model: Any, rows: int, cache: Any = None) -> None:
        self.model = model
        self.caches = [EngineCache(model) if cache is None else cache]
        self.mask = torch.zeros(rows, 0, dtype=torch.long, device=model.device)
        self.order = list(range(rows))  # which row of the script each is
        self.inference = False  # whether passes run in torch's inference mode

    def feed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits of a pass; rows in the order of the script, in and out."""
        with torch.inference_mode(self.inference), torch.no_grad():
            return self.passed(ids, mask)

    def passed(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, mask[self.order]], 1)
        at = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        ids, out = ids[self.order], []
        for i, cache in enumerate(self.caches):
            some = slice(i, i + 1) if len(self.caches) > 1 else slice(None)
            inputs = {"attention_mask": self.mask[some], "position_ids": at[some], CACHE: cache}
            out.append(self.model(ids[some], **inputs, use_cache=True).logits)
        found = torch.cat(out)
        back = torch.tensor(self.order).argsort()
        return found[back]

    def each(self, do: Callable[[Any], Any]) -> None:
        for cache in self.caches:
            do(cache)


def plain(model: Any, script: Script, cache: Any = None) -> list[Tensor]:
    """Logits of every part, each turn in one pass."""
    batch = Batch(model, len(script[0].ids), cache)
    out = []
    for one in script:
        if one.kind == "follow" and cache is None:
            batch.each(lambda c: c.follow_up(True))
        if one.kind == "decode":
            steps = [batch.feed(i, m) for i, m in zip(one.ids.split(1, 1), one.mask.split(1, 1), strict=True)]
            out.append(torch.cat(steps, 1))
        else:
            if one.kind == "prompt" and cache is None:
                total = batch.mask.shape[1] + one.ids.shape[1]
                batch.each(lambda c, total=total: c.announce(total))
            out.append(batch.feed(one.ids, one.mask))
        if one.kind == "follow" and cache is None:
            batch.each(lambda c: c.follow_up(False))
    return out


@dataclass
class Detours:
    """Takes a script another way: in pieces, and with detours between passes."""

    model: Any
    chance: Random
    folder: Path
    often: float = 0.3
    chunks: bool = True  # whether a prompt may come in pieces
    log: list[str] = field(default_factory=list)

    def live(self, script: Script) -> list[Tensor]:
        batch, out = Batch(self.model, len(script[0].ids)), []
        for one in script:
            n = one.ids.shape[1]
            if one.kind == "follow":
                batch.each(lambda c: c.follow_up(True))
            if one.kind == "prompt":
                total = batch.mask.shape[1] + n
                batch.each(lambda c, total=total: c.announce(total))
            found, i = [], 0
            while i < n:
                whole = one.resumes or (one.kind == "prompt" and not self.chunks)
                m = n if whole else self.piece(one.kind, n - i)
                ids, mask = one.ids[:, i : i + m], one.mask[:, i : i + m]
                if one.kind == "decode" and m > 1:
                    found.append(self.guess(batch, ids, mask))
                else:
                    found.append(batch.feed(ids, mask))
                i += m
                self.log.append(f"{one.kind} {m}")
                self.detour(batch, within=one.kind != "decode" and i < n)
            out.append(torch.cat(found, 1))
            if one.kind == "follow":
                batch.each(lambda c: c.follow_up(False))
        return out

    def noise(self, rows: int, n: int) -> Tensor:
        g = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        return torch.randint(2, TOKENS, (rows, n), generator=g).to(self.model.device)

    def piece(self, kind: str, left: int) -> int:
        if kind == "decode":
            return self.chance.randint(1, min(left, 9)) if self.chance.random() < self.often / 2 else 1
        return left if self.chance.random() < 0.4 else self.chance.randint(1, left)

    def guess(self, batch: Batch, ids: Tensor, mask: Tensor) -> Tensor:
        """As speculation does: all at once, with some more that turn out wrong."""
        wrong = self.chance.randint(0, 6)
        more = self.noise(len(ids), wrong)
        batch.each(lambda c: c.activate_past_recording())
        found = batch.feed(torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1))
        if wrong:
            self.back(batch, wrong)
        batch.each(lambda c: c.deactivate_past_recording())
        return found[:, : ids.shape[1]]

    @staticmethod
    def back(batch: Batch, n: int) -> None:
        batch.each(lambda c: c.rollback(n))
        batch.mask = batch.mask[:, :-n]

    def detour(self, batch: Batch, within: bool) -> None:
        ways = {"copy": self.copy, "save": self.save, "swap": self.swap, "repeat": self.repeat, "split": self.split,
                "other": self.other, "inference": self.inference}  # fmt: skip
        if not within:
            ways |= {"draft": self.draft, "crop": self.crop}
        while self.chance.random() < self.often:
            way = self.chance.choice(sorted(ways))
            self.log.append(way)
            ways[way](batch)

    def copy(self, batch: Batch) -> None:
        """What goes on is the copy, while the first does something else."""
        kept = batch.caches
        batch.caches = [copy.deepcopy(c) for c in kept]
        aside = Batch(self.model, len(batch.order))
        aside.caches, aside.mask, aside.order = kept, batch.mask, list(range(len(batch.order)))
        try:
            self.some(aside, self.chance.randint(1, 12), self.chance.random() < 0.5)
        except (
            CacheError
        ) as error:  # in the middle of a prompt: this is more than was announced, and by that queries were chosen
            assert "was to end at" in str(error)
        if self.chance.random() < 0.5:
            del aside, kept

    def some(self, batch: Batch, n: int, together: bool) -> None:
        ids = self.noise(len(batch.order), n)
        for piece in [ids] if together else ids.split(1, 1):
            batch.feed(piece, torch.ones_like(piece))

    def save(self, batch: Batch) -> None:
        for i, cache in enumerate(batch.caches):
            path = self.folder / f"{i}.kv"
            saved.save(cache, path, self.model)
            batch.caches[i] = saved.load(self.model, path)

    def swap(self, batch: Batch) -> None:
        order = self.chance.sample(range(len(batch.order)), len(batch.order))
        self.select(batch, torch.tensor(order))

    def select(self, batch: Batch, index: Tensor) -> None:
        if len(batch.caches) > 1:
            batch.caches = [batch.caches[i] for i in index]
        else:
            batch.caches[0].reorder_cache(index)
        batch.mask, batch.order = batch.mask[index], [batch.order[i] for i in index]

    def repeat(self, batch: Batch) -> None:
        """Beams that go on a little, of which the best are all one's own."""
        if len(batch.caches) > 1:
            return
        by = self.chance.randint(2, 3)
        batch.each(lambda c: c.batch_repeat_interleave(by))
        n = len(batch.order)
        index = torch.tensor([i * by + self.chance.randrange(by) for i in range(n)])
        batch.each(lambda c: c.batch_select_indices(index))

    def split(self, batch: Batch) -> None:
        if len(batch.caches) > 1 or len(batch.order) == 1 or self.chance.random() < 0.7:
            return
        first = batch.caches[0]
        batch.caches = [copy.deepcopy(first) for _ in batch.order]
        for i, cache in enumerate(batch.caches):
            cache.batch_select_indices(torch.tensor([i]))

    def draft(self, batch: Batch) -> None:
        n = self.chance.randint(1, 12)
        batch.each(lambda c: c.activate_past_recording())
        self.some(batch, n, self.chance.random() < 0.7)
        self.back(batch, n)
        batch.each(lambda c: c.deactivate_past_recording())

    def crop(self, batch: Batch) -> None:
        """As assisted decoding does where nothing of a draft is right."""
        n = self.chance.randint(1, 12)
        batch.each(lambda c: c.activate_past_recording())
        self.some(batch, n, self.chance.random() < 0.7)
        batch.each(lambda c: c.crop(-n))
        batch.mask = batch.mask[:, :-n]
        batch.each(lambda c: c.deactivate_past_recording())

    @staticmethod
    def inference(batch: Batch) -> None:
        """Passes run in torch's inference mode from now on, or no longer."""
        batch.inference = not batch.inference

    def other(self, batch: Batch) -> None:
        """Another cache has its turn."""
        twin = Batch(self.model, 2)
        self.some(twin, self.chance.randint(1, 70), True)
        self.some(twin, 2, False)


@torch.no_grad()
def by_hand(model: Any, cache: Any, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """The text, and `count` more tokens of the greedy kind."""
    cache.announce(ids.shape[1])
    while True:
        new = ids[:, cache.seen :]
        at = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        logits = model(new, attention_mask=mask, position_ids=at, cache=cache).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        count -= 1
        if not count:
            return ids
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)


def conversation(model: Any, rows: int, ways: list[str], chance: Random, folder: Path, ragged: bool) -> None:
    """Turns by `generate`, each in its way, compared with the same by hand; the cache is copied, saved, reordered between."""
    hand, cache = EngineCache(model), EngineCache(model)
    ids = mask = torch.zeros(rows, 0, dtype=torch.long)
    for turn, way in enumerate(ways):
        new = part("prompt", rows, chance.choice([9, 20, 61]), chance.randrange(1 << 20))
        for row in range(1, rows if ragged or not turn else 1):
            new.mask[row, : chance.randrange(len(new.mask[row]) - 1)] = 0
        ids, mask = torch.cat([ids, new.ids], 1), torch.cat([mask, new.mask], 1)
        options: dict[str, Any] = {}
        if way == "chunks":
            options["prefill_chunk_size"] = chance.randint(1, 30)
        if way == "look-up" and not turn and rows == 1:
            options["prompt_lookup_num_tokens"] = chance.randint(1, 5)
        if way == "recording":
            cache.activate_past_recording()
        count = chance.randint(1, 12)
        options |= {"attention_mask": mask, CACHE: cache, "max_new_tokens": count, "do_sample": False}
        found = model.generate(ids, **options)
        ids = by_hand(model, hand, ids, mask, count)
        assert torch.equal(found, ids)
        mask = torch.cat([mask, torch.ones(rows, count, dtype=torch.long)], 1)
        cache.commit()
        between = chance.choice(["copy", "save", "swap", ""])
        if between == "copy":
            cache = copy.deepcopy(cache)
        if between == "save":
            saved.save(cache, folder / "turn.kv", model)
            cache = saved.load(model, folder / "turn.kv")
        if between == "swap":
            index = torch.tensor(chance.sample(range(rows), rows))
            ids, mask = ids[index], mask[index]
            for each in (hand, cache):
                each.reorder_cache(index)
