"""Full: keep every token."""

from dataclasses import dataclass
from typing import ClassVar

from kvengine.policies.retention import Retention


@dataclass(frozen=True)
class Full(Retention):
    """Keep every token."""

    remembers: ClassVar[bool] = False
