"""What a prompt takes for a while: beside what it brings no more than a few blocks, whatever judges, stores or answers it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_layer import rope
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvengine import joint, page_reads
from kvengine.cache import LayerCache
from kvengine.offload.placement import _tiered
from kvengine.policies import retention
from kvengine.policies.prefill import _blocks
from kvengine.policies.retention import d2o, rkv
from kvengine.session import Call, Session
from kvengine.stack import Stack

HEADS, GROUP, DIM, TOKENS = 8, 2, 32, 1024
BROUGHT = 2 * HEADS * TOKENS * DIM * 2  # bytes of keys and values in bfloat16


class Live(TorchDispatchMode):
    """The most bytes that were alive at once, of tensors made in here."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.alive, self.most = dict[StorageWeakRef, int](), 0
        self.known = {x.untyped_storage().data_ptr() for x in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.alive[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        self.alive = {ref: size for ref, size in self.alive.items() if not ref.expired()}
        self.most = max(self.most, sum(self.alive.values()))
        return out


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many blocks as a prompt of 100 000 tokens has."""
    for module, name in ((retention, "FLOATS"), (d2o, "FLOATS"), (_blocks, "NEAR")):
        monkeypatch.setattr(module, name, 1 << 14)
    for module, name in ((joint, "PART"), (page_reads, "LAID"), (rkv, "BLOCK"), (rkv, "SPAN")):
        monkeypatch.setattr(module, name, 256 if module is rkv else 128)


def feed(cache: LayerCache, tokens: int, stock: bool) -> Live:
    g = torch.Generator().manual_seed(cache.seen)
    q, k, v = (torch.randn(1, h, tokens, DIM, generator=g).bfloat16() for h in (HEADS * GROUP, HEADS, HEADS))
    k[:, :, 1::2] = k[:, :, ::2]  # some are alike
    nothing = q.new_zeros(1, 1, 1, 1).expand(1, tokens, HEADS * GROUP, DIM)
    with Live(q, k, v, nothing) as live:
        cache.forward(q, k, v, Call(DIM**-0.5), None, (lambda k, v: nothing) if stock else None)
    return live


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        ("keydiff(budget=64)", 1.4),
        ("rkv(budget=64)", 2.0),
        ("lowrank(rank=16)", 2.9),  # floats of all keys are what it finds directions of
        ("elastic(budget=64)", 3.0),  # what was merged is beside what it was made of
        ("d2o(budget=64)", 3.1),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_a_verdict_makes_floats_of_some_rows_at_a_time(policy: str, most: float) -> None:
    cache = LayerCache(Stack.of(policy), 0, 1, Session(rope=rope(DIM)))
    cache.session.prompt_end = TOKENS
    assert 1 <= feed(cache, TOKENS, stock=True).most / BROUGHT < most


@pytest.mark.parametrize("policy", ["xattention", "vertical_slash(vertical=64, slash=128)"])
@pytest.mark.usefixtures("small_blocks")
def test_a_prefill_method_holds_its_answer_twice_at_most(policy: str) -> None:
    """As long as heads are put in their places, as in the model's own attention; queries and answers are as large here as
    keys and values."""
    cache = LayerCache(Stack.of(policy), 0, 1, Session(rope=rope(DIM)))
    cache.session.prompt_end = TOKENS
    assert feed(cache, TOKENS, stock=False).most / BROUGHT < 3.4


@pytest.mark.parametrize(("policy", "most"), [("zipcache(probes=1.0)", 3.7), ("h2o(budget=1024) + kivi", 3.7)])
@pytest.mark.usefixtures("small_blocks")
def test_codes_are_decoded_some_at_a_time_for_a_later_prompt(policy: str, most: float) -> None:
    cache = LayerCache(Stack.of(policy), 0, 1, Session(rope=rope(DIM)))
    cache.session.prompt_end = TOKENS
    feed(cache, TOKENS, stock=True)
    cache.session.prompt_end = TOKENS + 64
    assert feed(cache, 64, stock=False).most / BROUGHT < most


@pytest.mark.parametrize(("policy", "most"), [("disk", 1.3), ("disk(host=0)", 2.3)])
def test_what_tiers_hold_is_read_to_where_it_is_wanted(
    policy: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoded token that reads all of it has it once, and of what is below memory what was fetched ahead as bytes."""
    monkeypatch.setattr(_tiered, "READ", 1 << 14)
    cache = LayerCache(Stack.of(policy), 0, 1)
    for n in (TOKENS, 1, 1):
        taken = feed(cache, n, stock=n > 1)
    assert 1 <= taken.most / BROUGHT < most


@pytest.mark.parametrize("policy", ["ashape", "duo(prompt='streaming')"])
def test_answers_lie_as_models_read_them(policy: str) -> None:
    """Else each model copies what a prompt gave once more."""
    cache = LayerCache(Stack.of(policy), 0, 1)
    cache.session.prompt_end = 100
    q, k, v = (torch.randn(2, h, 100, DIM) for h in (HEADS * GROUP, HEADS, HEADS))
    assert cache.forward(q, k, v, Call(DIM**-0.5)).is_contiguous()
