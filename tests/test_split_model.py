"""A model whose layers lie on two devices, as `device_map="auto"` splits one that is too large: all is as on one device.

The second device is the pretended one, so whatever of one layer's meets what is on another's device raises.
"""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import configs
from support import MIXED, SMALL, every, greedy, llama, prompts
from support_device import CPU, CUDA, Device, Pretended, pretended, there
from torch import Tensor
from torch.utils._pytree import tree_map

import kvengine
from kvengine import saved
from kvengine.errors import UnsupportedPolicy
from kvengine.hf.devices import first_device, layer_devices, offloaded
from kvengine.offload import stores
from kvengine.prefix import Prefix
from kvengine.speculative import TriForce
from kvengine.stack import Stack

STACKS = list({Stack.parse(text): text for text in (*SMALL.values(), *MIXED)}.values())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return pretended(monkeypatch)


def brought(x: Any) -> Any:
    return shared(x, brought) if isinstance(x, UserDict) else x.inner if isinstance(x, Pretended) else x


def there_too(x: Any) -> Any:
    return shared(x, there_too) if isinstance(x, UserDict) else there(x) if isinstance(x, Tensor) else x


def shared(kept: UserDict[str, Any], to: Any) -> UserDict[str, Any]:
    """What layers with shared keys leave for one another; accelerate has it move itself, in place."""
    kept.data = tree_map(to, kept.data)
    return kept


def split(model: Any, first: bool = False) -> Any:
    """Move the first or the last layer, and what modules are given when they are called, as accelerate's hooks do."""
    layers = getattr(model.model, "language_model", model.model).layers
    gone = there(layers[0 if first else -1])
    inside = set(gone.modules())
    for module in (x for x in model.modules() if x in set(layers) or x._parameters):
        to = there_too if module in inside else brought
        module.register_forward_pre_hook(lambda _, args, kwargs, to=to: tree_map(to, (args, kwargs)), with_kwargs=True)
    return model


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(5, STACKS, 2))
@pytest.mark.parametrize(
    "first", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["the last layer", "the first layer"]
)
def test_text(text: str, first: bool, device: Device) -> None:
    model, batch = llama(), prompts(2)
    with kvengine.patched(model, text):
        want = greedy(model, batch, 8)
    with device, kvengine.patched(split(model, first), text):
        assert greedy(model, batch, 8).tolist() == want.tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["snapkv(budget=12, window=4)", *(
    pytest.param(text, marks=pytest.mark.slow) for text in ("full", "quest(budget=24, page=4)"))])  # fmt: skip
@pytest.mark.parametrize("family", ["gemma2", "gemma3n", "gemma4", "minicpm3", "cohere2"])
def test_families(family: str, text: str, device: Device) -> None:
    """Windows of transformers' own, layers that share keys, latents."""
    model, batch = configs.build(family), configs.padded_batch()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with kvengine.patched(model, text):
        want = model.generate(**batch, **options)
    with device, kvengine.patched(split(model), text):
        assert model.generate(**batch, **options).tolist() == want.tolist()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "text", every(2, ["h2o(budget=24)", "full", "snapkv(budget=24, window=6) + kivi(group=8, residual=8)"])
)
def test_turns_beams_and_chunks(text: str, device: Device) -> None:
    """Later turns hide tokens, and their masks come with the first layer's device."""
    model, batch = llama(), prompts(2)

    def said() -> list[Any]:
        cache = kvengine.EngineCache(model)
        out = greedy(model, batch, 4, cache=cache)
        mask = torch.cat([batch["attention_mask"], batch["attention_mask"].new_ones(2, 9)], 1)
        mask[0, -5] = 0
        more = {"input_ids": torch.cat([batch["input_ids"], out, out[:, :1].expand(-1, 5)], 1), "attention_mask": mask}
        turns = greedy(model, more, 4, cache=cache)
        beams = greedy(model, batch, 4, num_beams=2)
        chunks = greedy(model, batch, 4, prefill_chunk_size=16)
        return [turns.tolist(), beams.tolist(), chunks.tolist()]

    with kvengine.patched(model, text):
        want = said()
    with device, kvengine.patched(split(model), text):
        assert said() == want


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draft, middle", [(None, "quest(budget=24, page=4)"), ("recycling", "streaming(sinks=2, recent=20)"),
    *(pytest.param(draft, None, marks=pytest.mark.slow) for draft in ("lookup", "recycling"))])  # fmt: skip
def test_speculation(draft: str | None, middle: str | None, device: Device) -> None:
    """A tree's mask is made where the tokens are, and read in every layer."""
    model, batch = llama(), prompts(1)
    with kvengine.patched(model):
        want = greedy(model, batch, 12)
    with device, kvengine.patched(split(model)):
        decoder = TriForce(model, draft, middle, gamma=(1, 3))
        assert decoder.generate(batch["input_ids"], max_new_tokens=12)[:, 61:].tolist() == want.tolist()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("draft_there", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"temperature": 0.9, "seed": 3},
        pytest.param({"temperature": 0.9, "seed": 3, "coupled": True}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("more", [{}, pytest.param({"middle": "quest(budget=24, page=4)"}, marks=pytest.mark.slow),
                                  {"widths": (2, 2)}])  # fmt: skip
def test_a_draft_model_on_another_device(
    more: dict[str, Any], options: dict[str, Any], draft_there: bool, device: Device
) -> None:
    ids = prompts(1)["input_ids"]

    def said(target: Any, draft: Any, ids: Tensor) -> Any:
        decoder = TriForce(kvengine.patch(target), draft, **{"middle": None, "gamma": (2, 3), **more})
        return decoder.generate(ids, max_new_tokens=8, **options).tolist()

    want = said(llama(), llama(3), ids)
    with device:
        if draft_there:
            assert said(llama(), there(llama(3)), ids) == want
        else:
            assert said(there(llama()), llama(3), there(ids)) == want


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "text", ["full", "snapkv(budget=24, window=6)", "kivi(group=8, residual=8) + quest(budget=24, page=8)"]
)
def test_a_saved_session_goes_on_where_its_layers_are(text: str, device: Device, tmp_path: Path) -> None:
    model, batch = llama(), prompts(2)
    with device, kvengine.patched(split(model), text):
        cache = kvengine.EngineCache(model)
        out = greedy(model, batch, 4, cache=cache)
        saved.save(cache, tmp_path / "session", model)
        again = saved.load(model, tmp_path / "session")
        for one, other in zip(cache.engines, again.engines, strict=True):
            assert one.parts[0].lane.first.device == other.parts[0].lane.first.device
        assert [layer.parts[0].lane.first.device for layer in again.engines] == [CPU, CUDA]
        more = {"input_ids": torch.cat([batch["input_ids"], out, out[:, :1].expand(-1, 5)], 1)}
        more["attention_mask"] = torch.cat([batch["attention_mask"], torch.ones(2, 9, dtype=torch.long)], 1)
        want, got = (greedy(model, more, 4, cache=one) for one in (cache, again))
        assert got.tolist() == want.tolist()


def test_a_stored_prefix_enters_where_its_layers_are(device: Device, tmp_path: Path) -> None:
    model, ids = llama(), prompts(1)["input_ids"]
    with device, kvengine.patched(split(model)):
        reuse = Prefix(model, stores.Store(stores.Files(tmp_path, sync="none")), chunk=16)
        cache = reuse.fetch(ids)
        want = greedy(model, {"input_ids": ids}, 4, cache=cache)
        assert reuse.keep(ids, cache) == 3
        reuse.store.drain()
        found = reuse.fetch(ids)
        assert found.seen == 48
        assert greedy(model, {"input_ids": ids}, 4, cache=found).tolist() == want.tolist()


def test_a_step_is_not_recorded(device: Device) -> None:
    model = llama()
    with device, kvengine.patched(split(model)), pytest.raises(UnsupportedPolicy, match="several devices"):
        greedy(model, prompts(2), 4, custom_generate=kvengine.compile_decode(model))


class Hook(SimpleNamespace):
    """What accelerate leaves on a module."""


@pytest.mark.parametrize("tied", [False, True])
def test_where_weights_come_when_they_are_needed(tied: bool) -> None:
    """A session of a model whose weights are offloaded is that of the model."""
    model, plain = (llama(tie_word_embeddings=tied) for _ in range(2))
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tied
    for part in (model.model.embed_tokens, model.model.layers[1].self_attn.q_proj):
        kept = {"weight": part.weight.detach().clone()}
        part._hf_hook = Hook(hooks=[Hook(execution_device="cuda:0", offload=True, weights_map=kept)])
        part.weight = torch.nn.Parameter(part.weight.to("meta"))
    assert saved.identity(model) == saved.identity(plain)
    kept["weight"].add_(1)
    assert saved.identity(model) != saved.identity(plain)
    assert layer_devices(model, 3) == [CPU, CUDA, CUDA] and first_device(model) == CUDA
    assert layer_devices(plain, 3) == [CPU, CPU, CPU] and first_device(plain) == CPU
    assert offloaded(model) and not offloaded(plain)


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # transformers 5.17, of the weights away
@pytest.mark.parametrize("text", ["full", "snapkv(budget=24, window=6) + kivi(group=8, residual=8)"])
@pytest.mark.parametrize("away", ["model.layers.1", "model.embed_tokens"])
def test_weights_on_disk(away: str, text: str, tmp_path: Path) -> None:
    """As accelerate leaves them with `device_map`, which hooks the modules itself."""
    model, batch = llama(), prompts(2)
    model.save_pretrained(tmp_path / "model")
    place = {
        name: "cpu" for name in ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    }
    place = place | {"model.rotary_emb": "cpu", away: "disk"}
    gone = type(model).from_pretrained(tmp_path / "model", device_map=place, offload_folder=tmp_path / "off")
    assert offloaded(gone) and not offloaded(model)
    with kvengine.patched(model, text), kvengine.patched(gone, text):
        caches = [kvengine.EngineCache(one) for one in (model, gone)]
        want, got = (greedy(one, batch, 8, cache=c) for one, c in zip((model, gone), caches, strict=True))
        assert got.tolist() == want.tolist()
        saved.save(caches[1], tmp_path / "session", gone)
        again = saved.load(model, tmp_path / "session")  # the weights are the same, wherever they are
        assert again.seen == caches[1].seen


@pytest.mark.parametrize("family", ["hrm_text", "gemma3n"])
def test_a_session_of_layers_that_are_no_modules_of_their_own(family: str, tmp_path: Path) -> None:
    """Whose weights run several times, or that read another's keys."""
    if not configs.exists(family):
        pytest.skip(f"this transformers has no {configs.FAMILIES[family].model}")
    model, ids = kvengine.patch(configs.build(family)), configs.padded_batch()["input_ids"]
    cache = kvengine.EngineCache(model)
    out = model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False)
    saved.save(cache, tmp_path / "session", model)
    said = [
        model.generate(out, cache=one, max_new_tokens=4, do_sample=False).tolist()
        for one in (saved.load(model, tmp_path / "session"), cache)
    ]
    assert said[0] == said[1]
