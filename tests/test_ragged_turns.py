"""A second turn whose rows are of different lengths, after prompts of different lengths: each row as it is alone."""

import pytest
import torch
from support import patched
from torch import Tensor

from kvengine import EngineCache

PADS, LATER = (0, 21, 39), (9, 0, 5)  # padding before the rows of the first turn, and before those of the second
STACKS = [
    "streaming(sinks=2, recent=12)",
    "streaming(sinks=2, recent=12, positions='in-cache')",
    "h2o(budget=16)",
    "tova(budget=16, recent=4)",
    "snapkv(budget=0.3, window=8)",
    "pyramidkv(budget=20, window=8)",
    "adakv(budget=20, window=8)",
    "keydiff(budget=16, recent=4)",
    "expected_attention(budget=16)",
    "d2o(budget=16)",
    "elastic(budget=16, offset=-3)",
    "h2o(budget=16) + kivi(bits=4, group=8, residual=8)",
    "snapkv(budget=20, window=8) + zipcache(block=8, probes=0.5)",
    "expected_attention(budget=24) + quest(budget=16, page=8)",
    "streaming(sinks=2, recent=12) + quest(budget=12, page=4)",
    "elastic(budget=16, offset=-3) + quest(budget=8, page=2)",
    "h2o(budget=16) + host",
    "zipcache(block=8, probes=0.5)",
    "kivi(bits=4, group=8, residual=8)",
    "ashape(sinks=2, local=9)",
    "ashape(sinks=2, local=9) + lowrank(rank=8)",
    "lowrank(rank=8)",
    "shadowkv(budget=24, rank=8, chunk=4, local=4)",
]


def ragged(rows: int, length: int, pads: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, 100, (rows, length), generator=torch.Generator().manual_seed(seed))
    return ids, (torch.arange(length) >= torch.tensor(pads)[:, None]).long()


def talk(model: torch.nn.Module, rows: list[int], follow: bool, chunks: tuple[int, ...] = ()) -> Tensor:
    """Logits of these rows' tokens over two turns and what is decoded after each; one row comes without padding."""
    cache, masks, out = EngineCache(model), [], []
    turns = (ragged(3, 40, PADS, 1), ragged(3, 5, (0,) * 3, 2), ragged(3, 14, LATER, 3), ragged(3, 8, (0,) * 3, 4))
    for number, (ids, mask) in enumerate(turns):
        start = int(mask[rows].sum(1).max())
        ids, mask = ids[rows, -start:], mask[rows, -start:]
        cuts = [c - 14 + start for c in chunks] if number == 2 else []
        edges = [*range(start), start] if number % 2 else [0, *(c for c in cuts if c > 0), start]
        if number == 2:
            cache.follow_up(follow)
        if not number % 2 and not cache.session.following:
            cache.announce(sum(x.shape[1] for x in masks) + start)
        for a, b in zip(edges, edges[1:], strict=False):
            seen = torch.cat([*masks, mask[:, :b]], 1)
            at = (seen.cumsum(1) - 1).clamp(min=0)[:, a - b :]
            with torch.no_grad():
                found = model(ids[:, a:b], attention_mask=seen, position_ids=at, past_key_values=cache).logits
        masks.append(mask)
        out.append(found[:, -1])
    return torch.stack(out, 1)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("text", STACKS)
def test_a_row_of_a_ragged_turn_is_as_alone(text: str, follow: bool) -> None:
    model = patched(text).double()
    together = talk(model, [0, 1, 2], follow)
    assert together.isfinite().all()
    for row in range(3):
        torch.testing.assert_close(together[row], talk(model, [row], follow)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("text", ["h2o(budget=16)", "expected_attention(budget=16)", "lowrank(rank=8)"])
def test_chunks_of_a_ragged_turn_do_not_matter(text: str) -> None:
    model = patched(text).double()
    whole, parts = (talk(model, [0, 1, 2], False, chunks) for chunks in ((), (6, 11)))
    torch.testing.assert_close(whole, parts, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", STACKS)
def test_ragged_turns_in_half_precision(text: str, dtype: torch.dtype) -> None:
    """The same as in double precision, but for rounding and the choices it turns."""
    got, want = (talk(patched(text).to(kind), [0, 1, 2], False).double() for kind in (dtype, torch.float64))
    alike = torch.cosine_similarity(got, want, dim=-1)
    assert alike.median() > 0.99 and alike.min() > 0.9, alike
