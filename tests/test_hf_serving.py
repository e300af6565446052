"""What serves and evaluates models, as it drives a patched one."""

from functools import partial, partialmethod
from typing import Any

import pytest
import torch
import transformers
from families import configs
from families.configs import BASE, VOCABULARY
from support import greedy, llama, one, patched, prompts
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

import kvengine
from kvengine.errors import ModelError
from kvengine.hf import trial
from kvengine.hf.names import CACHE

POLICY = "streaming(sinks=2, recent=14)"


def manager(model: Any) -> ContinuousBatchingManager:
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return ContinuousBatchingManager(model, config, ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64))


@pytest.mark.parametrize("way", ["made before the patch", "given another attention"])
@pytest.mark.parametrize("text", ["full", POLICY])
def test_a_manager_of_continuous_batches_is_refused_by_the_pass(text: str, way: str) -> None:
    """It calls the model, not what `patch` stands in for: the text was a wrong one, or the policy passed over."""
    model = llama()
    if way == "made before the patch":
        made = manager(model)
        if model.config._attn_implementation.startswith("paged|"):  # transformers 5.17
            with pytest.raises(ModelError, match="continuous batching alone"):
                kvengine.patch(model, text)
            return
        kvengine.patch(model, text)
    else:
        kvengine.patch(model, text).set_attn_implementation("sdpa")
        made = manager(model)
    made.start()
    try:
        made.add_request(one()["input_ids"][0].tolist(), max_new_tokens=6)
        found = made.get_result(timeout=60)
    finally:
        made.stop(block=True, timeout=60)
    assert found is not None and not found.generated_tokens
    assert "keeps its own paged cache" in str(found.error) and "kvengine.unpatch(model)" in str(found.error)


@pytest.mark.parametrize("ask", ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"])
def test_continuous_batching_is_refused(ask: str) -> None:
    with pytest.raises(ModelError, match="keeps its own paged cache"):
        getattr(patched("full"), ask)([[1, 2, 3]])


def test_a_model_loaded_for_continuous_batching_says_so_when_patched() -> None:
    model = llama()
    model.set_attn_implementation("paged|eager")
    with pytest.raises(ModelError, match=r"paged\|eager.*set_attn_implementation\('sdpa'\) first"):
        kvengine.patch(model, POLICY)


def checkpointed(model: Any, on: bool = True) -> Any:
    """A model in the midst of training."""
    new, old = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    names = (new, old) if on else (new.replace("enable", "disable"), old.replace("enable", "disable"))
    getattr(model, next(name for name in names if hasattr(model, name)))()
    return model.train()


@pytest.mark.parametrize("text", ["full", POLICY])
def test_text_made_while_training_with_checkpoints_is_refused(text: str) -> None:
    """Layers then drop the cache, and the model says each token by the one before it; transformers lets it."""
    model = checkpointed(patched(text))
    with pytest.raises(ModelError, match=r"drops the cache.*model.eval\(\) to generate"):
        greedy(model, prompts())
    with pytest.raises(ModelError, match="every pass would see its own tokens only"):
        model(**prompts(), cache=kvengine.EngineCache(model))
    assert torch.equal(greedy(model, prompts(), use_cache=False), greedy(llama(), prompts()))
    assert model(**prompts(), use_cache=True).get(CACHE) is None  # a step of training, by the book
    want = greedy(patched(text), prompts())
    assert torch.equal(greedy(model.eval(), prompts()), want)
    assert torch.equal(greedy(checkpointed(model, False), prompts()), want)


@pytest.mark.parametrize("text", ["full", POLICY])
def test_attention_dropout_is_refused_where_tokens_are_cached(text: str) -> None:
    """Prompts were read with it, and tokens decoded without."""
    model = kvengine.patch(llama(attention_dropout=0.5), text)
    want, cache = greedy(model, prompts()), kvengine.EngineCache(model)
    with pytest.raises(ModelError, match=r"attention dropout in training mode.*model.eval\(\)"):
        greedy(model.train(), prompts())
    model.eval()(**prompts(), cache=cache)
    with pytest.raises(ModelError, match="attention dropout"):
        model.train()(prompts()["input_ids"][:, :1], cache=cache)
    model(**prompts(), labels=prompts()["input_ids"]).loss.backward()
    assert torch.equal(greedy(model.eval(), prompts()), want)


def test_a_checkpointed_part_that_caches_nothing_is_no_matter() -> None:
    found: Any = transformers.Gemma3ForConditionalGeneration
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = BASE | {"query_pre_attn_scalar": 16, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    model = found(found.config_class(text_config=options, vision_config=vision, image_token_id=VOCABULARY - 1)).eval()
    want = greedy(kvengine.patch(model, POLICY), one(), 9)
    checkpointed(model.model.vision_tower)
    assert torch.equal(greedy(model.train(), one(), 9), want)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_pass_while_a_model_is_patched_runs_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's, say: in the middle of the trial, and wherever a part of the model gets a hook."""
    model, ids, found = configs.build(name), torch.randint(1, 128, (1, 20)), list[torch.Tensor | Exception]()
    hook, check = torch.nn.Module.register_forward_pre_hook, trial.check_brought

    def run() -> torch.Tensor:
        with monkeypatch.context() as unseen, torch.no_grad():
            unseen.setattr(torch.nn.Module, "register_forward_pre_hook", hook)
            return model(ids, use_cache=False).logits  # type: ignore[no-any-return]

    def meanwhile(do: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            found.append(run())
        except Exception as error:
            found.append(error)
        return do(*args, **kwargs)

    want = run()
    monkeypatch.setattr(trial, "check_brought", partial(meanwhile, check))
    monkeypatch.setattr(torch.nn.Module, "register_forward_pre_hook", partialmethod(partial(meanwhile, hook)))
    kvengine.patch(model)
    assert len(found) > 3 and all(isinstance(one, torch.Tensor) and torch.equal(one, want) for one in found)


def test_a_method_that_was_looked_up_before_the_model_was_unpatched_is_the_models_own() -> None:
    model = kvengine.patch(configs.build("llama"), "quest(budget=24, page=4)")
    mine = model._prepare_generation_config
    kvengine.unpatch(model)
    options, rest = mine(None, max_new_tokens=3)
    assert options.max_new_tokens == 3 and not rest
