"""Lives of a cache on a pretended CUDA device: what happens between passes leaves no trace there either. Oracle: the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from support import MIXED, SMALL, every, greedy, llama, prompts
from support_device import Device, pretended, there
from support_lives import Detours, Script, part, plain
from torch import Tensor

import kvengine

STACKS = [text for text in (*SMALL.values(), *MIXED) if not text.startswith("ann")]
PAUSES = [
    SMALL["streaming"],
    "elastic(budget=24, offset=-8) + quest(budget=16, page=4)",
    SMALL["retrieval"],
    "d2o(budget=12)",
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return pretended(monkeypatch)


def conversation(pauses: bool) -> Script:
    """Two rows; the second begins later, and has fewer tokens in its second turn. `pauses`: it waits while the first decodes."""
    script = [part(kind, 2, n, n) for kind, n in (("prompt", 40), ("decode", 6), ("prompt", 3), ("decode", 4))]
    script[0].mask[1, :7] = 0
    script[2].mask[1, :1] = 0
    if pauses:
        script[1].mask[1, 1:4] = 0
    return script


def lifted(script: Script) -> Script:
    return [replace(one, ids=there(one.ids), mask=there(one.mask)) for one in script]


def close(script: Script, found: list[Tensor], want: list[Tensor]) -> None:
    for one, a, b in zip(script, found, want, strict=True):
        torch.testing.assert_close(a.cpu()[one.mask.bool()], b[one.mask.bool()], rtol=0, atol=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", every(6, STACKS))
def test_detours_leave_no_trace(text: str, device: Device, tmp_path: Path) -> None:
    """Copies, saved sessions, drafts taken back, rows in another order."""
    model = llama(num_hidden_layers=1 + ("tidal" in text))  # there, one layer follows another
    script = conversation(False)
    with kvengine.patched(model, text):
        want = plain(model, script)
    with device, kvengine.patched(there(model), text):
        close(script, Detours(model, Random(len(text)), tmp_path, chunks=False).live(lifted(script)), want)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", PAUSES)
def test_a_row_may_pause_while_others_decode(text: str, device: Device) -> None:
    """In a loop of one's own a mask may have zeros at a decoded token: to that row it never was, and its next turn is taken."""
    model, script = llama(num_hidden_layers=1), conversation(True)
    with kvengine.patched(model, text):
        want = plain(model, script)
    with device, kvengine.patched(there(model), text):
        close(script, plain(model, lifted(script)), want)


def test_nobody_looks_at_the_mask_of_a_token_that_generate_decodes(device: Device) -> None:
    """It appends ones; who goes on by hand may not."""
    model, looks = llama(num_hidden_layers=1), []
    with device, kvengine.patched(there(model), SMALL["h2o"]):
        given = {name: there(x) for name, x in prompts(2).items()}
        for count in (1, 4):
            device.moved.clear()
            cache = kvengine.EngineCache(model)
            greedy(model, given, count, cache=cache)
            looks.append(sum(n for what, n in device.moved.items() if " at mask.py" in what))
            assert not cache.session.generating
    assert looks[0] == looks[1] > 0
