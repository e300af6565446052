"""Models whose prompts are not read from left to right alone: an image's tokens, or a whole prefix, see each other."""

import pytest
import torch
import transformers
from families.configs import BASE, VOCABULARY, padded_batch

import kvengine
from kvengine.errors import UnsupportedPolicy

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("text", ["full", "quest(budget=500)"])
def test_a_text_model_that_is_handed_its_mask_takes_it(text: str) -> None:
    """PaliGemma makes the mask, and its text model asks for one again."""
    found = transformers.PaliGemmaForConditionalGeneration
    options = BASE | {"model_type": "gemma"}
    torch.manual_seed(0)
    config = found.config_class(text_config=options, vision_config=VISION | {"projection_dim": 64}, projection_dim=64)
    config.image_token_id = VOCABULARY - 1
    model = found(config).float().eval()
    model.generation_config.eos_token_id = None
    batch = padded_batch()
    types = torch.zeros_like(batch["input_ids"])
    types[:, 15:] = 1

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(**batch, token_type_ids=types, use_cache=False).logits
        return model.generate(**batch, max_new_tokens=12, do_sample=False), logits[:, -1]

    with torch.no_grad():
        want = run()
        kvengine.patch(model, text)
        for mine, stock in zip(run(), want, strict=True):
            torch.testing.assert_close(mine, stock)
        plain = model(**batch, token_type_ids=types).logits[:, -1]
        cached = model(**batch, token_type_ids=types, cache=kvengine.EngineCache(model)).logits[:, -1]
        torch.testing.assert_close(cached, plain)


@pytest.mark.parametrize("text", ["ashape(sinks=2, local=8)", "duo(prompt='streaming', sinks=2, recent=8)"])
def test_a_prompt_with_images_is_not_read_as_if_it_were_text(text: str) -> None:
    """An image's tokens see each other; a prefill pattern would let each see the earlier ones only."""
    found = transformers.Gemma3ForConditionalGeneration
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    torch.manual_seed(0)
    options = BASE | layers | {"query_pre_attn_scalar": 16}
    model = found(found.config_class(text_config=options, vision_config=VISION, image_token_id=VOCABULARY - 1)).eval()
    ids = padded_batch()["input_ids"][:1]
    types = torch.zeros_like(ids)
    types[:, 4:12] = 1
    with torch.no_grad():
        want = model(ids, token_type_ids=types).logits
        assert not torch.allclose(model(ids, token_type_ids=types * 0).logits, want)
        for policy in ("full", "snapkv(budget=12, window=4)", "kvzip(budget=12, chunk=8, carry=2)"):
            cache = kvengine.EngineCache(kvengine.patch(model, policy))
            torch.testing.assert_close(model(ids, token_type_ids=types, cache=cache).logits, want)
        kvengine.patch(model, text)
        with pytest.raises(UnsupportedPolicy, match="tokens see later ones"):
            model(ids, token_type_ids=types, cache=kvengine.EngineCache(model))
        model(ids, token_type_ids=types * 0, cache=kvengine.EngineCache(model))
