"""Uniform: every head follows the stack."""

from dataclasses import dataclass

from kvengine.policies.routing import Routing


@dataclass(frozen=True)
class Uniform(Routing):
    """Every head follows the stack."""
