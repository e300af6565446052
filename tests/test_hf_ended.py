"""Rows of a batch that end before others: in a later turn each is as it is alone."""

import copy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import configs
from support import MIXED, SMALL, every, greedy, in_turn, llama, patched, prompts
from support_device import pretended, there
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

import kvengine
from kvengine import EngineCache, compile_decode
from kvengine.errors import CacheError
from kvengine.fixed import refusal
from kvengine.hf import compiled
from kvengine.hf.ended import Ends, Padding, ended
from kvengine.hf.names import CACHE
from kvengine.hf.states import held_states
from kvengine.saved import save
from kvengine.session import Session
from kvengine.stack import Stack

END, PAD, LAST = 127, 0, 14
ENDS = (3, 9, LAST)
"""Tokens after which each row ends: one soon, one later, and one as the last."""

STACKS = [text for text in (*SMALL.values(), *MIXED) if text != "full"]
RECORDED = [text for text in STACKS if refusal(Stack.parse(text)) is None]


class Ending(LogitsProcessor):
    """Has each row end at its own time, and not before."""

    def __init__(self, prompt: int, ends: tuple[int, ...]) -> None:
        self.prompt, self.ends = prompt, ends

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, [END, PAD]] = -torch.inf
        for row, end in enumerate(self.ends):
            if end == input_ids.shape[1] - self.prompt + 1:
                scores[row, END] = torch.inf
        return scores


def say(model: Any, cache: EngineCache | None, ids: Tensor, mask: Tensor, ends: tuple[int, ...], **options: Any) -> Any:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=LAST + 3, do_sample=False, eos_token_id=END, pad_token_id=PAD,
        logits_processor=[Ending(ids.shape[1], ends)], return_dict_in_generate=True, output_logits=True,
        **options, **({} if cache is None else {CACHE: cache}),
    )  # fmt: skip


def real(ids: Tensor, prompt: int, mask: Tensor) -> Tensor:
    """Which tokens are tokens: padding stands before a row's first and behind its last."""
    behind = ids[:, prompt:] == END
    return torch.cat([mask, (behind.cumsum(1) - behind.long() == 0).long()], 1)


def talk(model: Any, rows: list[int], turns: int = 3, where: Any = Tensor.cpu, **options: Any) -> list[Tensor]:
    """The logits of each turn but the first, [row, token, vocab]: what a row is given at its end is a decoded token."""
    batch = prompts(3, 40)
    ids, mask = batch["input_ids"][rows], batch["attention_mask"][rows]
    start = int((mask.sum(0) > 0).int().argmax())
    ids, mask, out = where(ids[:, start:]), where(mask[:, start:]), []
    cache = EngineCache(model)
    for turn in range(turns):
        ends = tuple(ENDS[(row + turn) % 3] for row in rows)
        found = say(model, cache, ids, mask, ends, **options)
        out.append(torch.stack(found.logits, 1))
        groups = [group for layer in cache.engines for part in layer.parts for group in part.lane.lengths]
        assert all(rows is None or len(rows) for _, rows in groups)
        now = found.sequences
        mask = real(now, ids.shape[1], mask)
        if len(rows) == 1 and ends[0] != LAST:
            at = mask.sum(1, keepdim=True) - 1
            with torch.no_grad():
                model(now[:, -1:], attention_mask=mask, position_ids=at, **{CACHE: cache})
        more = where(torch.randint(1, END, (3, 6), generator=torch.Generator().manual_seed(turn))[rows])
        ids, mask = torch.cat([now, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    return out


def compare(model: Any, **options: Any) -> None:
    together = talk(model, [0, 1, 2], **options)
    for row in range(3):
        for turn, alone in enumerate(talk(model, [row], **options)):
            torch.testing.assert_close(together[turn][row, : alone.shape[1]], alone[0], rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", every(7, STACKS))
def test_a_row_that_ended_early_is_as_alone_in_later_turns(text: str) -> None:
    compare(patched(text).double())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("gemma3n", "h2o(budget=24)"),
        ("gpt_oss", "streaming(sinks=2, recent=14)"),
        ("deepseek_v3", "h2o(budget=24) + kivi(group=8, residual=8)"),
    ],
)
def test_so_it_is_where_layers_share_keys_where_logits_have_sinks_and_over_latents(family: str, text: str) -> None:
    model = configs.build(family)
    config = model.config.get_text_config()
    if hasattr(config, "sliding_window"):
        config.sliding_window = 512  # layers with windows are transformers' own, and hold padding too
    for module in model.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = 512
    compare(kvengine.patch(model, text))


STATES = [
    ("qwen3_next", "full"),
    ("lfm2", "h2o(budget=24)"),
    ("falcon_h1", "quest(budget=16, page=4)"),
    ("zamba2", "full"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("case", "recorded"), in_turn(STATES, [False, True]))
def test_states_are_put_back_to_where_their_row_ended(case: tuple[str, str], recorded: bool) -> None:
    """They take what is fed behind it, as all rows of a batch are fed, under the full cache too."""
    family, text = case
    if not configs.exists(family):
        pytest.skip(f"this transformers has no {family}")
    model = kvengine.patch(configs.build(family), text)
    compare(model, **({"custom_generate": compile_decode(model)} if recorded else {}))


def test_states_are_put_back_where_an_answer_is_broken_off() -> None:
    model = kvengine.patch(configs.build("qwen3_next"))
    batch, caches = prompts(3, 40), [EngineCache(model) for _ in range(2)]
    given = batch["input_ids"], batch["attention_mask"], (3, 9, LAST)

    class Stop(Exception):
        pass

    def stop(input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        if input_ids.shape[1] == 48:
            raise Stop
        return torch.zeros(3, dtype=torch.bool)

    with pytest.raises(Stop):
        say(model, caches[0], *given, stopping_criteria=StoppingCriteriaList([stop]))
    say(model, caches[1], *given)
    assert caches[0].session.aside is None and caches[1].session.aside is None
    for mine, its in zip(caches[0].others, caches[1].others, strict=True):
        for name in ("conv_states", "recurrent_states"):
            for i, state in getattr(mine, name).items():
                assert torch.equal(state[0], getattr(its, name)[i][0])
                assert not torch.equal(state[1], getattr(its, name)[i][1])


def test_a_copy_that_is_made_meanwhile_has_them_as_they_were_there_too(tmp_path: Path) -> None:
    model, batch = kvengine.patch(configs.build("qwen3_next")), prompts(3, 40)
    cache, copies = EngineCache(model), []

    def look(input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        if input_ids.shape[1] == 48:
            with pytest.raises(CacheError, match="have ended before others"):
                save(cache, tmp_path / "session", model)
            copies.append(copy.deepcopy(cache))
            save(copies[0], tmp_path / "session", model)
            raise KeyboardInterrupt
        return torch.zeros(3, dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        say(model, cache, *batch.values(), (3, 9, LAST), stopping_criteria=StoppingCriteriaList([look]))
    for mine, its in zip(copies[0].others, cache.others, strict=True):
        assert all(map(torch.equal, held_states(mine), held_states(its)))


def test_states_are_put_back_where_a_convolution_recorded_its_past() -> None:
    """As wide as it has become since: what the row had stands last."""
    model = kvengine.patch(configs.build("lfm2"))
    batch, caches = prompts(3, 40), [EngineCache(model) for _ in range(2)]
    caches[0].activate_past_recording()
    for cache in caches:
        say(model, cache, batch["input_ids"], batch["attention_mask"], (3, 9, LAST))
    caches[0].deactivate_past_recording()
    for mine, its in zip(caches[0].others, caches[1].others, strict=True):
        assert mine.conv_states
        for i, state in mine.conv_states.items():
            torch.testing.assert_close(state, its.conv_states[i], rtol=1e-4, atol=1e-4)


def test_so_it_is_over_latents_where_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ROOM", 4)
    model = kvengine.patch(configs.build("minicpm3"), "h2o(budget=24) + kivi(group=8, residual=8)")
    compare(model, custom_generate=compile_decode(model))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", every(7, RECORDED))
def test_so_it_is_where_steps_are_recorded(text: str) -> None:
    model = patched(text).double()
    compare(model, custom_generate=compile_decode(model))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["kivi(bits=4, group=8, residual=8)", SMALL["tova"]])
def test_a_recording_that_is_made_anew_knows_who_has_ended(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ROOM", 4)
    model = patched(text).double()
    compare(model, custom_generate=compile_decode(model))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("text", "how"), in_turn(RECORDED, ["eager", "trace"], 12))
def test_a_recording_leaves_what_a_loop_without_leaves(text: str, how: Any) -> None:
    """Pages, tokens and what is decoded next, in a loop of one's own too."""
    leaves(text, how, ENDS)


def test_a_row_that_paused_is_judged_when_it_is_full() -> None:
    """The recording ends right behind a verdict, which a row that pauses has yet to come to."""
    leaves(SMALL["rkv"], "eager", (6, 3, 9))


def leaves(text: str, how: Any, ends: tuple[int, ...]) -> None:
    model, batch, out = (
        patched(text).double(),
        {"ids": torch.randint(1, END, (3, 40)), "mask": torch.ones(3, 40).long()},
        [],
    )
    for options in ({}, {"custom_generate": compile_decode(model, how)}):
        cache = EngineCache(model)
        now = say(model, cache, *batch.values(), ends, **options).sequences
        mask = real(now, 40, batch["mask"])
        lanes = [part.lane for layer in cache.engines for part in layer.parts]
        pages, padded = (
            [lane.pages.pages_in_use() for lane in lanes if lane.pages is not None],
            [x.padded for x in lanes],
        )
        logits = []
        for token in torch.tensor([[5, 9, 11, 3, 8, 2, 4, 7, 6, 1, 12, 14]]).expand(3, -1).split(1, 1):
            seen = torch.cat([mask[:, : cache.seen], torch.ones(3, 1, dtype=torch.long)], 1)
            mask = seen
            with torch.no_grad():
                logits.append(
                    model(token, attention_mask=seen, position_ids=seen.sum(1, keepdim=True) - 1, cache=cache).logits
                )
        out.append((torch.cat(logits, 1), [len(x) for x in pages], padded, cache.stats().held))
    torch.testing.assert_close(out[0][0], out[1][0], rtol=1e-6, atol=1e-6)
    assert out[0][1:3] == out[1][1:3] and torch.equal(out[0][3], out[1][3])


def test_who_gave_no_cache_and_goes_on_with_the_one_that_came_back() -> None:
    model, batch = patched("streaming(sinks=2, recent=14)").double(), prompts(3, 40)
    out = [say(model, cache, *batch.values(), ENDS) for cache in (None, EngineCache(model))]
    lanes = [found.past_key_values.engines[0].parts[0].lane for found in out]
    assert torch.equal(*(lane.tail.position for lane in lanes)) and bool(lanes[0].moved)


@pytest.mark.parametrize("own", [False, True])
def test_rows_that_do_not_end_are_given_no_padding(own: bool) -> None:
    """Nothing pauses where no token ends a text, nor in beams, nor in a loop of one's own after a turn."""
    model, batch = patched("streaming(sinks=2, recent=14)").double(), prompts(3, 40)
    cache = EngineCache(model)
    if own:
        now = say(model, cache, *batch.values(), ENDS).sequences
        mask, moved = torch.ones_like(now), cache.engines[0].seen
        with torch.no_grad():
            model(now[:, -1:], attention_mask=mask, cache=cache)
        lane = cache.engines[0].parts[0].lane
        assert cache.engines[0].seen == moved + 1
        assert bool((lane.tail.position[:, lane.tail.span] == moved).any(1).all())
    else:
        model.generate(**batch, max_new_tokens=9, eos_token_id=None, do_sample=False, cache=cache)
        assert cache.session.ended is None
        model.generate(**batch, max_new_tokens=9, eos_token_id=END, num_beams=2, do_sample=False)


def test_who_ended_in_one_turn_is_not_taken_to_pause_in_the_next() -> None:
    """In which no token ends a text, so that nobody says again who has ended."""
    model, batch = patched("snapkv(budget=500)"), prompts(3, 40)
    cache = EngineCache(model)
    now = say(model, cache, *batch.values(), ENDS).sequences
    more = torch.randint(1, END, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.cat([real(now, 40, batch["attention_mask"]), torch.ones_like(more)], 1)
    later = {"input_ids": torch.cat([now, more], 1), "attention_mask": mask}
    assert torch.equal(greedy(model, later, 6, cache=cache), greedy(llama(), later, 6))


class Numbers(StoppingCriteria):
    """Says with numbers which rows have ended, as those of before transformers asked for booleans may."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -1] == END).long()


def test_criteria_that_answer_in_numbers() -> None:
    model, batch, out = patched("streaming(sinks=2, recent=14)").double(), prompts(3, 40), []
    for criteria in ([], [Numbers()]):
        cache = EngineCache(model)
        found = say(model, cache, *batch.values(), ENDS, stopping_criteria=criteria)
        out.append((found.sequences, cache.engines[0].parts[0].lane.tail.position))
    assert torch.equal(out[0][0], out[1][0]) and torch.equal(out[0][1], out[1][1])


class Stop(StoppingCriteria):
    """Control-C, while a row pauses."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        if input_ids.shape[1] == 40 + ENDS[1] + 2:
            raise KeyboardInterrupt
        return False


@pytest.mark.parametrize("recorded", [False, True])
def test_behind_a_generate_that_was_interrupted_nothing_pauses(recorded: bool) -> None:
    """Though its settings are still there: Python keeps the last error, with all that was at hand where it came from."""
    model, batch, out = patched("streaming(sinks=2, recent=14)").double(), prompts(3, 40), []
    for stop in (False, True):
        cache, options = EngineCache(model), dict[str, Any](eos_token_id=END, pad_token_id=PAD, do_sample=False)
        options |= {"custom_generate": compile_decode(model)} if recorded else {}
        options |= {"stopping_criteria": [Stop()]} if stop else {}
        options |= {"logits_processor": [Ending(40, ENDS)], "cache": cache}
        with pytest.raises(KeyboardInterrupt) if stop else nullcontext() as kept:
            model.generate(**batch, **options, max_new_tokens=ENDS[1] + 2)
        mask = torch.cat([batch["attention_mask"], torch.ones(3, ENDS[1] + 2, dtype=torch.long)], 1)
        with torch.no_grad():
            found = model(torch.tensor([[5], [6], [7]]), attention_mask=mask, cache=cache).logits
        assert cache.seen == mask.shape[1] and (kept is not None) == stop
        position = cache.engines[0].parts[0].lane.tail.position.clone()
        assert (position.amax(1) == cache.seen - 1).all()
        out.append((found, cache.stats().held, position))
    assert torch.equal(out[0][0], out[1][0]) and torch.equal(out[0][1], out[1][1]) and torch.equal(out[0][2], out[1][2])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "text", ["streaming(sinks=2, recent=14)", SMALL["d2o"], "quest(budget=24, page=4) + kivi(group=8, residual=8)"]
)
def test_a_gpu_says_what_a_cpu_says(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(num_hidden_layers=1)
    with kvengine.patched(model, text):
        want = talk(model, [0, 1, 2], 2)
    with pretended(monkeypatch), kvengine.patched(there(model), text):
        got = [x.cpu() for x in talk(model, [0, 1, 2], 2, there)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


class Told(StoppingCriteria):
    """Says what it is told, pass for pass."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        told: Tensor = kwargs["told"]
        return told


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_who_has_ended_is_fed_one_token_more(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a list of sets, and of when. A row of its own is never told: its text ends with it. And who has ended stays so."""
    passes: list[set[int]] = [set(), {0}, {0}, {rows - 1}, {rows - 1}]
    with pretended(monkeypatch):
        session, ids = Session(), there(torch.zeros(rows, 5, dtype=torch.long))
        ends, ended, before = Ends(StoppingCriteriaList([Told()]), session, True), set[int](), None
        when = dict[int, int]()
        for length, now in enumerate(passes, 1):
            told = there(torch.tensor([row in now for row in range(rows)]))
            assert ends(ids[:, :length], None, told=told).tolist() == told.tolist()
            assert session.paused is before
            if rows == 1:
                assert session.ended is None
                continue
            if now <= ended:  # whoever compares tensors by where they are sees at once that nothing came
                assert session.ended is before
            ended |= now
            when |= {row: length for row in now if row not in when}
            assert session.ends == ([when.get(row) for row in range(rows)] if ended else None)
            before = session.ended
            assert (before is None) == (not ended)
            if before is not None:
                assert before.device == ids.device and before.tolist() == [row in ended for row in range(rows)]


SAID = [[5, 7, 0], [5, 6, 6], [9, 0, 0], [5, 6, 0]]
"""What rows have said: two ended by a token, one that says its padding, and one that goes on."""

OF_A_CALL = SimpleNamespace(eos_token_id=6, pad_token_id=5)
WHO: dict[
    str, tuple[dict[str, Any], list[int], list[int], int | None]
] = {  # options, whom the criteria had ended, who has
    "as the model says": ({}, [], [0, 2], 0),
    "an end of the call's own": ({"eos_token_id": 6}, [], [1, 3], 0),
    "a config of the call's own": ({"generation_config": OF_A_CALL}, [], [1, 3], 5),
    "a call's own beside it": ({"generation_config": OF_A_CALL, "eos_token_id": [7]}, [], [0], 5),
    "no token to pad with": ({"pad_token_id": None}, [], [0, 2], 7),
    "nothing that ends": ({"eos_token_id": None}, [], [], None),
    "nothing that ends or pads": ({"eos_token_id": None, "pad_token_id": None}, [], [], None),
    "ended by strings": ({"stop_strings": ["."]}, [3], [0, 2, 3], 0),
    "ended by strings, padded by another": ({"stop_strings": ["."], "pad_token_id": 6}, [0, 1], [0, 1, 2], 6),
    "ended by strings alone": ({"stop_strings": ["."], "eos_token_id": None}, [1], [1], None),
}


@pytest.mark.parametrize("case", WHO)
def test_after_a_loss_it_is_known_who_had_ended(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has before the first token. Who has says padding from then on, whatever the scores; the others' stay."""
    options, told, who, token = WHO[case]
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 9], pad_token_id=0))
    with pretended(monkeypatch):
        session = Session(ended=there(torch.tensor([row in told for row in range(4)])) if told else None)
        rows, padding = ended(model, there(torch.tensor(SAID)), options, session)
        assert [row in who for row in range(4)] == rows.tolist() and padding == token
        assert not any(ended(model, there(torch.zeros(4, 0, dtype=torch.long)), options, Session())[0].tolist())
        if padding is None:
            return
        before = torch.randn(4, 10)
        scores = there(before.clone())
        said = Padding(rows, padding)(there(torch.tensor(SAID)), scores).cpu()
        assert torch.equal(scores.cpu(), before)
    for row in range(4):
        want = torch.nn.functional.one_hot(torch.tensor(token), 10).float() if row in who else before[row].softmax(0)
        assert torch.equal(said[row].softmax(0), want)
