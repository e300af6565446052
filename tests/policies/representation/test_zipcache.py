import math

import pytest
import torch
from support import one, patched
from support_layer import Run, Tokens, draw, padded, plain, run, stacked

from kvengine import EngineCache
from kvengine.errors import PolicyError
from kvengine.kernels.quantise import unpack
from kvengine.policies.representation.zipcache import ZipCache
from kvengine.policies.retention.full import Full
from kvengine.saliency import Saliency


@pytest.fixture(autouse=True)
def scores_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saliency is stored only while somebody will read it: here, the tests."""
    monkeypatch.setattr(Full, "remembers", True)


def pages(count: int = 3, tokens: int = 128, dim: int = 24, dim_v: int = 16) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    k = torch.randn(count, tokens, dim, generator=g) * torch.linspace(0.1, 20, dim) + torch.linspace(-3, 3, dim)
    v = torch.randn(count, tokens, dim_v, generator=g) * torch.linspace(0.5, 4, dim_v)
    return k, v, torch.rand(count, tokens, generator=g)


@pytest.mark.parametrize("policy", [ZipCache(), ZipCache(high=8, low=4, salient=0.25), ZipCache(salient=1.0)], ids=str)
def test_error_is_at_most_half_a_step(policy: ZipCache) -> None:
    k, v, score = pages()
    fields = policy.encode(k, v, score)
    k_hat, v_hat = policy.decode(fields)
    for p in range(len(k)):
        best = set(score[p].argsort(descending=True)[: policy.best(128)].tolist())
        for width, members in (("high", sorted(best)), ("low", sorted(set(range(128)) - best))):
            if not members:
                assert not fields[f"k_{width}"].numel()
                continue
            bits = getattr(policy, width)
            group = k[p, members]
            step = (group.amax(0) - group.amin(0)) / (2**bits - 1)
            rounding = (group.abs().amax(0) + (2**bits) * step) * 2**-10  # of the range, in half precision
            assert ((k_hat[p, members] - group).abs() <= step / 2 + rounding).all()
            channel = v[p].abs().amax(0).sqrt()
            scaled = v[p, members] / channel
            step = (scaled.amax(1) - scaled.amin(1)) / (2**bits - 1)
            allowed = (step / 2 + (scaled.abs().amax(1) + 2**bits * step) * 2**-9)[:, None] * channel
            assert ((v_hat[p, members] - v[p, members]).abs() <= allowed).all()


def test_fewer_bits_than_promised_break_the_bound() -> None:
    """The bound above is tight enough to notice a width that is one step too narrow."""
    k, v, score = pages()
    narrow, _ = ZipCache(high=2, low=2).decode(ZipCache(high=2, low=2).encode(k, v, score))
    step = (k.amax(1) - k.amin(1)) / 15
    assert ((narrow - k).abs() > step[:, None] / 2).any()


def test_salient_tokens_get_the_wider_codes() -> None:
    k, v, score = pages()
    k_hat, _ = ZipCache().decode(ZipCache().encode(k, v, score))
    error = ((k_hat - k) / k.std(1, keepdim=True)).square().mean(2)
    best = score.argsort(1, descending=True)
    assert error.gather(1, best[:, :77]).mean() * 5 < error.gather(1, best[:, 77:]).mean()


def test_constant_channels_and_tokens_are_exact() -> None:
    k, v, score = torch.full((1, 16, 8), 3.0), torch.zeros(1, 16, 8), torch.rand(1, 16)
    k_hat, v_hat = ZipCache(block=16).decode(ZipCache(block=16).encode(k, v, score))
    assert torch.equal(k_hat, k) and torch.equal(v_hat, v)


def test_a_value_channel_scales_with_its_reconstruction() -> None:
    """Scaling a channel by 4 scales its normaliser by 2 exactly, so relative errors stay of their size."""
    _, v, score = pages()
    loud = v.clone()
    loud[..., 3] *= 100
    plain_error = (ZipCache(high=4, low=4).decode(ZipCache(high=4, low=4).encode(v, v, score))[1] - v).abs()
    loud_error = (ZipCache(high=4, low=4).decode(ZipCache(high=4, low=4).encode(loud, loud, score))[1] - loud).abs()
    others = [c for c in range(16) if c != 3]
    growth = loud_error[..., others].mean() / plain_error[..., others].mean()
    assert growth < 20  # plain tokenwise codes would grow by about the loudness, 100 times a quarter


def test_a_value_channel_of_next_to_nothing_is_as_one_of_nothing() -> None:
    """The square root of 1e-18 is beyond half precision; divided by the 0 that it becomes there, no token would have a range."""
    k, v, score = pages()
    v[..., 3] *= 1e-18
    silent = v.clone()
    silent[..., 3] = 0
    found, want = (ZipCache().decode(ZipCache().encode(k, x, score))[1] for x in (v, silent))
    others = [c for c in range(16) if c != 3]
    assert torch.equal(found[..., others], want[..., others]) and bool(found.isfinite().all())


def test_bytes_are_those_of_the_formula() -> None:
    dim, block = 64, 128
    k, v, score = torch.randn(5, block, dim), torch.randn(5, block, dim), torch.rand(5, block)
    policy = ZipCache()
    fields = policy.encode(k, v, score)
    r = policy.best(block) / block
    keys, values = 4 * r + 2 * (1 - r) + 64 / block + 1 / dim, 4 * r + 2 * (1 - r) + 32 / dim + 16 / block
    assert sum(x.nbytes for x in fields.values()) * 8 == round(5 * block * dim * (keys + values))


# Saliency


def paid(tokens: Tokens, head: int, q_head: int, seen: slice, query: int) -> torch.Tensor:
    """What a query pays to the tokens that it sees."""
    logits = tokens.k[0, head, seen] @ tokens.q[0, q_head, query] * tokens.scale
    return (
        logits.softmax(0)
        if tokens.sinks is None
        else torch.cat([logits, tokens.sinks.flatten()[q_head, None]]).softmax(0)[:-1]
    )


def loop_saliency(tokens: Tokens, probes: list[int], first: int = 0) -> list[list[float]]:
    """Mean over the probes that see a token, summed over the query group: [head][token]."""
    heads, n = tokens.k.shape[1], tokens.k.shape[2]
    group = tokens.q.shape[1] // heads
    total = [[0.0] * n for _ in range(heads)]
    for h in range(heads):
        for g in range(group):
            for p in probes:
                row = paid(tokens, h, h * group + g, slice(first, p + 1), p)
                for j in range(first, p + 1):
                    total[h][j] += float(row[j - first])
    return [[x / max(1, sum(p >= j for p in probes)) for j, x in enumerate(line)] for line in total]


def probe_positions(n: int, first: int = 0) -> list[int]:
    at = torch.arange(n)
    return Saliency(0.1, 0, n).probes(at, torch.tensor([first]))[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("heads, group", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("chunks", [(), (17, 40)], ids=["whole", "chunks"])
def test_saliency_of_a_prompt(heads: int, group: int, chunks: tuple[int, ...]) -> None:
    tokens = draw(70, heads, group)
    found: Run = run("zipcache(block=32)", tokens, 70, chunks=chunks)
    lane = found.lane
    score = torch.cat([lane.pages.score, lane.tail.held()[3]], 1)  # type: ignore[union-attr]
    want = torch.tensor(loop_saliency(tokens, probe_positions(70)))
    torch.testing.assert_close(score, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("tokens", "first", "share"), [(2000, 0, 0.1), (333, 40, 0.25), (90, 0, 1.0), (7, 3, 0.1)])
def test_probes_are_the_last_ones_and_a_fixed_sequence_of_the_others(tokens: int, first: int, share: float) -> None:
    """By a loop from the end: half of them come last, and as many are spread over what is before."""
    golden, many = (math.sqrt(5) - 1) / 2, tokens - first
    last = max(1, math.ceil(many * share / 2 - 1e-9))
    spread = share / 2 / (1 - share / 2)
    want = [at for at in range(first, tokens) if (back := tokens - 1 - at) < last or back * golden % 1 < spread]
    found = Saliency(share, 0, tokens).probes(torch.arange(tokens), torch.tensor([first]))[0].nonzero()[:, 0].tolist()
    assert found == want
    early = sum(tokens - 1 - at >= last for at in found)
    assert many < 100 or abs(early - many * share / 2) <= 3


def test_probes_are_about_their_share_and_half_are_the_last() -> None:
    found = probe_positions(2000)
    assert 185 <= len(found) <= 215
    assert set(range(1900, 2000)) <= set(found)
    gaps = torch.tensor([x for x in found if x < 1900]).diff()
    assert gaps.max() <= 60  # spread over all of the prompt


def test_dividing_by_all_queries_would_understate_early_tokens() -> None:
    """With uniform attention the right mean of the first token is that of 1/(k+1) over probes."""
    tokens = draw(400, 1, 1)
    tokens.q.zero_()
    lane = run("zipcache", tokens, 400).lane
    probes = probe_positions(400)
    want = sum(1 / (p + 1) for p in probes) / len(probes)
    assert float(lane.pages.score[0, 0]) == pytest.approx(want, rel=1e-4)  # type: ignore[union-attr]
    assert want > 5 * sum(1 / (p + 1) for p in probes) / 400


@pytest.mark.parametrize("sinks", [None, torch.tensor([[0.5, 2.0], [-1.0, 3.0]])], ids=["", "sinks"])
@pytest.mark.parametrize("at_once", [False, True])
def test_saliency_goes_on_while_decoding(at_once: bool, sinks: torch.Tensor | None) -> None:
    """A model's sinks take their part of what probes pay, of a prompt and later."""
    tokens = draw(60)
    tokens.sinks = sinks
    lane = run("zipcache(block=64)", tokens, 40, at_once=at_once).lane
    _, _, position, score = lane.tail.held()
    assert position[0].tolist() == list(range(60))
    before = torch.tensor(loop_saliency(Tokens(*tokens.part(0, 40), sinks=sinks), probe_positions(40)))
    for h in range(2):
        for j in range(60):
            seen = [before[h, j]] if j < 40 else []
            for i in range(max(j, 40), 60):
                rows = [paid(tokens, h, h * 2 + g, slice(i + 1), i) for g in (0, 1)]
                seen.append(rows[0][j] + rows[1][j])
            assert float(score[h, j]) == pytest.approx(float(sum(seen) / len(seen)), abs=1e-5)


def test_tokens_at_once_are_as_one_by_one() -> None:
    tokens = draw(120)
    one, all_at_once = (run("zipcache(block=32)", tokens, 50, at_once=x) for x in (False, True))
    torch.testing.assert_close(one.lane.pages.score, all_at_once.lane.pages.score)  # type: ignore[union-attr]
    torch.testing.assert_close(one.out, all_at_once.out)


def test_old_blocks_are_never_quantised_again() -> None:
    tokens = draw(200)
    early, late = (
        run("zipcache(block=32)", Tokens(*tokens.part(0, 100)), 80).lane,
        run("zipcache(block=32)", tokens, 80).lane,
    )
    a, b = early.pages.decoded(), late.pages.decoded(slice(0, early.pages.columns))  # type: ignore[union-attr]
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert late.pages.columns > early.pages.columns  # type: ignore[union-attr]


def test_a_padded_row_alone_is_as_in_a_batch() -> None:
    short, other = draw(90, seed=1), draw(107, seed=2)
    longer, valid = padded(short, 17)
    alone = run("zipcache(block=32)", short, 70)
    both = run("zipcache(block=32)", stacked(longer, other), 87, valid=torch.cat([valid, torch.ones_like(valid)]))
    torch.testing.assert_close(both.out[:1, 17:], alone.out, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("more", ["", "h2o(budget=40) + "])
def test_a_row_that_pauses_keeps_its_scores(more: str) -> None:
    """What comes for it meanwhile is padding, which takes the first of its open slots, and asks for nothing."""
    policy, (tokens, valid) = f"{more}zipcache(block=16)", padded(draw(100, seed=1), 17)
    alone = run(policy, Tokens(*tokens.part(17, 117)), 70)
    real = torch.cat([valid[0, :89], torch.zeros(3, dtype=torch.bool), valid[0, 89:]])
    late = Tokens(*(x.new_full((*x.shape[:2], 120, x.shape[3]), 7.0) for x in (tokens.q, tokens.k, tokens.v)))
    for x, y in zip((late.q, late.k, late.v), tokens.part(17, 117), strict=True):
        x[:, :, real] = y
    both = run(policy, stacked(late, draw(120, seed=2)), 87, valid=torch.stack([real, real | True]))
    torch.testing.assert_close(both.out[:1, real], alone.out, atol=1e-5, rtol=1e-4)


def test_many_bits_are_nearly_exact() -> None:
    tokens = draw(100, dim_v=24)
    found = run("zipcache(high=8, low=8, block=16)", tokens, 60)
    for i in range(60, 100):
        torch.testing.assert_close(found.out[:, i : i + 1], plain(tokens, i), atol=0.02, rtol=0)


@pytest.mark.parametrize("text", ["h2o(budget=24)", "kvzip(budget=24, chunk=16, carry=3)"])
def test_a_retention_that_scores_tokens_goes_on_with_its_own_scores(text: str) -> None:
    found = []
    for more in ("", " + zipcache(block=8, probes=0.5)"):
        model = patched(text + more)
        cache = EngineCache(model)
        with torch.no_grad():
            model(**one(), cache=cache)
        _, _, position, score = cache.engines[0].parts[0].lane.everything()
        found.append([sorted(zip(*row, strict=True)) for row in zip(position.tolist(), score.tolist(), strict=True)])
    for plain_row, row in zip(*found, strict=True):
        torch.testing.assert_close(torch.tensor(row)[-len(plain_row) :], torch.tensor(plain_row))


def test_of_answers_under_kvzip_the_newest_are_salient() -> None:
    """They are repeated by nobody, and a score that were not KVzip's would be taken for one at the next prompt's end."""
    model = patched("kvzip(budget=24, chunk=16, carry=3) + zipcache(block=16, probes=0.5)")
    cache = EngineCache(model)
    with torch.no_grad():
        model(**one(40), cache=cache)
        for token in range(36):
            model(torch.full((1, 1), 5 + token % 9), cache=cache)
    pages = cache.engines[0].parts[0].lane.pages
    assert pages is not None and bool((pages.position[0, -16:] >= 40).all())
    mask = (pages.resident(None) or {})["mask"][pages.table[0, -1].long()]
    assert unpack(mask, 1).tolist() == [0] * 6 + [1] * 10


@pytest.mark.parametrize(
    "options, message",
    [
        ({"high": 3}, "high=3 must be one of 1, 2, 4, 8"),
        ({"block": 20}, "block=20 must be a multiple of 8"),
        ({"salient": 1.5}, "salient=1.5 must be a fraction"),
        ({"salient": "high"}, "salient='high' must be a fraction"),
        ({"block": 0}, "block=0 must be a whole number of at least 8"),
        ({"block": 1 << 22}, "at least 8, and 2\\*\\*16 .65536. at most"),
        ({"probes": 0.0}, "probes=0 leaves nobody"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        ZipCache(**options)  # type: ignore[arg-type]


def test_channels_that_fill_no_bytes_are_refused() -> None:
    with pytest.raises(PolicyError, match="6 channels of 2 bits do not fill whole bytes"):
        ZipCache(block=16).encode(torch.zeros(1, 16, 6), torch.zeros(1, 16, 6), torch.zeros(1, 16))
    with pytest.raises(PolicyError, match="6 channels of 2 bits do not fill whole bytes .values."):
        ZipCache(block=16).encode(torch.zeros(1, 16, 8), torch.zeros(1, 16, 6), torch.zeros(1, 16))


@pytest.mark.parametrize(("tokens", "salient"), [(16, 10), (48, 29), (128, 77)])
def test_the_salient_share_is_of_a_page(tokens: int, salient: int) -> None:
    """Which may be several blocks."""
    k, v, score = pages(tokens=tokens)
    fields = ZipCache(block=16).encode(k, v, score)
    assert fields["k_high"].shape[1] == fields["v_high"].shape[1] == salient


@pytest.mark.parametrize(
    ("text", "together"),
    [("zipcache(block=24)", 24), ("zipcache(block=8)", 16), ("zipcache(block=32) + quest(budget=96, page=24)", 96)],
)
def test_several_blocks_are_one_where_a_page_is_larger(text: str, together: int) -> None:
    pages = run(text, draw(200), 200).lane.pages
    fields = None if pages is None else pages.resident(None)
    assert fields is not None and fields["v_scale"].shape[1:] == (together, 1) and fields["k_scale"].shape[1] == 2
    assert fields["k_high"].shape[1] == round(0.6 * together)


@pytest.mark.parametrize("high, low, dim", [(4, 2, 12), (4, 4, 6), (8, 1, 8), (8, 8, 5)])
def test_any_number_of_channels_that_fills_bytes_is_taken(high: int, low: int, dim: int) -> None:
    """Whether it is a multiple of 8 or not. Of salient tokens no key is off by more than half a step."""
    k, v = torch.randn(2, 3, 16, dim, generator=torch.Generator().manual_seed(0))
    method = ZipCache(high=high, low=low, salient=1.0, block=16)
    key, value = method.decode(method.encode(k, v, torch.rand(3, 16)))
    step = (k.amax(1, keepdim=True) - k.amin(1, keepdim=True)) / (2**high - 1)
    assert ((key - k).abs() <= 0.51 * step + 4e-3).all() and value.shape == v.shape
