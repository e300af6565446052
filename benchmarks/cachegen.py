"""The cache codec measured: size and speed, each against what else there is, in one run.

    python -P benchmarks/cachegen.py [--model FOLDER] [--tokens 2048] [--out FOLDER]

Speed is CPU time of one thread, best of several, per second of fp16 KV (2 bytes per number): "per core" also on a busy
machine. Size counts every byte of the stream. Data: the bundled model's own KV of English text, and random numbers of
the same shape as a control; "8 heads" repeats the model's heads to the size that larger models have, where calls of
small sections cost less. Quality is benchmarks/cachegen_quality.py's. About two minutes.

cachegen.json has the levels, and zstd on the raw numbers; cachegen_coders.json the entropy coders alone, on the same
symbols: ours, zstd, constriction and torchac. One that is not installed is named with the reason.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import DynamicCache

from kvengine.evals.loading import load, model_digest
from kvengine.evals.prompt import Prompter
from kvengine.evals.tasks._words import essay, prose
from kvengine.hf.names import CACHE
from kvengine.offload import cachegen
from kvengine.offload.cachegen import codec, coder, lossy, native, tables
from kvengine.offload.cachegen.levels import NAMES

R = TypeVar("R")
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def timed(work: Callable[[], R], repeat: int = 7) -> tuple[float, R]:
    """Least CPU seconds of several runs, and the result."""
    spent = []
    for _ in range(repeat):
        start = time.process_time()
        result = work()
        spent.append(time.process_time() - start)
    return min(spent), result


def model_kv(model: Any, tokenizer: Any, tokens: int) -> Pairs:
    """Keys and values of each layer for the start of a novel, in bf16."""
    ids = Prompter(tokenizer).first(essay(prose(), tokens))[:tokens]
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]), **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    return [(layer.keys[0].bfloat16(), layer.values[0].bfloat16()) for layer in cache.layers]


def random_kv(like: Pairs) -> Pairs:
    make = torch.Generator().manual_seed(0)
    return [(torch.randn(k.shape, generator=make).bfloat16(), torch.randn(v.shape, generator=make).bfloat16())
            for k, v in like]  # fmt: skip


# ---- size and speed ------------------------------------------------------------------------------------------------


def eight_bit(x: torch.Tensor) -> torch.Tensor:
    """CacheGen's baseline: 8 bits, scaled by the largest channel of each token; 16 bits of scale per token."""
    wide = x.float()
    top = wide.abs().amax((0, 2), keepdim=True).clamp_min(1e-8)
    return (wide * 127 / top).round() * top / 127


def error(a: Pairs, b: Pairs) -> float:
    """Root mean square error over root mean square, all layers together."""
    flat = [torch.cat([t.float().flatten() for pair in pairs for t in pair]) for pairs in (a, b)]
    return float((flat[0] - flat[1]).square().mean().sqrt() / flat[0].square().mean().sqrt())


def levels(kv: Pairs) -> Iterator[dict[str, Any]]:
    numbers = sum(k.numel() + v.numel() for k, v in kv)
    back = [(eight_bit(k), eight_bit(v)) for k, v in kv]
    scales = sum(2 * k.shape[1] for k, _ in kv)
    eight = 8 + 16 * scales / numbers
    yield {"codec": "bf16", "bits": 16.0, "error": 0.0, "times_smaller_than_8_bit": eight / 16}
    yield {"codec": "8 bit", "bits": eight, "error": error(kv, back), "times_smaller_than_8_bit": 1.0}
    for name in NAMES:
        encode, data = timed(lambda name=name: cachegen.encode(cachegen.KV(kv), name))  # type: ignore[misc]
        decode, found = timed(lambda data=data: cachegen.decode(data))  # type: ignore[misc]
        bits = 8 * len(data) / numbers
        yield {
            "codec": name, "bits": bits, "error": error(kv, list(found.layers)),
            "times_smaller_than_8_bit": eight / bits,
            "encode_mb_s": 2e-6 * numbers / encode, "decode_mb_s": 2e-6 * numbers / decode,
        }  # fmt: skip


# ---- entropy coders on the same symbols ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Symbols:
    """Codes [channel, token] of one chunk of all layers, the table of each channel, and how many codes there are."""

    codes: np.ndarray[Any, Any]
    table: np.ndarray[Any, Any]

    @property
    def count(self) -> int:
        return int(self.codes.size)


def symbols(kv: Pairs, chunk: int = 256) -> Symbols:
    """What the coder is given at the level "medium", without deltas and escapes."""
    found = []
    for pair in kv:
        for part, x in enumerate(pair):
            piece = x[:, :chunk]
            width = lossy.widths(piece, codec.LEVELS["medium"].step(1, 3, part), native)
            kind, _, codes, _ = native.to_codes(piece, width, 10, 1, tables.shared())
            found.append((codes, kind & 63))
    codes, table = (np.concatenate(parts) for parts in zip(*found, strict=True))
    keep = (codes != tables.ESCAPE).all(1) & (table != tables.CONSTANT)
    return Symbols(np.ascontiguousarray(codes[keep]), np.ascontiguousarray(table[keep]))


Coder = tuple[Callable[[], Any], Callable[[Any], np.ndarray[Any, Any]], Callable[[Any], float]]


def ours(s: Symbols) -> Coder:
    shared, slots = tables.shared(), coder.shared_slots()
    return (
        lambda: native.encode(s.codes, s.table, shared.freq),
        lambda out: native.decode(s.table, s.codes.shape[1], slots, *out),
        lambda out: 16 * len(out[1]) + 32 * 16 + 8 * len(s.table),
    )


def zstd(s: Symbols, level: int = 1) -> Coder:
    import zstandard

    press, back = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    return (
        lambda: press.compress(s.codes.tobytes()),
        lambda out: np.frombuffer(back.decompress(out), np.uint8).reshape(s.codes.shape),
        lambda out: 8 * len(out),
    )


def constriction_coder(s: Symbols, family: str) -> Coder:
    """Per-channel categorical tables (their bytes counted as 16 bits per entry), or a Gaussian per channel."""
    import constriction

    make = constriction.stream.model
    signed = np.where(s.codes & 1, -(s.codes.astype(np.int32) + 1) // 2, s.codes // 2).astype(np.int32)
    if family == "categorical":
        width = int(s.codes.max()) + 1
        counts = np.stack([np.bincount(row, minlength=width) + 0.01 for row in s.codes]).astype(np.float32)
        chosen = [make.Categorical(c / c.sum(), perfect=False) for c in counts]
        data, tables_bits = s.codes.astype(np.int32), 16 * width * len(counts)
    else:
        bound = int(np.abs(signed).max())
        fitted = zip(signed.mean(1), np.maximum(signed.std(1), 0.05), strict=True)
        chosen = [make.QuantizedGaussian(-bound, bound, float(m), float(d)) for m, d in fitted]
        data, tables_bits = signed, 32 * len(signed)

    def encode() -> Any:
        stream = constriction.stream.queue.RangeEncoder()
        for row, model in zip(data, chosen, strict=True):
            stream.encode(row, model)
        return stream.get_compressed()

    def decode(out: Any) -> np.ndarray[Any, Any]:
        stream = constriction.stream.queue.RangeDecoder(out)
        return np.stack([stream.decode(model, data.shape[1]) for model in chosen])

    return encode, lambda out: decode(out) if family == "categorical" else _codes(decode(out)), \
        lambda out: 32 * len(out) + tables_bits  # fmt: skip


def _codes(signed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(signed >= 0, 2 * signed, -2 * signed - 1)


def torchac_coder(s: Symbols) -> Coder:
    """Per-channel counts, as CacheGen; torchac wants the table of every symbol."""
    import torchac

    width = int(s.codes.max()) + 1
    counts = np.stack([np.bincount(row, minlength=width) + 0.01 for row in s.codes])
    cdf = np.concatenate([np.zeros((len(counts), 1)), (counts / counts.sum(1, keepdims=True)).cumsum(1)], 1)
    spread = torch.from_numpy(cdf.clip(0, 1)).float()[:, None].expand(-1, s.codes.shape[1], -1).contiguous()
    data = torch.from_numpy(s.codes.astype(np.int16))
    return (
        lambda: torchac.encode_float_cdf(spread, data, needs_normalization=True),
        lambda out: torchac.decode_float_cdf(spread, out, needs_normalization=True).numpy(),
        lambda out: 8 * len(out) + 16 * (width + 1) * len(counts),
    )


CODERS: dict[str, Callable[[Symbols], Coder]] = {
    "kvengine rANS, shared tables": ours,
    "zstd -1": zstd,
    "constriction range, table per channel": lambda s: constriction_coder(s, "categorical"),
    "constriction range, Gaussian per channel": lambda s: constriction_coder(s, "gaussian"),
    "torchac, table per channel": torchac_coder,
}


def coders(kv: Pairs) -> Iterator[dict[str, Any]]:
    s = symbols(kv)
    for name, make in CODERS.items():
        try:
            encode, decode, bits = make(s)
            slow = 1 if "torchac" in name else 3
            encoding, out = timed(encode, slow)
            decoding, back = timed(lambda decode=decode, out=out: decode(out), slow)  # type: ignore[misc]
        except (ImportError, OSError, RuntimeError) as missing:
            yield {"coder": name, "missing": str(missing)[:200]}
            continue
        if not np.array_equal(back, s.codes):
            raise AssertionError(f"{name} did not return the symbols")
        per = 2e-6 * s.count
        yield {"coder": name, "bits": bits(out) / s.count, "encode_mb_s": per / encoding, "decode_mb_s": per / decoding}


def lossless_peers(kv: Pairs) -> Iterator[dict[str, Any]]:
    import zstandard

    raw = b"".join(t.contiguous().view(torch.int16).numpy().tobytes() for pair in kv for t in pair)
    for level in (1, 9):
        press = zstandard.ZstdCompressor(level=level)
        encoding, out = timed(lambda press=press: press.compress(raw), 3)  # type: ignore[misc]
        decoding, _ = timed(lambda out=out: zstandard.ZstdDecompressor().decompress(out), 3)  # type: ignore[misc]
        yield {"codec": f"zstd -{level} of the raw bf16", "bits": 16 * len(out) / len(raw),
               "encode_mb_s": 1e-6 * len(raw) / encoding, "decode_mb_s": 1e-6 * len(raw) / decoding}  # fmt: skip


# ---- the run -------------------------------------------------------------------------------------------------------


LEVELS = {
    "data": "data",
    "codec": "codec",
    "bits per number": "bits:.2f",
    "times smaller than 8 bit": "times_smaller_than_8_bit:.2f",
    "error": "error:.3f",
    "encode (MB/s)": "encode_mb_s:.0f",
    "decode (MB/s)": "decode_mb_s:.0f",
}
CODED = {
    "data": "data",
    "entropy coder": "coder",
    "bits per symbol, tables included": "bits:.2f",
    "encode (MB/s)": "encode_mb_s:.0f",
    "decode (MB/s)": "decode_mb_s:.0f",
    "missing": "missing",
}


def labelled(name: str, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        print({"data": name, **row}, file=sys.stderr, flush=True)
        yield {"data": name, **row}


def run(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from where import processor

    torch.set_num_threads(1)
    model, tokenizer = load(options.model, device="cpu", dtype="float32")
    kv = model_kv(model, tokenizer, options.tokens)
    heads, tokens, dim = kv[0][0].shape
    spread = -(-8 // heads)
    large = [(torch.cat([k] * spread)[:, :1024], torch.cat([v] * spread)[:, :1024]) for k, v in kv]
    machine = f"one CPU core{processor()}, torch {torch.__version__}, Python {platform.python_version()}"
    shape = f"{len(kv)} layers, {heads} KV heads, {tokens} tokens, {dim} channels; MB of fp16 KV per CPU second"
    shared: dict[str, Any] = {
        "command": "python -P benchmarks/cachegen.py", "machine": f"{machine}; {shape}", "model": model_digest(model),
    }  # fmt: skip
    sized = [row for name, data in (("model", kv), ("random", random_kv(kv)))
             for part in (levels, lossless_peers) for row in labelled(name, part(data))]  # fmt: skip
    sized += labelled("model, 8 heads", levels(large))
    coded = [row for name, data in (("model", kv), ("random", random_kv(kv))) for row in labelled(name, coders(data))]
    return {
        "cachegen": shared | {"columns": LEVELS, "rows": sized},
        "cachegen_coders": shared | {"columns": CODED, "rows": coded},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for both files")
    options = parser.parse_args()
    result = json.loads(json.dumps(run(options)), parse_float=lambda text: float(f"{float(text):.5g}"))
    for name, part in result.items():
        (options.out / f"{name}.json").write_text(json.dumps(part, indent=1) + "\n")


if __name__ == "__main__":
    main()
