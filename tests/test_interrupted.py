"""Control-C comes between any two lines: the next pass is right, or says that the last one broke off."""

from __future__ import annotations

import contextlib
import copy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support import SMALL, llama, one

import kvengine
from kvengine.errors import CacheError

OURS = str(Path(kvengine.__file__).parent)


class Interrupt:
    """Within `with`, KeyboardInterrupt before the `at`-th line of the engine that runs; `lines` counts them."""

    def __init__(self, at: int = -1, file: str = "") -> None:
        self.at, self.file, self.lines = at, file, 0

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self.called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def called(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self.line if name.startswith(OURS) and name.endswith(self.file) else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self.line


def check(policy: str, tokens: int, file: str = "", step: int = 1) -> None:
    ids, more = one()["input_ids"], one(9, seed=2)["input_ids"]
    some, last = more[:, :tokens], more[:, -1:]
    with torch.no_grad(), kvengine.patched(llama(), policy) as model:

        def rest(cache: Any, taken: int) -> torch.Tensor:
            """The last token's logits, whatever of `some` has been read."""
            if taken < tokens:
                model(some[:, taken:], cache=cache)
            found: torch.Tensor = model(last, cache=cache).logits
            return found

        cache = kvengine.EngineCache(model)
        model(ids, cache=cache)
        cache.follow_up()
        start = cache.seen
        want = rest(copy.deepcopy(cache), 0)
        with Interrupt(file=file) as whole:
            model(some, cache=copy.deepcopy(cache))
        assert whole.lines > 5
        for at in range(1, whole.lines + 1, step):
            tried = copy.deepcopy(cache)
            with (
                contextlib.suppress(KeyboardInterrupt),
                Interrupt(at, file),
            ):  # a pass may have fewer lines than the first
                model(some, cache=tried)
            try:
                got = rest(tried, tried.seen - start)
            except CacheError as error:
                assert "broke off" in str(error)
            else:
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["full", "streaming", "quest"])
def test_a_decoded_token_is_interrupted(name: str) -> None:
    check(SMALL[name], 1, "/cache.py")


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["full", "h2o", "kivi", "quest", "duo", "d2o", "zipcache", "rkv"])
def test_a_pass_is_interrupted_anywhere(name: str, tokens: int) -> None:
    check(SMALL[name], tokens, step=7)
