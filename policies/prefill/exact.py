"""Exact: the prompt is read with plain causal attention."""

from dataclasses import dataclass

from kvengine.policies.prefill import Prefill


@dataclass(frozen=True)
class Exact(Prefill):
    """Plain causal attention."""
