"""A second turn whose rows are of different lengths, after prompts of different lengths: each row as it is alone."""

import pytest
import torch
from support import MIXED, SMALL, Bare, every, patched
from torch import Tensor

from kvengine import EngineCache
from kvengine.errors import CacheError
from kvengine.hf.names import CACHE

PADS, LATER = (0, 21, 39), (9, 0, 5)  # padding before the rows of the first turn, and before those of the second
STACKS = [
    "streaming(sinks=2, recent=12)",
    "streaming(sinks=2, recent=12, positions='in-cache')",
    "h2o(budget=16)",
    "tova(budget=16, recent=4)",
    "rkv(budget=14, buffer=5, window=4)",
    "snapkv(budget=0.3, window=8)",
    "pyramidkv(budget=20, window=8)",
    "chunkkv(budget=20, window=8, chunk=5)",
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
SILENT = [  # and these, of rows without a token in a turn
    "snapkv(budget=0.4, window=6)",
    "d2o(budget=16, form='official')",
    "d2o(budget=16, shares='measured')",
    "elastic(budget=16, offset=-3) + kivi(bits=4, group=8, residual=8)",
    "adakv(budget=24, base='expected_attention') + quest(budget=12, page=4)",
    "snapkv(budget=20, window=8) + quest(budget=12, page=4) + host",
    "keydiff(budget=16, recent=4) + kivi(bits=4, group=8, residual=8)",
    "duo(sinks=2, recent=10) + snapkv(budget=20, window=8)",
    "h2o(budget=16, decode=False)",
    "rkv(budget=0.3, buffer=5, window=3) + kivi(bits=4, group=8, residual=8)",
]


def ragged(rows: int, length: int, pads: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, 100, (rows, length), generator=torch.Generator().manual_seed(seed))
    return ids, (torch.arange(length) >= torch.tensor(pads)[:, None]).long()


def talk(
    model: torch.nn.Module,
    rows: list[int],
    follow: bool,
    chunks: tuple[int, ...] = (),
    later: tuple[int, ...] = LATER,
    more: int = 8,
) -> Tensor:
    """Logits of these rows' tokens over two turns and what is decoded after each; one row comes without padding."""
    cache, masks, out = EngineCache(model), [], []
    turns = (ragged(3, 40, PADS, 1), ragged(3, 5, (0,) * 3, 2), ragged(3, 14, later, 3), ragged(3, more, (0,) * 3, 4))
    for number, (ids, mask) in enumerate(turns):
        start = int(mask[rows].sum(1).max())
        if not start:
            out.append(torch.full_like(out[-1], torch.nan))
            continue
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
                found = model(ids[:, a:b], attention_mask=seen, position_ids=at, cache=cache).logits
        masks.append(mask)
        out.append(found[:, -1])
    return torch.stack(out, 1)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("text", every(3, STACKS))
def test_a_row_of_a_ragged_turn_is_as_alone(text: str, follow: bool) -> None:
    model = patched(text).double()
    together = talk(model, [0, 1, 2], follow)
    assert together.isfinite().all()
    for row in range(3):
        torch.testing.assert_close(together[row], talk(model, [row], follow)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chunks", [(), pytest.param((6, 11), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("text", every(3, [*STACKS, *SILENT], 1))
def test_a_row_that_says_nothing_in_a_turn_stays_as_it_was(text: str, chunks: tuple[int, ...]) -> None:
    model, later = patched(text).double(), (9, 14, 0)
    together, alone = (talk(model, rows, False, chunks, later, 20) for rows in ([0, 1, 2], [1]))
    torch.testing.assert_close(together[1, [0, 1, 3]], alone[0, [0, 1, 3]], rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(3, ["duo(sinks=2, recent=10) + quest(budget=24, page=4)", *STACKS, *SILENT]))
def test_a_turn_of_padding_alone_leaves_no_trace(text: str) -> None:
    """Of a row that has a cache of its own, but the turns of a batch."""
    model, out, (ids, mask), more = patched(text).double(), [], ragged(1, 40, (0,), 1), ragged(1, 26, (0,), 2)[0]
    for turn in (0, 2):
        cache, seen, found = EngineCache(model), mask, []
        passes = [ids, *more[:, :14].split(1, 1), *([ids[:, :2]] if turn else []), *more[:, 14:].split(1, 1)]
        for i, piece in enumerate(passes):
            seen = torch.cat([seen, torch.full_like(piece, i != 15 or not turn)], 1)[:, -cache.seen - piece.shape[1] :]
            at = (seen.cumsum(1) - 1)[:, -piece.shape[1] :]
            with torch.no_grad():
                found.append(model(piece, attention_mask=seen, position_ids=at, cache=cache).logits[:, -1])
        out.append(torch.stack([*found[:15], *found[-12:]]))
    torch.testing.assert_close(*out, rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(4, [*SMALL.values(), *MIXED]))
def test_a_batch_that_begins_with_padding_alone_begins_behind_it(text: str) -> None:
    model, out, (ids, _) = patched(text).double(), [], ragged(2, 40, (0,), 1)
    for first in (0, 9):
        cache, seen = EngineCache(model), torch.zeros(2, first, dtype=torch.long)
        with torch.no_grad():
            if first:
                model(ids[:, :first], attention_mask=seen, cache=cache)
            for piece in ids.split(1, 1):
                seen = torch.cat([seen, torch.ones_like(piece)], 1)
                at = seen.cumsum(1)[:, -1:] - 1
                found = model(piece, attention_mask=seen, position_ids=at, cache=cache).logits
        out.append(found)
    torch.testing.assert_close(*out)


MORE = [
    "quest(budget=12, page=4)",
    "duo(sparsity=0.5, sinks=1, recent=8) + h2o(budget=20)",
    "tidal(budget=24, start=0)",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", every(3, [*STACKS, *SILENT, *MORE], 2))
def test_a_row_with_one_token_in_a_turn_goes_on_decoding(text: str) -> None:
    """As it does alone, where one token resumes what was said before."""
    model = patched(text).double()
    together = talk(model, [0, 1, 2], False, (), (9, 13, 0), 20)
    for row in range(3):
        torch.testing.assert_close(
            together[row], talk(model, [row], False, (), (9, 13, 0), 20)[0], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("text", ["h2o(budget=16)", "expected_attention(budget=16)", "lowrank(rank=8)"])
def test_chunks_of_a_ragged_turn_do_not_matter(text: str) -> None:
    model = patched(text).double()
    whole, parts = (talk(model, [0, 1, 2], False, chunks) for chunks in ((), (6, 11)))
    torch.testing.assert_close(whole, parts, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("text", every(3, STACKS, 1))
def test_ragged_turns_in_half_precision(text: str, dtype: torch.dtype) -> None:
    """The same as in double precision, but for rounding and the choices it turns."""
    got, want = (talk(patched(text).to(kind), [0, 1, 2], False).double() for kind in (dtype, torch.float64))
    alike = torch.cosine_similarity(got, want, dim=-1)
    assert alike.median() > 0.99 and alike.min() > 0.9, alike


def scattered() -> tuple[Tensor, Tensor]:
    """A prompt with padding between the tokens of one row, and before and behind those of another."""
    ids, mask = ragged(3, 40, (0, 0, 5), 3)
    mask[1, 12:20], mask[1, 38:], mask[2, 33:] = 0, 0, 0
    return ids, mask


@torch.no_grad()
def read(model: torch.nn.Module, ids: Tensor, mask: Tensor, cuts: tuple[int, ...] = (), row: int = 0) -> list[Tensor]:
    """Logits of a prompt's tokens and of what is decoded behind it, of each row."""
    cache, out, edges = EngineCache(model), [], [0, *cuts, ids.shape[1]]
    cache.announce(ids.shape[1])
    more = ragged(3, 12, (0,) * 3, 4)[0][row : row + len(ids)]
    passes = [*(ids[:, a:b] for a, b in zip(edges, edges[1:], strict=False)), *more.split(1, 1)]
    mask = torch.cat([mask, torch.ones(len(ids), 12, dtype=torch.long)], 1)
    for piece in passes:
        seen = mask[:, : cache.seen + piece.shape[1]]
        at = (seen.cumsum(1) - 1).clamp(min=0)[:, -piece.shape[1] :]
        found = model(piece, attention_mask=seen, position_ids=at, cache=cache)
        out.append(found.logits)
    return [row[real] for row, real in zip(torch.cat(out, 1), mask.bool(), strict=True)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "text", [SMALL[name] for name in ("h2o", "snapkv", "tova", "d2o", "elastic", "duo", "ashape")] + STACKS[-6:-1]
)
def test_padding_anywhere_in_a_prompt_is_no_distance(text: str) -> None:
    model, (ids, mask) = patched(text).double(), scattered()
    for row, found in enumerate(read(model, ids, mask)):
        real = mask[row].bool()
        want = read(model, ids[row : row + 1, real], mask[row : row + 1, real], row=row)[0]
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "snapkv(budget=20, window=8)",
        "tova(budget=16)",
        "h2o(budget=16)",
        "expected_attention(budget=16)",
        "lowrank(rank=8)",
    ],
)
def test_padding_within_a_prompt_may_come_with_a_later_chunk(text: str) -> None:
    model, (ids, mask) = patched(text).double(), scattered()
    for whole, parts in zip(read(model, ids, mask), read(model, ids, mask, (15, 35)), strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-3, atol=1e-3)


def test_probes_that_were_chosen_for_a_longer_text_are_refused() -> None:
    with pytest.raises(CacheError, match="padding follows tokens.*earlier chunk.*in one pass"):
        read(patched("zipcache(block=8, probes=0.5)"), *scattered(), (15, 35))


@pytest.mark.parametrize(("first", "later"), [(40, None), (60, 50)], ids=["longer", "shorter"])
def test_a_prompt_that_ends_elsewhere_is_refused_where_probes_were_chosen_by_its_end(
    first: int, later: int | None
) -> None:
    model, ids = patched("zipcache(block=8, probes=0.5)"), ragged(1, 60, (0,), 1)[0]
    cache, end = EngineCache(model), later or 60
    cache.announce(first)
    with torch.no_grad():
        model(ids[:, :30], **{CACHE: cache})
        if later is not None:
            cache.announce(later)
        with pytest.raises(CacheError, match=f"was to end at {first} tokens.*now it is to end at {end}.*announce"):
            model(ids[:, 30:end], **{CACHE: cache})


@pytest.mark.parametrize(
    "text", ["snapkv(budget=20, window=8)", "adakv(budget=20, window=8) + kivi(group=8, residual=8)"]
)
def test_a_row_that_pauses_within_a_pass_of_several_tokens(text: str) -> None:
    """As in a draft after which a row has nothing to say: its next tokens are no further away for that."""
    model, (ids, mask), (more, pause) = patched(text).double(), ragged(2, 40, (0, 7), 1), ragged(2, 9, (0, 0), 2)
    pause[1, 3:7] = 0
    out = []
    for rows in ([0, 1], [1]):
        cache, real = EngineCache(model), slice(None) if len(rows) > 1 else pause[1].bool()
        with torch.no_grad():
            model(ids[rows], attention_mask=mask[rows], cache=cache)
            cache.follow_up()
            seen = torch.cat([mask, pause[:, real]], 1)[rows]
            tokens = more[rows][:, real]
            at = (seen.cumsum(1) - 1)[:, 40:].clamp(min=0)
            found = model(tokens, attention_mask=seen, position_ids=at, cache=cache).logits[-1]
        out.append(found[pause[1].bool()] if len(rows) > 1 else found)
        assert all(int(part.lane.first[-1]) == 7 + 4 * len(rows) - 4 for part in cache.engines[0].parts)
    torch.testing.assert_close(*out, rtol=1e-3, atol=1e-3)


def test_saliency_goes_on_where_it_was_behind_a_turn_of_padding() -> None:
    """As a mean over the queries since the row's own last prompt."""
    found = []
    for silent in (True, False):
        one = Bare("zipcache(block=16, probes=0.5)", rows=2, heads=1)
        one.feed(24)
        if silent:
            one.feed(6, torch.tensor([[True], [False]]).expand(-1, 6))
        else:
            one.at += 6
        for _ in range(3):
            one.feed(1)
        _, _, position, score = one.cache.parts[0].lane.everything()
        found.append(score[1][position[1] >= 0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize(
    "text", ["snapkv(budget=20, window=8)", "tova(budget=16)", "h2o(budget=16)", "ashape(sinks=2, local=9)"]
)
def test_generate_takes_a_ragged_turn_behind_the_last_token(text: str, size: int | None) -> None:
    """The token that was generated last is read with the next question, so a row's padding comes behind it."""
    model, out = patched(text).double(), []
    for rows in ([0, 1], [1]):
        cache, ids, mask = EngineCache(model), torch.zeros(len(rows), 0, dtype=torch.long), None
        for length, pads, seed in ((40, (0, 9), 1), (15, (0, 6), 2)):
            new, real = (x[rows] for x in ragged(2, length, pads, seed))
            new, real = (new, real) if len(rows) > 1 else (new[:, pads[1] :], real[:, pads[1] :])
            ids = torch.cat([ids, new], 1)
            mask = real if mask is None else torch.cat([mask, torch.ones(len(rows), 6, dtype=torch.long), real], 1)
            options = {"attention_mask": mask, CACHE: cache, "prefill_chunk_size": size}
            ids = model.generate(ids, max_new_tokens=6, do_sample=False, **options)
        out.append(ids[-1, -6:])
    assert torch.equal(*out)


def test_a_fraction_is_one_of_all_prompts_without_the_answers() -> None:
    model = patched("keydiff(budget=0.5)")
    cache = EngineCache(model)
    text = model.generate(torch.randint(1, 128, (1, 40)), max_new_tokens=21, do_sample=False, **{CACHE: cache})
    assert set(cache.stats().held.flatten().tolist()) == {20 + 20}
    with torch.no_grad():
        model(torch.cat([text[:, -1:], text[:, :10]], 1), cache=cache)  # the answer's last token comes with the prompt
    assert set(cache.stats().held.flatten().tolist()) == {(40 + 11) // 2}


@pytest.mark.parametrize("text", ["h2o(budget=16)", "quest(budget=12, page=4)", "lowrank(rank=8)"])
def test_a_row_that_has_yet_to_begin_does_so_behind_another_rows_single_token(text: str) -> None:
    """As if there had been none: its first token comes after all that was padding to it."""
    bare, (first, second, third) = Bare(text, rows=2, tokens=120), torch.ones(3, 2, 40, dtype=torch.bool)
    first[1], second[1], second[0, [0, 1, 3, 4]], third[0, :9] = False, False, False, False
    for n, valid in ((40, first), (5, second[:, :5]), (40, third)):
        bare.feed(n, valid)
    got = torch.cat([bare.feed(1) for _ in range(20)], 1)
    lane = bare.cache.parts[0].lane
    assert lane.first.tolist() == [lane.first[0], lane.first[0], 45, 45]
    for row, now in ((0, [*range(40), 42, *range(54, 105)]), (1, [*range(45, 105)])):
        alone = Bare(text, tokens=0)
        alone.q, alone.k, alone.v = (x[row : row + 1, :, now] for x in (bare.q, bare.k, bare.v))
        for n in (40, 1, 31) if row == 0 else (40,):
            alone.feed(n)
        want = torch.cat([alone.feed(1) for _ in range(20)], 1)
        torch.testing.assert_close(got[row : row + 1], want, rtol=1e-4, atol=1e-5)
