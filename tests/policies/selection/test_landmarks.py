from typing import Literal

import pytest
import torch
from support_layer import Tokens, draw, plain, rope, run

from kvengine.errors import PolicyError
from kvengine.policies.selection import landmarks
from kvengine.policies.selection._chunks import coherence
from kvengine.policies.selection.landmarks import Landmarks
from kvengine.stack import Stack
from kvengine.stats import measure

PROMPT, CHUNK = 128, 8


def chunks(k: torch.Tensor, upto: int) -> torch.Tensor:
    """[chunk, token, dim] of one head's keys."""
    return k[: upto // CHUNK * CHUNK].unflatten(0, (-1, CHUNK))


def worst(k: torch.Tensor, upto: int, count: int) -> set[int]:
    """The chunks whose mean is farthest, by angle, from one of their keys."""
    found = []
    for j, chunk in enumerate(chunks(k, upto)):
        mean = chunk.mean(0)
        found.append((min(float(torch.cosine_similarity(mean, key, dim=0)) for key in chunk), j))
    return {j for _, j in sorted(found)[:count]}


def expected(tokens: Tokens, policy: Landmarks, head: int, sealed: int, query: int) -> set[int]:
    """The tokens that one KV head reads, by loops."""
    open_ = query + 1 - sealed
    count = max(1, (int(policy.budget) - open_) // CHUNK)
    outliers = worst(tokens.k[0, head], sealed, int(count * policy.outliers))
    landmarks = {j: c.mean(0) for j, c in enumerate(chunks(tokens.k[0, head], sealed)) if j not in outliers}
    share = []
    for g in range(2):
        q = tokens.q[0, head * 2 + g, query]
        logits = torch.stack([mean @ q * tokens.scale for mean in landmarks.values()])
        share.append(tokens.capped(logits).softmax(0))
    shares = torch.stack(share)
    best = (shares.amax(0) if policy.reduce == "max" else shares.mean(0)).argsort(descending=True).tolist()
    chosen = [*outliers, *(list(landmarks)[i] for i in best)][:count]
    return {j * CHUNK + i for j in chosen for i in range(CHUNK)} | set(range(sealed, query + 1))


@pytest.mark.parametrize("policy", [Landmarks(88), Landmarks(72, outliers=0.0), Landmarks(64, local=8)], ids=str)
def test_reads_are_those_of_the_loop(policy: Landmarks) -> None:
    same_reads(policy, draw(PROMPT + 1))


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_heads_are_compared_by_capped_logits(reduce: Literal["max", "mean"]) -> None:
    for seed in range(3):
        tokens = draw(PROMPT + 1, seed=seed)
        tokens.q *= torch.linspace(1, 4, 4)[:, None, None]
        tokens.softcap = 0.3
        same_reads(Landmarks(budget=88, reduce=reduce), tokens)


def test_outliers_take_no_share_from_the_others() -> None:
    """A head that is all for an outlier would otherwise have little say in what else is read."""
    for seed in range(10):
        tokens = draw(PROMPT + 1, seed=seed)
        tokens.q[:] *= 2
        same_reads(Landmarks(budget=104), tokens)


def same_reads(policy: Landmarks, tokens: Tokens) -> None:
    found = run(Stack(selection=policy), tokens, PROMPT)
    sealed = len(found.lane.pages)  # type: ignore[arg-type]
    seen = torch.zeros(1, 2, PROMPT + 1, dtype=torch.bool)
    for head in range(2):
        seen[0, head, sorted(expected(tokens, policy, head, sealed, PROMPT))] = True
    torch.testing.assert_close(found.out[:, -1:], plain(tokens, PROMPT, seen), atol=1e-5, rtol=1e-4)
    assert (found.out[:, -1:] - plain(tokens, PROMPT)).abs().max() > 1e-3  # it did leave something out


def test_summaries_grow_as_if_built_at_once() -> None:
    tokens = draw(200)
    grown, whole = run("landmarks(budget=64)", tokens, 40).lane, run("landmarks(budget=64)", tokens, 200).lane
    for name, x in grown.pages.summary.items():  # type: ignore[union-attr]
        torch.testing.assert_close(x, whole.pages.summary[name][:, : x.shape[1]])  # type: ignore[union-attr]


# ShadowKV: with keys of low rank


def test_outliers_stay_exact_in_the_tail() -> None:
    tokens = draw(161)
    found = run("shadowkv(budget=128, rank=6)", tokens, 160)
    lane = found.lane
    tail, pages = lane.tail.position[:, lane.tail.span], lane.pages.position  # type: ignore[union-attr]
    for head in range(2):
        outliers = {j * CHUNK + i for j in worst(tokens.k[0, head], 128, 3) for i in range(CHUNK)}  # 0.1875 of 128
        here, there = set(tail[head].tolist()), set(pages[head].tolist())
        assert outliers <= here and not outliers & there
        assert here | there == set(range(161)) and not here & there
        assert set(range(128, 161)) <= here
    k = lane.tail.held()[0]
    torch.testing.assert_close(k[0], tokens.k[0, 0][tail[0].long()])


def test_each_row_has_its_outliers_among_the_chunks_before_its_local_tokens() -> None:
    """A sequence of 160 tokens, and one of 91 behind padding: fractions and chunks are of these, not of the longest."""
    k = torch.randn(2, 160, 8, generator=torch.Generator().manual_seed(0))
    position = torch.arange(160).repeat(2, 1)
    position[1, :69] = -1
    for row, local in ((0, 128), (1, 69 + 56)):  # the least coherent chunk is the first local one
        k[row, local] = -0.9 * k[row, local + 1 : local + 8].sum(0)
    found = Landmarks(budget=0.6, outliers=0.25).exact(k, position, torch.tensor([160, 91]))
    for row, (pad, count) in enumerate(((0, 3), (69, 1))):  # a quarter of 96 tokens, and of 54
        outliers = worst(k[row, pad:], 160 - pad - 32, count)
        want = {pad + j * CHUNK + i for j in outliers for i in range(CHUNK)}
        assert found is not None and set(found[row].nonzero()[:, 0].tolist()) == want


def test_outliers_are_looked_for_some_chunks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As floats, with their products, a long prompt's keys would take several times what the cache keeps of them."""
    k, position = draw(200).k[0], torch.arange(200).repeat(2, 1)
    position[1, :30] = -1
    found, looked = Landmarks(budget=80, local=8), list[int]()
    whole = found.exact(k, position, (position >= 0).sum(1))
    monkeypatch.setattr(landmarks, "PART", 10)
    monkeypatch.setattr(landmarks, "coherence", lambda k, *more: (looked.append(len(k)), coherence(k, *more))[1])
    parts = found.exact(k, position, (position >= 0).sum(1))
    assert whole is not None and parts is not None and torch.equal(whole, parts)
    assert looked == [10] * 4 + [8]


def test_chunks_stay_whole_when_outliers_are_taken_out() -> None:
    lane = run("shadowkv(budget=128, rank=6)", draw(190), 190).lane
    units = lane.pages.position.unflatten(1, (-1, CHUNK))  # type: ignore[union-attr]
    assert (units[..., 0] % CHUNK == 0).all() and (units.diff(dim=2) == 1).all()


def test_full_rank_and_budget_are_full_attention() -> None:
    tokens = draw(140)
    found = run("shadowkv(budget=1000, rank=32)", tokens, 120)
    for i in (120, 139):
        torch.testing.assert_close(found.out[:, i : i + 1], plain(tokens, i), atol=1e-3, rtol=1e-3)


def test_full_rank_reads_what_exact_keys_would() -> None:
    """Only the choice is sparse then: outliers, the tail and the best chunks, each once."""
    tokens = draw(161)
    found = run("shadowkv(budget=128, rank=32)", tokens, 160)
    lane = found.lane
    chosen = lane.units
    assert chosen is not None
    seen = torch.zeros(1, 2, 161, dtype=torch.bool)
    for head in range(2):
        tail = lane.tail.position[head, lane.tail.span].tolist()
        units = lane.pages.position[head].unflatten(0, (-1, CHUNK))[chosen[head][chosen[head] >= 0]]  # type: ignore[union-attr]
        read = tail + units.flatten().tolist()
        assert len(read) == len(set(read)) <= 128
        seen[0, head, read] = True
    torch.testing.assert_close(found.out[:, -1:], plain(tokens, 160, seen), atol=1e-3, rtol=1e-3)


def test_values_are_on_the_host_and_keys_on_the_device() -> None:
    held = measure([run("shadowkv(budget=64, rank=6)", draw(160), 160).cache]).bytes
    assert set(held["host"]) == {"page.v"} and "pages.joint.u" in held["device"]


def test_a_wrong_share_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"outliers=1.0 must be a fraction of the budget, below 1"):
        Landmarks(outliers=1.0)


def test_a_prompt_shorter_than_everything() -> None:
    tokens = draw(30)
    for prompt in (1, 2, 9, 20):
        found = run("shadowkv(budget=64, rank=6)", tokens, prompt)
        torch.testing.assert_close(found.out[:, -1:], plain(tokens, 29))
    assert rope(16).frequency.shape == (8,)
