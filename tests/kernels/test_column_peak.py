"""The most that any query pays to each token, against a loop."""

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.column_mass import fits
from kvengine.kernels.column_peak import column_peak, reference

HERE = torch.zeros(1, 1, 1, 16)
BACKENDS = [name for name in oracle.backends() if name != "native" or fits(HERE, HERE[0])]


def looped(
    q: Tensor, k: Tensor, position: Tensor, at: Tensor, real: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    found = torch.zeros(k.shape[:2])
    for row, group, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        sees = [t for t in range(int(at[i]) + 1) if position[row, t] >= 0]
        if not real[row, i] or not sees:
            continue
        logits = q[row, group, i] @ k[row, sees].T * 0.4
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        logits = logits if sinks is None else torch.cat([logits, sinks[row, group, None]])
        paid = logits.softmax(-1)[: len(sees)]
        found[row, sees] = torch.maximum(found[row, sees], paid)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("holes", [False, True])
def test_as_the_loop(
    backend: str, softcap: float | None, joined: bool, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "NEAR", 40)
    q, k = torch.randn(3, 2, 9, 16), torch.randn(3, 21, 16)
    position = torch.arange(21).expand(3, -1).clone()
    real, at = torch.ones(3, 9, dtype=torch.bool), torch.arange(12, 21)
    if holes:
        position[torch.rand(3, 21) < 0.4] = -1
        real[:, :3], position[2] = False, -1
        k[position < 0], q.transpose(1, 2)[~real] = torch.nan, torch.nan
    sinks = torch.randn(3, 2) if joined else None
    want = looped(q, k, position, at, real, softcap, sinks)
    run = oracle.on(backend, column_peak)
    found = run(q, k, position, at, real, scale=0.4, softcap=softcap, sinks=sinks, backend=backend)
    torch.testing.assert_close(found.cpu(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler, or vectors of less than 256 bits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "tokens", "group"), [(300, 700, 4), (1, 130, 2), (257, 257, 1)])
def test_in_c_as_in_torch(dtype: torch.dtype, queries: int, tokens: int, group: int) -> None:
    q, k = (2 * torch.randn(2, group, queries, 64)).to(dtype), torch.randn(2, tokens, 64).to(dtype)
    position = torch.arange(tokens).where(torch.rand(2, tokens) < 0.9, -1)
    at, real = torch.arange(tokens - queries, tokens), torch.rand(2, queries) < 0.8
    found = [column_peak(q, k, position, at, real, scale=0.125, backend=name) for name in ("native", "reference")]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert float(found[0].max()) <= 1 and found[0][position < 0].count_nonzero() == 0


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name == "triton"])
def test_tiles_of_long_texts(backend: str) -> None:
    """In the models' dtype: of several tiles of queries and tokens, the last ones not full, some of no token at all."""
    q, k = torch.randn(2, 2, 130, 32).bfloat16(), torch.randn(2, 200, 32).bfloat16()
    position, at = torch.arange(200).repeat(2, 1), torch.arange(70, 200)
    position[0, 64:128], position[1, 190:] = -1, -1
    real = torch.ones(2, 130, dtype=torch.bool)
    real[:, 64:] = False
    found = oracle.on(backend, column_peak)(q, k, position, at, real, scale=0.3, backend=backend).cpu()
    want = column_peak(q.double(), k.double(), position, at, real, scale=0.3, backend="reference")
    torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-4)
    assert not found[position < 0].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, real = torch.zeros(1, 1, 2, 4), torch.zeros(1, 3, 4), torch.ones(1, 2, dtype=torch.bool)
    position, at = torch.zeros(1, 3), torch.arange(2)
    with pytest.raises(KernelError):
        column_peak(q, k[..., :3], position, at, real, scale=1.0)
    with pytest.raises(KernelError):
        column_peak(q, k, position, at, real[:, :1], scale=1.0)


def test_without_queries_nobody_pays() -> None:
    given = torch.zeros(2, 1, 0, 16), torch.ones(2, 5, 16), torch.arange(5).expand(2, 5)
    found = column_peak(*given, torch.zeros(0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.bool), scale=0.4)
    assert found.tolist() == torch.zeros(2, 5).tolist()
