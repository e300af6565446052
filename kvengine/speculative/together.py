"""Several sequences decoded at once, each in its own time.

Every sequence asks for its own passes (session.py). Those that wait for the same model are run as one: their tokens
stand one behind the other, so the weights are read once, and no row is padded to another's length. In each attention
layer every sequence goes to its own cache, so a row drafts, is judged, rolls back and ends exactly as it does alone,
under any stack and on any tier, however long the others are.

The model that drafts is asked first: the sequences gather in front of the larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvengine import latent
from kvengine.cache import Stock
from kvengine.hf.cache import EngineCache
from kvengine.hf.cross import engine_layers
from kvengine.hf.layer import EngineLayer
from kvengine.hf.names import CACHE
from kvengine.hf.rope import DYNAMIC, LONG, declared
from kvengine.hf.states import beyond_tokens
from kvengine.session import Call
from kvengine.session import Session as Shared
from kvengine.speculative.clock import Watch, now, plus
from kvengine.speculative.session import Asks, Logits, Out, Pass


def together(rows: Sequence[tuple[Asks[Out], Watch]]) -> list[Out]:
    """The result of every sequence's work. Each watch runs for its own sequence's share only."""
    asks: dict[int, Pass] = {}
    results: dict[int, Out] = {}
    for _, watch in rows:
        watch.stop()

    def resume(row: int, logits: Logits | None) -> None:
        work, watch = rows[row]
        watch.go()
        try:
            asks[row] = next(work) if logits is None else work.send(logits)
        except StopIteration as end:
            results[row] = end.value
        finally:
            watch.stop()

    for row in range(len(rows)):
        resume(row, None)
    while asks:
        chosen = waiting_for_the_smallest(asks)
        began = now()
        found = run([asks.pop(row) for row in chosen])
        spent = plus((0.0, 0.0), now(), began)
        for row, logits in zip(chosen, found, strict=True):
            rows[row][1].charge((spent[0] / len(chosen), spent[1] / len(chosen)))
            resume(row, logits)
    return [results[row] for row in range(len(rows))]


def waiting_for_the_smallest(asks: dict[int, Pass]) -> list[int]:
    """The sequences that wait for the smallest of the models waited for."""
    sizes = {id(ask.session.model): ask.session.model for ask in asks.values()}
    model = min(sizes.values(), key=size) if len(sizes) > 1 else next(iter(sizes.values()))
    return [row for row, ask in asks.items() if ask.session.model is model]


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def run(passes: Sequence[Pass]) -> list[Logits]:
    """The logits of passes of one model."""
    if len(passes) == 1 or not (packs(passes[0].session.model) and passes[0].session.placed):
        return [one.run() for one in passes]
    return packed(passes)


def packs(model: Any) -> bool:
    """Whether the model may read several sequences in one.

    Not where an attention layer reads its cache by itself (MLA), another's or images, nor where a layer keeps states or a window,
    nor where the rotation of a token depends on the length of what is read with it ("dynamic", "longrope") or has several parts
    (mRoPE): such models run row by row. So do those that pass over where their tokens stand (`Session.placed`).
    """
    config = model.config.get_text_config(decoder=True)
    plain = not any(x.get("rope_type") in (DYNAMIC, LONG) or "mrope_section" in x for x in declared(config))
    return plain and not latent.configured(config) and all(engine_layers(config)) and not beyond_tokens(config)


@torch.no_grad()
def packed(passes: Sequence[Pass]) -> list[Logits]:
    """The logits that passes of one model want, from one pass over all their tokens."""
    model, device = passes[0].session.model, passes[0].session.device
    counts = [len(one.tokens) for one in passes]
    wanted = [one.keep or len(one.tokens) for one in passes]
    last = [torch.arange(end - keep, end) for end, keep in zip(accumulate(counts), wanted, strict=True)]
    ids = torch.tensor([[token for one in passes for token in one.tokens]], device=device)
    places = torch.tensor([[place for one in passes for place in positions(one)]], device=device)
    with ExitStack() as stack:
        for one in passes:
            one.session.count(len(one.tokens), len(passes))
            stack.enter_context(one.session.reading(one.sees))
        cache = PackedCache([one.session.cache for one in passes], counts)
        keep = {} if wanted == counts else {"logits_to_keep": torch.cat(last).to(device)}
        logits: Tensor = model(ids, position_ids=places, **{CACHE: cache}, use_cache=True, **keep).logits[0]
    if keep and len(logits) == sum(counts):  # a model that passes it over
        logits = logits[keep["logits_to_keep"]]
    return list(logits.split(wanted))


def positions(one: Pass) -> Sequence[int]:
    seen = one.session.cache.seen
    return range(seen, seen + len(one.tokens)) if one.places is None else one.places


class PackedLayer(EngineLayer):
    """One layer of several caches; `counts`: how many of a pass's tokens belong to each."""

    def __init__(self, rows: Sequence[EngineLayer], counts: Sequence[int]) -> None:
        self.rows, self.counts = rows, counts
        super().__init__(rows[0].stack, 0, 1, rows[0].session)

    def attend(
        self,
        query: Float[Tensor, "1 q_head token dim"],
        call: Call,
        valid: Bool[Tensor, "1 token"] | None,
        stock: Stock,
    ) -> Float[Tensor, "1 token q_head dim_v"]:
        (k, v), self.incoming = self.incoming, None  # type: ignore[misc]
        parts = zip(*(x.split(list(self.counts), 2) for x in (query, k, v)), strict=True)
        out = []
        for row, (mine, keys, values) in zip(self.rows, parts, strict=True):
            row.update(keys, values)
            out.append(row.attend(mine, call, None, stock))
        return torch.cat(out, 1)


class PackedCache(EngineCache):
    """Several caches of one model, for one pass."""

    def __init__(self, caches: Sequence[EngineCache], counts: Sequence[int]) -> None:
        self.stack, self.config, self.session = caches[0].stack, caches[0].config, Shared()
        layers: Any = zip(*(cache.layers for cache in caches), strict=True)
        Cache.__init__(self, layers=[PackedLayer(rows, counts) for rows in layers])
