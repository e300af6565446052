"""The Hugging Face edge: everything that `generate` does, on a patched model."""

import copy
from typing import Any

import pytest
import torch
from support import SMALL, Bare, greedy, llama, one, patched, prompts

import kvengine
from kvengine.errors import CacheError, ModelError, PolicyError, UnknownPolicy, UnsupportedPolicy
from kvengine.hf.cache import STATE
from kvengine.hf.names import CACHE

WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams and several returned": {"num_beams": 4, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 13},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate_is_as_before(way: str) -> None:
    want = greedy(llama(), prompts(), **WAYS[way])
    assert torch.equal(greedy(patched("full"), prompts(), **WAYS[way]), want)


def test_sampling_is_as_before() -> None:
    found = []
    for model in (llama(), patched("full")):
        torch.manual_seed(5)
        found.append(model.generate(**prompts(), max_new_tokens=20, do_sample=True, num_return_sequences=2))
    assert torch.equal(*found)


@pytest.mark.parametrize("text", ["full", "snapkv(budget=24, window=6)", "quest(budget=24, page=4)", "h2o(budget=24)"])
def test_beam_search_with_one_beam_each_is_greedy(text: str) -> None:
    """Rows are reordered and repeated with all that they hold."""
    model, batch = patched(text), prompts()
    doubled = {k: v.repeat_interleave(2, 0) for k, v in batch.items()}
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        position = (doubled["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = model(**doubled, position_ids=position, cache=cache).logits[:, -1]
        cache.reorder_cache(torch.tensor([1, 0, 3, 2, 5, 4]))
        cache.batch_select_indices(torch.tensor([0, 2, 4]))
        found = []
        mask = batch["attention_mask"]
        next_token = logits[::2].argmax(-1, keepdim=True)
        for _ in range(20):
            found.append(next_token)
            mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
            position = mask.cumsum(1)[:, -1:] - 1
            out = model(next_token, attention_mask=mask, position_ids=position, cache=cache)
            next_token = out.logits[:, -1].argmax(-1, keepdim=True)
    assert torch.equal(torch.cat(found, 1), greedy(model, batch, 20))


def test_a_count_of_tokens_may_be_a_tensor() -> None:
    """As assisted decoding of transformers 5.17 has it."""
    model = patched("full")
    cache, ids = kvengine.EngineCache(model), one()["input_ids"]
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, cache=cache)
        cache.crop(torch.tensor(-2))
        again = model(ids[:, -2:], cache=cache).logits
        assert torch.allclose(again, llama()(ids).logits[:, -2:], atol=1e-5)


def test_an_assistant_model_gives_the_greedy_text() -> None:
    model, assistant = patched("full"), llama(seed=1, num_hidden_layers=1)
    batch = one()
    want = greedy(llama(), batch)
    assert torch.equal(greedy(model, batch, assistant_model=assistant), want)
    assert torch.equal(greedy(model, batch, assistant_model=kvengine.patch(assistant, "streaming(recent=12)")), want)


@pytest.mark.parametrize("text", ["h2o(budget=24)", "quest(budget=24, page=4)", "kivi(group=8, residual=8) + host"])
def test_an_assistant_under_a_policy_drafts_behind_a_single_token(text: str) -> None:
    """It is asked to forget the prompt's last token then, which is all that it holds."""
    model, assistant, batch = patched("full"), patched(text, seed=3), one(1)
    want = greedy(llama(), batch)
    assert torch.equal(greedy(model, batch, assistant_model=assistant), want)


def test_what_was_accepted_of_drafts_is_no_prompt_to_an_assistant() -> None:
    """Its prompt is judged once, at its last token but one, and what comes behind is decoded."""
    assistant, caches = patched("snapkv(budget=24, window=6)"), []
    assistant.register_forward_pre_hook(lambda _, __, given: caches.append(given[CACHE]), with_kwargs=True)
    greedy(patched("full"), one(), 6, assistant_model=assistant)
    assert caches[0].seen > 63 and int(caches[0].stats().held.max()) == 24 + caches[0].seen - 60


@torch.no_grad()
def test_a_prompt_of_which_a_part_was_read_goes_on() -> None:
    """Announced anew, and where somebody stops to follow up; one token ends it if its length is not told."""
    model, ids = patched("snapkv(budget=24, window=6)"), one()["input_ids"]
    cache = kvengine.EngineCache(model)
    cache.announce(61)
    model(ids[:, :30], cache=cache)
    cache.announce(61)
    cache.follow_up(False)
    model(ids[:, 30:40], cache=cache)
    assert cache.half_read
    cache.announce(None)
    model(ids[:, 40:41], cache=cache)
    assert int(cache.stats().held.max()) == 24 and not cache.half_read


def test_a_text_that_is_cached_but_for_its_last_token_is_decoded_on() -> None:
    """That one is no prompt, by whose end all would be judged anew."""
    model, batch, found = patched("snapkv(budget=24, window=6)"), one(), []
    for counts in ((12,), (6, 6)):
        cache, ids = kvengine.EngineCache(model), batch["input_ids"]
        for count in counts:
            ids = torch.cat([ids, greedy(model, {"input_ids": ids}, count, cache=cache)], 1)
        found.append((ids, cache.stats().held))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("text", ["full", "snapkv(budget=40, window=6)", "quest(budget=32, page=4)"])
def test_a_conversation_goes_on_in_one_cache(text: str) -> None:
    """The second turn comes with all ids; what is cached is not read again."""
    model, batch = patched(text), one()
    cache = kvengine.EngineCache(model)
    first = model.generate(**batch, max_new_tokens=10, do_sample=False, cache=cache)
    turn = torch.cat([first, one(9, seed=3)["input_ids"]], 1)
    second = model.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=10, do_sample=False, cache=cache)
    assert cache.seen == turn.shape[1] + 9
    if text == "full":
        assert torch.equal(
            second, llama().generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=10, do_sample=False)
        )


@pytest.mark.parametrize("text", ["full", "h2o(budget=24)", "snapkv(budget=24, window=6)", "kivi(group=8, residual=8)"])
def test_resuming_is_as_if_never_stopped(text: str) -> None:
    model, batch = patched(text), one()
    cache = kvengine.EngineCache(model)
    part = model.generate(**batch, max_new_tokens=7, do_sample=False, cache=cache)
    rest = model.generate(part, attention_mask=torch.ones_like(part), max_new_tokens=13, do_sample=False, cache=cache)
    assert torch.equal(rest[:, 61:], greedy(model, batch, 20))


def test_training_is_untouched() -> None:
    batch = one()["input_ids"]
    norms = []
    for model in (llama(), patched("quest(budget=24)")):
        model.train()
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
        model(batch, labels=batch, use_cache=False).loss.backward()
        norms.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*norms, strict=True))


def test_a_stock_cache_on_a_patched_model_is_stock() -> None:
    from transformers import DynamicCache

    model = patched("streaming(recent=12)")
    found = greedy(model, prompts(), cache=DynamicCache(config=model.config))
    assert torch.equal(found, greedy(llama(), prompts()))


def test_unpatch_restores_the_model_exactly() -> None:
    model = llama()
    before = {k: dict(m.__dict__) for k, m in model.named_modules()}
    config = copy.deepcopy(model.config.__dict__)
    kvengine.unpatch(kvengine.patch(model, "quest + kivi"))
    assert model.config.__dict__ == config and not hasattr(model, STATE)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs


def test_patched_is_a_context_and_nests() -> None:
    model = llama()
    with kvengine.patched(model, "streaming(recent=12)"):
        with kvengine.patched(model, "h2o"):
            assert str(getattr(model, STATE).chosen.stack) == "h2o"
        assert str(getattr(model, STATE).chosen.stack) == "streaming(recent=12)"
    assert not hasattr(model, STATE)
    with pytest.raises(RuntimeError, match="boom"), kvengine.patched(model):
        raise RuntimeError("boom")
    assert not hasattr(model, STATE)


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model = patched("streaming(recent=12)")
    twin = copy.deepcopy(model)
    assert torch.equal(greedy(twin, prompts()), greedy(model, prompts()))
    with pytest.raises(CacheError, match="another model"), torch.no_grad():
        twin(one()["input_ids"], cache=kvengine.EngineCache(model))


def test_after_a_reset_a_shorter_prompt_is_judged_at_its_own_end() -> None:
    model = patched("snapkv(budget=12, window=4)")
    cache = kvengine.EngineCache(model)
    greedy(model, one(200), 1, cache=cache)
    cache.reset()
    with torch.no_grad():
        model(**one(50), cache=cache)
    assert (cache.stats().held == 12).all()


def test_vectors_before_a_prompt_are_part_of_it() -> None:
    """Prompt tuning puts them there within the model, where `generate` does not count them."""
    model = patched("snapkv(budget=24, window=6)")
    prepare, soft = (
        model.prepare_inputs_for_generation,
        torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1)),
    )

    def tuned(ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(ids, **kwargs)
        if kwargs[CACHE].seen:
            return inputs | {"attention_mask": None, "position_ids": None}
        vectors = torch.cat([soft, model.get_input_embeddings()(inputs["input_ids"])], 1)
        return {"inputs_embeds": vectors, CACHE: kwargs[CACHE], "use_cache": True}

    model.prepare_inputs_for_generation = tuned
    cache = kvengine.EngineCache(model)
    greedy(model, one(), 4, cache=cache)
    assert cache.seen == 61 + 5 + 3 and (cache.stats().held == 24 + 3).all()


def test_a_mask_of_ones_costs_no_masked_attention() -> None:
    """transformers 5.17 keeps such a mask; slots must still count as full."""
    model = patched("full")
    cache = kvengine.EngineCache(model)
    mask = torch.ones(1, 61, dtype=torch.long)
    with torch.no_grad():
        model(one()["input_ids"], attention_mask=mask, cache=cache)
        model(one(1)["input_ids"], attention_mask=torch.ones(1, 62, dtype=torch.long), cache=cache)
    assert all(part.lane.tail.clean for layer in cache.engines for part in layer.parts)


def test_a_mask_given_as_a_tensor_works_where_everything_is_kept() -> None:
    ids = one(20)["input_ids"]
    mask = torch.zeros(1, 1, 20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), torch.finfo(torch.float32).min)
    model = patched("full")
    with torch.no_grad():
        want = llama()(ids).logits
        found = model(ids, attention_mask=mask, cache=kvengine.EngineCache(model)).logits
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("name", [name for name, text in SMALL.items() if str(kvengine.Stack.parse(text)) != "full"])
def test_a_mask_given_as_a_tensor_is_refused_where_a_policy_would_be_passed_over(name: str) -> None:
    ids, model = one(40)["input_ids"], patched(SMALL[name])
    mask = torch.zeros(1, 1, 40, 40).masked_fill(torch.ones(40, 40).triu(1).bool(), torch.finfo(torch.float32).min)
    with torch.no_grad(), pytest.raises(UnsupportedPolicy, match="a mask given as a tensor is read by the model's own"):
        model(ids, attention_mask=mask, cache=kvengine.EngineCache(model))


def test_a_cache_may_be_cropped_while_it_is_whole() -> None:
    model, ids = patched("full"), one()["input_ids"]
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.crop(-20)
        again = model(ids[:, 41:], cache=cache).logits
        torch.testing.assert_close(again, llama()(ids).logits[:, 41:])


def test_reset_empties_a_cache() -> None:
    model, batch = patched("h2o(budget=24)"), one()
    cache = kvengine.EngineCache(model)
    want = greedy(model, batch, cache=cache)
    cache.reset()
    assert cache.seen == 0 and torch.equal(greedy(model, batch, cache=cache), want)


@pytest.mark.slow
def test_a_compiled_forward_gives_the_same_tokens() -> None:
    model, batch = patched("full"), prompts()
    want = greedy(model, batch, 8)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(greedy(model, batch, 8), want)


# ---- what cannot work says so


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cache_implementation": "static"}, "brings its own cache. Drop it"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "never forms the attention matrix"),
    ],
)
def test_generate_refuses(options: dict[str, object], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        greedy(patched("full"), one(), **options)


def test_forward_with_attentions_is_refused() -> None:
    model = patched("full")
    with pytest.raises(ModelError, match="never forms"), torch.no_grad():
        model(one()["input_ids"], cache=kvengine.EngineCache(model), output_attentions=True)


def test_a_generate_that_fails_before_its_loop_is_over() -> None:
    """A configuration that always asks for attentions is heeded nowhere but in a pass of one's own."""
    model = patched("full")
    cache = kvengine.EngineCache(model)
    model.config._output_attentions = True  # before it was patched, it may be asked for
    greedy(model, one(), 2, cache=kvengine.EngineCache(model))
    with pytest.raises(ValueError, match="tokenizer"):
        greedy(model, one(), 2, cache=cache, stop_strings="x")
    with pytest.raises(ModelError, match="never forms"), torch.no_grad():
        model(one()["input_ids"], cache=cache)


def test_unpatchable_models_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    with pytest.raises(ModelError, match="expected a transformers PreTrainedModel, got Linear"):
        kvengine.patch(torch.nn.Linear(2, 2))
    tiny = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
    with pytest.raises(ModelError, match="encoder-decoder"):
        kvengine.patch(T5ForConditionalGeneration(tiny))


def test_a_cache_needs_a_patched_model() -> None:
    model = llama()
    with pytest.raises(ModelError, match=r"call kvengine.patch\(model\) first"):
        kvengine.EngineCache(model)
    cache = kvengine.EngineCache(kvengine.patch(model))
    kvengine.unpatch(model)
    with torch.no_grad(), pytest.raises(ModelError, match="not patched"):
        model(one()["input_ids"], **{CACHE: cache})
        model(one()["input_ids"], **{CACHE: cache})


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("quset", UnknownPolicy, "no policy is called 'quset'. Did you mean 'quest'"),
        ("quest(bugdet=3)", UnknownPolicy, "Did you mean 'budget'"),
        ("quest(budget=0)", PolicyError, "budget=0 must be 1 to 2\\*\\*30 tokens"),
        ("quest(budget=1.5)", PolicyError, "budget=1.5 must be 1 to 2\\*\\*30 tokens"),
        ("h2o(budget=True)", PolicyError, "budget=True must be"),
        ("h2o + snapkv", UnsupportedPolicy, "'h2o' and 'snapkv' both choose the retention"),
        ("host + shadowkv", UnsupportedPolicy, "'host' and 'host' of 'shadowkv' both choose the placement"),
        ("h2o + quest", UnsupportedPolicy, "reads only some of them"),
        ("", PolicyError, "is not a policy string"),
        ("quest(", PolicyError, "is not a policy string"),
        ("quest(64)", PolicyError, "not of the form"),
        ("quest(budget={[]: 1})", PolicyError, "plain numbers"),
        (f"quest(budget={'-' * 9999}1)", PolicyError, "is not a policy string"),
        ("\udcff", PolicyError, "is not a policy string"),  # what a byte that is no UTF-8 arrives as
        ("pyramidkv(beta=1e400)", PolicyError, "beta=inf must be a number"),
        ("expected_attention(epsilon=1e400)", PolicyError, "epsilon=inf must be a number"),
        ("remote(ttl=1e400)", PolicyError, "ttl=inf must be a positive number of seconds"),
        ("remote(disk={})", PolicyError, "disk={} must be a number of bytes"),
        ("kivi(bits=4, bits=2)", PolicyError, "gives an option twice"),
        ("quest(budget=x)", PolicyError, "plain numbers"),
        ("quest(reduce=each)", PolicyError, "text in quotes"),
        ("remote(url=redis://cache:6379/0)", PolicyError, "text in quotes"),
        ("kivi(bits=3)", PolicyError, "bits=3 must be one of 1, 2, 4, 8"),
        ("kivi(bits=True)", PolicyError, "bits=True must be one of 1, 2, 4, 8"),
        ("kivi(bits=4.0)", PolicyError, "bits=4.0 must be one of 1, 2, 4, 8"),
        ("zipcache(high=2, low=4)", PolicyError, "low=4 must not exceed high=2"),
        ("h2o(recent=32)", PolicyError, "recent=32 must be a fraction between 0 and 1"),
        ("h2o(decode='no')", PolicyError, "decode='no' must be True or False"),
        ("d2o(least='little')", PolicyError, "least='little' must be a fraction"),
        ("duo(pattern=3)", PolicyError, "pattern=3 must be a text in quotes"),
        ("duo(sparsity='half')", PolicyError, "sparsity='half' must lie between 0"),
        ("disk(folder=7)", PolicyError, "folder=7 must be a text"),
        ("snapkv(budget=10000000000000000000000)", PolicyError, "budget=10+ must be 1 to 2\\*\\*30 tokens"),
        ("snapkv(budget=16)", PolicyError, "must exceed window"),
        ("snapkv(kernel=4)", PolicyError, "must be odd"),
        ("duo(pattern='/nowhere')", PolicyError, "cannot read the pattern"),
    ],
)
def test_wrong_policies_are_refused(text: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        model = patched(text)
        greedy(model, one())


def test_another_batch_or_dtype_is_refused() -> None:
    model = patched("full")
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(one()["input_ids"], cache=cache)
        with pytest.raises(CacheError, match="holds 1 sequences"):
            model(prompts(2, 1)["input_ids"], cache=cache)


def test_a_cache_of_another_dtype_is_refused() -> None:
    model = patched("full")
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(one()["input_ids"], cache=cache)
        model.to(torch.bfloat16)
        with pytest.raises(CacheError, match="torch.float32"):
            model(one(1)["input_ids"], cache=cache)


def test_a_cache_of_another_device_is_refused() -> None:
    layer = Bare("full")
    layer.feed(20)
    for name in "qkv":
        setattr(layer, name, getattr(layer, name).to("meta"))
    for count in (1, 3):
        with pytest.raises(CacheError, match="on cpu.*on meta.*model.to"):
            layer.feed(count)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_mask_of_another_number_of_rows_is_refused(rows: int) -> None:
    model, mask = patched("streaming(sinks=2, recent=12)"), prompts()["attention_mask"][[1, 1, 2, 2][:rows]]
    ids = prompts()["input_ids"]
    with pytest.raises(ModelError, match=rf"shape \({rows}, 61\), but there are 3 rows"):
        model(ids, attention_mask=mask, cache=kvengine.EngineCache(model))
    model(ids, attention_mask=torch.ones_like(mask), cache=kvengine.EngineCache(model))


def test_going_back_too_far_is_refused() -> None:
    model = patched("streaming(sinks=2, recent=12)")
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(one()["input_ids"], cache=cache)
        with pytest.raises(CacheError, match="activate_past_recording"):
            cache.crop(-3)


def test_reordering_a_pending_draft_is_refused() -> None:
    model = patched("streaming(sinks=2, recent=12)")
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(one()["input_ids"], cache=cache)
        cache.activate_past_recording()
        model(one(3)["input_ids"], cache=cache)
        with pytest.raises(CacheError, match="draft is pending"):
            cache.reorder_cache(torch.tensor([0]))
