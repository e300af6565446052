"""Scripts set torch's default dtype, to load a model in half precision for instance; the engine's numbers stay what they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import SMALL, greedy, llama, prompts

import kvengine
from kvengine.kernels.page_scores import units_by_share
from kvengine.policies.prefill.flexprefill import FlexPrefill
from kvengine.policies.retention.d2o import D2O, sizes
from kvengine.policies.retention.h2o import H2O
from kvengine.policies.retention.pyramidkv import share
from kvengine.policies.selection import Where
from kvengine.policies.selection.landmarks import Landmarks
from kvengine.saliency import Saliency


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SMALL)
def test_the_text_is_the_same_whatever_the_default_dtype(name: str, default: torch.dtype) -> None:
    model, batch = kvengine.patch(llama(), SMALL[name]), prompts()
    want = greedy(model, batch, 8)
    torch.set_default_dtype(default)
    kvengine.unpatch(model)
    kvengine.patch(model, SMALL[name])  # what is found out of a model then is too
    assert torch.equal(greedy(model, batch, 8), want)


def counted() -> list[torch.Tensor]:
    """What methods make of more tokens than half precision tells apart."""
    random, many = torch.Generator().manual_seed(0), torch.tensor([100_000, 1001])
    q, k = (torch.randn(2, n, 8, generator=random, dtype=torch.float32) for n in (2, 700))
    far, alive = torch.rand(2, 700, generator=random, dtype=torch.float32), torch.ones(2, 700, dtype=torch.bool)
    at = Where(0, 1, lambda: torch.tensor([501, 503]), 503, lambda: k, 0.3, 700)
    keys, place = torch.randn(1, 6000, 4, generator=random, dtype=torch.float32), torch.arange(6000)[None]
    kept = Landmarks(budget=0.7, chunk=2, outliers=0.3).exact(keys, place, torch.tensor([6000]))
    chosen = Landmarks(outliers=0.3).select(q, {"mean": k, "coherence": far}, alive, at)
    plain = units_by_share(q, k, alive, 503, 0.3, coherence=far, outliers=0.3, backend="reference")
    spread = torch.tensor([[0.5], [1.0], [3.0]], dtype=torch.float64)
    lines = torch.randn(1, 1, 2048, 8, generator=random, dtype=torch.float32)
    assert kept is not None
    return [
        H2O(budget=1.0, recent=0.3).newest(many),
        D2O(recent=0.3).newest(many),
        sizes(spread, torch.tensor([70_000]), torch.tensor([90_000]), 0.3),
        *(share(torch.tensor([79_990]), torch.tensor([99_999]), 9, layer, 32) for layer in (0, 31)),
        Saliency(0.1, 0, 100_003).probes(torch.arange(100_003)[None], torch.tensor([7])),
        *(x.int() for x in FlexPrefill(gamma=0.5, min_budget=1, block=1024).choose(lines, lines[0], 0.3)[:1]),
        *FlexPrefill(block=1024).shares(lines, lines[0], 0.3),
        kept, chosen, plain,
    ]  # fmt: skip


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str, indirect=True)
def test_counts_are_the_same_whatever_the_default_dtype(default: torch.dtype) -> None:
    want = counted()
    torch.set_default_dtype(default)
    assert all(torch.equal(a, b) for a, b in zip(counted(), want, strict=True))
