from pathlib import Path

import pytest
import torch
from support_layer import draw, plain, run

from kvengine.cache import LayerCache
from kvengine.errors import PolicyError
from kvengine.policies.retention.streaming import Streaming
from kvengine.policies.routing.duo import Duo, read_pattern, write_pattern
from kvengine.session import Session
from kvengine.stack import Stack
from kvengine.stats import measure

ALPHA = [[0.9, 0.1, 0.5, 0.3], [0.2, 0.8, 1.0, 0.4]]


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    write_pattern(tmp_path / "pattern", ALPHA, 64, 256)
    return str(tmp_path / "pattern")


def test_pattern_files_round_trip(pattern: str) -> None:
    assert [list(row) for row in read_pattern(pattern)] == ALPHA
    assert read_pattern(str(Path(pattern) / "full_attention_heads.tsv")) == read_pattern(pattern)
    assert "sink_size" in (Path(pattern) / "config.json").read_text()


def test_published_files_are_read(tmp_path: Path) -> None:
    """As numpy.savetxt writes them, with values that overshoot."""
    file = tmp_path / "full_attention_heads.tsv"
    file.write_text(
        "1.000000000000000000e+00\t-3.906250000000000000e-03\n5.000000000000000000e-01\t1.007812500000e+00\n"
    )
    assert read_pattern(str(tmp_path)) == ((1.0, 0.0), (0.5, 1.0))
    file.write_text(file.read_text(), encoding="utf-8-sig")  # as editors on Windows write it
    assert read_pattern(str(tmp_path)) == ((1.0, 0.0), (0.5, 1.0))


@pytest.mark.parametrize(
    "sparsity, streaming",
    [(0.0, [set(), set()]), (0.35, [{1, 3}, {0}]), (0.5, [{1, 3}, {0, 3}]), (1.0, [{0, 1, 2, 3}] * 2)],
)
def test_the_lowest_alphas_over_all_layers_stream(pattern: str, sparsity: float, streaming: list[set[int]]) -> None:
    duo = Duo(sparsity=sparsity, pattern=pattern)
    assert [duo.streaming(i, 2, 4) for i in range(2)] == streaming


def test_ties_are_broken_the_same_way_every_time(tmp_path: Path) -> None:
    write_pattern(tmp_path, [[1.0] * 4] * 3, 64, 256)
    duo = Duo(sparsity=0.25, pattern=str(tmp_path))
    assert sum(len(duo.streaming(i, 3, 4)) for i in range(3)) == 3


def test_a_pattern_that_was_trained_again_is_read_again(pattern: str) -> None:
    before = Duo(sparsity=0.25, pattern=pattern)
    write_pattern(Path(pattern), ALPHA[::-1], 64, 256)
    after = Duo(sparsity=0.25, pattern=pattern)
    assert [before.streaming(i, 2, 4) for i in range(2)] == [{1}, {0}]
    assert [after.streaming(i, 2, 4) for i in range(2)] == [{0}, {1}]


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_without_a_pattern_the_share_of_heads_is_what_was_asked_for(heads: int, sparsity: float) -> None:
    duo = Duo(sparsity=sparsity)
    streaming = [len(duo.streaming(i, 32, heads)) for i in range(32)]
    assert sum(streaming) == round(sparsity * heads * 32) and max(streaming) - min(streaming) <= 1


@pytest.mark.parametrize(("sparsity", "heads", "streaming"), [(0.25, 2, 2), (0.75, 2, 6), (0.5, 1, 2)])
def test_layers_without_attention_have_no_part_in_the_share(sparsity: float, heads: int, streaming: int) -> None:
    """As in Qwen3-Next, where every fourth layer has some: counted among all layers, no head streamed, or each did."""
    found, ours = 0, (3, 7, 11, 15)
    for layer in ours:
        cache = LayerCache(Stack.parse(f"duo(sparsity={sparsity})"), layer, 16, Session(ours=ours))
        cache.open(*torch.zeros(2, 1, heads, 1, 8))
        found += sum(part.lane.heads for part in cache.parts if isinstance(part.lane.retention, Streaming))
    assert found == streaming


def test_a_pattern_tells_of_all_layers(pattern: str) -> None:
    cache = LayerCache(Stack.parse(f"duo(sparsity=0.5, pattern={pattern!r})"), 1, 2, Session(ours=(1,)))
    cache.open(*torch.zeros(2, 1, 4, 1, 8))
    assert [part.index.tolist() for part in cache.parts if part.index is not None] == [[1, 2], [0, 3]]


def test_each_head_reads_what_it_holds() -> None:
    tokens = draw(100, heads=4)
    found = run("duo(sparsity=0.5, sinks=4, recent=20)", tokens, 70)
    for i in (70, 99):
        seen = torch.ones(1, 4, i + 1, dtype=torch.bool)
        seen[:, 2:, 4 : i - 20] = False  # 20 before the query, and its own token
        torch.testing.assert_close(found.out[:, i : i + 1], plain(tokens, i, seen), atol=1e-5, rtol=1e-4)


def test_streaming_heads_free_their_bytes() -> None:
    """Held bytes of keys and values grow with the full heads' tokens alone."""

    def size(policy: str, n: int) -> int:
        held = measure([run(policy, draw(n, heads=4), n).cache]).bytes["device"]
        return held["tail.k"] + held["tail.v"]

    full = size("full", 800) - size("full", 400)
    assert size("duo(sinks=4, recent=20)", 800) - size("duo(sinks=4, recent=20)", 400) <= full * 0.55


def test_nothing_streams_at_sparsity_zero() -> None:
    tokens = draw(60, heads=4)
    assert torch.equal(run("duo(sparsity=0.0)", tokens, 50).out, run("full", tokens, 50).out)


def test_what_does_not_fit_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="is for 2 layers of 4 KV heads, but the model has 3 of 4"):
        Duo(pattern=pattern).streaming(0, 3, 4)
    with pytest.raises(PolicyError, match="'kvengine duo train' makes one"):
        Stack.parse("duo(pattern='nowhere')")
    (tmp_path / "full_attention_heads.tsv").write_text("1\t2\n3\n")
    with pytest.raises(PolicyError, match="must have one line per layer"):
        read_pattern(str(tmp_path))
    (tmp_path / "full_attention_heads.tsv").write_text("1\tnan\n0.5\t0.5\n")  # would count as 0, and stream first
    with pytest.raises(PolicyError, match="alpha is no number"):
        read_pattern(str(tmp_path))
    with pytest.raises(PolicyError, match="must lie between 0"):
        Duo(sparsity=2.0)


@pytest.mark.parametrize("chunks", [(), (17, 40)], ids=["whole", "chunks"])
def test_streaming_heads_may_read_the_prompt_through_their_window(chunks: tuple[int, ...]) -> None:
    tokens = draw(61, 2, 2)
    found = run("duo(sparsity=0.5, sinks=3, recent=7, prompt='streaming')", tokens, 60, chunks=chunks)
    exact = run("duo(sparsity=0.5, sinks=3, recent=7)", tokens, 60, chunks=chunks)
    for i in (2, 9, 35, 59):
        seen = torch.ones(1, 2, i + 1, dtype=torch.bool)
        seen[:, 1] = torch.tensor([j < 3 or i - j < 7 for j in range(i + 1)])
        torch.testing.assert_close(found.out[:, i : i + 1], plain(tokens, i, seen))
        torch.testing.assert_close(exact.out[:, i : i + 1], plain(tokens, i))
    assert not Stack.parse("duo(prompt='streaming')").reads_prompts_exactly and Stack.parse("duo").reads_prompts_exactly


def test_the_pattern_of_the_bundled_model_comes_with_the_package() -> None:
    alpha = read_pattern("tiny")
    assert (len(alpha), len(alpha[0])) == (4, 2)
    assert sum(len(Duo(pattern="tiny").streaming(layer, 4, 2)) for layer in range(4)) == 4


def test_a_text_that_is_no_pattern_is_not_shown_whole(tmp_path: Path) -> None:
    (tmp_path / "essay.txt").write_text("The sky is blue. " * 9999)
    with pytest.raises(PolicyError, match="not a table of numbers") as caught:
        read_pattern(str(tmp_path / "essay.txt"))
    assert len(str(caught.value)) < 500


def test_a_pattern_is_looked_for_where_one_is_and_then_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pattern(Path("mine/tiny"), ALPHA, 4, 16)
    assert [list(row) for row in read_pattern("mine/tiny")] == ALPHA
    assert len(read_pattern("tiny")) == 4
