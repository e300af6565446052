"""The evaluation from Python: the same run as `kvengine eval`, with results as objects, and a report.

python examples/evaluate.py [FOLDER [MODEL]]          a folder that exists is resumed
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from kvengine.evals import report, tables
from kvengine.evals.measure import measure

given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
given.add_argument("folder", nargs="?", type=Path, help="of the run; by default a temporary one")
given.add_argument("model", nargs="?", default="bundled", help="folder or hub id")
args = given.parse_args()
folder = args.folder or Path(tempfile.mkdtemp())
try:
    cells = measure(
        "scbench",
        model=args.model,
        policies="snapkv(budget=0.125); quest(budget=0.125)",
        tasks="scbench_needles",
        lengths=1024,
        samples=1,  # contexts, of five questions each
        modes="multi-turn",
        out=folder,
    )
except (OSError, ValueError) as error:  # no such model, or a folder that is no run of it
    given.error(str(error))
for cell in cells:
    turns = " ".join(f"{100 * turn:3.0f}" for turn in cell.turns)
    difference = tables.span(cell.delta) if cell.delta else ""
    print(f"{cell.policy:28} {tables.score_text(cell):20} turns: {turns}   against full: {difference}")

report.write(folder)
print(f"tables, pictures and a page to open in a browser: {folder / 'report.html'}")
