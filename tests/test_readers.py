"""Later layers that read an earlier one's keys and values (Gemma 3n, Gemma 4): told what that one's queries were told."""

from typing import Any

import pytest
import torch
from families import configs
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SMALL, Bare, methods
from torch import Tensor

import kvengine
from kvengine.cache import LayerCache
from kvengine.policies import catalogue
from kvengine.readers import read, sources
from kvengine.session import Call, Session
from kvengine.stack import Stack

FAMILIES = ("gemma3n", "gemma4")
AXES = st.lists(st.sampled_from(methods()), min_size=1, max_size=4, unique_by=lambda name: catalogue()[name])


class Asked(LayerCache):
    """A layer with two later readers, which ask what the layer asked: one for all tokens of a pass, one for the last."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *rest: Any) -> Tensor:
        out = super().forward(q, k, v, call, *rest)
        some = q.shape[2] if self.stack.prefill.chooses else max(1, q.shape[2] // 3)  # else others' queries choose
        for n in (q.shape[2], some):
            again = read(self, q[:, :, q.shape[2] - n :], call, rest[-1] if len(rest) == 2 else None)
            real = torch.ones_like(out[:, -n:], dtype=torch.bool)
            if rest and rest[0] is not None:
                real &= rest[0][:, -n:, None, None]
            torch.testing.assert_close(again[real], out[:, -n:][real])
        assert not self.readers.moments and not self.readers.left
        assert all(part.lane.tail.shared is bool(part.lane.marks) for part in self.parts)  # else every token copies it
        return out


def pair(text: str, rows: int = 2) -> tuple[Bare, Bare]:
    alone, asked = Bare(text, rows=rows), Bare(text, rows=rows)
    asked.cache = Asked(Stack.parse(text), 0, 1, Session(rope=asked.cache.session.rope), readers=2)
    return alone, asked


PASSES = st.lists(
    st.tuples(
        st.sampled_from(["decode", "follow", "turn", "draft", "tree", "ragged", "ended"]),
        st.integers(1, 9),
        st.integers(0, 8),
    ),
    max_size=6,
)


@settings(max_examples=60)
@given(AXES, st.sampled_from([1, 7, 33, 60]), PASSES)
def test_a_reader_is_told_what_the_layer_is_told_and_leaves_no_trace(
    names: list[str], prompt: int, passes: list[tuple[str, int, int]]
) -> None:
    try:
        text = str(Stack.parse(" + ".join(SMALL[name] for name in names)))
        both = pair(text)
        outs = [one.feed(prompt) for one in both]
        for kind, n, other in passes:
            outs = [event(one, kind, n, other) for one in both]
            torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(one.feed(1) for one in both))
    except kvengine.errors.PolicyError:
        return


def event(one: Bare, kind: str, n: int, other: int) -> Tensor:
    session = one.cache.session
    if kind == "tree":
        session.tree = torch.ones(n, n, dtype=torch.bool).tril() & (torch.arange(n) % 3 > 0)
        session.tree |= torch.eye(n, dtype=torch.bool)
        out = one.feed(n + other)
        session.tree, one.at = None, one.at - n
        return out
    if kind == "draft":
        session.recording = True
        out = one.feed(n)
        one.back(min(n, other))
        one.cache.commit()
        session.recording = False
        return out
    session.following = kind in ("follow", "ended")
    valid = None
    if kind == "ended":  # the second row has nothing more to say after some tokens
        valid = torch.ones(2, n, dtype=torch.bool)
        valid[1, other // 2 :] = False
    if kind == "ragged":  # the second row takes one token, or some, behind padding
        valid = torch.ones(2, n, dtype=torch.bool)
        valid[1, : max(0, n - 1 - other // 4)] = False
    out = one.feed(1 if kind == "decode" else n, valid)
    session.following = False
    return out if valid is None else out[valid]


def test_who_reads_whom_is_what_the_models_say() -> None:
    for family in FAMILIES:
        model = configs.build(family)
        found, asked = sources(model.config), {}
        for i, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            if attention.is_kv_shared_layer:
                before = [j for j in range(i) if not model.model.layers[j].self_attn.is_kv_shared_layer]
                asked[i] = max(j for j in before if model.config.layer_types[j] == attention.layer_type)
        assert found == asked and found
    assert sources(configs.build("llama").config) == {}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    ["quest(budget=12, page=4)", "h2o(budget=12)", "kivi(bits=4, group=8, residual=8)", "duo(sinks=2, recent=6)"],
)
def test_a_row_alone_is_as_in_a_batch(family: str, text: str) -> None:
    model, batch = kvengine.patch(configs.build(family), text), configs.padded_batch()
    del batch["attention_mask"]  # windows count padding as distance
    found = model.generate(**batch, max_new_tokens=16, do_sample=False)
    for row in range(3):
        alone = model.generate(batch["input_ids"][row : row + 1], max_new_tokens=16, do_sample=False)
        assert torch.equal(found[row : row + 1], alone)
    assert not torch.equal(found, kvengine.unpatch(model).generate(**batch, max_new_tokens=16, do_sample=False))


def test_what_is_read_again_is_counted_again() -> None:
    model = kvengine.patch(configs.build("gemma3n"), "snapkv(budget=12, window=4)")
    cache = kvengine.EngineCache(model)
    model.generate(configs.padded_batch()["input_ids"][:1], cache=cache, max_new_tokens=3, do_sample=False)
    ((lane,),) = ([part.lane for part in layer.parts] for layer in cache.engines)
    k, v, *_ = lane.tail.held()
    window: Any = cache.layers[0]  # which another layer reads again too
    assert cache.engines[0].readers.count == 1
    assert cache.stats().read_per_token == 2 * (k.nbytes + v.nbytes + window.keys.nbytes + window.values.nbytes)
    assert cache.stats().bytes_held < 3 * (k.nbytes + v.nbytes)


def test_a_pass_that_no_later_layer_came_to_does_not_spoil_the_next() -> None:
    one = Bare("h2o(budget=24)", rows=2)
    one.cache = LayerCache(Stack.parse("h2o(budget=24)"), 0, 1, readers=2)
    plain = Bare("h2o(budget=24)", rows=2)
    for n in (40, 1, 1):
        torch.testing.assert_close(one.feed(n), plain.feed(n))
    out = one.feed(1)
    assert len(one.cache.readers.moments) == 1
    for _ in range(2):
        again = read(one.cache, one.q[:, :, one.at - 1 : one.at], one.call, None)
        torch.testing.assert_close(again, out)


@pytest.mark.parametrize("text", ["snapkv(budget=24, window=6)", "ashape(sinks=2, local=12)", "full"])
@pytest.mark.parametrize("last", [None, 5, 1])
def test_a_reader_of_the_last_tokens_is_told_of_those_wherever_padding_stands(text: str, last: int | None) -> None:
    """In a prompt, and among tokens that are taken together."""
    bare, valid = Bare(text, rows=2, tokens=60), torch.ones(2, 60, dtype=torch.bool)
    valid[0, 10:20], valid[1, :7], valid[1, 36:38], valid[0, 43:45] = False, False, False, False
    bare.cache.readers.count = 1
    for begin, end in ((0, 40), (40, 47)):
        bare.cache.session.following = begin > 0
        some = slice(end - (last or end - begin), end)
        want = bare.feed(end - begin, valid[:, begin:end])[:, -(last or end - begin) :]
        got = read(bare.cache, bare.q[:, :, some], bare.call, None)
        real = valid[:, some]
        torch.testing.assert_close(got[real], want[real])
