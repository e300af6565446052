"""What serves and evaluates models, as it drives a patched one."""

from typing import Any

import pytest
from support import llama, one, patched
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

import kvengine
from kvengine.errors import ModelError

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
