"""What a cache holds and reads, counted on the tensors themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine import named
from kvengine.cache import LayerCache
from kvengine.kernels import codecs
from kvengine.kernels.paged_attention import by_page
from kvengine.kernels.slots import resolve
from kvengine.lane import Lane
from kvengine.pages import Pages


@dataclass(frozen=True)
class Stats:
    """A snapshot of a cache's layers.

    Tokens and pages are those of the layers that are the engine's, in their order; bytes are those of all layers, and while
    a recorded step holds them still, those of the slots that it has reserved.

    Attributes:
        bytes: bytes allocated in all layers, by tier ("device", "host", "disk", …) and field ("tail.k", "page.k_code", …);
            "stock" is what stays transformers' own (keys and values of sliding windows, recurrent states, index keys), "text"
            what tokens were made of that a retention will have read again.
        held: tokens held, [layer, sequence, kv head].
        attended: tokens that the last decoded token read, without those that were dropped after it, [layer, sequence,
            kv head]; after a prompt, those held.
        read_per_token: bytes of keys, values, codes, summaries and states that decoding one more token reads, all layers; as
            often as layers read them, where later ones share an earlier one's. Of pages of codes of which some tokens are read:
            their codes, and once the ranges of the groups that they are in; the whole page, once, where a tier brings it.
        pages_used, pages_free: pages that some table names, and that none does, all layers.
        seen: tokens seen, padding included.
        served: pieces of pages that were read where pages are placed below the device, by the tier that had them
            ("device": already there; "ahead": fetched from a lower tier before they were asked for), all layers, since the cache
            was made or loaded.
        faults: times that a tier failed to take or to give pages, all layers, since then.
        computed: of the pairs of a prompt's queries and the tokens up to them, the share whose attention was computed; None
            where no prefill method leaves any out.
    """

    bytes: dict[str, dict[str, int]]
    held: Int[Tensor, "layer seq head"]
    attended: Int[Tensor, "layer seq head"]
    read_per_token: int
    pages_used: int
    pages_free: int
    seen: int
    served: dict[str, int] = field(default_factory=dict)
    faults: int = 0
    computed: float | None = None

    @property
    def hits(self) -> int:
        """Pieces that were on the device when they were read."""
        return self.served.get("device", 0)

    @property
    def misses(self) -> int:
        """Pieces that had to be fetched."""
        return sum(self.served.values()) - self.hits

    @property
    def bytes_held(self) -> int:
        return sum(sum(fields.values()) for fields in self.bytes.values())

    def tier(self, name: str) -> int:
        """Bytes held on one tier."""
        return sum(self.bytes.get(name, {}).values())

    def __str__(self) -> str:
        tiers = ", ".join(f"{tier} {sum(fields.values()) / 2**20:.2f} MiB" for tier, fields in self.bytes.items())
        held, read = (float(x.sum()) / max(1, x.numel()) for x in (self.held, self.attended))  # of nothing: 0
        prompt = "" if self.computed is None else f"; {self.computed:.0%} of the prompt's attention computed"
        return f"{self.seen} tokens seen; per head {held:.0f} held, {read:.0f} read; {tiers or 'nothing held'}{prompt}"


def measure(layers: list[LayerCache], stock: Iterable[Tensor] = (), seen: int | None = None) -> Stats:
    """Count what these layers hold, and the tensors that are `stock`, each as often as a token has it read. `seen`: tokens; by
    default what the first layer says."""
    held: dict[str, dict[str, int]] = {}
    used = free = read = faults = 0
    computed = every = 0.0
    served = Counter[str]()
    for lane, times in ((part.lane, 1 + layer.readers.count) for layer in layers for part in layer.parts):
        for tier, fields in lane_bytes(lane).items():
            for name, size in fields.items():
                held.setdefault(tier, {})[name] = held.setdefault(tier, {}).get(name, 0) + size
        read += lane_reads(lane) * times
        computed, every = computed + lane.tally.computed, every + lane.tally.every
        if lane.pages is not None:
            pool, mine = lane.pages.pool, len(set(lane.pages.pages_in_use()))
            used, free = used + mine, free + pool.pages - mine
            served, faults = served + pool.served(), faults + pool.faults
    own = list(stock)
    read += sum(x.nbytes for x in own)
    if whole := sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in own)}.values()):
        held.setdefault("device", {})["stock"] = whole
    if text := layers[0].session.text.nbytes if layers else 0:
        held.setdefault("device", {})["text"] = text
    return Stats(
        held, by_head(layers, live), by_head(layers, attended), read, used, free,
        layers[0].seen if seen is None else seen, dict(served), faults, computed / every if every else None,
    )  # fmt: skip


def lane_bytes(lane: Lane) -> dict[str, dict[str, int]]:
    own = {f"tail.{name}": x.nbytes for name, x in lane.tail.tensors().items()}
    own |= {f"notes.{name}": x.nbytes for name, x in lane.notes.items()}
    if lane.pages is not None:
        own |= {f"pages.{name}": x.nbytes for name, x in lane.pages.tensors().items()}
        stored = {tier: {f"page.{n}": b for n, b in f.items()} for tier, f in lane.pages.pool.nbytes().items()}
        if beside := sum(getattr(x, "nbytes", 0) for x in lane.pages.beside.values()):
            stored["host"] = stored.get("host", {}) | {"pages.index": beside}
    else:
        stored = {}
    return {**stored, "device": own | stored.get("device", {})}


def live(lane: Lane) -> Int[Tensor, "row"]:
    """Tokens held by each row."""
    count = lane.tail.count()
    return count if lane.pages is None else count + (lane.pages.position >= 0).sum(1)


def attended(lane: Lane) -> Int[Tensor, "row"]:
    """Tokens that the row's last query read."""
    return (lane.reach() >= 0).sum(1)


def lane_reads(lane: Lane, coarse: bool = False) -> int:
    """Bytes that one more decoded token reads of this lane, if it reads as many tokens as the last one did. `coarse`: without
    what the representation calls fine."""
    tail, pages, asked = lane.tail, lane.stored, lane.asked
    stored = [x for name, x in tail.tensors().items() if name != "score"]  # no slots of positions where order tells
    size = sum(x[:, tail.span].numel() * x.element_size() for x in stored)
    if asked is not None and len(tail) > named.FEW * asked.shape[1]:  # these alone are read
        there = named.among(asked[:, None], tail.position[:, tail.span], lane.seen)
        size = size * int(there.sum()) // there.numel()
    if pages is None:
        return size
    if lane.units is None and asked is None:
        joint = 0 if pages.joint is None else pages.joint.reads(None)
        return size + joint + int(page_bytes(pages, coarse) * int((pages.table >= 0).sum()))
    size += pages.bounds.reads(pages.units, sum(x.numel() * x.element_size() for x in pages.summary.values()))
    return size + sum(getattr(x, "reads", 0) for x in pages.beside.values()) + chosen_reads(lane, pages, coarse)


def chosen_reads(lane: Lane, pages: Pages, coarse: bool) -> int:
    """The same of its pages, of which it reads some tokens."""
    if lane.asked is not None:
        units = named.slots(lane.asked, pages.position, lane.seen)
    else:
        units = cast(Tensor, lane.units)
        units = units.masked_fill(units >= pages.units, -1)  # those of pages that were taken back
    where, position = resolve(pages.table, pages.position, units, pages.selection.unit, pages.page)
    there = position >= 0
    tokens = found = int(there.sum())
    if lane.asked is None and lane.saw is not None:  # some of what it read has been sealed since
        tokens = max(0, int(attended(lane).sum()) - int(lane.tail.count().sum()))
    if (fields := in_place(lane, pages, coarse)) is not None:
        size: float = codecs.bytes_of(pages.representation.read_as(coarse), fields, where, there, pages.page)
    else:
        size = brought(lane, pages, units) * page_bytes(pages, coarse)
    if tokens != found:
        size = size * tokens / found if found else page_bytes(pages, coarse) * tokens / pages.page
    return int(size) + (0 if pages.joint is None else pages.joint.reads(tokens))


def brought(lane: Lane, pages: Pages, units: Int[Tensor, "row chosen"]) -> float:
    """Pages' worth of what is brought for these units: a piece for each, or their pages, each once if it is decoded first."""
    per, there = pages.page // pages.selection.unit, units >= 0
    each = not pages.pool.once or (lane.shift() is None and pages.readable(pages.table[:, :0]) is not None)
    if pages.pool.per == per or each:
        return int(there.sum()) / pages.pool.per
    return len(pages.table.gather(1, units.clamp(min=0).long() // per)[there].unique())


def in_place(lane: Lane, pages: Pages, coarse: bool) -> dict[str, Tensor] | None:
    """What a kernel reads of chosen units where they are; None if they are brought to where it reads them."""
    fields = pages.resident(pages.table[:, :0]) if lane.shift() is None else None
    if fields is None:
        return None
    if pages.joint is not None:
        where = pages.table, pages.position
        run = pages.joint.attend(lane.tail.k[:, None, :1], fields["v"], *where, page=pages.page, scale=1.0)
        return None if run is None else fields
    codec = pages.representation.read_as(coarse)
    if not codec or by_page(codec, fields):
        return None
    return {name: fields[name] for name in codecs.FIELDS[codec] if name in fields}  # latents are keys that hold values


def page_bytes(pages: Pages, coarse: bool) -> float:
    """Bytes of a page, wherever it is."""
    pool, without = pages.pool, pages.representation.fine if coarse else ()
    left_out = sum(size for held in pool.nbytes().values() for name, size in held.items() if name in without)
    return pool.page_bytes - left_out / pool.pages


def by_head(layers: list[LayerCache], count: object) -> Int[Tensor, "layer seq head"]:
    """Nothing of layers that hold nothing, as those that a pass which broke off did not come to."""
    most = [max((getattr(layer, side) for layer in layers), default=0) for side in ("sequences", "heads")]
    every = torch.zeros(len(layers), *most, dtype=torch.long)
    for whole, layer in zip(every, layers, strict=True):
        for part in layer.parts:
            found = count(part.lane).cpu().long().unflatten(0, (layer.sequences, -1))  # type: ignore[operator]
            whole[:, slice(None) if part.index is None else part.index.cpu()] = found
    return every
