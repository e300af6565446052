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
from families.configs import build
from support import SMALL, llama, one, prompts
from transformers import LogitsProcessor

import kvengine
from kvengine import compile_decode, saved
from kvengine.errors import CacheError
from kvengine.hf import compiled

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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(1, 5))
def test_the_first_pass_is_interrupted(first: int) -> None:
    """While a layer's lanes are made: it has all of them then, or none."""
    ids = one()["input_ids"]
    with torch.no_grad(), kvengine.patched(llama(), SMALL["duo"]) as model:
        want = model(ids, cache=kvengine.EngineCache(model)).logits
        with Interrupt(file="/cache.py") as whole:
            model(ids, cache=kvengine.EngineCache(model))
        told = 0
        for at in range(first, whole.lines + 1, 4):
            cache = kvengine.EngineCache(model)
            with contextlib.suppress(KeyboardInterrupt), Interrupt(at, "/cache.py"):
                model(ids, cache=cache)
            if cache.seen == ids.shape[1]:
                continue
            try:
                assert torch.equal(model(ids, cache=cache).logits, want)
            except CacheError as error:
                assert "broke off" in str(error)
                told += 1
        assert 0 < told < whole.lines


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["full", "h2o", "kivi", "quest", "duo", "d2o", "zipcache", "rkv"])
def test_a_pass_is_interrupted_anywhere(name: str, tokens: int) -> None:
    check(SMALL[name], tokens, step=7)


class Ending(LogitsProcessor):
    """Rows end after two tokens, after four, and not at all."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = input_ids.shape[1] - 40
        scores[:, [0, 127]] = -torch.inf
        scores[0 if new == 1 else 1 if new == 3 else [], 127] = torch.inf
        return scores


def rest(model: Any, cache: Any, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of four more tokens, behind what the cache has read of a text."""
    more = prompts(3, 4, seed=7)["input_ids"].clamp(min=1)
    ids, mask, out = torch.cat([text[:, : cache.seen], more], 1), torch.cat([mask[:, : cache.seen], more > 0], 1), []
    for end in range(cache.seen + 1, ids.shape[1] + 1):
        seen = mask[:, :end].long()
        at = {"attention_mask": seen, "position_ids": seen.sum(1, keepdim=True) - 1}
        out.append(model(ids[:, end - 1 : end], **at, cache=cache).logits)
    return torch.cat(out, 1)


@torch.no_grad()
def interrupt(policy: str, step: int, record: bool, file: str) -> None:
    """A `generate` in which rows pause; recordings have room for four tokens."""
    model, batch = kvengine.patch(llama().double(), policy), prompts(3, 40)

    def say(cache: Any, count: int, record: bool) -> torch.Tensor:
        decoder = {"custom_generate": compile_decode(model)} if record else {}
        options = {"logits_processor": [Ending()], "eos_token_id": 127, "do_sample": False}
        found: torch.Tensor = model.generate(**batch, cache=cache, max_new_tokens=count, **options, **decoder)
        return found

    text = say(kvengine.EngineCache(model), 9, False)
    mask = torch.cat([batch["attention_mask"] > 0, text[:, 40:] > 0], 1)
    want = {}
    for count in range(1, 10):
        cache = kvengine.EngineCache(model)
        say(cache, count, False)
        want[39 + count] = rest(model, cache, text, mask)
    with Interrupt(file=file) as whole:
        say(kvengine.EngineCache(model), 9, record)
    assert whole.lines > step
    for at in range(1 + step // 2, whole.lines + 1, step):
        cache = kvengine.EngineCache(model)
        with contextlib.suppress(KeyboardInterrupt), Interrupt(at, file):
            say(cache, 9, record)
        seen = cache.seen
        try:
            got = rest(model, cache, text, mask)
        except CacheError as error:
            assert "broke off" in str(error)
        else:
            if seen in want:  # else it was not begun
                torch.testing.assert_close(got, want[seen], msg=f"line {at} of {file}")


def test_a_recorded_generate_is_interrupted_while_rows_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ROOM", 4)
    interrupt(SMALL["streaming"], 179, True, "/fixed_lane.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o", "kivi", "quest", "rkv"])
@pytest.mark.parametrize(
    "file", ["/fixed.py", "/fixed_lane.py", "/hf/compiled.py", "/hf/steps.py", "/hf/ended.py", "/hf/generate.py"]
)
def test_a_recorded_generate_is_interrupted_anywhere(name: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ROOM", 4)
    interrupt(SMALL[name], 47 if "fixed" in file else 11, True, file)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streaming", "kivi", "quest"])
def test_a_generate_in_which_rows_pause_is_interrupted_anywhere(name: str) -> None:
    interrupt(SMALL[name], 211, False, "")


class Leaving:
    """A streamer that has heard enough."""

    def __init__(self, puts: int) -> None:
        self.puts, self.text = puts, list[int]()

    def put(self, value: torch.Tensor) -> None:
        self.text += value.flatten().tolist()
        self.puts -= 1
        if not self.puts:
            raise KeyboardInterrupt

    def end(self) -> None: ...


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_of_a_pass_that_broke_off_between_two_layers_nothing_is_taken_back(name: str) -> None:
    """Layers that it had not reached would give up tokens before it."""
    ids = one(9)["input_ids"]
    with torch.no_grad(), kvengine.patched(build(name), "full") as model:
        model(ids, cache=(cache := kvengine.EngineCache(model)))
        last = model.model.layers[-1].register_forward_pre_hook(control_c)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], cache=cache)
        last.remove()
        with pytest.raises(CacheError, match="broke off"):
            cache.rollback(1)


def test_a_mask_behind_a_first_prompt_that_broke_off_is_told_so() -> None:
    """Layers behind the break hold nothing yet, of which something could be hidden."""
    ids, mask = (prompts()[name] for name in ("input_ids", "attention_mask"))
    with torch.no_grad(), kvengine.patched(build("gemma2"), "full") as model:
        cache = kvengine.EngineCache(model)
        last = model.model.layers[-1].register_forward_pre_hook(control_c)
        with pytest.raises(KeyboardInterrupt):
            model(ids, attention_mask=mask, cache=cache)
        last.remove()
        more = torch.cat([mask, torch.ones_like(mask[:, :4])], 1)
        with pytest.raises(CacheError, match="broke off"):
            model(ids[:, -4:], attention_mask=more, cache=cache)


def repeating() -> torch.Tensor:
    return one(20)["input_ids"].repeat(1, 2)


@pytest.mark.parametrize("policy", ["full", SMALL["quest"]])
def test_who_leaves_an_assisted_turn_goes_on_from_its_text_or_is_told(policy: str, tmp_path: Path) -> None:
    """Drafts were cached that nobody had said, and the next turn was read behind them."""
    model, told = kvengine.patch(llama().double(), policy), 0
    for puts in range(2, 6):
        cache, streamer = kvengine.EngineCache(model), Leaving(puts)
        with contextlib.suppress(KeyboardInterrupt):
            options = {"prompt_lookup_num_tokens": 4, "streamer": streamer}
            model.generate(repeating(), cache=cache, max_new_tokens=20, do_sample=False, **options)
        said = torch.tensor([streamer.text])
        ids, twin = torch.cat([said, one(9, seed=2)["input_ids"]], 1), kvengine.EngineCache(model)
        model.generate(repeating(), cache=twin, max_new_tokens=said.shape[1] - 40, do_sample=False)
        if cache.seen == twin.seen:
            found, want = (model.generate(ids, cache=x, max_new_tokens=4, do_sample=False) for x in (cache, twin))
            assert torch.equal(found, want)
            continue
        told += 1
        for act in (
            lambda ids=ids, cache=cache: model.generate(ids, cache=cache, max_new_tokens=4),
            lambda cache=cache: model(one(1)["input_ids"], cache=cache),
            lambda cache=cache: saved.save(cache, tmp_path / "half.kv", model),
        ):
            with torch.no_grad(), pytest.raises(CacheError, match="assisted turn broke off.*cache.reset"):
                act()
        cache.reset()
        assert model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False).shape == (1, ids.shape[1] + 4)
    assert told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "h2o", "kivi", "quest"])
@pytest.mark.parametrize("file", ["", "/hf/generate.py", "/hf/rewind.py"])
@torch.no_grad()
def test_an_assisted_turn_is_interrupted_anywhere(name: str, file: str) -> None:
    model, options = kvengine.patch(llama().double(), SMALL[name]), {"prompt_lookup_num_tokens": 4}

    def say(cache: Any, count: int, **options: Any) -> None:
        model.generate(repeating(), cache=cache, max_new_tokens=count, do_sample=False, **options)

    def rest(cache: Any) -> torch.Tensor:
        return torch.cat([model(x, cache=cache).logits for x in one(4, seed=7)["input_ids"].split(1, 1)], 1)

    want = {}
    for count in range(1, 13):
        say(cache := kvengine.EngineCache(model), count)
        want[39 + count] = rest(cache)
    with Interrupt(file=file) as whole:
        say(kvengine.EngineCache(model), 12, **options)
    for at in range(1, whole.lines + 1, 1 + whole.lines // 60):
        cache = kvengine.EngineCache(model)
        with contextlib.suppress(KeyboardInterrupt), Interrupt(at, file):
            say(cache, 12, **options)
        seen = cache.seen
        try:
            got = rest(cache)
        except CacheError as error:
            assert "broke off" in str(error)
        else:
            if seen:  # else it was not begun
                torch.testing.assert_close(got, want[seen], msg=f"line {at} of {file}")


def test_a_turn_of_which_nothing_was_read_leaves_no_announcement() -> None:
    """The next token of one's own loop was taken for the beginning of the prompt that never came."""
    ids, more = one()["input_ids"], one(9, seed=2)["input_ids"]
    with torch.no_grad(), kvengine.patched(llama(), SMALL["h2o"]) as model:
        caches = kvengine.EngineCache(model), kvengine.EngineCache(model)
        for cache in caches:
            model(ids, cache=cache)
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
            stack.callback(model.model.register_forward_pre_hook(control_c).remove)
            model.generate(torch.cat([ids, more], 1), cache=caches[0], max_new_tokens=4)
        found, want = ([model(x, cache=cache).logits for x in more.split(1, 1)] for cache in caches)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def control_c(*_: Any) -> None:
    raise KeyboardInterrupt
