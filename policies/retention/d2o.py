"""D2O (Wan et al., ICLR 2025, arXiv:2406.13035): tokens that are alike are merged; layers may share by concentration.

    F_l       =  variance over tokens of the attention each received from the prompt's queries  (mean over query heads)
    size_l    =  c exp(-F_l), between `least` and the whole prompt; c such that the layers hold layers * budget
    score_j   =  sum over all queries so far of softmax(q k^T)_j        (reduced over the query group)
    keep      =  `sinks` first tokens, a part `recent` of size_l newest, and the best others up to size_l
    u_ij      =  cos(k_i, k_j), for each dropped i and each kept j that is no sink;  c(i) = argmax_j u_ij
    tau       =  mean_i max_j u_ij at the first drop;  later  beta max_i max_j u_ij + (1 - beta) tau
    merge i   if  max_j u_ij >= tau:
    x_c       =  (e x_c + sum over its i of exp(u_ic) x_i) / (e + sum over its i of exp(u_ic)),  x: key, and value alike

The weights are positive and add up to 1. While decoding, one token goes for each that comes. Defaults: 4 sinks, a
quarter of the layer's size for the newest, beta 0.7, as in the paper.

`form="official"` follows the official code where it says something else:

    F_l       is spread to [0, 1] over the layer's heads before their mean: layers differ by a factor of e at most
    size_l    the first two layers and the last keep everything all the same, beyond the budget and while decoding
    c(i)      among all kept tokens
    tau       beta mean_i max_j u_ij + (1 - beta) tau, with beta 0.5
    recent    stays a quarter; the code's configurations say `recent=0.5`, and the least it holds is 0.01 of the prompt
    x_c       =  (x_c + sum u_ic x_i) / (1 + their number)        (no convex weights: vectors shrink)

Layers are judged when all of them have read the prompt; until then they hold it whole.

Differs from both: what the bounds on size_l take from a layer, others get, so that the budget is met; verdicts,
neighbours and tau belong to a KV head (the paper compares keys of all heads at once, the code mixes heads that
dropped different tokens); nothing is carried over from one prompt to the next. Differs from the official code also in
that the prompt is judged at its end instead of at the first decoded token. Merged keys are averaged as they are
cached, rotated; a merged token keeps its survivor's position. All layers hold the budget unless `shares="measured"` or
the official form is asked for: as the paper states F_l, one strong sink outweighs all else, and the exponential leaves
some layers next to nothing. On the bundled model nothing is then found at half the cache, and with even shares more
than half of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from kvengine.kernels.step.reference import earliest
from kvengine.policies._budget import Budget, check_budget, check_choice, check_count, check_share, part
from kvengine.policies.retention import (
    FLOATS,
    REDUCE,
    Merged,
    Notes,
    Paid,
    Reduce,
    Retention,
    Seen,
    best_of,
    over_group,
    some_rows,
    twin,
)
from kvengine.tokens import pack, take


@dataclass(frozen=True)
class D2O(Retention):
    """Keep what has received most attention, and merge what resembles it.

    Args:
        budget: tokens held per KV head, on average over the layers, or a fraction of the prompt.
        recent: how much of a layer's size goes to the newest tokens, as far as the sinks leave room; one token at the
            least. A fraction.
        sinks: the first tokens, always kept; a size that holds no more than them leaves one place to the newest. Tokens.
        least: the least a layer holds. A fraction of the budget.
        beta: how fast the threshold follows. A fraction; None: 0.7, or 0.5 in the official form.
        shares: "even", or "measured" by F_l. None: even, or measured in the official form.
        form: "paper" or "official".
        reduce: how the heads of a query group agree on a token's score.
    """

    decodes: ClassVar[bool] = True
    wants_mass: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    remerges: ClassVar[bool] = True
    budget: Budget = 1024
    recent: float = 0.25
    sinks: int = 4
    least: float = 0.05
    beta: float | None = None
    shares: Literal["even", "measured"] | None = None
    form: Literal["paper", "official"] = "paper"
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, sinks=self.sinks)
        check_choice(self, shares=(self.shares, (None, "even", "measured")), form=(self.form, ("paper", "official")))
        check_choice(self, reduce=(self.reduce, REDUCE))
        check_share(self, recent=self.recent, least=self.least, beta=0.0 if self.beta is None else self.beta)

    def at(self, layer: int, layers: int) -> Retention:
        """The official form leaves some layers alone. They count all the same when the others share."""
        if self.form != "official" or layer not in (0, 1, layers - 1):
            return self
        alone = {"decodes": False, "merges": False, "remerges": False, "remembers": False}
        return twin(self, **alone, limit=Retention.limit, keep=all_of_them)

    def limit(self, seen: Seen) -> int | None:
        return int(seen.notes["size"].max())

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        if seen.mass is None:
            raise ValueError("D2O needs the attention that each token received")
        return seen.score + over_group(seen.mass, self.reduce)

    # ---- how much a layer holds -------------------------------------------------------------------------------------

    def measure(self, seen: Seen) -> Float[Tensor, "sequence"] | None:
        """F of this layer, per sequence."""
        even = self.form != "official" if self.shares is None else self.shares == "even"
        if even or seen.mass is None:
            return None
        there = seen.valid[:, None]
        count = there.sum(-1).clamp(min=1)
        mean = seen.mass.masked_fill(~there, 0).sum(-1) / count
        apart = (seen.mass - mean[..., None]).masked_fill(~there, 0).double()
        by_head = (apart.square().sum(-1) / count).unflatten(0, (-1, seen.heads)).flatten(1)
        if self.form == "official":
            low, high = by_head.amin(1, keepdim=True), by_head.amax(1, keepdim=True)
            by_head = (by_head - low) / (high - low).clamp(min=1e-12)
        found: Tensor = by_head.mean(1)
        return found

    def share(self, seen: Sequence[Seen], measures: Sequence[Float[Tensor, "sequence"]]) -> list[Int[Tensor, "_"]]:
        """Tokens that each row of each layer holds."""
        one, at = seen[0], seen[0].first.device
        budget, prompt = one.count(self.budget)[:: one.heads], one.prompt_length[:: one.heads]
        size = sizes(torch.stack([m.to(at) for m in measures]), budget, prompt, self.least)
        return [n.repeat_interleave(s.heads).to(s.first.device) for n, s in zip(size, seen, strict=True)]

    # ---- which tokens, and what becomes of the others ---------------------------------------------------------------

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"] | None:
        if seen.prompt:
            seen.notes["size"] = seen.count(self.budget) if seen.share is None else seen.share
        size = seen.notes["size"]
        always = self.early(seen, size) | (seen.position > seen.newest - self.newest(size)[:, None])  # no more than fit
        want = seen.score.float().masked_fill(always, float("inf")).masked_fill(~seen.valid, float("-inf"))
        return best_of(seen, want, size)

    def newest(self, size: Int[Tensor, "row"]) -> Int[Tensor, "row"]:
        """How many of the newest tokens stay beside the sinks, which go last."""
        return (size - self.first(size)).minimum(part(size, self.recent)).clamp(min=1)

    def first(self, size: Int[Tensor, "row"]) -> Int[Tensor, "row"]:
        """How many sinks there is room for beside the newest token: without that, no token said would ever be read."""
        return (size - 1).clamp(max=self.sinks)

    def early(self, seen: Seen, size: Int[Tensor, "row"]) -> Bool[Tensor, "row token"]:
        """These sinks."""
        return seen.valid & (seen.position < (seen.first + self.first(size))[:, None])

    def rule(
        self, first: Int[Tensor, "row"], prompt_length: Int[Tensor, "row"], heads: int, notes: Notes
    ) -> Merged | None:
        said = ("score", "keep", "newest", "first", "early", "refold", "targets", "threshold", "merged")
        if any(getattr(type(self), name) is not getattr(D2O, name) for name in said):
            return None
        size, official = notes["size"], self.form == "official"
        paid = Paid(size.contiguous(), self.newest(size), self.reduce, adds=True, first=first + self.first(size))
        return Merged(paid, notes["threshold"], self.pace, shrinks=official, spares=not official)

    def fold(
        self, seen: Seen, keep: Bool[Tensor, "row token"]
    ) -> tuple[Float[Tensor, "row token dim"], Float[Tensor, "row token dim_v"]]:
        keys, values = seen.read()
        gone = seen.valid & ~keep
        if not bool(gone.any()):
            seen.notes["threshold"] = torch.full((len(keys),), float("nan"), dtype=torch.float32, device=keys.device)
            return keys, values
        like, mate, index, real = nearest(keys, gone, self.targets(seen, keep))
        passed = real & (like >= self.threshold(seen, like, real)[:, None])
        return self.merged(keys, like, mate, index, passed), self.merged(values, like, mate, index, passed)

    def refold(
        self, seen: Seen, keep: Bool[Tensor, "row token"]
    ) -> tuple[Int[Tensor, "row"], Float[Tensor, "row dim"], Float[Tensor, "row dim_v"]]:
        """The same for one token, of which nothing but its survivor is written; and no shape follows from the data."""
        keys, values = seen.read()
        gone, target = seen.valid & ~keep, self.targets(seen, keep)
        row, lost = torch.arange(len(keys), device=keys.device), gone.to(torch.int8).argmax(1)
        vectors = keys.float()
        length = vectors.norm(dim=-1).clamp(min=1e-12)
        cosine = (vectors @ vectors[row, lost][..., None])[..., 0] / (length * length[row, lost][:, None])
        cosine = cosine.masked_fill_(~target, -2)
        like = cosine.amax(1, keepdim=True)
        mate = earliest(cosine >= like, seen.position)[:, None]
        real = (gone.any(1) & target.any(1))[:, None]
        passed = real & (like >= self.threshold(seen, like, real)[:, None])
        two = torch.stack([mate[:, 0], lost], 1)  # a row of two slots, the second of which goes into the first
        first, second = torch.zeros_like(mate), torch.ones_like(mate)
        pairs = (x.gather(1, wide(two, x)) for x in (keys, values))
        k, v = (self.merged(x, like, first, second, passed)[:, 0] for x in pairs)
        return two[:, 0], k, v

    def targets(self, seen: Seen, keep: Bool[Tensor, "row token"]) -> Bool[Tensor, "row token"]:
        """The survivors that may take others in."""
        there = keep & seen.valid
        return there if self.form == "official" else there & ~self.early(seen, seen.notes["size"])

    @property
    def pace(self) -> float:
        """beta."""
        return self.beta if self.beta is not None else 0.5 if self.form == "official" else 0.7

    def threshold(
        self, seen: Seen, like: Float[Tensor, "row gone"], real: Bool[Tensor, "row gone"]
    ) -> Float[Tensor, "row"]:
        """tau, brought up to date and noted; rows that drop nothing keep theirs. NaN before the first drop."""
        most = like.masked_fill(~real, -2).amax(1)
        mean = like.masked_fill(~real, 0).sum(1) / real.sum(1).clamp(min=1)
        mean = mean.minimum(most)  # of equal ones it may be rounded to more than each, and none would reach it
        beta, fresh = self.pace, torch.full_like(mean, float("nan"))
        before = fresh if seen.prompt else seen.notes.get("threshold", fresh)
        new = mean if self.form == "official" else most
        after = torch.where(before.isnan(), mean, beta * new + (1 - beta) * before)
        seen.notes["threshold"] = torch.where(real.any(1), after, before)
        return seen.notes["threshold"]

    def merged(
        self,
        x: Float[Tensor, "row token dim"],
        like: Float[Tensor, "row gone"],
        mate: Int[Tensor, "row gone"],
        index: Int[Tensor, "row gone"],
        passed: Bool[Tensor, "row gone"],
    ) -> Float[Tensor, "row token dim"]:
        """`x` with the tokens at `index` that `passed` merged into those at `mate`."""
        official = self.form == "official"
        weight = (like if official else like.exp()).masked_fill(~passed, 0)
        part = passed.float() if official else weight
        own = 1.0 if official else torch.e
        total = torch.full(x.shape[:2], own, dtype=torch.float32, device=x.device).scatter_add_(1, mate, part)
        found = torch.empty_like(x)
        for rows in some_rows(x):
            one, from_, into = x[rows], wide(index[rows], x), wide(mate[rows], x)
            more = one.gather(1, from_).float().masked_fill(~passed[rows, :, None], 0) * weight[rows, :, None]
            summed = (one.float() * own).scatter_add(1, into, more) / total[rows, :, None]
            found[rows] = torch.where((total[rows] > own)[..., None], summed.to(x.dtype), one)
        return found


def all_of_them(retention: Retention, seen: Seen) -> None:
    """A verdict (`keep`) that drops nothing."""


def wide(index: Int[Tensor, "row chosen"], x: Float[Tensor, "row token dim"]) -> Int[Tensor, "row chosen dim"]:
    return index[..., None].expand(-1, -1, x.shape[-1])


def nearest(
    keys: Float[Tensor, "row token dim"], gone: Bool[Tensor, "row token"], target: Bool[Tensor, "row token"]
) -> tuple[Float[Tensor, "row gone"], Int[Tensor, "row gone"], Int[Tensor, "row gone"], Bool[Tensor, "row gone"]]:
    """For each dropped token: its greatest cosine to a target, which one, its own index, and whether there is one."""
    count = gone.sum(1)
    most = int(count.max())
    index = gone.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    real = (torch.arange(most, device=keys.device) < count[:, None]) & target.any(1, keepdim=True)
    like = keys.new_full(index.shape, -2, dtype=torch.float32)
    mate, survivors = torch.zeros_like(index), pack(target)
    if not survivors.shape[1]:
        return like, mate, index, real
    for rows in some_rows(keys):
        unit = F.normalize(keys[rows].float(), dim=-1).masked_fill_(~(gone | target)[rows, :, None], 0)
        at = survivors[rows]
        into, none = take(unit, at).transpose(1, 2), (at < 0)[:, None]
        step = max(1, FLOATS // at.numel())
        for i in range(0, most, step):
            some = unit.gather(1, wide(index[rows, i : i + step], keys))
            like[rows, i : i + step], best = (some @ into).masked_fill_(none, -2).max(2)
            mate[rows, i : i + step] = at.gather(1, best).clamp(min=0)
    return like, mate, index, real


def sizes(
    measures: Float[Tensor, "layer sequence"],
    budget: Int[Tensor, "sequence"],
    prompt: Int[Tensor, "sequence"],
    least: float,
) -> Int[Tensor, "layer sequence"]:
    """Tokens per layer: as exp(-F), within bounds, rounded so that they add up to layers * budget.

    Where the budget holds the whole prompt, every layer has the budget.

    >>> F = torch.tensor([[1.0], [1.0], [3.0]])
    >>> sizes(F, torch.tensor([30]), torch.tensor([100]), 0.05)[:, 0].tolist()
    [42, 42, 6]
    """
    n = len(measures)
    low = (budget.double() * least).clamp(min=1).expand(n, -1)
    share = fill(-measures.double(), low, prompt.expand(n, -1).double(), n * budget.double())
    whole = F.pad(share.cumsum(0), (0, 0, 1, 0)).add(1e-6).floor().long().diff(dim=0)
    return torch.where(budget >= prompt, budget.expand(n, -1), whole)


def fill(
    log: Float[Tensor, "layer sequence"],
    low: Float[Tensor, "layer sequence"],
    high: Float[Tensor, "layer sequence"],
    total: Float[Tensor, "sequence"],
) -> Float[Tensor, "layer sequence"]:
    """exp(log + c) within its bounds, with c such that a sequence's layers add up to `total`: by bisection."""
    a, b = (low.log() - log).amin(0), (high.log() - log).amax(0)
    for _ in range(100):
        c = (a + b) / 2
        over = (log + c).exp().clamp(low, high).sum(0) > total
        a, b = torch.where(over, a, c), torch.where(over, c, b)
    return (log + b).exp().clamp(low, high)
