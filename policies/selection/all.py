"""All: read every stored token."""

from dataclasses import dataclass

from kvengine.policies.selection import Selection


@dataclass(frozen=True)
class All(Selection):
    """Read every stored token."""
