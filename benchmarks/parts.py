"""What is lost where a prompt is judged in parts: the same questions about the same texts, by the size of a part.

    OMP_NUM_THREADS=1 python -P benchmarks/parts.py [--length 4096] [--contexts 6] [--parts 1024,256]

A text with needles is read whole, and in parts that are judged one by one (`judge_every` of `kvengine.patch`: parts are turns,
and here they are given as such). Each question is asked on a copy of the cache, after the text, so that no part knows it.
Beside the answers stands how many tokens a head held at most, those of the part that was being read among them. Policies that
hold every token as it came have no use for parts; `full` is the ceiling. Writes benchmarks/results/parts.json.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from kvengine.evals import loading
from kvengine.evals.engine import Session
from kvengine.hf.parts import ends

TASKS = "quiz_single,quiz_multikey_1,quiz_multikey_2"
STACKS = (
    "full", "kivi(bits=4)", "kivi(bits=2)", "snapkv(budget=1024)", "kvzip(budget=1024)", "h2o(budget=1024)",
    "streaming(recent=1020)",
)  # fmt: skip


def read(session: Session, ids: list[int], size: int) -> float:
    """Read these ids in parts of so many, 0: in one. The most tokens that a head has held."""
    begin, held, most = 0, 0.0, 0.0
    for end in ends(0, len(ids), size or len(ids)):
        session.read(ids[begin:end])
        most, held, begin = max(most, held + end - begin), session.usage().held, end
    return most


def main() -> None:
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from long_answer import measure, save

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--contexts", type=int, default=6)
    parser.add_argument("--parts", default="1024,256", help="sizes, separated by commas; the whole is read always")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--policies", default=";".join(STACKS), help="separated by semicolons")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/parts.json"))
    given = parser.parse_args()
    model, tokenizer = loading.load("bundled", device="cpu", dtype="float32")
    sizes = [0, *map(int, given.parts.split(","))]
    wanted = [(policy, size) for policy in given.policies.split(";") for size in sizes if policy != "full" or not size]
    rows = []
    for policy, size in wanted:
        row = measure(model, tokenizer, policy, given, partial(read, size=size))
        rows.append({**row, "part": size or "the whole"})
    command = f"python -P benchmarks/parts.py --length {given.length} --contexts {given.contexts} --parts {given.parts}"
    asked = f"{given.length} tokens, {given.contexts} contexts per task, questions after the prompt"
    held = "held at most while reading (tokens per head)"
    save(given, command, asked, {"tokens of a part": "part"}, held, rows)


if __name__ == "__main__":
    main()
