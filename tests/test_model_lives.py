"""Random stacks on random models live random lives: whatever happens to a cache between passes leaves no trace.

A life is a script of prompts, questions and decoded tokens, of up to three rows with padding anywhere. It is the same in
pieces, copied, saved and loaded, reordered, split into rows, drafted on; each row is the same alone; and where nothing is
lost it is the stock model's.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from families import configs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import MIXED, SMALL, WIDE, llama, methods
from support_lives import Detours, Part, Script, alone, conversation, part, plain
from torch import Tensor

import kvengine
from kvengine.errors import CacheError, PolicyError
from kvengine.policies import catalogue
from kvengine.stack import Stack

MODELS = (
    "grouped", "every head its own", "one head", "three layers", "softcap", "sinks", "windows", "latents", "shared keys",
)  # fmt: skip
WINDOWS = ("softcap", "windows")  # transformers' own layers count padding as distance
MORE = {
    "retention": [
        "streaming(sinks=2, recent=0.4)", "streaming(sinks=2, recent=14, positions='in-cache')",
        "streaming(sinks=2, recent=14, decode=False)", "h2o(budget=0.5)", "h2o(budget=24, decode=False)",
        "h2o(budget=20, average=True)", "snapkv(budget=0.4, window=6)", "snapkv(budget=40, window=30)", "tova(budget=0.3)",
        "pyramidkv(budget=0.4, window=6)", "adakv(budget=0.4, window=6)", "adakv(budget=24, base='expected_attention')",
        "keydiff(budget=20, recent=6)", "expected_attention(budget=0.4)", "d2o(budget=0.4)", "d2o(budget=24, form='official')",
        "d2o(budget=24, shares='measured')", "elastic(budget=0.4)", "elastic(budget=24, offset=3)",
        "chunkkv(budget=0.4, window=5, chunk=7)", "rkv(budget=0.4, buffer=5, window=5)",
        "rkv(budget=20, buffer=30, window=3, mix=0.5)",
    ],
    "routing": ["duo(sparsity=0.25, sinks=1, recent=8)", "duo(sinks=2, recent=10, prompt='streaming')"],
    "prefill": [
        "ashape(sinks=0, local=8)", "ashape(sinks=1, local=6, last=5)", "xattention(threshold=0.3, stride=2, block=16, last=0)",
        "vertical_slash(vertical=0.2, slash=0.1, sinks=0, recent=1, block=16)",
        "flexprefill(gamma=0.63, tau=0.0, min_budget=0.1, block=16)",
    ],
    "representation": [
        "kivi(bits=2, group=8, residual=8)", "quantspec(bits=4, group=8, residual=8)",
        "turboquant(bits=3, residual=8)", "zipcache(block=8, probes=0.5)",
        "lowrank(rank=0.5)",
    ],
    "selection": [
        "quest(budget=0.3, page=4)", "ann(budget=0.3)", "tidal(budget=24, start=0, reselect=1)",
        "landmarks(budget=0.4, chunk=4, local=4)", "retrieval(budget=0.4, chunk=4)",
    ],
    "placement": ["host(resident=40)", "disk(device=0, host=0)", "host(fields=('v',), resident=40)"],
}  # fmt: skip


def by_axis(texts: dict[str, str]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for name in methods():
        found[catalogue()[name]].append(texts[name])
    return found


NARROW = {axis: [*texts, *MORE[axis]] for axis, texts in by_axis(SMALL).items()}
LOSSLESS = by_axis(WIDE | {"lowrank": "dense"})


@cache
def model(name: str) -> Any:
    """In double precision where the model's own code can, so that two ways differ by rounding in the engine only."""
    if name == "softcap":
        return configs.build("gemma2")
    if name == "latents":
        found = configs.build("deepseek_v3")
    elif name == "windows":
        found = configs.build("gpt_oss")
    elif name == "shared keys":
        options = configs.BASE | configs.FAMILIES["gemma3n"].options | {"layer_types": ["full_attention"] * 4}
        torch.manual_seed(0)
        found = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**options)).eval()
    elif name == "sinks":
        options = configs.BASE | configs.FAMILIES["gpt_oss"].options | {"layer_types": ["full_attention"] * 4}
        torch.manual_seed(0)
        found = transformers.GptOssForCausalLM(transformers.GptOssConfig(**options)).eval()
        for layer in found.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    else:
        shapes = {
            "every head its own": {"num_key_value_heads": 4, "head_dim": 24},
            "one head": {"num_key_value_heads": 1, "head_dim": 64},
            "three layers": {"num_attention_heads": 8, "head_dim": 16, "num_hidden_layers": 3},
        }
        found = llama(**shapes.get(name, {}))
    if name in ("windows", "sinks", "latents"):
        found.set_experts_implementation("eager")  # the others know no double precision
    return found.double()


@st.composite
def stacks(draw: Any, choices: dict[str, list[str]]) -> str:
    axes = draw(st.lists(st.sampled_from(sorted(choices)), min_size=1, max_size=4, unique=True))
    return " + ".join(draw(st.sampled_from(choices[axis])) for axis in axes)


def padding(draw: Any, rows: int, length: int, anywhere: bool, later: bool = False) -> Tensor:
    """Which are tokens: at least two of each row, all of one. Mostly on the left, and then `anywhere`.

    In a `later` turn, a row may also have one, or none.
    """
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(1, rows):
        least = draw(st.sampled_from([2, 2, 1, 0])) if later else 2
        if not least:
            mask[row] = 0
            continue
        mask[row, : draw(st.integers(0, max(0, length - least)))] = 0
        if anywhere and draw(st.booleans()):
            a, n = draw(st.integers(0, length - 1)), draw(st.integers(1, 8))
            if int(mask[row].sum() - mask[row, a : a + n].sum()) >= least:
                mask[row, a : a + n] = 0
        if least == 1 and draw(st.booleans()):
            mask[row] = torch.arange(length) == draw(st.integers(0, length - 1))
    return mask


@st.composite
def scripts(draw: Any, ragged: bool) -> Script:
    rows = draw(st.integers(1, 3))
    length, seed = draw(st.sampled_from([3, 20, 40, 61, 80])), draw(st.integers(0, 1 << 20))
    first = part("prompt", rows, length, seed)
    script = [Part("prompt", first.ids, padding(draw, rows, length, ragged))]
    kinds = st.lists(st.sampled_from(["decode", "prompt", "follow"]), max_size=3)
    for i, kind in enumerate([*draw(kinds), "decode"]):
        length = draw(st.integers(2, 16 if kind == "decode" else 30))
        one = part(kind, rows, length, seed + i + 1)
        if ragged and kind != "decode":
            one = Part(kind, one.ids, padding(draw, rows, length, True, True))
        elif ragged and rows > 1 and draw(st.booleans()):  # a row has nothing more to say for now
            one.mask[draw(st.integers(0, rows - 1)), draw(st.integers(1, length)) :] = 0
        script.append(one)
    return script


def close(name: str, found: Tensor, want: Tensor) -> None:
    # In single precision, what is quantised may fall to the other side of a step.
    torch.testing.assert_close(found, want, rtol=0, atol=5e-2 if name == "softcap" else 1e-3)


def chooses(text: str) -> bool:
    """Whether it matters where chunks of a prompt end, if only to rows with padding to come."""
    prefill = Stack.parse(text).prefill
    return prefill.chooses or prefill.whole > 0


def live(name: str, text: str, lossless: bool, script: Script, seed: int) -> None:
    here = kvengine.unpatch(model(name))
    try:
        kvengine.patch(here, text)
        want = plain(here, script)
    except PolicyError:
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            lived = Detours(here, Random(seed), Path(folder), chunks=not chooses(text)).live(script)
        except CacheError as error:
            assert "in an earlier chunk" in str(error)
            return
        except PolicyError:
            return
    for one, a, b in zip(script, lived, want, strict=True):
        close(name, a[one.mask.bool()], b[one.mask.bool()])
    for row in range(len(script[0].ids)):
        together = [logits[row][one.mask[row].bool()] for one, logits in zip(script, want, strict=True)]
        close(name, torch.cat(together), torch.cat(plain(here, alone(script, row)), 1)[0])
    if lossless:
        stock = plain(kvengine.unpatch(here), script, transformers.DynamicCache(config=here.config))
        for one, a, b in zip(script, want, stock, strict=True):
            close(name, a[one.mask.bool()], b[one.mask.bool()])


@st.composite
def lives(draw: Any) -> tuple[str, str, bool, Script, int]:
    name, lossless = draw(st.sampled_from(MODELS)), draw(st.integers(0, 5)) == 0
    text = draw(stacks(LOSSLESS) if lossless else st.one_of(stacks(NARROW), stacks(NARROW), st.sampled_from(MIXED)))
    return name, text, lossless, draw(scripts(name not in WINDOWS)), draw(st.integers(0, 1 << 20))


FEW = settings(max_examples=4, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=400, suppress_health_check=list(HealthCheck))


@FEW
@given(lives())
def test_a_life_leaves_no_trace(life: tuple[str, str, bool, Script, int]) -> None:
    live(*life)


@pytest.mark.slow
@MANY
@given(lives())
def test_many_lives_leave_no_trace(life: tuple[str, str, bool, Script, int]) -> None:
    live(*life)


def talk(name: str, text: str, rows: int, ways: list[str], seed: int) -> None:
    """A conversation by `generate`, in these ways, is the greedy one by hand."""
    here = kvengine.unpatch(model(name))
    try:
        kvengine.patch(here, text)
        ways = ["plain" if way == "chunks" and chooses(text) else way for way in ways]
        with tempfile.TemporaryDirectory() as folder:
            conversation(here, rows, ways, Random(seed), Path(folder), ragged=name not in WINDOWS)
    except PolicyError:
        return
    except CacheError as error:
        assert "in an earlier chunk" in str(error)


WAYS = st.lists(st.sampled_from(["plain", "chunks", "look-up", "recording"]), min_size=2, max_size=3)


@FEW
@given(st.sampled_from(MODELS), stacks(NARROW), st.integers(1, 3), WAYS, st.integers(0, 1 << 20))
def test_generate_in_any_way_is_greedy_by_hand(name: str, text: str, rows: int, ways: list[str], seed: int) -> None:
    talk(name, text, rows, ways, seed)


@pytest.mark.slow
@MANY
@given(st.sampled_from(MODELS), stacks(NARROW), st.integers(1, 3), WAYS, st.integers(0, 1 << 20))
def test_generate_in_many_ways_is_greedy_by_hand(name: str, text: str, rows: int, ways: list[str], seed: int) -> None:
    talk(name, text, rows, ways, seed)
