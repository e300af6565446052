"""Full: keep every token."""

from dataclasses import dataclass

from kvengine.policies.retention import Retention


@dataclass(frozen=True)
class Full(Retention):
    """Keep every token."""
