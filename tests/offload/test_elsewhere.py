"""On another machine: another process goes on with a saved session, and with a stored prefix. And when a tier dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import SMALL, greedy, llama, one
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

import kvengine
from kvengine import recover, saved
from kvengine.errors import ModelError, StoreError
from kvengine.offload import stores
from kvengine.offload.placement import _ahead
from kvengine.prefix import Prefix

STACKS = [
    *SMALL.values(), "quest(budget=32, page=8) + kivi(bits=4, group=16) + disk(host=0)", "h2o(budget=24) + remote(url='memory://')",
]  # fmt: skip
OTHER = """
import json, sys
from pathlib import Path
from support import greedy, llama, one
import kvengine
from kvengine import saved
from kvengine.offload import stores
from kvengine.prefix import Prefix
from test_elsewhere import go_on

folder, found, model = Path(sys.argv[1]), {}, llama()
for path in sorted(folder.glob("*.kv")):
    text = saved.extra(path)
    with kvengine.patched(model, text["stack"]):
        found[path.name] = go_on(model, saved.load(model, path), text["next"])
with kvengine.patched(model, "full"):
    reuse = Prefix(model, stores.Store(stores.Files(folder / "store")), chunk=16)
    cache = reuse.fetch(one(100)["input_ids"])
    found["prefix"] = [cache.seen, *greedy(model, one(100), 12, cache=cache)[0].tolist()]
print(json.dumps(found))
"""


def go_on(model: Any, cache: Any, token: int, count: int = 8) -> list[int]:
    out = [token]
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([[out[-1]]]), cache=cache, use_cache=True).logits
            out.append(int(logits[0, -1].argmax()))
    return out


@pytest.mark.parametrize("stacks", [STACKS[3::10], pytest.param(STACKS, marks=pytest.mark.slow)], ids=["some", "every"])
def test_another_process_goes_on_with_every_policy(stacks: list[str], tmp_path: Path) -> None:
    model, want = llama(), dict[str, list[int]]()
    for i, stack in enumerate(dict.fromkeys(stacks)):
        with kvengine.patched(model, stack):
            cache = kvengine.EngineCache(model, stack)
            with torch.inference_mode():
                out = model(**one(60), cache=cache, use_cache=True)
            begun = go_on(model, cache, int(out.logits[0, -1].argmax()), 5)
            saved.save(cache, tmp_path / f"{i}.kv", model, extra={"stack": stack, "next": begun[-1]})
            want[f"{i}.kv"] = go_on(model, cache, begun[-1])
    ids = one(100)["input_ids"]
    with kvengine.patched(model, "full"):
        reuse = Prefix(model, stores.Store(stores.Files(tmp_path / "store")), chunk=16)
        cache = kvengine.EngineCache(model)
        want["prefix"] = [96, *greedy(model, one(100), 12, cache=cache)[0].tolist()]
        reuse.keep(ids, cache)
        reuse.store.close()
    tests = Path(__file__).parent
    found = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    command = [sys.executable, "-P", "-c", OTHER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=found)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == want


class Dies(stores.Objects):
    """A store in memory that stops answering after so many reads."""

    left = 10**9

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        Dies.left -= 1
        if Dies.left < 0:
            raise ConnectionError("nobody answers")
        return super().read(key, into, offset)


@pytest.mark.parametrize("stack", ["full", "quest(budget=64, page=8)"])
def test_generation_outlives_a_store_that_dies(
    stack: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    obstore = pytest.importorskip("obstore.store")
    monkeypatch.setattr(_ahead.Ahead, "backend", lambda self, url: made)
    model, inputs = llama(), one(100)
    policy = f"{stack} + remote(host=4096)"
    with kvengine.patched(model, policy):
        monkeypatch.setattr(Dies, "left", 10**9)
        made = Dies(obstore.MemoryStore())
        want = recover.generate(model, inputs, max_new_tokens=40, do_sample=False)
        reads = 10**9 - Dies.left
        assert reads > 40 and "computed again" not in caplog.text
        made, Dies.left = Dies(obstore.MemoryStore()), reads // 2
        with pytest.raises(StoreError, match="nobody answers"):
            recover.generate(model, inputs, max_new_tokens=40, do_sample=False, attempts=1)
        made, Dies.left = Dies(obstore.MemoryStore()), reads // 2

        real = kvengine.EngineCache.__init__
        calls = []

        def count(self: Any, *arguments: Any, **named: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                Dies.left = 10**9  # it is back
            real(self, *arguments, **named)

        monkeypatch.setattr(kvengine.EngineCache, "__init__", count)
        found = recover.generate(model, inputs, max_new_tokens=40, do_sample=False)
    at = int(caplog.records[-1].args[0]) if stack != "full" else 140  # type: ignore[index, call-overload, arg-type]
    assert 100 < at <= found.shape[1] == 140 and len(calls) == 2
    assert torch.equal(found[:, :at], want[:, :at])  # up to the loss, under `full` to the end
    assert "computed again: pages could not be read from the remote tier: nobody answers" in caplog.text
    kept = [x for record in caplog.records for x in record.args or ()]
    assert not any(isinstance(x, Exception) for x in kept)  # which know the frames that they passed, and so the cache


class Lost(LogitsProcessor):
    """Fails once, at the given step."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise StoreError("nobody answers")
        return scores


def test_rows_that_had_ended_stay_at_their_end_after_a_loss() -> None:
    ids = torch.randint(3, 128, (3, 20), generator=torch.Generator().manual_seed(3))
    with kvengine.patched(llama(), "full") as model:
        said = model.generate(ids, max_new_tokens=30, do_sample=False)[:, 20:].tolist()
        end = next(x for x in said[1][:8] if x not in said[0] + said[2])
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": end, "pad_token_id": 0}
        want = model.generate(ids, max_new_tokens=30, **options)
        assert want[1, -1] == 0 and want.shape[1] == 50
        for least in (None, 9):
            options |= {"min_new_tokens": least}
            want = model.generate(ids, max_new_tokens=30, **options)
            found = recover.generate(
                model, {"input_ids": ids}, max_new_tokens=30, logits_processor=[Lost(15)], **options
            )
            assert torch.equal(found, want)


class Sevenths(StoppingCriteria):
    """Ends rows by their last token."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 3


@pytest.mark.parametrize("options", [{"eos_token_id": 127, "pad_token_id": 0}, {}], ids=["padded", "not padded"])
def test_rows_that_a_criterion_has_ended_stay_at_their_end_after_a_loss(options: dict[str, Any]) -> None:
    """Right behind their last token too, where no padding tells of it yet, or ever."""
    ids = torch.randint(3, 128, (3, 20), generator=torch.Generator().manual_seed(3))
    with kvengine.patched(llama(), "full") as model:
        options |= {"max_new_tokens": 20, "do_sample": False, "stopping_criteria": [Sevenths()]}
        want = model.generate(ids, **options)
        for step in (3, 5, 9, 11, 20):
            given: dict[str, Any] = {"input_ids": ids, "attention_mask": None}  # as good as left out
            found = recover.generate(model, given, logits_processor=[Lost(step)], **options)
            assert torch.equal(found, want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [
    {"min_new_tokens": 9, "eos_token_id": list(range(3, 128, 2)), "pad_token_id": 0},
    {"begin_suppress_tokens": list(range(100))},
    {"exponential_decay_length_penalty": (8, 1.2), "eos_token_id": 5, "pad_token_id": 0},
    {"guidance_scale": 1.5},
    {"guidance_scale": 1.5, "negative_prompt_ids": torch.arange(3, 11)[None]},
    {"guidance_scale": 1.5, "negative_prompt_ids": torch.arange(3, 11)[None],
     "negative_prompt_attention_mask": (torch.arange(8)[None] > 2).long()},
], ids=lambda options: " ".join(options))  # fmt: skip
@pytest.mark.parametrize("named", [True, False])
def test_settings_that_count_from_the_prompts_end_still_do_after_a_loss(options: dict[str, Any], named: bool) -> None:
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    negative = {name: options.pop(name) for name in list(options) if name.startswith("negative")}
    with kvengine.patched(llama(), "full") as model:
        given = options if named else {"generation_config": GenerationConfig(**options)}
        want = model.generate(**one(), **given, **negative)
        for step in (1, 5, 14):
            if not named:
                given = {"generation_config": GenerationConfig(**options)}
            found = recover.generate(
                model, one(), **{"max_new_tokens": 20, **given}, **negative, logits_processor=[Lost(step)]
            )
            assert torch.equal(found, want)


def test_the_time_that_was_given_is_over_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    given, now = [], [1000.0]
    monkeypatch.setattr(recover, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with kvengine.patched(llama(), "full") as model:

        def slow(**options: Any) -> Any:
            given.append(options["max_time"])
            now[0] += 5
            raise StoreError("nobody answers")

        monkeypatch.setattr(model, "generate", slow)
        with pytest.raises(StoreError):
            recover.generate(model, one(), max_new_tokens=4, max_time=7)
    assert given == [7, 2, 0]


class Heard:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []
        self.ended = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens.append(tokens)

    def end(self) -> None:
        self.ended += 1


class Nudge(LogitsProcessor):
    """A processor of the caller's: at every other length, the token behind the likeliest."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(input_ids.shape[1] % 2, 1)


@pytest.mark.parametrize("least", [None, 6])
def test_rows_end_after_a_loss_where_they_end_without(least: int | None) -> None:
    """All before the limit and each at its time, under what the caller does to scores."""
    ids = torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(3))
    with kvengine.patched(llama(), "full") as model:
        said = model.generate(ids, max_new_tokens=24, do_sample=False, logits_processor=[Nudge()])[:, 20:]
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
        options |= {"eos_token_id": [int(said[0, 8]), int(said[1, 13])], "min_new_tokens": least}
        want = model.generate(ids, logits_processor=[Nudge()], **options)
        assert want.shape[1] == 34 and int((want[0] == 0).sum()) == 5
        for step in (2, 4, 10, 11, 14):
            processors = [Nudge(), Lost(step)]
            assert torch.equal(
                recover.generate(model, {"input_ids": ids}, logits_processor=processors, **options), want
            )


class HeardToTheEnd(Heard):
    """Fails behind the last token: where stops are looked at late, a pass more may have begun by then."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def put(self, tokens: torch.Tensor) -> None:
        super().put(tokens)
        if len(self.tokens) == self.last + 1:  # with the prompt
            raise StoreError("nobody answers")


@pytest.mark.parametrize("end", [None, 6])
def test_a_loss_behind_the_last_token_costs_nothing(end: int | None) -> None:
    with kvengine.patched(llama(), "full") as model:
        ids, options = one()["input_ids"], {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
        want = model.generate(ids, **options)
        if end is not None:
            options["eos_token_id"] = int(want[0, 61 + end])
            want = model.generate(ids, **options)
        heard = HeardToTheEnd(want.shape[1] - 61)
        found = recover.generate(model, {"input_ids": ids}, streamer=heard, attempts=2, **options)
    assert torch.equal(found, want) and (want.shape[1] == 73) == (end is None)
    assert heard.ended == 1 and len(heard.tokens) == heard.last + 1


def test_as_many_caches_may_be_lost_as_are_given() -> None:
    with kvengine.patched(llama(), "full") as model:
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
        want = model.generate(**one(), **options)
        for attempts in (2, 3):
            twice = {"logits_processor": [Lost(3), Lost(5)], "attempts": attempts, **options}
            if attempts == 3:
                assert torch.equal(recover.generate(model, one(), **twice), want)
            else:
                with pytest.raises(StoreError, match="nobody answers"):
                    recover.generate(model, one(), **twice)


def test_several_texts_of_a_prompt_go_on_after_a_loss() -> None:
    with kvengine.patched(llama(), "full") as model:
        ids = torch.cat([one()["input_ids"], one(seed=7)["input_ids"]])
        texts = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 12}
        found = recover.generate(model, {"input_ids": ids}, logits_processor=[Lost(5)], **texts)
        assert torch.equal(found, model.generate(ids, **texts))


@pytest.mark.parametrize("step", [1, 5, 12, 13])  # before any token, in the midst, at the last, not at all
def test_a_streamer_hears_each_token_once_whatever_is_lost(step: int) -> None:
    with kvengine.patched(llama(), "full") as model:
        ids, want, found = one()["input_ids"], Heard(), Heard()
        plain = model.generate(ids, max_new_tokens=12, do_sample=False, streamer=want)
        said = recover.generate(
            model, {"input_ids": ids}, max_new_tokens=12, do_sample=False, streamer=found, logits_processor=[Lost(step)]
        )
    assert torch.equal(said, plain)
    assert [x.tolist() for x in found.tokens] == [x.tolist() for x in want.tokens] and found.ended == 1


def test_tokens_that_come_several_at_a_time_are_those_of_one_text() -> None:
    """Assisted decoding accepts several tokens in a step."""
    with kvengine.patched(llama(), "full") as model:
        ids = torch.arange(3, 9).repeat(6)[None]
        look = {"do_sample": False, "max_new_tokens": 24, "prompt_lookup_num_tokens": 4}
        plain = model.generate(ids, **look)
        for step in (8, 16, 22):
            heard = Heard()
            found = recover.generate(model, {"input_ids": ids}, logits_processor=[Lost(step)], streamer=heard, **look)
            assert torch.equal(found, plain)
            assert torch.equal(torch.cat([x.reshape(-1) for x in heard.tokens])[None], plain)


@pytest.mark.parametrize(("options", "says"), [
    ({"past_key_values": "a cache"}, "caches of its own.*leave out the one"),
    ({"input_ids": torch.ones(1, 4, dtype=torch.long)}, "input_ids.*in `inputs`"),
    ({"attention_mask": torch.ones(1, 4)}, "attention_mask.*in `inputs`"),
    ({"num_beams": 2}, "beam search"),
    ({"generation_config": GenerationConfig(num_beams=2)}, "beam search"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ({"encoder_no_repeat_ngram_size": 1}, "encoder_no_repeat_ngram_size is about the prompt"),
    ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty is about the prompt"),
])  # fmt: skip
def test_what_cannot_go_on_after_a_loss_is_said_before(options: dict[str, Any], says: str) -> None:
    with kvengine.patched(llama(), "full") as model, pytest.raises(ModelError, match=says):
        recover.generate(model, one(), max_new_tokens=4, **options)
    with kvengine.patched(llama(), "full") as model, pytest.raises(ModelError, match="input_ids are a tensor"):
        recover.generate(model, {}, max_new_tokens=4)


@pytest.mark.parametrize(("more", "says"), [
    ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "leave pixel_values out"),  # later attempts would be without
    ({"position_ids": torch.arange(61)[None]}, "leave position_ids out"),
    ({"attention_mask": torch.ones(1, 3)}, r"shape, \[1, 61\], not \[1, 3\]"),
    ({"attention_mask": [1] * 61}, "not list"),
    ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, "input_ids are a tensor"),
])  # fmt: skip
def test_inputs_that_would_be_passed_over_are_refused(more: dict[str, Any], says: str) -> None:
    with kvengine.patched(llama(), "full") as model, pytest.raises(ModelError, match=says):
        recover.generate(model, {**one(), **more}, max_new_tokens=4)


def test_a_count_and_a_model_that_are_none_are_told() -> None:
    with kvengine.patched(llama(), "full") as model:
        for count in (None, 0, 2.5):
            with pytest.raises(ModelError, match="a whole number from 1 on"):
                recover.generate(model, one(), max_new_tokens=count)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="not a LlamaModel"):
            recover.generate(model.model, one(), max_new_tokens=4)
