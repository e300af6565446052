"""What every test runs under: no network, no display, one thread per worker, fixed seeds, and poisoned memory."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import ast
import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import pytest
import support_random
import torch

from kvengine import memory

# Machines that run tests are busy; a slow example is not a failure.
hypothesis.settings.register_profile("kvengine", deadline=None)
hypothesis.settings.load_profile("kvengine")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

LONG = {"test_triton.py", "test_launched_again.py", "test_remembered_launches.py"}  # of which single tests take longest
SENTINEL = 1_234_567_890  # what integers too narrow for it get instead: their largest value
UNWRITTEN = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
    (memory, "empty"),
)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill what `torch.empty` returned with values that no right result contains."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(math.nan)
        if tensor.dtype is torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(min(SENTINEL, torch.iinfo(tensor.dtype).max))


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: Any, **options: Any) -> torch.Tensor:
        return poison(allocate(*args, **options))

    return allocate_poisoned


class Order:
    """What takes longest goes first, or one worker would end with it while the other has nothing left."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.path.name not in LONG)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Order())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of what is marked `sampled(n)` every n-th case stays in `make test`, the others are slow. The name of a test says which
    case is its first, so that a policy that one test leaves out is in another."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, found in cases.items():
        mark = found[0].get_closest_marker("sampled")
        each = min(mark.args[0] if mark else 1, len(found))
        for i, item in enumerate(found):
            if i % each != crc32(name.encode()) % each:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What is there before the first test stays; to look through it takes half a second for each `gc.collect`."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote must never reach a result. Fresh memory is often zero, which hides the mistake."""
    for owner, name in UNWRITTEN:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    """Tests run in random order; what torch draws must not depend on it."""
    support_random.seed(0)


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    """A script that was run in this process may have asked for more, and two workers on two cores then wait for each other."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Under `make test-shapes`: what a test hands over to see it refused, the checker of signatures refuses before us."""
    outcome = yield
    error = call.excinfo  # the checker's own, or one that quotes it: a policy string's, or of a message not as expected
    if error is None or not item.config.getoption("jaxtyping_packages", None):
        return
    if "Type-check error whilst" not in str(error.value):
        return
    source, lines = (
        Path(str(item.path)).read_text(),
        {entry.lineno + 1 for entry in error.traceback if entry.path == item.path},
    )
    refusing = [
        node for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.With) and any("raises" in ast.unparse(x.context_expr) for x in node.items)
    ]  # fmt: skip
    if any(node.lineno <= line <= (node.end_lineno or 0) for node in refusing for line in lines):
        report = outcome.get_result()
        report.outcome, report.longrepr = (
            "skipped",
            (str(item.path), min(lines), "refused by the checker of signatures"),
        )
