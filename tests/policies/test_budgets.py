"""Shares of tokens: whole numbers of what decimals mean, for a prompt and for each row alike."""

import torch

from kvengine.policies._budget import part, tokens, tokens_by_row


def test_a_share_is_of_the_decimal_that_was_written() -> None:
    """0.29 of 100 tokens are 29, though floats multiply to less; of what is no whole number, the whole tokens."""
    lengths = [3, 10, 97, 100, 250, 1001, 131_072, 1_000_000]
    for percent in range(1, 100):
        want = [n * percent // 100 for n in lengths]
        assert part(torch.tensor(lengths), percent / 100).tolist() == want
        assert [tokens(percent / 100, n) for n in lengths] == [max(1, n) for n in want]
        assert tokens_by_row(percent / 100, torch.tensor(lengths)).tolist() == [max(1, n) for n in want]
