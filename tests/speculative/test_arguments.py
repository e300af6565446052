"""Every argument of `generate` makes the difference that it makes elsewhere, or is refused: none is passed over."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support import llama, one
from transformers import DynamicCache, GenerationConfig, GPT2Config, GPT2LMHeadModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import kvengine
from kvengine.errors import EvaluationError, ModelError, PolicyError, UnsupportedPolicy
from kvengine.hf.cache import STATE
from kvengine.hf.names import CACHE
from kvengine.speculative.adaptive import Adaptive
from kvengine.speculative.branch import Branching
from kvengine.speculative.check import Gamma, check_arguments, check_room
from kvengine.speculative.commands import numbers
from kvengine.speculative.echo import Refresh
from kvengine.speculative.triforce import TriForce, coarse_of
from kvengine.stack import Stack

QUEST = "quest(budget=24, page=4)"
IDS = one(60)["input_ids"]
PADDED = (torch.arange(60) >= 9).long()[None]
PLACES = torch.arange(60)[None]


@pytest.fixture(scope="module")
def target() -> Any:
    return kvengine.patch(llama())


@pytest.fixture(scope="module")
def decoder(target: Any) -> TriForce:
    return TriForce(target, "lookup", QUEST, gamma=(2, 4))


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


class Length(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 67)


HONOURED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "mask of truths": {"attention_mask": PADDED.bool()},
    "mask of fractions": {"attention_mask": PADDED.float()},
    "usual positions": {"position_ids": PLACES},
    "usual positions behind padding": {
        "attention_mask": PADDED,
        "position_ids": (PADDED.cumsum(1) - 1).clamp(min=0),
    },
    "stopping_criteria": {"stopping_criteria": [Length()]},
    "max_length": {"max_length": 66, "max_new_tokens": None},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(40, 60))},
    "logits_to_keep": {"logits_to_keep": 1},
    "use_cache": {"use_cache": True},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [3 + int(ids[-1]) % 9, 40]},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", HONOURED)
@pytest.mark.parametrize("own", [True, False])
def test_honoured(target: Any, decoder: TriForce, name: str, own: bool) -> None:
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **HONOURED[name]}
    want = target.generate(IDS, **options)
    found = decoder.generate(IDS, **options) if own else target.generate(IDS, custom_generate=decoder, **options)
    assert torch.equal(found, want)


@pytest.mark.parametrize("bound", [False, True])
def test_a_streamer_hears_all_whichever_way_it_comes(target: Any, decoder: TriForce, bound: bool) -> None:
    """transformers puts the prompt, and would keep the streamer from a callable: whoever reads it waits for ever."""
    how: Any = partial(decoder, seed=3) if bound else decoder
    for decode in (how, kvengine.compile_decode(target, "eager")):
        streamer = Collector()
        out = target.generate(IDS, custom_generate=decode, streamer=streamer, max_new_tokens=12, do_sample=False)
        assert streamer.tokens == out[0].tolist() and streamer.ended == 1


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_several_texts_of_a_prompt_are_as_many_rows(decoder: TriForce, count: int, coupled: bool) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 3, "coupled": coupled}
    found = decoder.generate(IDS, num_return_sequences=count, **options)
    assert torch.equal(found, decoder.generate(IDS.repeat(count, 1), **options))
    assert len({tuple(row) for row in found.tolist()}) == count


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "position_ids": ({"position_ids": 2 * PLACES}, "leave them out"),
    "position_ids of another length": ({"position_ids": PLACES[:, :50]}, "leave them out"),
    "position_ids of other rows": ({"position_ids": PLACES.repeat(5, 1)}, "leave them out"),
    "position_ids of three parts": ({"position_ids": torch.stack([PLACES, PLACES, 2 * PLACES])}, "leave them out"),
    "position_ids that count padding": ({"attention_mask": PADDED, "position_ids": PLACES}, "leave them out"),
    "a longer mask": ({"attention_mask": torch.nn.functional.pad(PADDED, (9, 0))}, r"\[1, 69\].*belong together"),
    "a mask with holes": ({"attention_mask": 1 - PADDED}, "padded on the left"),
    "inputs_embeds": ({"inputs_embeds": torch.zeros(1, 60, 64)}, "give the prompt as input_ids"),
    "num_beams": ({"num_beams": 2}, "ask for beam search"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": False}, "ask for contrastive search"),
    "dola": ({"dola_layers": "low"}, "ask for dola generation"),
    "constraints": ({"force_words_ids": [[3]], "num_beams": 2}, "ask for constrained beam search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "ask for assisted generation"),
    "early exit": ({"assistant_early_exit": 1}, "ask for assisted generation"),
    "assistant_model": ({"assistant_model": llama(1)}, "ask for assisted generation"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus"),
    "return_dict": ({"return_dict_in_generate": True, "output_scores": True}, "no return_dict_in_generate"),
    "use_cache": ({"use_cache": False}, "leave use_cache=False out"),
    "prefill_chunk_size": ({"prefill_chunk_size": 16}, "leave prefill_chunk_size out"),
    "cache_implementation": ({"cache_implementation": "static"}, "brings its own cache"),
    "a cache": ({CACHE: DynamicCache()}, "leave out the one that is given"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("own", [True, False])
def test_refused(target: Any, decoder: TriForce, name: str, own: bool) -> None:
    given, why = REFUSED[name]
    options = {"max_new_tokens": 4, "do_sample": False, **given}
    with pytest.raises(ModelError, match=why):
        decoder.generate(IDS, **options) if own else target.generate(IDS, custom_generate=decoder, **options)


def test_an_empty_cache_of_the_callers_is_refused_too(target: Any, decoder: TriForce) -> None:
    """It would stay empty, and its policy would not be followed."""
    with pytest.raises(ModelError, match="leave out the one that is given"):
        decoder.generate(IDS, cache=kvengine.EngineCache(target, "streaming"), max_new_tokens=4)


def test_what_no_cache_of_the_models_can_be_is_refused_before_a_prompt() -> None:
    """Codes that do not fit heads of 20 channels, and keys to be turned where nothing rotates them."""
    odd, still = llama(head_dim=20), GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128)).eval()
    codes, turns = "turboquant(bits=3)", "expected_attention(budget=24)"
    for target, draft, stacks, says in (
        (odd, None, {"middle": codes}, "whole bytes"),
        (odd, "lookup", {"middle": None, "stack": codes}, "whole bytes"),
        (still, None, {"middle": turns}, "turns keys"),
        (llama(), odd, {"draft_stack": codes}, "whole bytes"),
    ):
        with pytest.raises(UnsupportedPolicy, match=says):
            TriForce(target, draft, **stacks)
    assert not hasattr(odd, STATE) and not hasattr(still, STATE)
    for target, stacks in ((llama(), {"middle": QUEST}), (odd, {"middle": codes})):
        kvengine.patch(target, own := "streaming(sinks=2, recent=30)")
        try:
            TriForce(target, None, **stacks)
        except UnsupportedPolicy:
            assert target is odd
        assert kvengine.EngineCache(target).stack == Stack.of(own)  # as it was patched


SAMPLES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"temperature": None, "top_k": None}, {"temperature": None, "top_k": None}),
    ({"temperature": 0}, {"temperature": None, "do_sample": False}),
    ({"temperature": 0.0, "do_sample": True}, {"temperature": None, "do_sample": False}),
    ({"temperature": 1}, {"temperature": 1, "do_sample": True}),
    ({"temperature": 1, "do_sample": False}, {"temperature": 1, "do_sample": False}),
    *(({name: x}, {name: x, "do_sample": True}) for name, x in (("top_k", 0), ("top_p", 0.5), ("min_p", 0.1))),
]


@pytest.mark.parametrize(("given", "want"), SAMPLES)
def test_what_asks_for_sampling(
    target: Any, decoder: TriForce, given: dict[str, Any], want: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the decoder's own `generate`; transformers' hears all else as it was said."""
    heard: list[Any] = []
    monkeypatch.setattr(target, "generate", lambda ids, **options: heard.append(options) or ids)
    decoder.generate(IDS, max_new_tokens=4, **given)
    assert heard == [{"custom_generate": decoder, "max_new_tokens": 4, **want}]


@pytest.mark.parametrize(
    ("middle", "stack", "want"),
    [
        ("quantspec(bits=4)", "quantspec", True),
        ("quantspec(bits=4) + host", "quantspec + host", True),
        ("quantspec(bits=4)", "quantspec + host", False),
        ("h2o(budget=24) + quantspec(bits=4)", "quantspec", False),
        ("quantspec", "quantspec(bits=4)", False),
        ("kivi", "kivi", False),
        ("quantspec(bits=4)", "quantspec(bits=4)", False),
    ],
)
def test_a_middle_reads_the_targets_codes_where_nothing_but_the_codes_differs(
    middle: str, stack: str, want: bool
) -> None:
    assert coarse_of(Stack.of(middle), Stack.of(stack)) is want


def test_whatever_else_a_model_reads_with_its_tokens_is_refused() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=128, n_embd=32, n_layer=2, n_head=2)).eval()
    decoder, types = TriForce(model, "lookup", None), torch.ones_like(IDS)
    with pytest.raises(ModelError, match="'token_type_ids' would be passed over"):
        decoder.generate(IDS, token_type_ids=types, max_new_tokens=4, pad_token_id=0)


@pytest.mark.parametrize("name", ["num_beams", "contrastive", "dola", "prompt lookup", "assistant_model"])
def test_a_compiled_decoder_refuses_other_ways_of_decoding_as_well(target: Any, name: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[name][1]):
        kvengine.compile_decode(target, "eager").generate(
            IDS, **{"max_new_tokens": 4, "do_sample": False, **REFUSED[name][0]}
        )


@pytest.mark.parametrize("gamma, drafted", [((1, 6), 7), ("auto", Adaptive().limit)], ids=str)
@pytest.mark.parametrize("cheap", ["quest(budget={0}, page=1)", "h2o(budget={0})", "streaming(sinks=0, recent={0})"])
def test_a_cheap_cache_holds_the_last_token_and_all_that_is_drafted_and_one(
    cheap: str, gamma: Gamma, drafted: int
) -> None:
    """The last token of the text, and those drafted behind it, and something besides to read."""
    with pytest.raises(PolicyError, match=f"holds {drafted + 1} tokens"):
        check_room("middle", Stack.parse(cheap.format(drafted + 1)), gamma)
    check_room("middle", Stack.parse(cheap.format(drafted + 2)), gamma)
    check_room("middle", Stack.parse("h2o(budget=0.01)"), gamma)  # of a prompt that is yet to come


def test_trees_are_refused_where_any_layer_of_the_target_acts_on_each_token() -> None:
    """The official D2O leaves the first two layers and the last alone: of three layers it spares all, of four one judges."""
    stack = "d2o(budget=12, form='official')"
    with pytest.raises(UnsupportedPolicy, match="drafts trees.*would not have its law"):
        TriForce(kvengine.patch(llama(num_hidden_layers=4)), "recycling", None, stack=stack)
    spared = kvengine.patch(llama(num_hidden_layers=3))
    plain, trees = (TriForce(spared, draft, None, stack=stack) for draft in (None, "recycling"))
    assert torch.equal(*(x.generate(IDS, max_new_tokens=8, do_sample=False) for x in (plain, trees)))


@pytest.mark.parametrize("options", [{"in_place": True}, {"refresh": Refresh(every=8)}], ids=str)
def test_how_a_middle_reads_is_refused_without_one(target: Any, options: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="says how a middle reads, and middle=None"):
        TriForce(target, "lookup", None, **options)


def test_models_that_were_unpatched_meanwhile_are_named() -> None:
    models = [llama(), llama(num_hidden_layers=2)]
    decoder = TriForce(*models, middle=None)
    for model in models:
        kvengine.unpatch(model)
        with pytest.raises(ModelError, match="has been unpatched since; call kvengine.patch"):
            decoder.generate(IDS, max_new_tokens=4)
        kvengine.patch(model)
    assert decoder.generate(IDS, max_new_tokens=4, do_sample=False).shape == (1, 64)


@pytest.mark.parametrize("draft", ["lookup", "recycling", None])
def test_widths_of_a_tree_that_no_model_drafts_are_refused(target: Any, draft: str | None) -> None:
    with pytest.raises(PolicyError, match="tree that a small model drafts"):
        TriForce(target, draft, QUEST, widths=(3, 2))


@pytest.mark.parametrize("widths", [(), (2, 0)])
def test_a_tree_without_branches_is_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(PolicyError, match="counts of at least 1"):
        Branching(None, None, None, widths)  # type: ignore[arg-type]


def test_numbers_of_a_command_are_whole() -> None:
    assert numbers("1, 6") == [1, 6]
    with pytest.raises(EvaluationError, match="'1,x' is not a list of whole numbers"):
        numbers("1,x")


def test_arguments_that_say_nothing_are_none() -> None:
    """`generate` hands such on to models that see, where a prompt has no image."""
    check_arguments(GenerationConfig(), {"token_type_ids": None, "images": {}})
    with pytest.raises(ModelError, match="'token_type_ids' would be passed over"):
        check_arguments(GenerationConfig(), {"token_type_ids": torch.zeros(1, 2)})
