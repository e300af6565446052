"""End to end on small random models: the text is the target's, whatever drafts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import every
from support_spec import llama, plain_sampling, prompt
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessor, PreTrainedTokenizerFast, SynthIDTextWatermarkingConfig
from transformers.generation.streamers import BaseStreamer

import kvengine
from kvengine.errors import CacheError, ModelError, PolicyError, UnknownPolicy, UnsupportedPolicy
from kvengine.hf.cache import EngineCache
from kvengine.speculative.accept import rule
from kvengine.speculative.clock import Watch
from kvengine.speculative.law import Law, Text
from kvengine.speculative.report import Report
from kvengine.speculative.session import Session
from kvengine.speculative.tier import Tier
from kvengine.speculative.triforce import TriForce
from kvengine.speculative.view import SLACK, Held, LayerView

MIDDLES = [
    "full",
    "quest(budget=24, page=4)",
    "oracle_topk(budget=24)",
    "streaming(sinks=4, recent=20)",
    "snapkv(budget=24, window=4)",
    "h2o(budget=24)",
    "kivi(bits=2)",
    "duo(sparsity=0.5)",
    "snapkv(budget=32, window=4) + kivi",
    "retrieval(budget=24, chunk=4)",
    "zipcache",
    "tidal(budget=24, start=0, reselect=0)",
    "quest(budget=24, page=4) + kivi",
    "ann(budget=24)",
]
QUEST = MIDDLES[1]


@pytest.fixture(scope="module")
def target() -> Any:
    return kvengine.patch(llama())


@pytest.fixture(scope="module")
def small() -> Any:
    return llama(1, layers=1)


def greedy(target: Any, ids: torch.Tensor, new: int = 30, **options: Any) -> list[list[int]]:
    return target.generate(ids, max_new_tokens=new, do_sample=False, **options).tolist()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "middle, draft", [*((middle, "lookup") for middle in MIDDLES), *((middle, "model") for middle in MIDDLES[:5])]
)
def test_greedy_text_is_the_targets(target: Any, small: Any, middle: str, draft: Any) -> None:
    decoder = TriForce(target, small if draft == "model" else draft, middle, gamma=(2, 4))
    out = decoder.generate(prompt(), max_new_tokens=20, do_sample=False)
    assert out.tolist() == greedy(target, prompt(), 20)
    assert decoder.report.emitted == 20 and decoder.report.tiers[0].passes < 20


@pytest.mark.parametrize(
    ("stack", "middle"),
    [("full", "kivi + host(fields=('v_code',))"), ("kivi(group=8, residual=8)", "d2o(budget=24)")],
)
def test_choices_that_the_target_could_not_make_are_the_middles(target: Any, stack: str, middle: str) -> None:
    """Fields that its pages do not have, a retention that its representation excludes."""
    decoder = TriForce(target, None, middle, gamma=(2, 4), stack=stack)
    with kvengine.patched(target, stack):
        want = greedy(target, prompt(), 12)
    assert decoder.generate(prompt(), max_new_tokens=12, do_sample=False).tolist() == want


@pytest.mark.sampled(3)
@pytest.mark.parametrize("middle", [QUEST, "retrieval(budget=0.125)", "ann(budget=0.2)", "snapkv(budget=0.125)"])
@pytest.mark.parametrize("in_place", [False, True])
def test_prompts_shorter_than_a_unit_of_the_middle(target: Any, middle: str, in_place: bool) -> None:
    decoder = TriForce(target, "lookup", middle, gamma=(2, 4), in_place=in_place)
    for length in (1, 2, 7, 17):
        ids = prompt(60)[:, :length]
        assert decoder.generate(ids, max_new_tokens=10, do_sample=False).tolist() == greedy(target, ids, 10)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("middle", [None, QUEST, "snapkv(budget=24, window=4)"])
@pytest.mark.parametrize("tree", ["recycling", (3, 2, 1)])
def test_trees_below_the_target_and_below_the_middle(target: Any, small: Any, middle: str | None, tree: Any) -> None:
    draft, widths = ("recycling", None) if tree == "recycling" else (small, tree)
    decoder = TriForce(target, draft, middle, gamma=(4, 4), widths=widths)
    out = decoder.generate(prompt(), max_new_tokens=16, do_sample=False)
    assert out.tolist() == greedy(target, prompt(), 16)
    sampled = decoder.generate(prompt(), max_new_tokens=16, temperature=1.0, seed=5, coupled=True)
    assert sampled.tolist() == [plain_sampling(target, prompt(), 16, seed=5)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tree", every(2, [(3, 2, 1), "recycling"]), ids=str)
@pytest.mark.parametrize(
    "stack",
    every(2, ["streaming(sinks=2, recent=14)", "duo(sinks=2, recent=10)", "turboquant(bits=2, residual=8)", QUEST]),
)
def test_trees_only_look_so_a_target_that_acts_on_each_token_takes_chains(
    target: Any, small: Any, stack: str, tree: Any
) -> None:
    draft, widths = ("recycling", None) if tree == "recycling" else (small, tree)
    with pytest.raises(UnsupportedPolicy, match="drafts trees.*would not have its law.*or a middle"):
        TriForce(target, draft, None, stack=stack, widths=widths)
    plain = TriForce(target, None, None, stack=stack).generate(prompt(), max_new_tokens=24, do_sample=False)
    decoder = TriForce(target, draft, "retrieval(budget=24, chunk=4)", (3, 3), stack=stack, widths=widths)
    assert torch.equal(decoder.generate(prompt(), max_new_tokens=24, do_sample=False), plain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "stack",
    [
        "snapkv(budget=24, window=4) + host",
        "kvzip(budget=24)",
        "flexprefill(gamma=0.5, min_budget=8, block=8)",
        "lowrank(rank=6)",
    ],
)
def test_a_target_that_only_adds_tokens_judges_trees(target: Any, stack: str) -> None:
    plain = TriForce(target, None, None, stack=stack).generate(prompt(), max_new_tokens=24, do_sample=False)
    decoder = TriForce(target, "recycling", None, stack=stack)
    assert torch.equal(decoder.generate(prompt(), max_new_tokens=24, do_sample=False), plain)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("middle", [None, QUEST, *MIDDLES[3:5]])
def test_coupled_sampling_is_plain_sampling_with_the_same_seed(target: Any, middle: str | None) -> None:
    decoder = TriForce(target, "lookup", middle, gamma=(2, 5))
    for seed in range(2):
        out = decoder.generate(prompt(), max_new_tokens=24, temperature=0.8, top_p=0.9, seed=seed, coupled=True)
        assert out.tolist() == [plain_sampling(target, prompt(), 24, seed=seed, temperature=0.8, top_p=0.9)]


def test_gamma_decided_at_run_time(target: Any) -> None:
    decoder = TriForce(target, "lookup", QUEST, gamma="auto")
    assert decoder.generate(prompt(), max_new_tokens=30, do_sample=False).tolist() == greedy(target, prompt())


def test_a_small_model_left_alone_reads_what_it_missed_in_one_pass(target: Any, small: Any) -> None:
    """It then drafts what it would have drafted, had it been asked all along."""
    kvengine.patch(small)
    lone, text = Session(small, EngineCache(small, "full")), Text(prompt(60)[0].tolist())
    other = Session(small, EngineCache(small, "full"))
    for session in (lone, other):
        session.prefill(text.tokens)
    text.tokens += list(range(3, 20))
    lone.feed([3])
    lone.prepare(text)  # not in the middle of a draft
    assert (lone.settled, lone.open) == (60, [3])
    lone.forget(1)
    lone.prepare(text)
    assert lone.settled == lone.cache.seen == 76 and lone.align(text, ()) == [19]
    assert other.settled == 60
    torch.testing.assert_close(lone.feed([19, 5])[-2:], other.feed([*range(3, 20), 5])[-2:], rtol=1e-4, atol=1e-4)
    lone.forget(2)
    assert lone.cache.seen == 76
    drops = Session(small, EngineCache(small, "h2o(budget=24)"))
    drops.prefill(text.tokens[:60])
    drops.prepare(text)
    drops.feed([19, 5])
    drops.forget(2)  # what comes behind is taken back as ever, whatever was dropped for it
    assert drops.settled == drops.cache.seen == 76
    with pytest.raises(CacheError, match="cannot go back"):
        drops.cache.rollback(1)


def test_seeds(target: Any) -> None:
    decoder = TriForce(target, "lookup", QUEST)
    draw = lambda **options: decoder.generate(prompt(), max_new_tokens=12, temperature=1.0, **options).tolist()  # noqa: E731
    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    torch.manual_seed(3)
    first = draw()
    torch.manual_seed(3)
    assert draw() == first
    torch.manual_seed(4)
    assert draw() != first


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 20, "eos_token_id": [7, 9, 11, 13]},
        {"eos_token_id": list(range(40, 50))},
        {"bad_words_ids": [[5], [6, 7]]},
        {"suppress_tokens": [3, 4]},
    ],
    ids=lambda o: next(iter(o)),
)
def test_processors_see_the_drafted_prefix(target: Any, options: dict[str, Any]) -> None:
    """Greedy, so that one wrong prefix shows."""
    decoder = TriForce(target, "lookup", QUEST, gamma=(2, 4))
    options = {"pad_token_id": 0, **options}
    out = decoder.generate(prompt(), max_new_tokens=30, do_sample=False, **options)
    assert out.tolist() == greedy(target, prompt(), **options)


def test_rows_end_each_for_itself(target: Any) -> None:
    """Left padding, an end token that stops one row early, and padding behind it."""
    ids = torch.cat([prompt(60, 3, seed=4)])
    ids[1, :20], mask = 0, torch.ones_like(ids)
    mask[1, :20] = 0
    free = greedy(target, ids, attention_mask=mask, pad_token_id=0)
    end = free[0][70]
    expected = greedy(target, ids, attention_mask=mask, pad_token_id=0, eos_token_id=end)
    decoder = TriForce(target, "lookup", QUEST, gamma=(2, 4))
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    assert decoder.generate(ids, **options).tolist() == expected
    assert target.generate(ids, custom_generate=decoder, **options).tolist() == expected
    assert any(len(set(row[-5:])) > 1 for row in expected), "some row should go on to the end"


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streaming(target: Any) -> None:
    collector = Collector()
    out = TriForce(target, "lookup", QUEST).generate(prompt(), max_new_tokens=20, do_sample=False, streamer=collector)
    assert sum(collector.pieces, []) == out[0].tolist() and collector.ended
    assert collector.pieces[0] == prompt()[0].tolist() and len(collector.pieces) > 2


def letters(vocab: int = 64) -> PreTrainedTokenizerFast:
    """One character per token."""
    tokenizer = Tokenizer(models.BPE({chr(ord("0") + i): i for i in range(vocab)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def test_stop_strings(target: Any) -> None:
    tokenizer = letters()
    stop = tokenizer.decode(greedy(target, prompt())[0][103:105])
    options = {"stop_strings": [stop], "tokenizer": tokenizer, "pad_token_id": 0}
    expected = greedy(target, prompt(), **options)
    out = TriForce(target, "lookup", QUEST).generate(prompt(), max_new_tokens=30, do_sample=False, **options)
    assert out.tolist() == expected and len(expected[0]) < 120


def test_one_store_judged_with_eight_bits_and_drafted_on_with_four(target: Any) -> None:
    """The text is that of the eight-bit cache, and nothing is held twice."""
    stack = "quantspec(group=8, residual=8)"
    decoder = TriForce(target, "lookup", "quantspec(bits=4, group=8, residual=8)", gamma=(2, 4), stack=stack)
    out = decoder.generate(prompt(), max_new_tokens=40, do_sample=False)
    alone = TriForce(target, None, None, stack=stack).generate(prompt(), max_new_tokens=40, do_sample=False)
    assert out.tolist() == alone.tolist()
    top, middle = decoder.report.tiers
    assert middle.cache_bytes == 0 and middle.bytes_read / middle.passes < top.bytes_read / top.passes
    assert top.acceptance is not None and 0.3 < top.acceptance and top.tokens_per_pass > 1.5


def test_off_loaded_target(target: Any) -> None:
    decoder = TriForce(target, "lookup", QUEST, stack="host")
    assert decoder.generate(prompt(), max_new_tokens=30, do_sample=False).tolist() == greedy(target, prompt())


def test_long_drafts_and_long_texts_do_not_overflow_a_view(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts longer than what may follow a choice: all that came since is read, always."""
    lengths: list[int] = []
    real = LayerView.held

    def held(self: LayerView) -> Held:
        out = real(self)
        lengths.append(out[0].shape[1])
        since = torch.arange(self.covered, self.seen)
        assert all(torch.isin(since, row).all() for row in out[2])
        return out

    def quick(self: LayerView, *args: Any) -> torch.Tensor | None:
        out = fast(self, *args)
        if out is not None:
            self.held()
        return out

    fast = LayerView.quick
    monkeypatch.setattr(LayerView, "held", held)
    monkeypatch.setattr(LayerView, "quick", quick)
    decoder = TriForce(target, None, "quest(budget=112, page=4)", gamma=(1, SLACK + 6))
    out = decoder.generate(prompt(100), max_new_tokens=SLACK + 20, do_sample=False)
    assert out.tolist() == greedy(target, prompt(100), SLACK + 20)
    assert 100 + SLACK < max(lengths) <= 112 + SLACK + SLACK + 6 + 1


def test_report(target: Any) -> None:
    decoder = TriForce(target, "lookup", "full", gamma=(1, 6))
    assert decoder.report == Report()  # nothing yet
    decoder.generate(prompt(90, 2), max_new_tokens=30, do_sample=False)
    report = decoder.report
    top, middle = report.tiers
    assert (report.prompt, report.emitted) == (180, 60) and top.acceptance == 1.0
    assert sum(top.stood) + top.passes == 58  # the first token of a row comes from its prompt
    assert middle.tested[0] >= middle.stood[0] and middle.bytes_read > 0
    assert "stood" in str(report) and report.bytes_per_token > 0
    decoder.generate(prompt(90), max_new_tokens=12, do_sample=False)
    assert (decoder.report.prompt, decoder.report.emitted, report.emitted) == (90, 12, 60)  # of the last call alone


@pytest.mark.parametrize(("threads", "name"), [(1, "cpu"), (2, "wall")])
def test_rounds_are_timed_by_the_clock_that_other_work_disturbs_least(
    target: Any, threads: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's own time where it is the only one that works, and on a GPU the time on the wall."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    law, watch = Law([], greedy=True), Watch()
    top = TriForce(target, "lookup", QUEST).tiers(law, rule(3, 0, False), frozenset(), watch)
    assert isinstance(top.below, Tier) and top.clock == top.below.clock == getattr(watch, name)
    there = TriForce(target, "lookup", None)
    monkeypatch.setattr(type(target), "device", torch.device("cuda"))
    assert there.tiers(law, rule(3, 0, False), frozenset(), watch).clock == watch.wall


def test_a_view_shares_the_targets_storage() -> None:
    model = kvengine.patch(llama())
    decoder = TriForce(model, "lookup", "quest(budget=32, page=4)")
    ids = prompt(400)
    decoder.generate(ids, max_new_tokens=8, do_sample=False)
    target, middle = decoder.report.tiers
    assert middle.cache_bytes < 0.8 * target.cache_bytes
    shared = middle.cache_bytes
    decoder = TriForce(model, "lookup", "full")
    decoder.generate(ids, max_new_tokens=8, do_sample=False)
    assert decoder.report.tiers[0].cache_bytes == pytest.approx(target.cache_bytes, rel=0.05)  # slots grow as drafts do
    assert shared < 0.8 * decoder.report.tiers[1].cache_bytes


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"gamma": (0, 6)}, PolicyError, "counts of at least 1"),
        ({"gamma": 4}, PolicyError, "counts of at least 1"),
        ({"middle": "quest(budget=4, page=4)"}, PolicyError, "holds 4 tokens"),
        ({"middle": "streaming(sinks=1, recent=4)"}, PolicyError, "holds 5 tokens"),
        ({"middle": "qeust"}, UnknownPolicy, "quest"),
        ({"draft": "lokup"}, PolicyError, "Did you mean 'lookup'"),
        ({"draft": 3}, ModelError, "not int"),
        ({"draft": "other"}, ModelError, "another tokenizer: its vocabulary has 48"),
        ({"draft": "same", "tokenizers": True}, ModelError, "same ids stand for other tokens"),
        ({"draft": "same", "draft_stack": "streaming(sinks=2, recent=2)"}, PolicyError, "draft_stack"),
    ],
)
def test_refusals(target: Any, small: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    models_ = {"other": llama(1, vocab=48), "same": small}
    arguments = {"middle": QUEST, **arguments}
    arguments["draft"] = models_.get(arguments.get("draft"), arguments.get("draft"))  # type: ignore[arg-type]
    if "tokenizers" in arguments:
        arguments["tokenizers"] = (letters(64), letters(65))
    with pytest.raises(error, match=message):
        TriForce(target, **arguments)


def test_refusals_of_a_call(target: Any, small: Any) -> None:
    decoder = TriForce(target, "lookup", QUEST)
    with pytest.raises(ModelError, match="made for another model"):
        small.generate(prompt(), custom_generate=decoder, max_new_tokens=2)
    with pytest.raises(ModelError, match="a streamer prints one row"):
        decoder.generate(prompt(rows=2), streamer=Collector(), max_new_tokens=2)
    with pytest.raises(ModelError, match="no beams"):
        decoder.generate(prompt(), num_beams=2, max_new_tokens=2)
    embeds = target.get_input_embeddings()(prompt())
    for ids in (None, prompt()):
        with pytest.raises(ModelError, match="give the prompt as input_ids"):
            decoder.generate(ids, inputs_embeds=embeds, max_new_tokens=2)
        with pytest.raises(ModelError, match="give the prompt as input_ids"):
            target.generate(ids, inputs_embeds=embeds, custom_generate=decoder, max_new_tokens=2)
    for ids, what in (
        (None, "NoneType"),
        (prompt().tolist(), "list"),
        (prompt()[0], r"int64 \[90\]"),
        (embeds, "float32"),
    ):
        with pytest.raises(ModelError, match=f"tensor of token ids.* not .*{what}"):
            decoder.generate(ids, max_new_tokens=2)
    with pytest.raises(ModelError, match="give the tokenizer too"):
        decoder.generate(prompt(), stop_strings=["a"], max_new_tokens=2)
    with pytest.raises(PolicyError, match="seed='a' is not a whole number"):
        decoder.generate(prompt(), seed="a", max_new_tokens=2)


@pytest.mark.parametrize(
    "options",
    [{"guidance_scale": 2.0}, {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400], ngram_len=3)}],
    ids=lambda o: next(iter(o)),
)
def test_processors_that_count_their_calls_are_refused(target: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="remembers earlier calls"):
        TriForce(target, "lookup", QUEST).generate(prompt(), max_new_tokens=2, do_sample=False, **options)


@pytest.mark.parametrize("coupled", [False, True])
def test_scores_that_overflow_are_named(target: Any, coupled: bool) -> None:
    decoder = TriForce(target, "lookup", QUEST)
    with pytest.raises(ModelError, match="not numbers"):
        decoder.generate(prompt(), max_new_tokens=4, temperature=1e-38, coupled=coupled)


class Favour(LogitsProcessor):
    """Another token in every row."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 4 * torch.eye(3, scores.shape[1]) * (input_ids[:, -1:] % 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"prefix_allowed_tokens_fn": lambda row, ids: [3 + 20 * row + int(ids[-1]) % 2, 5, 9, 60]},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 2},
        {"logits_processor": [Favour()]},
    ],
    ids=lambda o: next(iter(o)),
)
def test_processors_that_treat_rows_differently(target: Any, options: dict[str, Any]) -> None:
    """They are made for the whole batch, and each row is decoded in its own time."""
    ids, mask = prompt(60, 3, seed=4), torch.ones(3, 60, dtype=torch.long)
    ids[1, :20] = mask[1, :20] = 0
    options = {"attention_mask": mask, "pad_token_id": 0, **options}
    out = TriForce(target, "lookup", QUEST, gamma=(2, 4)).generate(ids, max_new_tokens=12, do_sample=False, **options)
    assert out.tolist() == greedy(target, ids, 12, **options)
