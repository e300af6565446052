"""Plain torch."""

from __future__ import annotations

from torch import Tensor

from kvengine.kernels.step.native import Ends, Merged, Paid, Placed, Rule, Sealed
from kvengine.kernels.step.reference import drop_placed, judge, keep_ends, merge


def verdict(
    rule: Rule, position: Tensor, now: Tensor, mass: Tensor | None, score: Tensor | None, keys: Tensor | None,
    values: Tensor | None,
) -> None:  # fmt: skip
    """See `kvengine.kernels.verdict`."""
    if isinstance(rule, Sealed):
        keep_ends(rule.position, now, rule.ends)
        rule.alive.copy_((rule.position >= 0).unflatten(1, (rule.alive.shape[1], -1)).any(2))
        rule = rule.ends
    if isinstance(rule, Ends):
        keep_ends(position, now, rule)
    elif isinstance(rule, Placed):
        drop_placed(position, rule)
    elif isinstance(rule, Paid) and mass is not None:
        judge(position, mass, score, now, rule)
    elif isinstance(rule, Merged) and mass is not None and keys is not None and values is not None:
        merge(keys, values, position, judge(position, mass, score, now, rule.paid), rule)
