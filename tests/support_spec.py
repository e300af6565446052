"""What the tests of speculation share: randomness that visits every outcome, and laws read from a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache

import support_random
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from kvengine.speculative.accept import Draft
from kvengine.speculative.law import Text
from kvengine.speculative.noise import Gumbel
from kvengine.speculative.session import Asks, Session


@dataclass
class Outcomes:
    """A source of randomness that replays one branch of the tree of all outcomes, and remembers where others begin."""

    script: list[int]
    weight: float = 1.0
    seen: list[tuple[int, list[int]]] = field(default_factory=list)

    def happens(self, probability: float) -> bool:
        yes = min(1.0, probability)
        return self._choose({1: yes, 0: 1 - yes}) == 1

    def draw(self, law: Tensor) -> int:
        total = float(law.sum())
        return self._choose({token: value / total for token, value in enumerate(law.tolist())})

    def _choose(self, options: dict[int, float]) -> int:
        possible = [option for option, value in options.items() if value > 0]
        step = len(self.seen)
        choice = self.script[step] if step < len(self.script) else possible[0]
        self.weight *= options[choice]
        self.seen.append((choice, possible))
        return choice


def enumerate_law(run: Callable[[Outcomes], Hashable]) -> dict[Hashable, float]:
    """The exact law of `run`'s result: run it once along every branch."""
    law: dict[Hashable, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        outcomes = Outcomes(script)
        law[run(outcomes)] += outcomes.weight
        script = _next_branch(outcomes.seen)
    return dict(law)


def _next_branch(seen: list[tuple[int, list[int]]]) -> list[int] | None:
    """The next script in depth-first order; None after the last."""
    for step in range(len(seen) - 1, -1, -1):
        choice, possible = seen[step]
        later = possible[possible.index(choice) + 1 :]
        if later:
            return [c for c, _ in seen[:step]] + later[:1]
    return None


def variation(a: dict[Hashable, float], b: dict[Hashable, float]) -> float:
    """Total variation between two laws given as dictionaries."""
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys()) / 2


def random_law(vocab: int, generator: torch.Generator, zeros: int = 0) -> Tensor:
    """A law in fp64, with `zeros` tokens impossible."""
    law = -torch.log(torch.rand(vocab, generator=generator, dtype=torch.float64))
    law[torch.randperm(vocab, generator=generator)[:zeros]] = 0
    return law / law.sum()


class TableSession(Session):
    """Stands in for a model and its cache: logits after a text are read from a table of laws, with the same bookkeeping."""

    def __init__(self, laws: Callable[[tuple[int, ...]], Tensor]) -> None:
        self.laws, self.cached, self.open = laws, [], []
        self.settled, self.guest = 0, None

    def prefill(self, prompt: list[int]) -> Tensor:
        self.cached, self.settled = list(prompt), len(prompt)
        return self._logits([prompt])

    def feed(self, tokens: list[int]) -> Tensor:
        self.cached += tokens
        self.open += tokens
        return self._logits([self.cached[: len(self.cached) - len(tokens) + i + 1] for i in range(len(tokens))])

    def feed_tree(self, tokens: list[int], draft: Draft) -> Tensor:
        chain = self.feed(list(tokens))[-1:] if tokens else torch.empty(0, 0, dtype=torch.float64)
        nodes = [self.cached + draft.path(node) for node in range(len(draft))]
        return torch.cat([chain, self._logits(nodes)]) if tokens else self._logits(nodes)

    def prepare(self, text: Text) -> None:
        return None

    def feeding(self, tokens: list[int], wanted: int) -> Asks[Tensor]:
        return self.feed(tokens)[-wanted:]
        yield  # a table is read without a pass

    def feeding_tree(self, tokens: list[int], draft: Draft) -> Asks[Tensor]:
        return self.feed_tree(tokens, draft)
        yield

    def _rollback(self, count: int) -> None:
        del self.cached[len(self.cached) - count :]

    def _commit(self) -> None:
        return None

    def _logits(self, prefixes: list[list[int]]) -> Tensor:
        return torch.stack([self.laws(tuple(prefix)).log() for prefix in prefixes])


def hashed_laws(vocab: int, seed: int, sharp: float = 1.5, base: Callable | None = None, mix: float = 0.5) -> Callable:
    """A fixed random law after every text; with `base`, one that resembles another's."""

    @cache
    def law(prefix: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
        own = torch.softmax(sharp * torch.randn(vocab, generator=generator, dtype=torch.float64), -1)
        return own if base is None else mix * own + (1 - mix) * base(prefix)

    return law


def llama(seed: int = 0, layers: int = 2, vocab: int = 64, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A small random model whose greedy text does not settle into a loop at once."""
    support_random.seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(dtype)


def prompt(length: int = 90, rows: int = 1, seed: int = 0, vocab: int = 64) -> Tensor:
    """Random tokens, twice over: something to look up."""
    half = torch.randint(2, vocab, (rows, length // 2), generator=torch.Generator().manual_seed(seed))
    return torch.cat([half, half], 1)


@torch.no_grad()
def plain_sampling(
    model: LlamaForCausalLM,
    ids: Tensor,
    new: int,
    seed: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    row: int = 0,
) -> list[int]:
    """Sampling without speculation or cache, written out: processors, then the largest of log p + noise."""
    warpers = [TemperatureLogitsWarper(temperature)] + ([TopPLogitsWarper(top_p)] if top_p < 1 else [])
    for _ in range(new):
        scores = model(ids, use_cache=False).logits[:, -1].float()
        for warper in warpers:
            scores = warper(ids, scores)
        noise = Gumbel(seed, row).at(ids.shape[1], scores.shape[-1])
        token = (scores[0].softmax(-1).double().log() + noise).argmax()
        ids = torch.cat([ids, token[None, None]], 1)
    return ids[0].tolist()
