"""What a cache holds and reads, counted on the tensors themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.cache import LayerCache
from kvengine.lane import Lane
from kvengine.named import FEW


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
            often as layers read them, where later ones share an earlier one's.
        pages_used, pages_free: pages that some table names, and that none does, all layers.
        seen: tokens seen, padding included.
        served: pieces of pages that were read where pages are placed below the device, by the tier that had them
            ("device": already there; "ahead": fetched from a lower tier before they were asked for), all layers.
        faults: times that a tier failed to take or to give pages, all layers.
        computed: of the pairs of a prompt's queries and the tokens up to them, the share whose attention was computed; None
            where no prefill method leaves any out. Of what came since the cache was made or loaded.
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
        if beside := sum(x.nbytes for x in lane.pages.beside.values()):
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


def lane_reads(lane: Lane) -> int:
    """Bytes that one more decoded token reads of this lane."""
    tail = lane.tail
    stored = [x for name, x in tail.tensors().items() if name != "score"]  # no slots of positions where order tells
    size = sum(x[:, tail.span].numel() * x.element_size() for x in stored)
    if lane.asked is not None and len(tail) > FEW * lane.asked.shape[1]:  # these alone are read
        size = size * lane.asked.shape[1] // len(tail)
    pages = lane.pages
    if pages is None or not len(pages):
        return size
    per_page = pages.pool.page_bytes
    joint, chosen = pages.joint, chosen_units(lane)
    if joint is not None:
        size += joint.reads(None if chosen is None else chosen * pages.selection.unit)
    if chosen is None:
        return size + int(per_page * int((pages.table >= 0).sum()))
    part = pages.page // pages.selection.unit if pages.representation.lossless or joint is not None else 1
    summaries = pages.bounds.reads(pages.units, sum(x.numel() * x.element_size() for x in pages.summary.values()))
    summaries += sum(x.reads for x in pages.beside.values())
    return size + summaries + int(per_page * chosen / part)


def chosen_units(lane: Lane) -> int | None:
    """Units that one more token reads if it reads as many tokens as the last one did; None: all."""
    if lane.units is None:
        return None
    if lane.saw is None:
        return int((lane.units >= 0).sum())
    return max(0, int(attended(lane).sum()) - int(lane.tail.count().sum())) // lane.stack.selection.unit


def by_head(layers: list[LayerCache], count: object) -> Int[Tensor, "layer seq head"]:
    rows = []
    for layer in layers:
        whole = torch.zeros(layer.sequences, layer.heads, dtype=torch.long)
        for part in layer.parts:
            found = count(part.lane).cpu().long().unflatten(0, (layer.sequences, -1))  # type: ignore[operator]
            whole[:, slice(None) if part.index is None else part.index.cpu()] = found
        rows.append(whole)
    return torch.stack(rows) if rows else torch.zeros(0, 0, 0, dtype=torch.long)
