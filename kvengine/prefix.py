"""Prompts that begin alike are computed once: their common chunks come from a store.

    reuse = Prefix(model, store, tokenizer)
    cache = reuse.fetch(ids)              # the longest stored chain of chunks; maybe nothing
    model.generate(ids, cache=cache)
    reuse.keep(ids, cache)                # what was computed, for the next prompt

    cache = reuse.fetch(ids)
    reuse.compute(document, cache)        # reads the whole chunks of the prompt's beginning, and keeps them
    model.generate(ids, cache=cache)

A chunk is named by a hash over the model, the tokenizer, the level and all tokens up to its end
(`kvengine.offload.stores.keys`), so a hit holds what this model would compute. At the level "lossless" the continued
text is that of a cold run; at the others it is close to it, and the chunks are a fraction of the size.

Chunks hold exact keys and values of a prefix, so the stack must keep everything until the prompt has ended: chunks are
taken while every layer still holds all it has seen. A window or a state is only what it is after the last token, so on
models with such layers a prompt can be taken up where one was computed to with `compute` (`kvengine/prefix_beside.py`).
Anything that goes wrong with a store is a miss: what is not there whole, in time, and of this model is computed again, and
the store's `counts` and `events` tell.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kvengine import prefix_beside
from kvengine.errors import CacheError, CorruptBitstream, ModelError, StoreError
from kvengine.fingerprint import check_maker, check_precision, check_whole, identity, state
from kvengine.hf import parts
from kvengine.hf.cache import STATE, EngineCache
from kvengine.hf.devices import layer_devices
from kvengine.hf.layer import EngineLayer
from kvengine.hf.names import CACHE
from kvengine.hf.places import placed
from kvengine.hf.replay import given
from kvengine.hf.rope import DYNAMIC, LONG, turning_point
from kvengine.hf.states import beyond_tokens
from kvengine.latent import is_latent
from kvengine.offload.cachegen import KV, Identity, decode, encode
from kvengine.offload.cachegen.codec import DTYPES, layout
from kvengine.offload.cachegen.levels import resolve
from kvengine.offload.container import read_bytes
from kvengine.offload.stores import Store, chain, root
from kvengine.offload.stores.record import check_seconds, check_ttl
from kvengine.policies import ours
from kvengine.stack import Stack

log = logging.getLogger(__name__)
LEVEL = "lossless"
Layer = tuple[Tensor, Tensor]
"""Keys and values of a layer, [head, token, dim]."""


@dataclass
class Prefix:
    """Chunks of prompts of one model, in a store.

    Args:
        model: a patched model. Of one whose layers read another layer's keys and values (Gemma 3n), or all have windows, or
            begin anew in each pass (Jamba), nothing is stored or found, and a warning says so.
        store: where chunks live.
        tokenizer: part of a chunk's name, if given.
        level: of the codec; "lossless" gives the text of a cold run.
        chunk: tokens of a chunk.
        salt: of the tenant; chunks under another salt are never found.
            Adapters that a call names for itself (PEFT's `adapter_names`) are not in a chunk's name: give them here.
        timeout: seconds to wait for the store, to say what it has and then for each chunk, before computing instead.
        ttl: seconds that chunks live in the store; None for ever.

    Raises ValueError for a salt that is no text or too long, or a chunk of no tokens or too many, ModelError for a model whose
    keys the codec does not take, IncompatibleCache for a level that does not exist, StoreError for a ttl or timeout that is no
    time, or a store that is none.
    """

    model: nn.Module
    store: Store
    tokenizer: object = None
    level: str = LEVEL
    chunk: int = 256
    salt: str = ""
    timeout: float = 10.0
    ttl: float | None = None
    whose: Identity = field(init=False)
    start: bytes = field(init=False)
    known: Hashable = field(init=False, default=None, repr=False)  # the state of the model of which these are
    whole: bool = field(init=False)  # whether all that the model caches can be stored
    beside: bool = field(init=False)  # whether some of it is no keys and values of every token
    turn: int | None = field(init=False)  # tokens of the longest text with the first of several rotations
    ranks: dict[int, int] = field(init=False)  # of each layer that caches latents, how many channels are values

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module) or not hasattr(self.model, "config"):
            raise ModelError(f"chunks are of prompts of a patched model, not of a {type(self.model).__name__}")
        if not isinstance(self.store, Store):
            raise StoreError(f"chunks live in a Store, not in a {type(self.store).__name__}; give Store(backend(URL))")
        text = self.model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        strange = prefix_beside.strange(text)
        self.whole, self.beside = not strange, bool(beyond_tokens(text)) and not strange
        if strange:
            log.warning(
                "no prompt of %s can go on from stored chunks: its layers read another layer's tokens, have index keys, "
                "begin anew in each pass, or none keeps all tokens (%s). All prompts are computed, and none is stored",
                type(self.model).__name__, ", ".join(strange),
            )  # fmt: skip
        dtype = next(self.model.parameters()).dtype
        if dtype not in DTYPES.values():
            raise ModelError(
                f"chunks hold keys and values of {', '.join(DTYPES)}, but the model has {dtype}; call model.to()"
            )
        resolve(self.level)
        check_ttl(self.ttl)
        check_seconds("timeout", self.timeout)
        self.identify()
        self.turn = turning_point(self.model, LONG, DYNAMIC)
        self.ranks = {m.layer_idx: m.kv_lora_rank for m in self.model.modules() if is_latent(m)}  # type: ignore[misc]

    def identify(self) -> None:
        """Name chunks by the model as it is now: its weights, or which adapter is in use, may have changed since."""
        if (now := state(self.model)) != self.known:
            self.whose = identity(self.model, self.tokenizer)
            self.start = root(self.whose, f"exact/{self.level}", chunk=self.chunk, salt=self.salt)
            self.known = now

    @property
    def part(self) -> int | None:
        """Tokens of a part, if the model reads a prompt in parts."""
        return getattr(getattr(self.model, STATE, None), "judge_every", None)

    def start_for(self, total: int) -> bytes | None:
        """Where the chunks of a prompt of so many tokens begin; None if each length has keys of its own.

        Where a model has a rotation for short texts and one for long ones, so have their chunks.
        """
        if self.turn is None or total <= self.turn:
            return self.start
        if turning_point(self.model, DYNAMIC) is not None:
            return None
        return root(self.whose, f"exact/{self.level}/long", chunk=self.chunk, salt=self.salt)

    def fetch(self, ids: Int[Tensor, "seq token"], stack: str | Stack | None = None) -> EngineCache:
        """A new cache with the longest stored chain of the prompt's chunks in it, to which the prompt is announced.

        At least one token of the prompt is left to compute, since its logits begin the answer, and as many as the stack
        judges by. The cache is empty where nothing is stored, of several sequences, where it judges by all queries, which a
        reused chunk does not have (as some heads may under a routing of one's own), and where texts of each length have keys
        of their own (`dynamic` rotations beyond the trained length). Of a prompt that is read in parts (`judge_every`) the first
        alone begins so: what a policy leaves of it is what the next is read beside. Raises CacheError for what is no tensor of
        ids [sequence, token], and under autocast.
        """
        check(ids)
        check_precision(self.model)
        cache = EngineCache(self.model, stack)  # type: ignore[arg-type]
        cache.announce(ids.shape[1])
        tokens = ids[0].tolist()
        if len(ids) != 1 or not self.whole or not self.fits(cache):
            return cache
        self.identify()
        last, start = max(1, cache.stack.retention.observes), self.start_for(len(tokens))
        end = parts.first(self.part, cache, len(tokens))
        keys = [] if start is None else chain(tokens[: max(0, end - last)], start, self.chunk)
        most, beside = self.read_beside(keys) if self.beside else (len(keys), None)
        chunks = self.read(keys[:most])
        if not chunks or (self.beside and len(chunks) < most):
            return cache
        self.enter(cache, chunks)
        if beside is not None and not self.enter_beside(cache, beside):
            cache.reset()
            cache.announce(len(tokens))
            return cache
        given(self.model, cache, ids[:, : cache.seen])
        return cache

    @staticmethod
    def fits(cache: EngineCache) -> bool:
        """Whether a prefix may be entered without its queries."""
        s = cache.stack
        learns = s.retention.wants_mass or s.retention.watches or s.representation.probes > 0
        return s.reads_prompts_exactly and ours(type(s.routing).__module__) and not learns  # another's heads may learn

    def read(self, keys: Sequence[str]) -> list[list[Layer]]:
        """The layers of the leading chunks that are there, whole and in time."""
        buffers: list[bytearray] = []
        for size in self.store.leading(keys, self.timeout):
            try:
                buffers.append(bytearray(size))
            except (MemoryError, OverflowError):  # what a store says of a value is checked only once it is here
                log.warning("a stored chunk is recomputed: the store says that it has %d bytes", size)
                break
        # The last first: a store that needs room gives up what was used longest ago, and that should not be the beginning.
        wanted = list(zip(keys, buffers, strict=False))[::-1]
        jobs = deque((self.store.submit_get([key], [buffer]), buffer) for key, buffer in wanted)
        found: list[list[Layer]] = []
        timeout = self.timeout
        del buffers, wanted  # each goes when it is decoded
        while jobs:  # all are under way; decoding one overlaps with reading the next
            job, buffer = jobs.popleft()
            done = self.store.wait(job, timeout)
            if done is None:
                timeout = 0.0  # that was the time there is: what has come by now counts
            try:
                found = [list(self.decoded(buffer).layers), *found] if done is not None and all(done.ok) else []
            except StoreError as error:
                log.warning("a stored chunk is recomputed: %s", str(error))  # itself it would keep what it has read
                found = []
        return found

    def decoded(self, data: bytearray) -> KV:
        """A stored chunk. Raises StoreError for what is none, or is of another length, before there is room made for it."""
        container = read_bytes(data)
        if (tokens := layout(container).tokens) != self.chunk:
            raise CorruptBitstream(f"a chunk is of {self.chunk} tokens, and this one of {tokens}")
        return decode(container, self.whose)

    def enter(self, cache: EngineCache, chunks: Sequence[list[Layer]]) -> None:
        """Puts chunks into an empty cache as the beginning of a prompt. Each layer leaves them as it is taken: else all of a long
        text would be there twice."""
        cache.thaw()
        dtype, devices = next(self.model.parameters()).dtype, layer_devices(self.model, len(cache.layers))
        for layer in cache.engines:
            pieces = [chunk.pop(0) for chunk in chunks]
            device = devices[layer.layer]
            k, v = (torch.cat([piece[part] for piece in pieces], 1)[None].to(device, dtype) for part in (0, 1))
            rank = self.ranks.get(layer.layer)
            layer.store(k, k[..., :rank] if rank and cache.stack != Stack() else v, None)
        for entered in cache.layers:
            if isinstance(entered, EngineLayer):
                entered.is_initialized = True

    def read_beside(self, keys: Sequence[str]) -> tuple[int, bytearray | None]:
        """How many of the leading chunks to read, and what is stored beside the last of these; none, if nothing is."""
        end = time.monotonic() + self.timeout
        for n in range(self.store.lookup(keys, self.timeout) if keys else 0, 0, -1):
            key, left = prefix_beside.name(keys[n - 1]), end - time.monotonic()
            if left <= 0:
                break
            if not (size := self.store.leading([key], left)):
                continue
            try:
                buffer = bytearray(size[0])
            except (MemoryError, OverflowError):
                log.warning("a prompt is recomputed: the store says that %d bytes are beside its chunks", size[0])
                break
            done = self.store.wait(self.store.submit_get([key], [buffer]), self.timeout)
            return (n, buffer) if done is not None and all(done.ok) else (0, None)
        return 0, None

    def enter_beside(self, cache: EngineCache, data: bytearray) -> bool:
        """Puts windows and states into a cache that has a prompt's chunks already; whether they could be."""
        devices = layer_devices(self.model, len(cache.layers))  # type: ignore[arg-type]
        try:
            prefix_beside.enter(data, cache, self.whose, devices)
        except StoreError as error:
            log.warning("a prompt is recomputed: what is stored beside its chunks cannot be read: %s", str(error))
            return False
        return True

    def keep(self, ids: Int[Tensor, "seq token"], cache: EngineCache) -> int:
        """Stores the prompt's whole chunks that are not stored yet; the chunks submitted. Does not wait until they are: where
        more come than may wait for the store (`Store.pending`), the first that it drops ends them, as its log and counts tell.

        `ids` are the tokens that the cache was given, from the first on: other ones would be found with these keys, and nothing
        here can tell.

        Where layers have windows or states, these are stored beside the last chunk, if the cache has seen no token behind it
        (`compute`); if it has, nothing is stored, and a warning says so. Nor is anything of a prompt for whose length alone the
        keys are (`dynamic` rotations beyond the trained length).

        Raises CacheError if the cache no longer holds every token of the prompt exactly, holds several sequences, is another
        model's, was given what no chunk's name tells: padding, a tuned prefix, vectors, images, autocast; or its text has
        outgrown the rotation for texts as long as the prompt.
        """
        check(ids)
        check_maker(cache, self.model, "chunks that name")
        if not self.whole:
            return 0
        self.identify()
        tokens, engines = ids[0].tolist(), cache.engines
        start = self.start_for(len(tokens))
        check_whole(ids, cache, len(tokens))
        if cache.session.without_ids:
            raise CacheError(
                "some of this cache's tokens have no ids (a tuned prefix, inputs_embeds, images or sounds), so that another "
                "prompt of the same ids would not have these keys. Store it from a cache that was made of ids alone"
            )
        if any(part.lane.padded for layer in engines for part in layer.parts):
            raise CacheError(
                "some of this cache's tokens were hidden by an attention_mask, so that another prompt of the same tokens "
                "would not have these keys. Give the prompt without padding"
            )
        if self.turn is not None and len(tokens) <= self.turn < cache.seen:
            raise CacheError(
                f"this prompt has {len(tokens)} tokens and was continued to {cache.seen}, and from {self.turn + 1} on this model "
                "rotates keys otherwise, those of the prompt too if it was read anew. Store a prompt before its answer"
            )
        if start is None or (self.beside and not self.stops(cache, len(tokens))):
            return 0
        keys = chain(tokens, start, self.chunk)
        have = self.store.lookup(keys, self.timeout)
        layers = [layer.contents() for layer in engines]
        check_precision(self.model, layers)
        # Values that a policy has of latents are the keys' first channels.
        layers = [(k, v[..., :0] if x.layer in self.ranks else v) for (k, v), x in zip(layers, engines, strict=True)]
        size = self.chunk * sum(k[:, :, :1].nbytes + v[:, :, :1].nbytes for k, v in layers)
        sent, end = 0, len(keys)
        for i in self.order(have, len(keys), size):
            if i > end:  # behind one that was dropped: nobody would find it
                continue
            span = slice(i * self.chunk, (i + 1) * self.chunk)
            kv = KV([(k[0, :, span], v[0, :, span]) for k, v in layers],
                    torch.arange(span.start, span.stop), self.whose)  # fmt: skip
            dropped = self.store.counts["dropped"]
            self.store.submit_put([keys[i]], [encode(kv, self.level, chunk=self.chunk)], self.ttl)
            sent, end = (sent + 1, end) if self.store.counts["dropped"] == dropped else (sent, i)
        if self.beside and keys and not self.store.leading([name := prefix_beside.name(keys[-1])], self.timeout):
            self.store.submit_put([name], [prefix_beside.encode(cache, self.whose)], self.ttl)
        return sent

    def stops(self, cache: EngineCache, total: int) -> bool:
        """Whether a cache's windows and states are those after the last whole chunk of a prompt, and can be stored."""
        if cache.seen != total // self.chunk * self.chunk:
            log.warning(
                "%s has layers with windows or states, which are now those of token %d: nothing is stored. Call "
                "compute(ids, cache), which stops at the end of a chunk (%d tokens), before what comes behind it is read",
                type(self.model).__name__, cache.seen, self.chunk,
            )  # fmt: skip
            return False
        if any(getattr(layer, "record_past", False) for layer in cache.layers):
            raise CacheError(
                "the cache's windows or states remember what can be taken back; call cache.deactivate_past_recording() first"
            )
        return True

    @torch.no_grad()
    def compute(self, ids: Int[Tensor, "seq token"], cache: EngineCache) -> int:
        """Reads those whole chunks of a prompt's beginning that its cache, of `fetch`, does not have yet, and keeps them; the
        chunks submitted.

        Of a prompt that is to be answered, give what may come back, such as the document before the question, and less than all
        of it. A cache that has seen as much is left as it is. Of a prompt that `fetch` was asked for and that is read in parts
        (`judge_every`), the first part's chunks are read.

        Raises CacheError as `keep`, and where the model reads a prompt in parts (`judge_every`) and this would be more than one.
        """
        check(ids)
        check_precision(self.model)
        if not (self.whole and (end := ids.shape[1] // self.chunk * self.chunk)):
            return 0
        if (total := cache.session.prompt_end or 0) >= end:  # so that parts end where they do without a store
            end = min(end, parts.first(self.part, cache, total) // self.chunk * self.chunk)
        if parts.parted(self.part, cache, end):
            raise CacheError(
                f"judge_every={self.part} has a part of a prompt held exactly, no more, and {end - cache.seen} tokens were to be "
                "read and stored. Patch the model without judge_every, or compute with EngineCache(model, 'full')"
            )
        if cache.seen < end:
            # Before it is read in pieces, which makes a difference to what skips some of it.
            check_whole(ids, cache)
            if (cache.session.prompt_end or 0) <= end:
                cache.announce(end + 1)  # more of the prompt is to come, and it is judged then
            at = placed(self.model, cache.seen, end - cache.seen)
            self.model(ids[:, cache.seen : end], **at, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        return self.keep(ids[:, :end], cache) if end else 0

    def keys(self, ids: Int[Tensor, "seq token"], beside: bool = False) -> list[str]:
        """Under what a prompt's whole chunks are stored, first to last, to ask a store for them or to delete them; and then what
        may be `beside` each."""
        check(ids)
        self.identify()
        start = self.start_for(ids.shape[1])
        chunks = [] if start is None else chain(ids[0].tolist(), start, self.chunk)
        return [*chunks, *map(prefix_beside.name, chunks if beside and self.beside else ())]

    def order(self, have: int, end: int, size: int) -> list[int]:
        """The chunks from `have` to `end`, of so many bytes each, in the order in which they are put.

        The last first, so that a store that is short of room gives up what nobody can use without the rest; but no more than
        may wait for it, as what does not is dropped.
        """
        # Twice their size: encoded they may be a little more, and others may wait too.
        most = have + self.store.pending // (2 * size)
        return [*range(have, end)[: most - have][::-1], *range(most, end)]


def check(ids: object) -> None:
    """Raises CacheError for what is no tensor of ids, a row for each sequence: nothing would ever be found for it."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not len(ids) or ids.is_floating_point():
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise CacheError(
            f"a prompt's ids are a tensor of whole numbers [1, token], as a tokenizer makes with return_tensors='pt'; got {got}"
        )
