"""The codec's laws: what comes back, how large it is, and that both implementations agree to the bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from support_offload import cache, stack

from kvengine.errors import CacheError, IncompatibleCache
from kvengine.offload import cachegen
from kvengine.offload.cachegen import codec, coder, lossless, lossy, native, reference, tables
from kvengine.offload.cachegen.coder import Backend
from kvengine.offload.cachegen.levels import LEVELS, NAMES, Level
from kvengine.offload.container import read_bytes

GOLDEN = Path(__file__).parent / "golden"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
shapes = st.tuples(
    st.integers(0, 3), st.integers(1, 3), st.sampled_from([0, 1, 2, 15, 16, 17, 63, 100]), st.integers(1, 9)
)


@pytest.mark.parametrize("using", ["auto", "reference"])
@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(DTYPES), st.integers(0, 2**31), st.sampled_from([1, 7, 64, 256]))
@example((1, 1, 1, 1), torch.float16, 0, 1)
def test_lossless_returns_every_bit(
    using: Backend, shape: tuple[int, ...], dtype: torch.dtype, seed: int, chunk: int
) -> None:
    layers, heads, tokens, dim = shape
    whole = torch.int16 if dtype.itemsize == 2 else torch.int32
    make = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (layers, 2, heads, tokens, dim), generator=make).to(whole)  # nan, inf, -0 too
    coded = cachegen.encode(cachegen.KV.stacked(bits.view(dtype)), "lossless", chunk=chunk, using=using)
    back = cachegen.decode(coded, using=using)
    assert len(back.layers) == layers
    for (k, v), (k2, v2) in zip(bits, back.layers, strict=True):
        assert torch.equal(k, k2.view(whole)) and torch.equal(v, v2.view(whole))


@settings(max_examples=60, deadline=None)
@given(
    shapes, st.sampled_from(DTYPES), st.sampled_from(list(LEVELS)), st.integers(0, 2**31), st.sampled_from([1, 64, 256])
)
def test_lossy_stays_within_a_step(
    shape: tuple[int, ...], dtype: torch.dtype, level: str, seed: int, chunk: int
) -> None:
    layers, heads, tokens, dim = shape
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(layers, 2, heads, tokens, dim, generator=make) * 10 ** float(torch.randn(1, generator=make))
    x = (x + torch.randn(layers, 2, heads, 1, dim, generator=make) * 3).to(dtype)
    back = cachegen.decode(cachegen.encode(cachegen.KV.stacked(x), level, chunk=chunk))
    for i, pair in enumerate(back.layers):
        for part, y in enumerate(pair):
            assert y.shape == x[i, part].shape and y.dtype == dtype
            for start in range(0, tokens, chunk):
                a, b = x[i, part][:, start : start + chunk].float(), y[:, start : start + chunk].float()
                width = torch.from_numpy(lossy.widths(a, LEVELS[level].step(i, layers, part), reference))
                rounding = torch.finfo(dtype).eps * a.abs().amax((1, 2)) * 2
                assert ((a - b).abs().amax((1, 2)) <= width + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extreme", [0.0, 1e-45, 6e4, 3e38, -3e38])
def test_numbers_at_the_edge_stay_finite(dtype: torch.dtype, extreme: float) -> None:
    x = torch.zeros(1, 2, 2, 20, 4)
    x[..., 3, 1] = extreme
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    back = stack(cachegen.decode(cachegen.encode(cachegen.KV.stacked(x), "low")))
    assert back.isfinite().all()
    assert (back.double() - x.double()).abs().max() <= x.double().abs().max() * 0.05 + 1e-37


@pytest.mark.parametrize("using", ["native", "reference"])
def test_steps_wider_than_any_number_are_read(using: Backend) -> None:
    """Three spreads of the largest numbers that there are: what was written with such steps could not be read."""
    x = torch.full((3, 2, 2, 20, 4), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    x[..., ::2, :] *= -1
    back = stack(cachegen.decode(cachegen.encode(cachegen.KV.stacked(x), "extreme", using=using), using=using))
    assert back.isfinite().all()


@pytest.mark.parametrize("level", NAMES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40, 300])
def test_numpy_and_native_agree_to_the_bit(level: str, tokens: int) -> None:
    kv = cache(tokens=tokens, dtype=torch.bfloat16)
    fast, slow = (cachegen.encode(kv, level, using=which) for which in ("native", "reference"))
    assert fast == slow
    a, b = (cachegen.decode(fast, using=which) for which in ("native", "reference"))
    assert torch.equal(stack(a), stack(b))


@pytest.mark.parametrize("using", ["native", "reference"])
def test_means_at_the_end_of_a_byte_and_few_tokens_that_are_alike(using: Backend) -> None:
    noise = torch.tensor([1.0, -1.0]).repeat(4)[None, :, None]  # a spread of one: steps are 1
    x = noise + torch.tensor([-129.0, -128, -127, 0, 126, 127, 128])
    for channels in (x, x[..., 1:6], x[..., 2:7]):
        back = torch.empty_like(channels)
        lossy.decode(lossy.encode(channels, 1.0, reference), back, coder.backend(using))
        assert (back - channels).abs().max() <= 0.5
    alike = torch.zeros(2, 5, 64, dtype=torch.bfloat16)
    section, back = lossless.encode(alike, coder.backend(using)), torch.ones_like(alike)
    lossless.decode(section, back, coder.backend(using))
    assert torch.equal(back, alike) and len(section) < alike.nbytes / 2


def test_a_plane_of_more_words_than_32_bits_count_is_kept_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a session's tensor of nine billion numbers may have."""
    x, back = torch.randn(2, 40, 16).bfloat16(), torch.empty(2, 40, 16, dtype=torch.bfloat16)
    coded, many = lossless.encode(x, reference), np.broadcast_to(np.uint16(0), 1 << 32)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "encode", lambda *given: (np.zeros(16, np.uint32), many))
        section = lossless.encode(x, reference)
    lossless.decode(section, back, reference)
    assert torch.equal(back, x) and len(coded) < len(section) == x.nbytes + 2


def test_later_layers_have_coarser_steps_than_earlier_ones() -> None:
    level = Level(keys=2.0, values=4.0)
    assert [level.step(i, 6, 0) for i in range(6)] == [1, 1, 2, 2, 3, 3]
    assert [level.step(i, 2, 1) for i in range(2)] == [2, 4] and level.step(0, 1, 1) == 2
    own, named = (read_bytes(cachegen.encode(cache(tokens=3), x, chunk=1)) for x in (LEVELS["high"], "high"))
    assert own.header["level"] == "custom" and [e[2] for e in own.entries] == [e[2] for e in named.entries]
    assert torch.equal(stack(cachegen.decode(own)), stack(cachegen.decode(named)))


def test_threads_change_nothing() -> None:
    kv = cache(layers=3, tokens=200)
    data = cachegen.encode(kv, "medium", chunk=64)
    assert data == cachegen.encode(kv, "medium", chunk=64, threads=4)
    assert torch.equal(stack(cachegen.decode(data)), stack(cachegen.decode(data, threads=4)))


def test_better_levels_are_larger_and_closer() -> None:
    kv = cache(tokens=256, dim=32)
    streams = [cachegen.encode(kv, level) for level in NAMES]
    errors = [float((stack(cachegen.decode(s)).float() - stack(kv).float()).square().mean()) for s in streams]
    assert [len(s) for s in streams] == sorted((len(s) for s in streams), reverse=True)
    assert errors == sorted(errors) and errors[0] == 0


def test_a_section_is_read_alone() -> None:
    kv = cache(layers=3, tokens=100)
    data = cachegen.encode(kv, "high", chunk=32)
    opened, touched = read_bytes(data), []
    spy = type(opened)(
        opened.header, opened.entries, opened.size, lambda at, n: (touched.append((at, n)), data[at : at + n])[1]
    )
    found = codec.layout(spy)
    piece = torch.empty(2, 32, 8, dtype=found.dtype)
    codec.decode_section(spy, found, 2, 1, 0, piece)
    assert touched == [opened.entries[(2 * 3 + 1) * 2][:2]]
    assert torch.equal(piece, cachegen.decode(data).layers[1][0][:, 64:96])


def test_layers_may_differ_in_shape_and_tokens_in_position() -> None:
    layers = [(torch.randn(h, 33, dk), torch.randn(h, 33, dv)) for h, dk, dv in [(1, 4, 4), (2, 8, 3), (2, 8, 3)]]
    at = torch.cat([torch.arange(4), torch.arange(100, 129)])
    who = cachegen.Identity(model="m", tokenizer="t", rope={"theta": 1e4})
    back = cachegen.decode(cachegen.encode(cachegen.KV(layers, at, who, {"note": "x"}), "lossless"), who)
    assert torch.equal(back.positions, at) and back.identity == who and back.extra == {"note": "x"}
    assert all(torch.equal(a, b) for x, y in zip(layers, back.layers, strict=True) for a, b in zip(x, y, strict=True))


def test_an_identity_is_its_own_whatever_json_makes_of_it() -> None:
    who = cachegen.Identity(model="m", rope={"short_factor": (1.0, 2.0)})
    assert cachegen.decode(cachegen.encode(cache(identity=who), "low"), who).tokens == 40


def test_overhead_beside_the_codes_is_small() -> None:
    x = torch.randn(8, 256, 128, generator=torch.Generator().manual_seed(0))
    section = lossy.encode(x, 0.6, native)
    *_, words = lossy.HEAD.unpack_from(section)
    assert (len(section) - 2 * words) * 8 / x.numel() <= 0.1


@pytest.mark.parametrize(("drift", "modes"), [(0.0, {0}), (0.999, {1, 2})])
def test_deltas_are_taken_where_they_pay(drift: float, modes: set[int]) -> None:
    """The card: deltas lose on independent tokens and win on slowly drifting ones."""
    noise = torch.randn(1, 512, 16, generator=torch.Generator().manual_seed(0))
    x = noise.clone()
    for t in range(1, 512):
        x[:, t] = drift * x[:, t - 1] + (1 - drift**2) ** 0.5 * noise[:, t]
    section = lossy.encode(x, 0.25, native)
    kinds = np.frombuffer(section, np.uint8, 16, lossy.HEAD.size + 4)
    assert set((kinds >> 6).tolist()) <= modes
    assert len(section) <= min(len(lossy.encode(x, 0.25, native, modes=1 | 1 << m)) for m in range(3))


def test_not_finite_is_refused_by_name() -> None:
    kv = cache()
    kv.layers[0][0][0, 0, 0] = float("nan")
    with pytest.raises(CacheError, match="lossless"):
        cachegen.encode(kv, "low")
    with pytest.raises(IncompatibleCache, match="Did you mean 'medium'"):
        cachegen.encode(kv, "mediun")
    with pytest.raises(ValueError, match="do not belong together"):
        cachegen.encode(cachegen.KV([(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3))]))


def test_rans_matches_constriction_and_a_scalar_decoder() -> None:
    """Size against a maintained entropy coder with the same probabilities; content against one symbol at a time."""
    constriction = pytest.importorskip("constriction")
    make, shared = np.random.default_rng(0), tables.shared()
    q = np.rint(make.normal(size=(32, 256)) * np.exp(make.uniform(-1, 3, (32, 1)))).astype(np.int16)
    kind, codes, _ = native.choose(q, 10, 1, shared)
    assert (kind < tables.CLASSES).all()
    state, words = native.encode(codes, kind, shared.freq)
    coder = constriction.stream.stack.AnsCoder()
    for row, table in zip(codes[::-1], kind[::-1], strict=True):
        odds = shared.freq[table] / tables.TOTAL
        model = constriction.stream.model.Categorical(np.maximum(odds, 1e-9), perfect=False)
        coder.encode_reverse(row.astype(np.int32), model)
    assert 16 * len(words) + 32 * 16 <= coder.num_bits() * 1.01 + 32 * 16
    assert _scalar(kind, 256, state.tolist(), words.tolist(), shared.freq.astype(int)) == codes.tolist()


def _scalar(table: np.ndarray, tokens: int, state: list[int], words: list[int], freq: np.ndarray) -> list[list[int]]:
    words, out = words[::-1], []
    for counts in (freq[t] for t in table):
        cum = [0, *np.cumsum(counts).tolist()]
        row = []
        for t in range(tokens):
            x = state[t % 16]
            code = next(i for i in range(256) if cum[i] <= x % 4096 < cum[i + 1])
            x = int(counts[code]) * (x // 4096) + x % 4096 - cum[code]
            state[t % 16] = x * 65536 + words.pop() if x < 65536 else x
            row.append(code)
        out.append(row)
    assert not words and set(state) == {65536}
    return out


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([0, 1, 2]), st.integers(0, 2**31))
def test_differences_undo(tokens: int, group: int, mode: int, seed: int) -> None:
    q = np.random.default_rng(seed).integers(-16000, 16000, (3, tokens)).astype(np.int16)
    assert (reference.undo(reference.difference(q, group, mode), group, mode) == q).all()


def test_tables_are_complete_and_the_same_everywhere() -> None:
    shared = tables.shared()
    assert (shared.freq.sum(1, dtype=np.int64) == tables.TOTAL).all()
    assert (shared.freq[:, tables.ESCAPE] > 0).all()
    assert tables.fingerprint() == "0db9dfd6e673cab7"


@pytest.mark.parametrize("using", ["native", "reference"])
def test_streams_of_version_1_are_read_for_ever(using: Literal["native", "reference"]) -> None:
    """Files written by the first version of the format. If this fails, give the container a new version instead."""
    x = torch.arange(2 * 2 * 1 * 20 * 3).reshape(2, 2, 1, 20, 3).remainder(17).half() - 8
    exact, lossy_ = (
        cachegen.decode((GOLDEN / f"{name}.kv").read_bytes(), cachegen.Identity(model="m"), using=using)
        for name in ("lossless", "low")
    )
    assert torch.equal(stack(exact), x)
    found = hashlib.sha256(stack(lossy_).numpy().tobytes()).hexdigest()
    assert found[:16] == "a32f0e2d04a6ef45"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"chunk": 0}, "a chunk holds 1 to 16384 tokens, 0 were asked for"),
        ({"chunk": 16385}, "16385 were asked for"),
        ({"dtypes": (torch.float32, torch.float16)}, "must share one dtype"),
        ({"dtypes": (torch.float64, torch.float64)}, "must share one dtype"),
        ({"positions": torch.arange(3)}, r"4 tokens need as many positions, got shape \(3,\)"),
        ({"positions": torch.arange(4.0)}, "positions are whole numbers, not torch.float32"),
        ({"positions": torch.ones(4, dtype=torch.bool)}, "positions are whole numbers, not torch.bool"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(wrong: dict[str, Any], why: str) -> None:
    first, second = (torch.ones(1, 4, 2, dtype=kind) for kind in wrong.pop("dtypes", (torch.float32, torch.float32)))
    kv = cachegen.KV([(first, first), (second, second)], wrong.pop("positions", None))
    with pytest.raises(ValueError, match=why):
        cachegen.encode(kv, "lossless", **wrong)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"keys": 0.0}, "keys=0.0 must be a positive number"),
        ({"values": -0.5}, "values=-0.5 must be a positive number"),
        ({"keys": float("nan")}, "keys=nan must be a positive number"),
        ({"values": float("inf")}, "values=inf must be a positive number"),
        ({"keys": "0.5"}, "keys='0.5' must be a positive number"),
        ({"keys": True}, "keys=True must be a positive number"),
        ({"groups": (1.0, 1.0)}, r"groups=\(1.0, 1.0\) must be three positive numbers"),
        ({"groups": (1.0, 0.0, 1.0)}, "must be three positive numbers"),
        ({"groups": 1.0}, "groups=1.0 must be three positive numbers"),
    ],
)
def test_a_level_without_steps_is_refused(wrong: dict[str, Any], why: str) -> None:
    """Steps of 0 or less were taken for the finest there are, and the error for too few groups was an index's."""
    with pytest.raises(ValueError, match=why):
        Level(**{"keys": 0.5, "values": 0.6, **wrong})
