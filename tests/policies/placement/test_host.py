from functools import partial
from typing import Any

import pytest
import torch
from support_kernels import backends
from support_layer import draw, run

from kvengine.errors import PolicyError
from kvengine.kernels import fetch_pages
from kvengine.kernels.state import State
from kvengine.lane import Lane
from kvengine.offload.placement import Site
from kvengine.offload.placement.host import Fetched, Host
from kvengine.policies._budget import tokens
from kvengine.stats import measure


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are fetched, as where the model runs on a GPU; on a CPU they are read in place."""
    monkeypatch.setattr(Fetched, "resident", lambda *_: None)


def rounded(policy: str) -> dict[str, float]:
    """Pages that were fetched are decoded; where they lie, tokens of two widths are attended to in another order."""
    return {"rtol": 1e-5, "atol": 1e-6} if "zipcache" in policy else {"rtol": 0, "atol": 0}


@pytest.mark.parametrize("policy", ["quest(budget=40, page=8)", "kivi(group=8, residual=16)", "zipcache(block=16)"])
@pytest.mark.parametrize("copied", [False, True])
def test_where_pages_live_changes_nothing_else(policy: str, copied: bool, request: pytest.FixtureRequest) -> None:
    if copied:
        request.getfixturevalue("fetched")
    tokens = draw(120)
    here, there = run(policy, tokens, 80), run(f"{policy} + host", tokens, 80)
    torch.testing.assert_close(there.out, here.out, **rounded(policy))
    a, b = measure([here.cache]).bytes, measure([there.cache]).bytes
    pages = {name: size for name, size in a["device"].items() if name.startswith("page.")}
    assert pages and b["host"] == pages
    assert b["device"] == {name: size for name, size in a["device"].items() if name not in pages}


@pytest.mark.parametrize("policy", ["", "quest(budget=40, page=8)", "kivi(group=8, residual=16)", "lowrank(rank=8)"])
def test_on_a_cpu_pages_are_read_in_place_and_counted(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "native" not in backends():
        pytest.skip("without the C kernels, keys of few directions are rebuilt from what was fetched")
    calls: list[int] = []
    begin = fetch_pages.start
    monkeypatch.setattr(fetch_pages, "start", lambda *args, **kwargs: calls.append(1) or begin(*args, **kwargs))
    tokens, stack = draw(120), " + ".join(filter(None, [policy, "host"]))
    place = run(stack, tokens, 80)
    assert not calls
    monkeypatch.setattr(Fetched, "resident", lambda *_: None)
    copied = run(stack, tokens, 80)
    assert calls and measure([place.cache]).served == measure([copied.cache]).served
    assert torch.allclose(place.out, copied.out, atol=1e-5)


def test_some_fields_may_stay() -> None:
    held = measure([run("quest(budget=40) + host(fields=('v',))", draw(120), 80).cache]).bytes
    assert set(held["host"]) == {"page.v"} and "page.k" in held["device"]


def test_fields_are_a_tuple_of_names() -> None:
    with pytest.raises(PolicyError, match="must be a tuple of field names"):
        Host(fields="v")  # type: ignore[arg-type]


def test_a_fraction_of_the_prompt_is_what_a_selections_budget_makes_of_it() -> None:
    """As floats 0.29 * 800 is less than 232: of 29 units that `landmarks(budget=0.29)` may read, 28 stayed."""
    like, site = {"v": torch.zeros(1, 8, 4)}, Site(prompt=800, piece=8)
    assert Host(resident=0.29).open(like, site)[0].slots == tokens(0.29, 800) // 8 == 29  # type: ignore[attr-defined]
    assert Host(resident=0.29, keep="lru").open(like, site)[0].levels[0].capacity == 29  # type: ignore[attr-defined]


@pytest.mark.usefixtures("fetched")
def test_pages_are_on_their_way_while_the_tail_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the fetch runs on a stream of its own; the order of these calls is what makes room for that."""
    events: list[str] = []
    begin, near = fetch_pages.start, Lane.near

    def started(*args: Any, **kwargs: Any) -> fetch_pages.Pending:
        events.append("start")
        return Noted(**vars(begin(*args, **kwargs)))

    def attended(*args: Any, **kwargs: Any) -> State:
        events.append("tail")
        return near(*args, **kwargs)

    class Noted(fetch_pages.Pending):
        def wait(self) -> dict[str, torch.Tensor]:
            events.append("used")
            return super().wait()

    monkeypatch.setattr(fetch_pages, "start", started)
    monkeypatch.setattr(Lane, "near", attended)
    for policy in ("quest(budget=40, page=8) + host", "host", "quest(budget=40, page=8) + host(fields=('v',))"):
        events.clear()
        run(policy, draw(120), 119)
        assert events[-3:] == ["start", "tail", "used"], policy


@pytest.mark.usefixtures("fetched")
def test_the_kernel_fetches_what_an_index_would(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = draw(120)
    here = run("quest(budget=40, page=8)", tokens, 80)
    for backend in (name for name in backends() if name != "native"):
        monkeypatch.setattr(fetch_pages, "fetch_pages", partial(fetch_pages.fetch_pages, backend=backend))
        assert torch.equal(run("quest(budget=40, page=8) + host", tokens, 80).out, here.out), backend
