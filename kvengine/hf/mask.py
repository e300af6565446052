"""The mask that a patched model runs with: the rule that would make one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from kvengine.errors import ModelError
from kvengine.session import Session

UNPATCH = ": call kvengine.unpatch(model)"
ATTENDS = (
    "{} attends by itself, and does not ask transformers' attention interface: it would see the newest tokens alone, as the "
    f"engine holds the others. Where its forward() was replaced, put it back; otherwise the engine cannot enter it{UNPATCH}"
)


class MaskUsed(ModelError, AttributeError):
    """The model's own code wanted to look at a mask; also what Python says of things that have no such attribute."""

    def __init__(self) -> None:
        super().__init__(
            "this model's attention reads or changes its mask itself (to choose tokens by it, say), or another thread has "
            "unpatched the model while it ran; on a patched model there is none, only the rule that would make it. Where nothing "
            f"unpatched it, the engine cannot enter it{UNPATCH}"
        )


class LazyMask:
    """A mask not yet made: the arguments that would make it. To who asks, it is of four dimensions, as if made."""

    ndim = 4

    def __init__(self, kwargs: dict[str, Any], origin: LazyMask | None = None) -> None:
        # A static cache counts its tokens in a tensor, and adds to it before the mask is made.
        self.kwargs = {name: x.clone() if isinstance(x, Tensor) and not x.ndim else x for name, x in kwargs.items()}
        self.made: dict[str, Any] = {}
        # What was found once for all layers of a pass: whether the newest so many are all tokens, and under "hides" and "hidden"
        # what the methods of that name have found. Copies for other devices share it.
        self.found: dict[int | str, bool] = {} if origin is None else origin.found
        self.origin = origin
        self.copies: dict[torch.device, LazyMask] = {}

    def __getitem__(self, index: Any) -> Any:
        """The last queries only, as Gemma's shared layers ask: `mask[:, :, -n:, :]`. Or where the model must have one, for an
        index of its own (`kvengine.hf.indexed`), the mask made: `mask[:, 0, :, :]`."""
        every = slice(None)
        if self.kwargs.get("allow_is_causal_skip") is False and index in ((every, 0), (every, 0, every, every)):
            return self.make("sdpa")[:, 0]  # type: ignore[no-any-return]
        if not isinstance(index, tuple) or len(index) != 4 or index[:2] + index[3:] != (every, every, every):
            raise MaskUsed
        queries: slice = index[2]
        q = range(self.kwargs["q_length"])[queries]
        return LazyMask({**self.kwargs, "q_offset": self.kwargs["q_offset"] + q.start, "q_length": len(q)})

    def on(self, device: torch.device) -> LazyMask:
        """The mask for layers on that device, where a model is split over several; what it says is copied there."""
        if self.kwargs.get("device", device) == device:
            return self
        if device not in self.copies:
            mine = copy.copy(self)
            mine.copies = {}  # no circle: a mask that was made may be large
            self.copies[device] = type(self)(self.kwargs | {"device": device}, mine)
        return self.copies[device]

    def here(self, x: Any) -> Any:
        """Something of a mask, on the device of the layers that ask."""
        return x if self.origin is None else x.to(self.kwargs["device"])

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.kwargs["batch_size"], 1, self.kwargs["q_length"], self.kwargs["kv_length"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MaskUsed

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MaskUsed

    @property
    def plain(self) -> bool:
        """Whether its rule is that each query sees the tokens up to its own."""
        return self.kwargs.get("mask_function") is causal_mask_function

    @property
    def causal(self) -> bool:
        """Whether that is what its rule comes to: no images here whose tokens see each other, no windows."""
        if self.origin is not None:
            return self.origin.causal
        if not self.plain and "causal" not in self.made:
            rule = {**self.kwargs, "attention_mask": None, "allow_is_causal_skip": False}
            make: Any = AttentionMaskInterface()["sdpa"]
            self.made["causal"] = torch.equal(make(**rule), make(**rule | {"mask_function": causal_mask_function}))
        return self.plain or bool(self.made["causal"])

    def make(self, implementation: str) -> Any:
        """The mask as that implementation wants it; made once for all layers of a pass."""
        if implementation not in self.made and self.origin is not None:
            made = self.origin.make(implementation)
            self.made[implementation] = None if made is None else self.here(made)
        if implementation not in self.made:
            functions = AttentionMaskInterface()
            known = implementation in functions
            self.made[implementation] = functions[implementation](**self.kwargs) if known else None
        return self.made[implementation]

    @property
    def padding(self) -> Tensor | None:
        """Which tokens are tokens, as the caller says; None if all are.

        Raises:
            ModelError: it does not say so for each row.
        """
        given: Tensor | None = self.kwargs.get("attention_mask")
        if given is None or (given.ndim == 2 and len(given) == self.kwargs["batch_size"]):
            return given
        if bool(given.all()):
            return None
        raise ModelError(
            f"attention_mask has the shape {tuple(given.shape)}, but there are {self.kwargs['batch_size']} rows; give one of "
            "shape (rows, tokens so far)"
        )

    def valid(self, n: int, ones: bool = False) -> Bool[Tensor, "seq token"] | None:
        """Which of the newest `n` tokens are tokens; None if all are. `ones`: a single one is, so nobody need look."""
        padding = self.padding
        if padding is None or (n == 1 and ones and padding.is_cuda):  # to look makes the host wait
            return None
        end = int(self.kwargs["q_offset"]) + int(self.kwargs["q_length"])
        if padding.shape[1] < end:  # an assistant's mask may stop at the prompt; what comes after it are tokens
            padding = torch.nn.functional.pad(padding.bool(), (0, end - padding.shape[1]), value=True)
        part: Tensor = padding[:, end - n : end].bool()
        if n not in self.found:
            self.found[n] = bool(part.all())
        return None if self.found[n] else self.here(part)

    def hides(self, session: Session) -> bool:
        """Whether it says other things of earlier tokens than the masks before it; on a GPU the host does not look."""
        if (found := self.found.get("hides")) is not None:
            return found
        given = self.padding
        if given is None or given.is_cuda:
            return False
        before = int(self.kwargs["q_offset"])
        part = given[:, : before + int(self.kwargs["q_length"])]
        rows = (part if part.dtype == torch.bool else part != 0).cpu().numpy()
        now = [row.tobytes() for row in rows]  # at every token: torch takes several times as long to compare
        was = session.mask if session.mask is not None and len(session.mask) == len(now) else [b""] * len(now)
        known = min(before, rows.shape[1], *map(len, was[:1]))
        same = all(new.startswith(old[:known]) for new, old in zip(now, was, strict=True))
        same = same and (known == before or bool(rows[:, known:before].all()))
        self.found["hides"], session.mask = not same, now
        return not same

    def turns(self, cache: Any, n: int) -> bool:
        """Whether `n` new tokens of a layer begin a turn or are a prompt's, or it says other things of earlier ones. `cache`: the
        layer's `LayerCache`, or a view of one."""
        session = cache.session
        return self.hides(session) or session.turn == cache.seen or cache.prompt_tokens(n) > 0

    def hidden(self, n: int, turn: bool) -> Bool[Tensor, "seq earlier"] | None:
        """Which of the tokens before the newest `n` are none by this mask; None if all are tokens, and for one that goes on.

        `turn`: the new ones begin a turn or are a prompt's, even if it is one alone.

        Raises:
            ModelError: it has padding, and stops short of the new ones: it may speak of them alone.
        """
        padding = self.padding
        before = int(self.kwargs["q_offset"]) + int(self.kwargs["q_length"]) - n
        if padding is None or (n == 1 and not turn):
            return None
        if padding.shape[1] < before + n and not bool(padding.all()):
            raise ModelError(
                f"attention_mask has {padding.shape[1]} columns, but with what the cache has seen there are {before + n} tokens; "
                "give one of shape (rows, tokens so far), ones for all that are no padding"
            )
        if before == 0:
            return None
        part: Tensor = ~padding[:, :before].bool()
        if "hidden" not in self.found:
            self.found["hidden"] = bool(part.any())
        return self.here(part) if self.found["hidden"] else None
