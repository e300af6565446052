"""A policy stack: one choice on each axis."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from inspect import getattr_static, isfunction
from typing import Any

import torch

from kvengine.errors import KernelError, PolicyError, UnknownPolicy, UnsupportedPolicy, unknown
from kvengine.offload.placement import Placement
from kvengine.offload.placement.device import Device
from kvengine.policies import catalogue, load, name_of, ours
from kvengine.policies._budget import TOGETHER, check_budget, check_count, check_share, check_text
from kvengine.policies.prefill import Prefill
from kvengine.policies.prefill.exact import Exact
from kvengine.policies.representation import Representation
from kvengine.policies.representation.dense import Dense
from kvengine.policies.retention import Replay, Retention
from kvengine.policies.retention.full import Full
from kvengine.policies.routing import Routing
from kvengine.policies.routing.uniform import Uniform
from kvengine.policies.selection import Selection
from kvengine.policies.selection.all import All
from kvengine.presets import PRESETS, call

NAMED = "put its file where policies are looked for (KVENGINE_POLICIES, see CONTRIBUTING.md)"
FORM = "write names joined by '+', and text in quotes, such as snapkv(budget=1024) + disk(folder='./pages')"
PAGE = 16  # tokens of a page, when no method asks for more
Channels = frozenset[tuple[int, int, bool]]
"""Of keys and of values, and whether these are a part of them (latents): what the layers of a model bring."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One choice on each axis; the default is the null choice, so `Stack()` is the full, exact cache.

    >>> Stack.parse("duo(sparsity=0.5) + quest(budget=256) + kivi(bits=4)").selection.budget
    256
    >>> str(Stack.parse("kivi(bits=4)+streaming"))
    'streaming + kivi'
    >>> Stack.parse("h2o + snapkv")
    Traceback (most recent call last):
    ...
    kvengine.errors.UnsupportedPolicy: 'h2o' and 'snapkv' both choose the retention; a stack has one
    """

    routing: Routing = Uniform()
    prefill: Prefill = Exact()
    retention: Retention = Full()
    representation: Representation = Dense()
    selection: Selection = All()
    placement: Placement = Device()

    def __post_init__(self) -> None:
        for axis in fields(self):
            check_kind(axis.name, getattr(self, axis.name), type(axis.default).__mro__[-2])
        if self.prefill.exact and type(self.prefill).visible is not Prefill.visible:
            raise PolicyError(f"{name_of(self.prefill)!r} hides tokens (`visible`), so its `exact` must be False")
        chooses = (
            type(self.selection).select is not Selection.select or type(self.selection).score is not Selection.score
        )
        if chooses and type(self.selection).reads is Selection.reads:
            raise PolicyError(
                f"{name_of(self.selection)!r} chooses, but its `reads` says that all is read: return a budget"
            )
        self.check_numbers()
        r, s = self.retention, self.selection
        if type(r).shift is not Retention.shift and type(r).needs_rope is Retention.needs_rope:
            raise PolicyError(f"{name_of(r)!r} turns keys (`shift`), so its `needs_rope` must say that it does")
        if self.representation.joint and not self.representation.needs_rope:
            form = name_of(self.representation)
            raise PolicyError(f"{form!r} keeps keys before their rotation (`joint`), so its `needs_rope` must be True")
        self.check_layers(1)
        if r.remerges and not self.representation.lossless:
            raise UnsupportedPolicy(
                f"{name_of(r)!r} rewrites tokens that it keeps while decoding, but {name_of(self.representation)!r} "
                "would lose more at each rewrite; keep the representation dense"
            )
        if r.remerges and (self.selects or self.placed):
            other = s if self.selects else self.placement
            raise UnsupportedPolicy(
                f"{name_of(r)!r} rewrites tokens that it keeps while decoding, but {name_of(other)!r} needs sealed "
                "pages, which never change; use one or the other"
            )
        if getattr(self.placement, "fields", ()):
            self.placement.check(self.representation.names)
        for policy in (self.retention, self.representation, self.selection):
            check = getattr(policy, "check", None)
            if check is not None:
                check(self)

    @cached_property
    def selects(self) -> bool:
        """Whether a query reads only some of what is stored."""
        return self.selection.reads is not None

    @cached_property
    def placed(self) -> bool:
        """Whether pages live elsewhere than on the compute device."""
        return type(self.placement) is not Device

    @cached_property
    def paged(self) -> bool:
        """Whether history is sealed into pages; if not, it stays in the open tail."""
        return not isinstance(self.representation, Dense) or self.selects or self.placed or self.retention.ragged

    @cached_property
    def page(self) -> int:
        """Tokens of a page: a multiple of what the representation groups and of what the selection chooses."""
        least = math.lcm(self.representation.multiple, self.selection.unit)
        return least * math.ceil(PAGE / least) if least < PAGE else least

    @cached_property
    def room(self) -> int:
        """The newest tokens that stay in the open tail."""
        return max(self.representation.room, self.selection.room)

    @property
    def reads_prompts_exactly(self) -> bool:
        """Whether every head reads a prompt as the model does."""
        return self.prefill.exact and self.routing.exact

    def check_numbers(self) -> None:
        """Refuse methods whose own numbers are none to count by."""
        r, form, s = self.retention, self.representation, self.selection
        check_count(self.prefill, whole=self.prefill.whole)
        check_count(r, observes=r.observes)
        check_told(r)
        check_count(form, least=1, most=TOGETHER, multiple=form.multiple)
        check_count(form, room=form.room)
        check_share(form, probes=form.probes)
        check_text(form, codec=form.codec)
        check_count(s, least=1, unit=s.unit)
        check_count(s, room=s.room)
        if s.reads is not None:
            check_budget(s, reads=s.reads)

    def check_layers(self, layers: int) -> None:
        """Refuse what does not go together in one of so many layers, in which a retention may differ."""
        r, s = self.retention, self.selection
        if self.selects and any(r.at(layer, layers).counts for layer in range(layers)):
            raise UnsupportedPolicy(
                f"{name_of(r)!r} counts the attention that every held token receives, but {name_of(s)!r} reads only "
                "some of them; use a retention that judges the prompt once (snapkv), or no selection"
            )

    def check_channels(self, dim: int, dim_v: int, nested: bool = False) -> None:
        """Refuse keys and values of so many channels where pages cannot hold them, before there is a page to seal.

        `nested`: values are the first channels of the keys (latents), and a dense page holds them once.

        Raises:
            PolicyError: the placement moves fields that such a page does not have. UnsupportedPolicy: codes do not fit.
        """
        form, moved = self.representation, getattr(self.placement, "fields", ())
        if form == Dense() and not (nested and moved):
            return
        k, v = (torch.zeros(1, form.multiple, n, dtype=torch.float32, device="cpu") for n in (dim, dim_v))
        try:
            with torch.autocast("cpu", enabled=False):  # as where pages are sealed
                names = form.encode(k, v, torch.zeros(1, form.multiple, dtype=torch.float32, device="cpu"))
        except (KernelError, PolicyError) as error:
            raise UnsupportedPolicy(
                f"'{spell(form)}' cannot store keys of {dim} and values of {dim_v} channels, which is what this model's heads "
                f"have: {error}"
            ) from error
        if moved:
            self.placement.check(
                tuple(name for name in names if not (nested and form.codec == "dense" and name == "v"))
            )

    def within(self, retention: Retention) -> Stack:
        """The stack of heads that a routing gives this retention: exact, where keys of all heads are kept as one.

        Raises:
            UnsupportedPolicy: it does not go with the other choices, or reads a prompt twice, which all heads do or none.
        """
        if retention == self.retention:
            return self
        if retention.replay is not None:
            raise UnsupportedPolicy(
                f"{name_of(retention)!r} reads the prompt a second time, for all heads or for none, but "
                f"{name_of(self.routing)!r} gives it to some; make it the stack's retention"
            )
        if self.representation.joint:
            return replace(self, retention=retention, representation=Dense(), selection=All(), placement=Device())
        if not ours(type(self.routing).__module__):
            replace(self, retention=retention)  # refused as any stack is
        return self

    @staticmethod
    def of(choice: str | Stack) -> Stack:
        return choice if isinstance(choice, Stack) else Stack.parse(choice)

    @staticmethod
    def parse(text: str) -> Stack:
        """The stack that a policy string spells: names with options, joined by `+`, in any order.

        Raises:
            UnknownPolicy: no policy or option has that name.
            UnsupportedPolicy: two names choose the same axis, or exclude each other.
            PolicyError: the text is not a policy string, or a value is out of range.
        """
        chosen: dict[str, Any] = {}
        named: dict[str, str] = {}
        for name, options, said in expand(text):
            axis, cls = load(name)
            if axis in chosen:
                raise UnsupportedPolicy(f"{named[axis]} and {said} both choose the {axis}; a stack has one")
            chosen[axis], named[axis] = build(name, cls, options), said
        return Stack(**chosen)

    def __str__(self) -> str:
        chosen = [(axis.default, getattr(self, axis.name)) for axis in fields(self)]
        return " + ".join(spell(policy) for default, policy in chosen if policy != default) or "full"

    def spelled(self) -> str:
        """The stack with every option written out, for records that outlive a default."""
        return " + ".join(spell(getattr(self, axis.name), every=True) for axis in fields(self))

    def lasting(self) -> str:
        """`spelled`, for what will be read again, by `parse`. Raises PolicyError if that would not give this stack."""
        text = self.spelled()
        try:
            same = Stack.parse(text) == self
        except PolicyError as error:
            raise PolicyError(f"{self} cannot be named in a file: {error}; {NAMED}") from error
        if not same:
            raise PolicyError(f"{self} cannot be named in a file: that is the name of another policy; {NAMED}")
        return text


def check_kind(axis: str, policy: object, interface: type[Any]) -> None:
    """Raises PolicyError for what is no policy of this axis: a string, a class, another axis's policy."""
    if not isinstance(policy, interface):
        what = f"the class {policy.__name__}: call it" if isinstance(policy, type) else repr(policy)
        raise PolicyError(f"{axis} takes an object of a class derived from {interface.__name__}, got {what}")
    if ours(type(policy).__module__):
        return
    for name, theirs in vars(interface).items():
        method, given = isfunction(theirs), getattr_static(policy, name)
        if method and not callable(found := getattr(policy, name)):
            raise PolicyError(
                f"{type(policy).__name__}: {name}={found!r}, but `{name}` is a method of {interface.__name__}"
            )
        if isfunction(given) and not method and not name.startswith("_"):
            raise PolicyError(
                f"{type(policy).__name__}: `{name}` is a value of {interface.__name__}, not a method: put @property above it"
            )


def check_told(r: Retention) -> None:
    """Refuse what a retention says of itself and the engine could not follow."""
    again, ends = r.replay, r.ends
    if r.order is not None:
        check_count(r, order=r.order)
    if again is not None and not isinstance(again, Replay):
        raise PolicyError(f"{type(r).__name__}: replay={again!r} must be a kvengine.policies.retention.Replay, or None")
    if again is not None:
        check_count(r, least=1, chunk=again.chunk)
        check_count(r, carry=again.carry, sinks=again.sinks)
        for name, ids in (("prompt", again.prompt), ("suffix", again.suffix)):
            if not isinstance(ids, tuple) or not all(type(token) is int and token >= 0 for token in ids):
                raise PolicyError(f"{type(r).__name__}: the replay's {name}={ids!r} must be a tuple of token ids")
    if ends is not None:
        if not isinstance(ends, tuple) or len(ends) != 2:
            raise PolicyError(f"{type(r).__name__}: ends={ends!r} must be a pair (first, newest) of tokens, or None")
        check_count(r, first=ends[0])
        check_budget(r, newest=ends[1])


def spell(policy: Any, every: bool = False) -> str:
    options = [f.name for f in fields(policy) if every or getattr(policy, f.name) != f.default]
    return call(name_of(policy), **{name: getattr(policy, name) for name in options})


def build(name: str, cls: type[Any], options: dict[str, Any]) -> Any:
    known = [f.name for f in fields(cls)]
    for option in options:
        if option not in known:
            raise UnknownPolicy(unknown(f"option of {name}", option, known))
    return cls(**options)


def expand(text: str) -> list[tuple[str, dict[str, Any], str]]:
    """The terms of a policy string, presets replaced by what they stand for, and what to call them."""
    found: list[tuple[str, dict[str, Any], str]] = []
    for name, options in terms(text):
        if name not in PRESETS:
            if name not in catalogue():
                said = unknown("policy", name, [*catalogue(), *PRESETS])
                raise UnknownPolicy(said if "Did you mean" in said else f"{said}. If it is your own, {NAMED}")
            found.append((name, options, repr(name)))
            continue
        for option in options:
            if option not in PRESETS[name].options:
                raise UnknownPolicy(unknown(f"option of {name}", option, PRESETS[name].options))
        found += [(*part, f"{part[0]!r} of {name!r}") for part in terms(PRESETS[name].text(options))]
    return found


def terms(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and options of a policy string.

    >>> terms("quest(budget=256) + duo")
    [('quest', {'budget': 256}), ('duo', {})]
    """
    if not isinstance(text, str) or not text.strip():
        raise PolicyError(f"{text!r} is not a policy string; {FORM}")
    try:
        node: ast.expr = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # no Unicode text; nested too deeply
        why = error.msg if isinstance(error, SyntaxError) else error
        raise PolicyError(f"{text!r} is not a policy string: {why}; {FORM}") from None
    parts: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts.insert(0, node.right)
        node = node.left
    return [term(part) for part in (node, *parts)]


def term(node: ast.expr) -> tuple[str, dict[str, Any]]:
    call = node if isinstance(node, ast.Call) else None
    head = call.func if call else node
    keywords = call.keywords if call else []
    if not isinstance(head, ast.Name) or (call and call.args) or any(k.arg is None for k in keywords):
        raise PolicyError(f"{ast.unparse(node)!r} is not of the form name or name(option=value, ...)")
    if len({k.arg for k in keywords}) < len(keywords):
        raise PolicyError(f"{ast.unparse(node)!r} gives an option twice")
    try:
        return head.id, {str(k.arg): ast.literal_eval(k.value) for k in keywords}
    except (ValueError, TypeError):  # the latter: a key that cannot be one
        raise PolicyError(
            f"{ast.unparse(node)!r}: option values must be plain numbers, strings or tuples; {FORM}"
        ) from None
