"""The fixture that poisons memory must itself bite, or it guards nothing."""

import pytest
import torch

from kvengine import memory

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unwritten_floats_are_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(3, dtype=dtype)
    for tensor in (torch.empty(3, dtype=dtype), torch.empty_like(like), like.new_empty(3)):
        assert tensor.dtype is dtype and tensor.float().isnan().all()
    assert memory.empty((memory.HUGE,), dtype, like.device).float().isnan().all()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_unwritten_integers_are_large(dtype: torch.dtype) -> None:
    assert (torch.empty(3, dtype=dtype) == min(1_234_567_890, torch.iinfo(dtype).max)).all()


def test_a_leaf_that_wants_gradients_and_a_parameter_can_be_allocated() -> None:
    assert torch.empty(3, requires_grad=True).isnan().all()
    assert torch.nn.Linear(3, 3)(torch.ones(3)).isfinite().all()
