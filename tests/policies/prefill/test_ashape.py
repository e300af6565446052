import pytest
import torch
from support import Bare
from support_layer import draw, padded, plain, run

from kvengine.policies.prefill.ashape import AShape


@pytest.mark.parametrize("chunks", [(), (11, 30)], ids=["whole", "chunks"])
def test_the_prompt_sees_sinks_and_a_band(chunks: tuple[int, ...]) -> None:
    tokens = draw(61)
    out = run("ashape(sinks=3, local=7)", tokens, 60, chunks=chunks).out
    for i in (0, 2, 9, 35, 59):
        seen = torch.zeros(1, 2, i + 1, dtype=torch.bool)
        for j in range(i + 1):
            seen[..., j] = j < 3 or i - j < 7
        torch.testing.assert_close(out[:, i : i + 1], plain(tokens, i, seen))
        wrong = seen.clone()
        wrong[..., max(0, i - 7)] = True
        assert i < 11 or (out[:, i : i + 1] - plain(tokens, i, wrong)).abs().max() > 1e-4
    torch.testing.assert_close(out[:, 60:], plain(tokens, 60))  # decoding reads everything


@pytest.mark.parametrize("chunks", [(), (11, 30), (50,), (57,)])
@pytest.mark.parametrize("last", [1, 5, 60, 100])
def test_the_last_queries_read_everything(last: int, chunks: tuple[int, ...]) -> None:
    tokens, text = draw(61), f"ashape(sinks=3, local=7, last={last})"
    band, full = (run(policy, tokens, 60).out for policy in ("ashape(sinks=3, local=7)", "full"))
    out, some = run(text, tokens, 60, chunks=chunks).out, max(0, 60 - last)
    torch.testing.assert_close(out[:, :some], band[:, :some])
    torch.testing.assert_close(out[:, some:], full[:, some:])
    longer, valid = padded(tokens, 13)
    torch.testing.assert_close(run(text, longer, 73, valid=valid).out[:, 13:], out)


def test_a_later_prompts_chunk_of_one_token_is_read_through_the_band() -> None:
    """Where slots no longer tell which tokens those are."""
    found = []
    for chunks in ((30,), (1, 28, 1)):
        bare = Bare("ashape(sinks=3, local=7) + snapkv(budget=20, window=4)", tokens=72)
        bare.feed(40)
        bare.feed(1)
        bare.cache.session.prompt_end = 71
        found.append(torch.cat([*(bare.feed(n) for n in chunks), bare.feed(1)], 1))
    torch.testing.assert_close(*found)


def test_pairs_of_positions_are_those_of_the_rule() -> None:
    """As a mask, for rows that begin at different places."""
    query, token, first = torch.arange(5, 12), torch.arange(12).expand(2, -1), [0, 4]
    found = AShape(sinks=3, local=4).visible(query, token, torch.tensor(first))
    assert found.tolist() == [[[j < n + 3 or i - j < 4 for j in range(12)] for i in range(5, 12)] for n in first]


def test_padding_is_no_sink() -> None:
    tokens = draw(60)
    longer, valid = padded(tokens, 13)
    want = run("ashape(sinks=3, local=7)", tokens, 60).out
    torch.testing.assert_close(run("ashape(sinks=3, local=7)", longer, 73, valid=valid).out[:, 13:], want)
