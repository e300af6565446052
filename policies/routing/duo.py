"""DuoAttention (Xiao et al., ICLR 2025, arXiv:2410.10819): retrieval heads follow the stack, the others stream.

    threshold  =  the `sparsity` quantile of alpha over all layers and KV heads
    streaming  =  heads with alpha below it: they hold `sinks` + `recent` tokens

`alpha` ranks KV heads; it is found by optimisation (`kvengine duo train`) and read from a pattern folder in the
published format: `full_attention_heads.tsv` (layers x KV heads, tab separated). The window that `config.json` beside it
names is the one that alpha was trained with; streaming heads hold `sinks` and `recent`, whose defaults, 64 and 256, are
those of the paper's accuracy runs.

Differs from the official code: exactly round(sparsity * heads) heads stream, ties broken by order instead of by noise;
no weights are permuted; a prompt is read exactly by all heads, in however many chunks it comes (the code's streaming
heads see less of a long prompt, depending on the chunk size), or with `prompt="streaming"` through the same window
everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kvengine.errors import PolicyError
from kvengine.policies._budget import check_choice, check_count, check_text, is_number
from kvengine.policies.prefill.ashape import AShape
from kvengine.policies.retention import Retention
from kvengine.policies.retention.streaming import Streaming
from kvengine.policies.routing import Routing

BUNDLED = Path(__file__).parent / "duo_patterns"


@dataclass(frozen=True)
class Duo(Routing):
    """Retrieval heads follow the stack, the others hold sinks and recent tokens.

    Args:
        sparsity: the share of heads that stream, over all layers. A fraction.
        pattern: folder (or .tsv file) with the heads' alphas, or the name of one that comes with the package. Without
            one, the last heads of each layer stream, in layers with few heads more of them in some layers than in
            others: a placeholder to measure bytes and time with, not a finding about the model.
        sinks: first tokens that a streaming head holds.
        recent: newest tokens that a streaming head holds.
        prompt: "exact", or "streaming" for streaming heads that also read a prompt through their window: faster on long
            prompts, as all but the window is skipped, but no longer what the model computes.
    """

    sparsity: float = 0.5
    pattern: str = ""
    sinks: int = 64
    recent: int = 256
    prompt: Literal["exact", "streaming"] = "exact"

    def __post_init__(self) -> None:
        if not (is_number(self.sparsity) and 0 <= self.sparsity <= 1):
            raise PolicyError(f"Duo: sparsity={self.sparsity!r} must lie between 0 (no head streams) and 1 (all do)")
        check_count(self, sinks=self.sinks)
        check_count(self, least=1, recent=self.recent)
        check_choice(self, prompt=(self.prompt, ("exact", "streaming")))
        check_text(self, pattern=self.pattern)
        if self.pattern:
            _ = self.alpha

    @cached_property
    def alpha(self) -> tuple[tuple[float, ...], ...]:
        """The pattern's, as it was when the policy was made: what is written over it later is for later policies."""
        return read_pattern(self.pattern)

    @property
    def exact(self) -> bool:
        return self.prompt == "exact"

    @property
    def numbered(self) -> bool:
        return bool(self.pattern)  # which tells of all layers

    def lanes(self, layer: int, layers: int, heads: int) -> list[tuple[tuple[int, ...], Retention | None]]:
        streaming = self.streaming(layer, layers, heads)
        full = tuple(h for h in range(heads) if h not in streaming)
        groups: list[tuple[tuple[int, ...], Retention | None]] = [(full, None)]
        groups.append((tuple(sorted(streaming)), Streaming(self.sinks, self.recent)))
        return [group for group in groups if group[0]]

    def prefill(self, retention: Retention | None) -> AShape | None:
        return AShape(self.sinks, self.recent) if retention is not None and self.prompt == "streaming" else None

    def streaming(self, layer: int, layers: int, heads: int) -> set[int]:
        """The layer's KV heads that stream."""
        if not self.pattern:
            before, after = (round(self.sparsity * heads * n) for n in (layer, layer + 1))
            return set(range(heads - (after - before), heads))
        alpha = self.alpha
        if len(alpha) != layers or len(alpha[0]) != heads:
            raise PolicyError(
                f"Duo: the pattern {self.pattern!r} is for {len(alpha)} layers of {len(alpha[0])} KV heads, but the "
                f"model has {layers} of {heads}"
            )
        ranked = sorted((a, i, h) for i, row in enumerate(alpha) for h, a in enumerate(row))
        chosen = ranked[: round(self.sparsity * layers * heads)]
        return {h for _, i, h in chosen if i == layer}


def read_pattern(path: str) -> tuple[tuple[float, ...], ...]:
    """The alphas of a pattern folder or file, [layer][head], clipped to [0, 1].

    Raises:
        PolicyError: there is no such file, or it is not a table of numbers.
    """
    file = Path(path) if Path(path).exists() else BUNDLED / path
    file = file / "full_attention_heads.tsv" if file.is_dir() else file
    try:
        rows = [
            [float(x) for x in line.split("\t")] for line in file.read_text("utf-8-sig").splitlines() if line.strip()
        ]
    except OSError as error:
        said = "" if isinstance(error, FileNotFoundError) else f" ({error.strerror})"
        raise PolicyError(f"Duo: cannot read the pattern {path!r}{said}; 'kvengine duo train' makes one") from None
    except ValueError as error:
        raise PolicyError(f"Duo: {str(file)!r} is not a table of numbers: {str(error)[:80]}") from None
    if any(math.isnan(x) for row in rows for x in row):
        raise PolicyError(f"Duo: {str(file)!r} says of some heads that their alpha is no number (nan); train it again")
    if not rows or len({len(row) for row in rows}) != 1:
        raise PolicyError(f"Duo: {str(file)!r} must have one line per layer, with as many numbers in each")
    return tuple(tuple(min(1.0, max(0.0, x)) for x in row) for row in rows)


def write_pattern(
    folder: Path, alpha: Sequence[Sequence[float]], sinks: int, recent: int, trained: Mapping[str, Any] | None = None
) -> None:
    """Write a pattern folder: alphas [layer][head], and the window that heads were trained with, in tokens, and by what
    training (`trained`), if any. Each file as a whole: of a table that is cut off the last number would still be one."""
    from kvengine.offload.stores.filesystem import replace_file

    folder.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(f"{float(x):.18e}" for x in row) for row in alpha]
    replace_file(folder / "full_attention_heads.tsv", ("\n".join(lines) + "\n").encode())
    about = {"sink_size": sinks, "recent_size": recent, **({"trained": trained} if trained else {})}
    replace_file(folder / "config.json", (json.dumps(about) + "\n").encode())
