"""One layer of the engine, as transformers' caches have them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvengine import latent, readers
from kvengine.cache import LayerCache, Stock
from kvengine.errors import ModelError, UnsupportedPolicy
from kvengine.gradients import watched
from kvengine.resuming import singles
from kvengine.session import Call, Session
from kvengine.stack import Stack

BREAKS = (
    "a model patched by kvengine is compiled in several graphs, between which its caches do their work: leave fullgraph=True "
    "out, or call kvengine.unpatch(model) first"
)
"""Why, to who compiles."""
EXPORTED = (
    "a model patched by kvengine cannot be exported, traced, or compiled as one graph, with a cache, which does its work outside "
    "of any graph. Pass use_cache=False, leave fullgraph=True out, or call kvengine.unpatch(model) first"
)
"""Which of the two it is torch 2.11 does not tell apart."""
COPIED = ", which the model has made: it runs layers several times over. The engine cannot enter it; call kvengine.unpatch(model)"
WEIGHTS = (
    "output_attentions=True on a patched model: the engine never forms the attention matrix. Pass use_cache=False or call "
    "kvengine.unpatch(model)"
)
DROPOUT = (
    "{} has attention dropout in training mode, and what is decoded from an engine cache would be without: call model.eval() to "
    "generate, or pass use_cache=False"
)
Listener = Callable[[Tensor, Tensor, Tensor, Call], None]
"""Told the queries, keys and values of every pass."""
Heard = tuple[Tensor, Tensor, Tensor, Call]


def compiling() -> bool:
    """Whether a compiler looks on, whose graph breaks where a cache works.

    Raises:
        ModelError: it exports, which goes on where a graph would break, or traces, which takes what kernels give for a constant.
    """
    if torch.jit.is_tracing() or (torch.compiler.is_compiling() and torch.compiler.is_exporting()):  # type: ignore[attr-defined]
        raise ModelError(EXPORTED)
    return torch.compiler.is_compiling()


class EngineLayer(CacheLayerMixin):
    """One layer: `update` takes the new keys and values, and the attention that follows puts them in their place."""

    is_croppable, is_sliding, is_compileable = True, False, False

    def __init__(self, stack: Stack, layer: int, layers: int, session: Session, readers: int = 0) -> None:
        super().__init__()
        self.stack, self.layer, self.layers, self.session, self.readers = stack, layer, layers, session, readers
        self.incoming: tuple[Tensor, Tensor] | None = None
        self.listener: Listener | None = None
        # Where to leave what a listener would be told, by layer, for those who look later.
        self.heard: dict[int, Heard] | None = None
        self.reset()

    def reset(self) -> None:
        self.cache = LayerCache(self.stack, self.layer, self.layers, self.session, self.readers)
        self.incoming, self.is_initialized = None, False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.incoming is not None:
            raise ModelError(
                "an engine cache was given to a model that is not patched; call kvengine.patch(model) first"
            )
        self.incoming, self.is_initialized = (key_states, value_states), True
        # A weak reference: what is cached may be views of these keys, and a circle through a view's base is never collected.
        key_states._kv_layer = weakref.ref(self)  # type: ignore[attr-defined]
        return key_states, value_states

    def quick(
        self, query: Float[Tensor, "seq q_head 1 dim"], key: Tensor, value: Tensor, scale: float
    ) -> Float[Tensor, "seq 1 q_head dim_v"] | None:
        """`attend` for a decoded token of a policy that has nothing to do, as most are; None if this is another."""
        if self.incoming is None or self.incoming[0] is not key or self.incoming[1] is not value:
            return None
        k, v = self.incoming
        out = self.cache.quick(query, k, v, scale)
        if out is not None:
            self.incoming = None
            if self.heard is not None or self.listener is not None:
                self.tell(query, k, v, Call(scale))
        return out

    def tell(self, query: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        """Let those who want to know what this pass computed, if it is one of theirs."""
        if self.session.again is not None:
            return
        if self.heard is not None:
            self.heard[self.layer] = query, k, v, call
        elif self.listener is not None:
            self.listener(query, k, v, call)

    def attend(
        self,
        query: Float[Tensor, "seq q_head token dim"],
        call: Call,
        valid: Bool[Tensor, "seq token"] | None,
        stock: Stock,
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        """Put the incoming tokens in their place, and answer their queries."""
        module = stock.module  # type: ignore[attr-defined]
        latents = latent.is_latent(module)
        if self.incoming is None:
            return self.read_latents(query, call, stock) if latents else readers.read(self.cache, query, call, stock)
        full = latents and self.stack == Stack() and self.cache.fixed is None
        full = full and (call.named is None or not latent.known(module))  # of latents, what is named alone is read
        if full and self.heard is None and self.listener is None:
            return self.attend_all(stock, valid)
        k, v = self.incoming
        if latents:
            query, k, v = latent.as_one_head(module, query, k, v)
        self.tell(query, k, v, call)
        if full:
            return self.attend_all(stock, valid)
        self.incoming = None
        if latents:
            if not self.cache.parts:
                self.cache.inner = v.shape[-1]
            return latent.forward(self.cache, module, query, k, v, call, valid, stock)
        return self.cache.forward(query, k, v, call, valid, None if stock.slow else stock)  # type: ignore[attr-defined]

    def read_latents(
        self, query: Float[Tensor, "seq q_head token dim"], call: Call, stock: Stock
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        """The answer to the queries of a later layer, which has weights of its own to make keys and values of these latents."""
        known = latent.known(module := stock.module)  # type: ignore[attr-defined]
        # Some of the weights are their layers' alone to read.
        if self.stack == Stack() and not (known and self.cache.inner):
            return self.attend_all(stock)
        return latent.read(self.cache, module, query, call, stock, self.where)

    def attend_all(self, stock: Stock, valid: Tensor | None = None) -> Float[Tensor, "seq token q_head dim_v"]:
        """Let the model's own attention run over everything seen."""
        if self.cache.fixed is not None:
            raise UnsupportedPolicy(
                "this model's attention asks for all keys and values at once, by a mask of its own, which a recorded step "
                "does not have; decode without it"
            )
        if self.incoming is not None:
            (k, v), self.incoming = self.incoming, None
            if latent.is_latent(stock.module):  # type: ignore[attr-defined]
                values = v[..., :0]
                if self.cache.named and latent.known(stock.module):  # type: ignore[attr-defined]
                    # Other tokens of this layer are read as policies read them.
                    self.cache.inner, values = k.shape[-1], k
                k, v = torch.cat([k, v], -1), values
            if self.session.tree is not None:
                return self.look_all(stock, k, v, self.session.tree.to(k.device))
            self.cache.store(k, v, valid)
        return watched(stock(*self.cache.contents()), self.cache.parts[0].lane.tail)

    def look_all(
        self, stock: Stock, k: Float[Tensor, "seq 1 token latent"], v: Tensor, tree: Bool[Tensor, "node node"]
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        """`attend_all` where the last tokens are the nodes of a tree, which look at latents and are not added."""
        module, query = stock.module, stock.query  # type: ignore[attr-defined]
        if not (latent.is_latent(module) and latent.known(module)):
            raise UnsupportedPolicy(
                "drafts that are trees cannot look here: the model has a mask of its own, or latents whose weights are "
                "quantised, off-loaded or have an adapter. Use draft='lookup', or a draft model without widths"
            )
        n, nodes = k.shape[2] - len(tree), k[:, :, k.shape[2] - len(tree) :]
        if n:
            self.cache.store(k[:, :, :n], v[:, :, :n], None)
        held = self.cache.contents()[0]
        sees = tree.new_ones(k.shape[2], held.shape[2] + len(tree)).tril(held.shape[2] - n)
        sees[n:, held.shape[2] :] = tree
        scale = stock.kwargs["scaling"]  # type: ignore[attr-defined]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return latent.attend(module, query, torch.cat([held, nodes], 2), sees[None, None], scale)

    def asks_stock(self, n: int, valid: Bool[Tensor, "seq token"] | None) -> bool:
        """Whether the model's own attention will answer the next `n` queries: a prompt's, with everything still there."""
        cache, exact = self.cache, self.stack.reads_prompts_exactly and self.session.tree is None
        whole = exact and cache.prompt_tokens(n) == n and (not cache.seen or cache.whole)
        return whole and singles(cache, valid) is None  # beside such a sequence a prompt is read by the engine

    def kv_heads(self, key: Tensor) -> int:
        return int(self.incoming[0].shape[1] if self.incoming is not None else key.shape[1])

    @property
    def where(self) -> torch.device:
        """Where it keeps what it has taken."""
        return self.cache.parts[0].lane.first.device

    @property
    def whole(self) -> bool:
        return not self.cache.parts or self.cache.whole

    def get_seq_length(self) -> int:
        return self.cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens; the rest becomes history. (Positive: keep that many.)"""
        drop = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.cache.seen - tokens_to_remove)
        self.cache.rollback(int(drop))
        self.cache.commit()

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...

    def reorder_cache(self, beam_idx: Int[Tensor, "chosen"]) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache.parts:
            self.batch_select_indices(torch.arange(self.cache.sequences).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Int[Tensor, "chosen"]) -> None:
        if self.cache.parts:
            self.cache.rows(indices.to(self.where))
