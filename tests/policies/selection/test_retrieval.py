from typing import Any

import pytest
import torch
from support_layer import draw, padded, plain, run, stacked

from kvengine.policies.selection.landmarks import Landmarks
from kvengine.policies.selection.retrieval import Retrieval


@pytest.mark.parametrize("softcap", [None, 0.3])
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_reads_are_those_of_the_loop(softcap: float | None, reduce: str) -> None:
    tokens, chunk, budget = draw(101), 8, 40
    tokens.q *= torch.linspace(1, 4, 4)[:, None, None]
    tokens.softcap = softcap
    found = run(f"retrieval(budget={budget}, chunk={chunk}, reduce={reduce!r})", tokens, 100)
    sealed = len(found.lane.pages)  # type: ignore[arg-type]
    seen = torch.zeros(1, 2, 101, dtype=torch.bool)
    seen[..., sealed:] = True
    for h in range(2):
        means = torch.stack([tokens.k[0, h, i : i + chunk].mean(0) for i in range(0, sealed, chunk)])
        logits = [means @ tokens.q[0, 2 * h + g, 100] * tokens.scale for g in (0, 1)]
        shares = torch.stack([tokens.capped(x).softmax(0) for x in logits])
        share = shares.amax(0) if reduce == "max" else shares.mean(0)
        order = [0, *(j for j in share.argsort(descending=True).tolist() if j)]
        for j in order[: (budget - (101 - sealed)) // chunk]:
            seen[0, h, j * chunk : j * chunk + chunk] = True
    torch.testing.assert_close(found.out[:, -1:], plain(tokens, 100, seen), atol=1e-5, rtol=1e-4)


def test_a_wide_budget_is_full_attention() -> None:
    tokens = draw(101)
    torch.testing.assert_close(run("retrieval(budget=101)", tokens, 100).out[:, -1:], plain(tokens, 100))


def test_the_first_chunk_that_a_row_holds_is_read_whatever_others_hold() -> None:
    """A page without a token goes once no row of the batch has one in its place, so its column may stay."""
    policy, long = "retrieval(budget=32, chunk=4) + streaming(sinks=0, recent=0.5)", draw(120, seed=2)
    short, valid = padded(draw(105, seed=1), 15)
    alone, both = run(policy, long, 80), run(policy, stacked(short, long), 80, valid=torch.cat([valid, valid | True]))
    torch.testing.assert_close(both.out[1:], alone.out, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("selection", [Retrieval(), Landmarks()])
def test_a_chunk_with_holes_is_summarised_by_the_tokens_it_has(selection: Any) -> None:
    k, valid = torch.randn(3, 8, 16), torch.rand(3, 8) < 0.5
    valid[1], valid[2] = False, torch.arange(8) == 3
    found = selection.summarise(k, valid)
    for chunk, (keys, there) in enumerate(zip(k, valid, strict=True)):
        mean = keys[there].mean(0) if there.any() else torch.zeros(16)
        torch.testing.assert_close(found["mean"][chunk], mean)
        if "coherence" in found and there.any():
            near = min(float(torch.cosine_similarity(mean, key, dim=0)) for key in keys[there])
            assert abs(float(found["coherence"][chunk]) - near) < 1e-3
    assert "coherence" not in found or found["coherence"].dtype == torch.half
