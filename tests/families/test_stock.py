"""The tiny models are fit to compare caches with: they generate, mind padding, and use all of their context."""

import pytest
import torch
from families import configs

LENGTH = 20


@pytest.fixture(params=configs.parameters())
def name(request: pytest.FixtureRequest) -> str:
    if not configs.exists(request.param):
        pytest.skip(f"this transformers has no {configs.FAMILIES[request.param].model}")
    return str(request.param)


def greedy(model: torch.nn.Module, batch: dict[str, torch.Tensor], count: int = 8) -> torch.Tensor:
    return model.generate(**batch, max_new_tokens=count, do_sample=False)[:, batch["input_ids"].shape[1] :]


def test_greedy_text_of_a_padded_batch(name: str) -> None:
    """Each row's text is what the row gives alone, and the text is no single token repeated."""
    model, batch = configs.build(name), configs.padded_batch(LENGTH)
    text = greedy(model, batch)
    assert text.shape == (3, 8) and len(text.unique()) >= 6
    for row, mask in enumerate(batch["attention_mask"].bool()):
        ids = batch["input_ids"][row, mask][None]
        alone = greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        assert torch.equal(alone[0], text[row])


def test_the_first_token_still_matters_at_the_end(name: str) -> None:
    """A cache that lost its oldest token would show; a model that ignores it could not tell."""
    model, ids = configs.build(name), configs.padded_batch(LENGTH)["input_ids"][:1]
    other = ids.clone()
    other[0, 0] = 1 + other[0, 0] % (configs.VOCABULARY - 1)
    with torch.no_grad():
        a, b = model(ids).logits[0, -1], model(other).logits[0, -1]
    assert a.isfinite().all()
    moved = (a - b).abs().max() / a.std()
    assert moved > (0 if configs.FAMILIES[name].caches == ("window",) else 0.01)


def test_building_twice_gives_the_same_model(name: str) -> None:
    ids = configs.padded_batch(LENGTH)["input_ids"][:1]
    with torch.no_grad():
        assert torch.equal(configs.build(name)(ids).logits, configs.build(name)(ids).logits)
