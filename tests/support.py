"""What many tests share: a tiny model, prompts, greedy text, and a cache driven without a model."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import support_random
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvengine
from kvengine.cache import LayerCache
from kvengine.policies import catalogue
from kvengine.replay import rerun, tell
from kvengine.rope import Rope
from kvengine.session import Call, Session
from kvengine.stack import Stack

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def llama(seed: int = 0, **options: Any) -> Any:
    support_random.seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | options))).eval()


def prompts(rows: int = 3, length: int = 61, seed: int = 1) -> dict[str, Tensor]:
    """Prompts of different lengths, padded on the left."""
    ids = torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
    padding = torch.tensor([0, length // 7, length // 2][:rows])[:, None]
    mask = (torch.arange(length) >= padding).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def one(length: int = 61, seed: int = 1) -> dict[str, Tensor]:
    return prompts(1, length, seed)


def greedy(model: Any, batch: dict[str, Tensor], count: int = 24, **options: Any) -> Tensor:
    """The new tokens."""
    found = model.generate(**batch, max_new_tokens=count, do_sample=False, **options)
    return found[:, batch["input_ids"].shape[1] :]


# One stack for each method, small enough to act within a prompt of 61 tokens. `test_laws` fails when one is missing.
SMALL: dict[str, str] = {
    "full": "full",
    "streaming": "streaming(sinks=2, recent=14)",
    "h2o": "h2o(budget=24)",
    "snapkv": "snapkv(budget=24, window=6)",
    "tova": "tova(budget=24)",
    "pyramidkv": "pyramidkv(budget=24, window=6)",
    "adakv": "adakv(budget=24, window=6)",
    "keydiff": "keydiff(budget=24)",
    "expected_attention": "expected_attention(budget=24)",
    "d2o": "d2o(budget=24)",
    "kvzip": "kvzip(budget=24, chunk=16, carry=3)",
    "elastic": "elastic(budget=24, offset=-8)",
    "chunkkv": "chunkkv(budget=24, window=6, chunk=4)",
    "rkv": "rkv(budget=24, buffer=7, window=4)",
    "uniform": "uniform",
    "duo": "duo(sinks=2, recent=10)",
    "exact": "exact",
    "ashape": "ashape(sinks=2, local=12)",
    "xattention": "xattention(threshold=0.6, stride=4, block=8, last=4)",
    "vertical_slash": "vertical_slash(vertical=5, slash=4, sinks=2, recent=2, window=16, block=8)",
    "flexprefill": "flexprefill(gamma=0.57, tau=0.25, min_budget=8, block=8)",
    "dense": "dense",
    "kivi": "kivi(bits=4, group=8, residual=8)",
    "quantspec": "quantspec(group=8, residual=8)",
    "turboquant": "turboquant(residual=8)",
    "all": "all",
    "quest": "quest(budget=24, page=4)",
    "ann": "ann(budget=24)",
    "oracle_topk": "oracle_topk(budget=24)",
    "tidal": "tidal(budget=24, start=0, reselect=0)",
    "landmarks": "landmarks(budget=24, chunk=4, local=4)",
    "retrieval": "retrieval(budget=24, chunk=4)",
    "zipcache": "zipcache(block=16)",
    "lowrank": "lowrank(rank=8)",
    "device": "device",
    "host": "host",
    "disk": "disk(device=4096, host=8192)",
    "remote": "remote(url='memory://', device=4096, host=4096, disk=4096)",
}

# The same methods where they must change nothing: budgets beyond the text, everything exact.
WIDE: dict[str, str] = {
    "full": "full",
    "streaming": "streaming(sinks=2, recent=500)",
    "h2o": "h2o(budget=500)",
    "snapkv": "snapkv(budget=500)",
    "tova": "tova(budget=500)",
    "pyramidkv": "pyramidkv(budget=500)",
    "adakv": "adakv(budget=500)",
    "keydiff": "keydiff(budget=500)",
    "expected_attention": "expected_attention(budget=500)",
    "d2o": "d2o(budget=500)",
    "kvzip": "kvzip(budget=500)",
    "elastic": "elastic(budget=500)",
    "chunkkv": "chunkkv(budget=500)",
    "rkv": "rkv(budget=500)",
    "uniform": "uniform",
    "duo": "duo(sparsity=1.0, recent=500)",
    "exact": "exact",
    "ashape": "ashape(local=500)",
    "xattention": "xattention(threshold=1.0)",
    "vertical_slash": "vertical_slash(slash=500)",
    "flexprefill": "flexprefill(min_budget=500)",
    "dense": "dense",
    "kivi": "kivi(residual=500)",
    "quantspec": "quantspec(residual=500)",
    "turboquant": "turboquant(residual=500)",
    "all": "all",
    "quest": "quest(budget=500)",
    "ann": "ann(budget=500)",
    "oracle_topk": "oracle_topk(budget=500)",
    "tidal": "tidal(budget=500, start=0, reselect=0)",
    "landmarks": "landmarks(budget=500)",
    "retrieval": "retrieval(budget=500)",
    "zipcache": "zipcache(block=512)",
    "lowrank": "lowrank(rank=32)",
    "device": "device",
    "host": "host",
    "disk": "disk(host=0)",
    "remote": "remote(url='memory://', host=0)",
}

MIXED = [
    "duo(sinks=2, recent=10) + quest(budget=24, page=4) + kivi(group=8, residual=8)",
    "snapkv(budget=0.5, window=6) + quest(budget=24, page=4) + host",
    "h2o(budget=24) + kivi(group=8, residual=8)",
    "streaming(sinks=2, recent=20) + host",
    "elastic(budget=24, offset=-8) + quest(budget=16, page=4)",
    "d2o(budget=24) + duo(sinks=2, recent=10)",
    "d2o(budget=24, form='official') + duo(sinks=2, recent=10)",
    "d2o(budget=24, shares='measured')",
    "streaming(sinks=2, recent=14, positions='in-cache') + kivi(group=8, residual=8)",
    "adakv(budget=24, base='expected_attention') + quest(budget=16, page=4)",
    "quest(budget=24, page=4) + kivi(group=8, residual=8) + disk(device=2048, host=2048)",
    "landmarks(budget=40, chunk=4) + host(fields=('v',), resident=40)",
    "ashape(sinks=2, local=12) + snapkv(budget=24, window=6) + kivi(bits=2, group=8, residual=8)",
    "duo(sinks=2, recent=10) + kvzip(budget=0.4, chunk=16) + quest(budget=16, page=4) + host",
    "kvzip(budget=24, chunk=20, prompt=(3, 4), suffix=(5,)) + zipcache(block=16)",
    "rkv(budget=24, buffer=7, window=4) + quest(budget=12, page=4)",
]


def every(which: int, cases: Iterable[Any], start: int = 0) -> list[Any]:
    """All cases for `make test-slow`, and every so many-th for `make test`, from `start` on."""
    return [case if i % which == start else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]


def in_turn(cases: Iterable[Any], ways: Sequence[Any], few: int = 2) -> list[Any]:
    """All cases in all ways for `make test-slow`; for `make test`, each case in one of the first few ways."""
    return [
        pytest.param(case, way, marks=[] if j == i % few else [pytest.mark.slow])
        for i, case in enumerate(cases)
        for j, way in enumerate(ways)
    ]


def methods() -> list[str]:
    return sorted(catalogue())


class Bare:
    """One layer's cache fed with random queries, keys and values, as attention would feed it."""

    def __init__(
        self, stack: str, heads: int = 2, group: int = 2, dim: int = 8, rows: int = 1, tokens: int = 200, seed: int = 0
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.q = torch.randn(rows, heads * group, tokens, dim, generator=g)
        self.k = torch.randn(rows, heads, tokens, dim, generator=g)
        self.v = torch.randn(rows, heads, tokens, dim, generator=g)
        self.call, self.at = Call(dim**-0.5), 0
        rope = Rope(torch.tensor([1.0, 0.3, 0.1, 0.02]))  # of a made-up model, for methods that turn keys
        self.cache = LayerCache(Stack.parse(stack), 0, 1, Session(rope=rope))

    def feed(self, n: int, valid: Tensor | None = None) -> Tensor:
        """Take the next `n` tokens; their outputs [seq, token, q_head, dim]."""
        s = slice(self.at, self.at + n)
        self.at += n
        tell(self.cache, s.start, s.stop, valid, len(self.q))
        out = self.cache.forward(self.q[:, :, s], self.k[:, :, s], self.v[:, :, s], self.call, valid)
        rerun([self.cache], [(self.q, self.k, self.v)], self.call)
        return out

    def back(self, n: int) -> None:
        self.cache.rollback(n)
        self.at -= n


def held(cache: LayerCache) -> list[list[list[int]]]:
    """Positions held, [sequence][kv head], sorted."""
    found: list[list[list[int]]] = [[[] for _ in range(cache.heads)] for _ in range(cache.sequences)]
    for part in cache.parts:
        lane = part.lane
        assert lane.tail.exact, "positions are not remembered: EngineCache(model, positions=True)"
        position = lane.tail.position[:, lane.tail.span]
        if lane.pages is not None:
            position = torch.cat([lane.pages.position, position], 1)
        heads = list(range(cache.heads)) if part.index is None else part.index.tolist()
        for row, values in enumerate(position.tolist()):
            found[row // len(heads)][heads[row % len(heads)]] = sorted(p for p in values if p >= 0)
    return found


def patched(text: str, **options: Any) -> Any:
    return kvengine.patch(llama(**options), text)
