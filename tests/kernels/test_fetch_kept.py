"""Pages from host memory, but for those that the last call brought."""

from __future__ import annotations

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels import dispatch
from kvengine.kernels.fetch_kept import MOST, empty, fits, forget, start

BACKENDS = [name for name in oracle.backends() if name != "native"]
SHAPES = {
    "fp32": (torch.float32, (4, 8)),
    "bf16": (torch.bfloat16, (8, 128)),
    "wide": (torch.bfloat16, (16, 300)),
    "odd": (torch.uint8, (3, 7)),
    "one": (torch.float16, ()),
}
CALLS = [  # pages of two rows
    [[3, 0, 8, 3], [5, 2, 7, 1]],
    [[0, 3, 9, 8], [7, 2, 5, 10]],
    [[8, 9], [10, 10]],
    [[8, 9, 3, 0, 0], [10, 5, 2, 7, 11]],
    [[8, 9, 3, 0, 4], [0, 3, 8, 11, 12]],
]


def device(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "triton" and dispatch.info()["triton"] == "available" else "cpu")


def pinned(x: Tensor, to: torch.device) -> Tensor:
    return x.pin_memory() if to.type == "cuda" else x


class Slots:
    """Lists of slots, as the kernel must keep them: a page, and what it held when it came."""

    def __init__(self, rows: int, slots: int) -> None:
        self.rows = [[(-1, torch.zeros(0))] * slots for _ in range(rows)]
        self.hits = self.misses = 0

    def read(self, asked: list[list[int]], field: Tensor, remember: bool) -> list[Tensor]:
        found = list[Tensor]()
        for row, pages in zip(self.rows, asked, strict=True):
            known = dict(row)
            mine = [(page, known[page] if page in known else field[page].clone()) for page in pages]
            self.hits += sum(page in known for page in pages)
            self.misses += sum(page not in known for page in pages)
            if remember:
                row[: len(mine)] = mine[: len(row)]
            found += [x for _, x in mine]
        return found


@pytest.mark.parametrize("slots", [3, 4, 9])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_lists_of_slots(backend: str, kind: str, slots: int) -> None:
    """The field changes after each call, so what comes says when it was fetched."""
    (dtype, shape), to = SHAPES[kind], device(backend)
    field = pinned(torch.randint(0, 90, (13, *shape), generator=torch.Generator().manual_seed(0)).to(dtype), to)
    other = pinned(field.float(), to)
    kept = empty({"a": field[:0].to(to), "b": other[:0].to(to)}, 2, slots)
    want, more = Slots(2, slots), Slots(2, slots)
    for number, asked in enumerate(CALLS):
        at, remember = torch.tensor(asked, dtype=torch.int64, device=to).flatten(), number != 2
        fields = {"a": field, "b": other} if remember else {"a": field}
        got = start(kept, fields, at, to, remember=remember, backend=backend).wait()
        for name, oracle_of, source in (("a", want, field), ("b", more, other)):
            if name not in got:
                continue
            for x, page in zip(got[name], oracle_of.read(asked, source, remember), strict=True):
                assert torch.equal(x.cpu(), page)
        assert kept.counts.sum((0, 1)).tolist() == [want.hits, want.misses]
        field.add_(1), other.add_(1)
        if number == 3:
            forget(kept, torch.tensor([9, 5, 12], device=to))
            for one in (want, more):
                one.rows = [[(-1, x) if page in (9, 5, 12) else (page, x) for page, x in row] for row in one.rows]
    assert want.hits > 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_pages_than_all_programs_look_at_in_a_turn(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of a row, one page each, where pages are not short; and those that fetch, which are three here, two each."""
    if backend == "triton":
        monkeypatch.setattr("kvengine.kernels.fetch_pages.triton.PROGRAMS", 3)
    to, pages = device(backend), torch.randperm(23, generator=torch.Generator().manual_seed(0))
    field = pinned(torch.randn(23, 4, 130), to)
    kept, before = empty({"a": field[:0].to(to)}, 1, 20), field.clone()
    assert torch.equal(
        start(kept, {"a": field}, pages[:19].to(to), to, backend=backend).wait()["a"].cpu(), before[pages[:19]]
    )
    field.add_(1)
    at = pages[:20].flip(0)
    got = start(kept, {"a": field}, at.to(to), to, backend=backend).wait()["a"].cpu()
    assert torch.equal(got, torch.cat([field[at[:1]], before[at[1:]]]))
    assert kept.counts.sum((0, 1)).tolist() == [19, 20]


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton does not run here")
def test_triton_reads_nothing_outside_of_the_field() -> None:
    to = device("triton")
    field = pinned(torch.ones(4, 3, 5), to)
    kept = empty({"a": field[:0].to(to)}, 1, 8)
    for _ in range(2):  # what is no page is not found the second time either
        at = torch.tensor([3, -1, 4, 0, 1 << 40], device=to)
        got = start(kept, {"a": field}, at, to, backend="triton").wait()["a"]
        assert got[:, 0, 0].tolist()[:2] == [1, 0] and got[3, 0, 0] == 1
    assert kept.counts.sum((0, 1)).tolist() == [4, 6]


def test_how_many_can_be_looked_for() -> None:
    kept = empty({"v": torch.zeros(0, 2)}, 3, 5)
    assert [fits(kept, n) for n in (0, 3, 4, 3 * MOST, 3 * MOST + 3)] == [False, True, False, True, False]
    assert empty({"v": torch.zeros(0, 2)}, 2, 4 * MOST).ids.shape == (2, MOST)


def test_refusals_say_why() -> None:
    kept, at = empty({"k": torch.zeros(0, 6)}, 1, 2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KernelError, match="contiguous in host memory"):
        start(kept, {"k": torch.zeros(6, 4).T}, at, torch.device("cpu"))
    with pytest.raises(KernelError, match="backend"):
        start(kept, {"k": torch.zeros(4, 6)}, at, torch.device("cpu"), backend="tritn")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_stream_of_its_own() -> None:
    here, field = torch.device("cuda"), torch.randn(256, 16, 128).pin_memory()
    kept, stream, x = empty({"k": field[:0].cuda()}, 4, 16), torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(6):
        at = torch.randint(0, 24, (64,), device=here)
        pending = start(kept, {"k": field}, at, here, stream=stream)
        for _ in range(4):  # work that does not need the pages
            x = (x @ x).tanh()
        assert torch.equal((pending.wait()["k"] + 0).cpu(), field[at.cpu()])
    hits, misses = kept.counts.sum((0, 1)).tolist()
    assert hits > 64 and hits + misses == 6 * 64
