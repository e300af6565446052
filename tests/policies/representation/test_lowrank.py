from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support_layer import Tokens, draw, padded, plain, rope, run, stacked

from kvengine import joint as joint_module
from kvengine.cache import LayerCache
from kvengine.errors import PolicyError, UnsupportedPolicy
from kvengine.joint import Joint, join
from kvengine.kernels import dispatch
from kvengine.policies.representation.lowrank import LowRank
from kvengine.rope import Rope
from kvengine.session import Call, Session
from kvengine.stack import Stack
from kvengine.stats import measure


def keys(tokens: int = 60, heads: int = 2, dim: int = 16) -> torch.Tensor:
    return torch.randn(2, heads, tokens, dim, generator=torch.Generator().manual_seed(3))


def restored(policy: LowRank, k: torch.Tensor) -> torch.Tensor:
    rows = k.shape[0] * k.shape[1]
    return policy.keys(policy.join(k), torch.arange(k.shape[2]).expand(rows, -1)).unflatten(0, k.shape[:2])


@pytest.mark.parametrize("rank", [1, 5, 20, 31])
def test_error_is_the_discarded_spectrum(rank: int) -> None:
    k = keys()
    joint = k.transpose(1, 2).flatten(2)
    for s in range(len(k)):
        spectrum = torch.linalg.svdvals(joint[s])
        error = (restored(LowRank(rank), k)[s] - k[s]).square().sum()
        torch.testing.assert_close(error, spectrum[rank:].square().sum(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rank, kept", [(0.25, 8), (0.05, 2), (0.01, 1), (1.0, 32), (100, 32)])
def test_a_fraction_is_of_all_heads_channels_and_no_rank_is_more(rank: int | float, kept: int) -> None:
    joined = LowRank(rank).join(keys().bfloat16())
    assert joined["u"].shape == (2, 60, kept) and joined["basis"].shape == (2, 2, kept, 16)
    assert joined["u"].dtype == joined["basis"].dtype == torch.bfloat16
    length = joined["u"].float().norm(dim=1)
    assert (length[:, 1:] <= 1.01 * length[:, :-1]).all()  # the directions that say most come first


def test_it_is_the_singular_value_decomposition_cut() -> None:
    k = keys()
    u, s, vt = torch.linalg.svd(k.transpose(1, 2).flatten(2), full_matrices=False)
    want = (u[..., :7] * s[:, None, :7]) @ vt[:, :7]
    torch.testing.assert_close(restored(LowRank(7), k).transpose(1, 2).flatten(2), want, atol=1e-3, rtol=1e-3)


def test_full_rank_is_exact() -> None:
    k = keys()
    torch.testing.assert_close(restored(LowRank(1000), k), k, atol=1e-4, rtol=1e-4)


def test_keys_are_turned_back_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles, sines and products of all of a long prompt's keys would take four times what they do as floats."""
    rng, turned, turn = torch.Generator().manual_seed(0), list[int](), Rope.turn
    k, position = torch.randn(4, 90, 8, generator=rng), torch.arange(90, dtype=torch.int32).repeat(4, 1)
    position[2:, :7] = -1
    whole = join(LowRank(rank=6), rope(8), 2, k, position, 90)

    def listening(self: Rope, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        turned.append(x.shape[1])
        return turn(self, x, by)

    monkeypatch.setattr(Rope, "turn", listening)
    monkeypatch.setattr(joint_module, "PART", 32)
    parts = join(LowRank(rank=6), rope(8), 2, k, position, 90)
    assert turned == [32, 32, 26]
    torch.testing.assert_close(parts.fields, whole.fields, rtol=0, atol=0)


def test_a_sequence_that_joins_is_addressed_by_the_positions_of_now() -> None:
    """Padding has come since the first prompt: of who was there, it is undone; of who is new, it came before its keys."""
    g, turn, form = torch.Generator().manual_seed(4), rope(8), LowRank(1000)
    one, other = (torch.randn(2, 1, n, 8, generator=g) for n in (6, 8))  # the second sequence is new in the second
    before, now = torch.arange(6).expand(2, -1), torch.arange(2, 10)
    joint = join(form, turn, 1, one[:, 0], before, 6).moved(torch.tensor([3, 2]))
    both = joint.joined(join(form, turn, 1, other[1:, 0], now[None], 10), torch.tensor([False, True]))
    torch.testing.assert_close(both.keys(before + 3)[0], one[0, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(both.keys(now.expand(2, -1))[1], other[1, 0], atol=1e-4, rtol=1e-4)
    later = both.moved(torch.tensor([1, 5]))
    torch.testing.assert_close(later.keys(before + 4)[0], one[0, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(later.keys(torch.stack([now - 2, now + 5]))[1], other[1, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(joint.keys(before + 2)[1], one[1, 0], atol=1e-4, rtol=1e-4)  # what is remembered stays


@pytest.mark.parametrize(("heads", "interleaved"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("moved", [False, True])
def test_what_becomes_of_sequences_becomes_of_their_keys(heads: int, interleaved: bool, moved: bool) -> None:
    """Padded, joined, chosen, in this order, against a list: for each sequence, what its positions have grown by and its keys."""
    g, turn, form, by_token = (
        torch.Generator().manual_seed(4),
        Rope(rope(8).frequency, interleaved),
        LowRank(1000),
        torch.arange,
    )

    def joined(k: torch.Tensor, seen: int) -> Joint:
        return join(form, turn, heads, k.flatten(0, 1), by_token(k.shape[2]).expand(len(k) * heads, -1), seen)

    def check(joint: Joint, want: list[tuple[int, torch.Tensor]]) -> None:
        for row, (late, k) in enumerate(want):
            position = torch.full((heads * len(want), 10), -1)
            position[row * heads : (row + 1) * heads, : k.shape[1]] = by_token(k.shape[1]) + late
            found = joint.keys(position)[row * heads : (row + 1) * heads, : k.shape[1]]
            torch.testing.assert_close(found, k, atol=1e-4, rtol=1e-4)
            home = torch.where(position < 0, -1, position - late)[row * heads : (row + 1) * heads]
            assert torch.equal(joint.home(position)[row * heads : (row + 1) * heads], home)

    first, more = (torch.randn(n, heads, m, 8, generator=g) for n, m in ((3, 6), (1, 9)))
    joint, late = joined(first, 6), [0, 0, 0]
    for by in ((1, 3, 0), (2, 0, 5)) if moved else ():
        joint, late = (
            joint.moved(torch.tensor(by).repeat_interleave(heads)),
            [a + b for a, b in zip(late, by, strict=True)],
        )
    want = list(zip(late, first, strict=True))
    check(joint, want)
    joint, want[1] = joint.joined(joined(more, 9), torch.tensor([False, True, False])), (0, more[0])
    check(joint, want)
    index = torch.tensor([2, 1, 1, 0])
    check(joint.rows((index[:, None] * heads + by_token(heads)).flatten()), [want[i] for i in index])


class Coded(LowRank):
    codec = "kivi"


def test_only_a_kernel_reads_keys_in_their_low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed to it, positions as they were when the keys came; and when there is none."""
    found: list[tuple[object, ...]] = []
    monkeypatch.setattr(joint_module, "lowrank_attention", lambda *given, **more: found.append((*given, more)))
    k, v, q, table = torch.randn(2, 2, 6, 16), torch.randn(3, 4, 16), torch.randn(4, 2, 1, 16), torch.zeros(4, 1).long()
    position = torch.arange(6).expand(4, -1)
    joint = join(LowRank(1000), rope(16), 2, k.flatten(0, 1), position, 6).moved(torch.tensor([1, 1, 2, 2]))
    now = torch.where(position == 3, -1, position + torch.tensor([1, 1, 2, 2])[:, None])
    monkeypatch.setattr(joint_module, "chosen", lambda tensors, ask, fits: "native" if fits else "reference")
    run = joint.attend(q, v, table, now, page=4)
    assert run is not None and not found
    run()
    u, basis, frequency = joint.fields["u"], joint.fields["basis"].flatten(0, 1), joint.rope.frequency
    for a, b in zip(
        found[0], (q, u, v, basis, frequency, table, torch.where(position == 3, -1, position)), strict=False
    ):
        assert isinstance(a, torch.Tensor) and torch.equal(a, b)
    assert found[0][7] == {"page": 4}
    turned = replace(joint, rope=Rope(joint.rope.frequency, True))
    coded = replace(joint, representation=Coded(1000))
    wide = replace(joint, fields={**joint.fields, "u": joint.fields["u"].mT})
    assert all(x.attend(q, v, table, now, page=4) is None for x in (turned, coded, wide))


def low_rank_tokens(tokens: int, rank: int, heads: int = 2, group: int = 2, dim: int = 16) -> Tokens:
    """Keys of that rank before rotation, over all heads together."""
    found = draw(tokens, heads, group, dim=dim)
    g = torch.Generator().manual_seed(5)
    flat = torch.randn(tokens, rank, generator=g) @ torch.randn(rank, heads * dim, generator=g) / rank**0.5
    k = flat.unflatten(1, (heads, dim)).transpose(0, 1)[None]
    return Tokens(found.q, rope(dim).turn(k, torch.arange(tokens).expand(1, heads, -1)), found.v)


@pytest.mark.parametrize("heads, group", [(2, 2), (4, 1), (1, 4)])
def test_keys_of_low_rank_before_rotation_are_exact(heads: int, group: int) -> None:
    """After rotation they have far more rank: a method that forgot to turn them back would fail here."""
    tokens = low_rank_tokens(90, 4, heads, group)
    found = run("lowrank(rank=4)", tokens, 70)
    assert found.lane.pages is not None and len(found.lane.pages) == 64
    for i in range(70, 90):
        torch.testing.assert_close(found.out[:, i : i + 1], plain(tokens, i), atol=1e-3, rtol=1e-3)
    wrong = run("lowrank(rank=4)", tokens, 70, session=Session(rope=rope(16).__class__(torch.zeros(8))))
    assert (wrong.out[:, -1:] - plain(tokens, 89)).abs().max() > 0.05


def test_reads_are_the_restored_keys_at_their_positions() -> None:
    """A loop: turn back, cut the joint decomposition, turn again, attend."""
    tokens, prompt, rank = draw(80), 64, 6
    found = run(f"lowrank(rank={rank})", tokens, prompt)
    turn = rope(16)
    flat = [turn.turn(tokens.k[0, h, :prompt], -torch.arange(prompt)) for h in range(2)]
    u, s, vt = torch.linalg.svd(torch.cat(flat, 1), full_matrices=False)
    cut = (u[:, :rank] * s[:rank]) @ vt[:rank]
    k = tokens.k.clone()
    for h in range(2):
        k[0, h, :prompt] = turn.turn(cut[:, h * 16 : h * 16 + 16], torch.arange(prompt))
    for i in (64, 79):
        want = plain(Tokens(tokens.q, k, tokens.v), i)
        torch.testing.assert_close(found.out[:, i : i + 1], want, atol=1e-3, rtol=1e-3)


def test_generated_tokens_and_later_prompts_stay_exact() -> None:
    tokens = draw(200)
    found = run("lowrank(rank=4)", tokens, 64)
    assert len(found.lane.pages) == 64 and len(found.lane.tail) == 136  # type: ignore[arg-type]
    cache, call = LayerCache(Stack.parse("lowrank(rank=4)"), 0, 1, Session(rope=rope(16))), Call(tokens.scale)
    for a, b in ((0, 64), (64, 130), (130, 131)):
        cache.forward(*tokens.part(a, b), call)
    lane = cache.parts[0].lane
    assert len(lane.pages) == 64 and torch.equal(lane.tail.held()[0], tokens.k[0, :, 64:131])  # type: ignore[arg-type]


def test_a_short_first_prompt_is_stored_with_the_next() -> None:
    tokens = draw(100)
    cache, call = LayerCache(Stack.parse("lowrank(rank=32)"), 0, 1, Session(rope=rope(16))), Call(tokens.scale)
    outs = [cache.forward(*tokens.part(a, b), call) for a, b in ((0, 7), (7, 8), (8, 90), (90, 91))]
    assert len(cache.parts[0].lane.pages) > 0  # type: ignore[arg-type]
    torch.testing.assert_close(outs[-1], plain(tokens, 90), atol=1e-3, rtol=1e-3)


def test_bytes_are_one_row_of_coordinates_per_token_and_sequence() -> None:
    tokens, rank = draw(160, heads=4, sequences=2), 6
    found = run(f"lowrank(rank={rank})", tokens, 160)
    held = measure([found.cache]).bytes["device"]
    assert held["pages.joint.u"] == 2 * 160 * rank * 4
    assert held["pages.joint.basis"] == 2 * rank * 4 * 16 * 4
    assert "page.k" not in held


def test_bytes_read_are_those_of_the_chosen_tokens() -> None:
    tokens, rank = draw(161, heads=4), 6
    whole, some = (run(f"lowrank(rank={rank}){more}", tokens, 160) for more in ("", " + quest(budget=33, page=8)"))
    tail = len(some.lane.tail) * (16 + 16) * 4 * 4 + len(some.lane.tail) * 4 * 4
    basis, sealed = rank * 4 * 16 * 4, len(whole.lane.pages)  # type: ignore[arg-type]
    assert len(whole.lane.tail) == len(some.lane.tail) == 161 - sealed
    assert measure([whole.cache]).read_per_token == tail + basis + 160 * rank * 4 + 4 * sealed * 16 * 4
    units, bounds = int((some.lane.units >= 0).sum()), 4 * sealed // 8 * 2 * 16 * 4  # type: ignore[operator]
    pages = measure([some.cache]).bytes["device"]["page.v"] / some.lane.pages.pool.pages  # type: ignore[union-attr]
    want = tail + basis + units * 8 * rank * 4 + int(units * pages / 2) + bounds
    assert measure([some.cache]).read_per_token == want


@pytest.mark.parametrize(
    "policy", ["lowrank(rank=6)", "lowrank(rank=6) + quest(budget=48, page=8)", "shadowkv(budget=64, rank=6)"]
)
def test_a_padded_row_alone_is_as_in_a_batch(policy: str) -> None:
    short, other = draw(110, seed=1), draw(127, seed=2)
    longer, valid = padded(short, 17)
    alone = run(policy, short, 90)
    both = run(policy, stacked(longer, other), 107, valid=torch.cat([valid, torch.ones_like(valid)]))
    torch.testing.assert_close(both.out[:1, 17:], alone.out, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("choice", ["landmarks(budget=48, chunk=4)", "quest(budget=32, page=8)", "full"])
def test_values_that_are_fetched_meet_keys_that_are_rebuilt(choice: str, tmp_path: Path) -> None:
    """By the kernel, which reads them as pages of their own, and without it, rotated and kept."""
    tokens, found = low_rank_tokens(130, 4, 2, 2), {}
    for place in ("device", f"disk(device=0, host=0, folder='{tmp_path}')"):
        for kernels in (True, False):
            with nullcontext() if kernels else dispatch.torch_only():
                found[place, kernels] = run(f"lowrank(rank=4) + {choice} + {place}", tokens, 110).out[:, 110:]
    want = found.pop(("device", False))
    assert len(found) == 3 and (choice != "full" or (want - plain(tokens, 129)).abs()[:, -1:].max() < 1e-3)
    for got in found.values():
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_sequences_may_be_reordered() -> None:
    tokens = draw(100, sequences=3)
    found = run("lowrank(rank=6) + host(fields=('v',))", Tokens(*tokens.part(0, 90)), 90)
    order = torch.tensor([2, 0, 2])
    want = run("lowrank(rank=6)", Tokens(*(x[order] for x in tokens.part(0, 91))), 90).out[:, -1:]
    found.cache.rows(order)
    got = found.cache.forward(*(x[order] for x in tokens.part(90, 91)), Call(tokens.scale))
    torch.testing.assert_close(got, want)


def test_streaming_heads_beside_it_stay_exact() -> None:
    tokens = draw(120, heads=4)
    found = run("duo(sparsity=0.5, sinks=4, recent=16) + lowrank(rank=4)", tokens, 100)
    whole, streaming = (part.lane for part in found.cache.parts)
    assert whole.pages is not None and whole.pages.joint is not None and whole.pages.joint.heads == 2
    assert streaming.pages is None and (streaming.tail.position[:, streaming.tail.span] >= 0).sum(1).max() <= 20


@pytest.mark.parametrize("other", ["snapkv", "h2o", "streaming"])
def test_retentions_that_drop_tokens_are_refused(other: str) -> None:
    with pytest.raises(
        UnsupportedPolicy, match=f"'lowrank' stores the keys of all heads .* but '{other}' drops tokens"
    ):
        Stack.parse(f"{other} + lowrank")


def test_a_model_without_rotation_is_refused() -> None:
    with pytest.raises(UnsupportedPolicy, match="'lowrank' needs keys before their rotation"):
        run("lowrank", draw(40), 40, session=Session())


def test_a_rank_is_told_in_directions() -> None:
    for rank in (0, 1.5):
        with pytest.raises(PolicyError, match=rf"LowRank: rank={rank} must be 1 to 2\*\*30 directions"):
            LowRank(rank)
