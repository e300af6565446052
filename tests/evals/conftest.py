"""What tests of the evaluation share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are made and not drawn, which takes a second for each report; `test_report.py` draws them."""

    def saved(self: Figure, out: Any, **options: Any) -> None:
        if hasattr(out, "write"):
            out.write("<svg></svg>")
        else:
            Path(out).write_bytes(b"")

    monkeypatch.setattr(Figure, "savefig", saved)
