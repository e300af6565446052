"""A decoded token costs no copy of what is held: the longer the context, the more that would be."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvengine.cache import LayerCache
from kvengine.policies import catalogue
from kvengine.replay import rerun, tell
from kvengine.rope import Rope
from kvengine.session import Call
from kvengine.stack import Stack

HEADS, GROUP, DIM, PROMPT, BUDGET, STEPS = 2, 2, 64, 1024, 256, 17
STACKS = [
    "full", "kivi", "zipcache", "quantspec", "turboquant", "lowrank(rank=16)", "duo(sparsity=0.5)", "adakv(budget=256) + kivi",
    f"streaming(recent={BUDGET - 4})", "streaming(recent=252) + quest(budget=64)", "lowrank(rank=16) + landmarks(budget=128)",
    *(f"{name}(budget={BUDGET})" for name in (
        "h2o", "tova", "snapkv", "pyramidkv", "adakv", "keydiff", "expected_attention", "elastic", "kvzip", "rkv", "chunkkv",
        "quest", "tidal", "landmarks", "retrieval", "ann",
    )),
]  # fmt: skip
WHOLE = {"oracle_topk", "d2o", "host", "disk", "remote"}
"""They read or merge what is held, as they say."""
NOTHING = {"ashape", "xattention", "vertical_slash", "flexprefill", "uniform", "exact", "all", "dense", "device"}
"""What they do to a decoded token."""
TOUCHING = {
    f"aten::{name}"
    for name in ("copy_", "cat", "index", "gather", "where", "mul", "sort", "masked_fill_", "index_select")
}


def test_every_method_is_here() -> None:
    named = {word for text in STACKS for word in text.replace("(", " ").split()}
    rest = set(catalogue()) - named - WHOLE - NOTHING
    assert not rest, f"add a stack with {sorted(rest)} to STACKS, or a name to WHOLE or NOTHING"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("text", STACKS)
def test_a_decoded_token_copies_little(text: str) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, PROMPT + STEPS, DIM, generator=rng).bfloat16() for h in (HEADS * GROUP, HEADS, HEADS))
    cache = LayerCache(Stack.parse(text), 0, 1)
    cache.session.rope = Rope(10000.0 ** -(torch.arange(DIM // 2) * 2 / DIM))
    with torch.inference_mode():
        tell(cache, 0, PROMPT)
        cache.forward(*(x[:, :, :PROMPT] for x in (q, k, v)), Call(DIM**-0.5))
        rerun([cache], [(q, k, v)], Call(DIM**-0.5))
        copied = []
        for i in range(PROMPT, PROMPT + STEPS):
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as taken:
                cache.forward(*(x[:, :, i : i + 1] for x in (q, k, v)), Call(DIM**-0.5))
            sizes = [torch.Size(shape).numel() for event in taken.events() if event.name in TOUCHING  # type: ignore[union-attr]
                     for shape in event.input_shapes if shape]  # fmt: skip
            copied.append(max(sizes, default=0))
    # Once in a while slots are moved to where there are more of them, or a page is made.
    assert sorted(copied)[len(copied) * 2 // 3] < BUDGET * HEADS * DIM // 2, copied
