import pytest
import torch
from support_layer import draw, run

from kvengine.errors import PolicyError
from kvengine.offload.placement.host import Host
from kvengine.stats import measure


@pytest.mark.parametrize("policy", ["quest(budget=40, page=8)", "kivi(group=8, residual=16)", "zipcache(block=16)"])
def test_where_pages_live_changes_nothing_else(policy: str) -> None:
    tokens = draw(120)
    here, there = run(policy, tokens, 80), run(f"{policy} + host", tokens, 80)
    assert torch.equal(here.out, there.out)
    a, b = measure([here.cache]).bytes, measure([there.cache]).bytes
    pages = {name: size for name, size in a["device"].items() if name.startswith("page.")}
    assert pages and b["host"] == pages
    assert b["device"] == {name: size for name, size in a["device"].items() if name not in pages}


def test_some_fields_may_stay() -> None:
    held = measure([run("quest(budget=40) + host(fields=('v',))", draw(120), 80).cache]).bytes
    assert set(held["host"]) == {"page.v"} and "page.k" in held["device"]


def test_fields_are_a_tuple_of_names() -> None:
    with pytest.raises(PolicyError, match="must be a tuple of field names"):
        Host(fields="v")  # type: ignore[arg-type]
