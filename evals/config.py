"""What a run does. Defaults, then a YAML file, then the command line; unknown keys are errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

import yaml

from kvengine.errors import EvaluationError, unknown
from kvengine.evals.policies import Arm, arms, everything, split
from kvengine.evals.records import MODES, key_of
from kvengine.evals.tasks import catalogue

DATA = {
    "essays": ("ruler", "quiz", "niah"), "book": ("ppl",), "squad": ("ruler",), "hotpotqa": ("ruler",),
    "scbench": ("scbench",), "longbench": ("longbench",),
}  # fmt: skip
"""What local files may be given as, and the suites that read them; docs/evaluation.md says what each has in it."""
FOLDERS = ("scbench", "longbench")
"""Those that have a file for each task."""
ASKING = ("quiz", "scbench")
"""Suites that ask several questions about one context."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One evaluation run. Lengths count tokens, prompt and generated together."""

    suite: str
    out: Path
    model: str = "bundled"
    policies: tuple[str, ...] = ("full",)  # "all": every method in the tree, at `budget`
    budget: float = 0.125  # tokens, or a fraction of the prompt
    tasks: str = "all"
    lengths: tuple[int, ...] = (4096,)
    samples: int = 20
    modes: tuple[str, ...] = ("multi-turn",)
    seed: int = 42
    limit: int | None = None  # stop each cell after so many samples; the data are those of `samples`
    minutes: float | None = None  # go in rounds, one sample of every cell at a time, and stop after about this long
    shared: bool = False  # read a context once for all policies, and ask several samples in lockstep
    batch: int = 8  # … at most so many
    few: int | None = None  # … and leave tasks that the full cache cannot do after so many samples of it
    judge_every: int | None = None  # read a prompt in parts of so many tokens, each judged before the next
    device: str = "auto"
    dtype: str = "auto"
    chat: str = "auto"  # "auto": if the tokenizer has a template; "on"; "off"
    ceiling: bool = True
    oracle: bool = True
    golden: bool = True  # multi-turn: later questions follow the right answers, or the model's own
    retry: bool = False  # do what failed, was refused or ran out of memory again
    report: bool = True  # write tables and pictures at the end; the exit code and the rows do not need them
    data: Mapping[str, Path] = field(default_factory=dict)
    fail_under: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for mode in self.modes:
            if mode not in MODES:
                raise EvaluationError(unknown("mode", mode, MODES))
        if self.chat not in ("auto", "on", "off"):
            raise EvaluationError(f"chat is {self.chat!r}, expected auto, on or off")
        if not self.modes:
            raise EvaluationError(f"no mode given: write {', '.join(MODES)} or both")
        if not self.tasks.strip(", "):
            raise EvaluationError("no task given: write names separated by commas, or all")
        if self.samples < 1 or not self.lengths or min(self.lengths) < 1:
            raise EvaluationError(f"samples={self.samples}, lengths={self.lengths}: both must be positive")
        for name, count in {"batch": self.batch, "few": self.few, "limit": self.limit}.items():
            if count is not None and count < 1:
                raise EvaluationError(f"{name}={count}: must be 1 or more")
        if self.judge_every is not None and (self.judge_every < 2 or self.shared):
            what = "read once for all policies, whole; leave shared out" if self.shared else "must be 2 tokens or more"
            raise EvaluationError(f"judge_every={self.judge_every}: {what}")
        if self.few is not None and not self.shared:
            raise EvaluationError("few wants shared: only then the full cache goes first; add --shared")
        if self.minutes is not None and not 0 < self.minutes < inf:
            raise EvaluationError(f"minutes={self.minutes}: must be positive")
        for name, bar in self.fail_under.items():
            if not 0 <= bar <= 100:
                raise EvaluationError(f"fail_under {name}={bar}: a score in percent, between 0 and 100")
        for name, path in self.data.items():
            if name not in DATA and name not in catalogue("scbench"):  # one task's file may be given by its name
                raise EvaluationError(unknown("data", name, DATA))
            if self.suite not in (readers := DATA.get(name, ("scbench",))):
                raise EvaluationError(f"{self.suite} reads no {name}: that is for {', '.join(readers)}; leave it out")
            if str(path) != "hub" and not path.exists():
                raise EvaluationError(f"data {name}={path}: there is no such file or folder")
            if name in FOLDERS and path.is_file():  # it would be read for every task
                hint = ", or give TASK=FILE" if name == "scbench" else ""
                raise EvaluationError(f"data {name}={path} is a file; give the folder that holds TASK.jsonl{hint}")

    @property
    def wanted(self) -> list[str]:
        """The policies, "all" spelled out."""
        named = [self.spread if policy == "all" else [policy] for policy in self.policies]
        return [policy for some in named for policy in some]

    @property
    def spread(self) -> list[str]:
        """What "all" stands for, if it is asked for."""
        return everything(self.budget) if "all" in self.policies else []

    def arms(self) -> list[Arm]:
        """The policies with their ceiling and oracles, as `kvengine.evals.policies.arms` has them."""
        return arms(self.wanted, ceiling=self.ceiling, oracle=self.oracle, spread=self.spread)

    @property
    def samples_per_cell(self) -> int:
        """How many samples of each cell this call does."""
        return self.samples if self.limit is None else min(self.samples, self.limit)


def build(suite: str, file: Path | None, given: Mapping[str, Any]) -> RunConfig:
    """A configuration from a YAML file and from what was given on the command line (None: not given)."""
    said = _load(file)
    if said.get("suite", suite) != suite:
        raise EvaluationError(f"{file} is of the suite {said['suite']!r}, and this run of {suite!r}")
    told = {("modes" if name == "mode" else name): value for name, value in given.items() if value is not None}
    merged: dict[str, Any] = {**said, **told}
    if merged.get("modes") == "both":
        merged["modes"] = ",".join(MODES)
    known = [one.name for one in fields(RunConfig)]
    for name in merged:
        if name not in known:
            raise EvaluationError(unknown("setting", name, known))
    typed: dict[str, Any] = {}
    for name, value in merged.items():
        try:
            typed[name] = _typed(name, value)
        except (TypeError, AttributeError, OverflowError) as error:
            raise EvaluationError(f"{name}={value!r} is not what this setting takes: {error}") from error
    typed.setdefault("out", default_folder(suite, merged))
    made = RunConfig(**{"suite": suite, **typed})
    check_used(said, told, made)
    return made


def check_used(said: Mapping[str, Any], told: Mapping[str, Any], made: RunConfig) -> None:
    """Raises EvaluationError for a setting that would change nothing; the command line may leave one of a file's idle."""
    idle = {
        ("budget", "policies"): "" if "all" in made.policies else "is of what the policy 'all' stands for; write it into a "
        f"policy: snapkv(budget={made.budget})",
        ("batch", "shared"): "" if made.shared else "counts samples in lockstep; add --shared, or leave it out",
        ("golden", "modes"): "" if made.golden or (made.suite in ASKING and "multi-turn" in made.modes) else "is of what later "
        f"questions of a conversation follow: of {' and '.join(ASKING)}, in the mode multi-turn; leave it out",
    }  # fmt: skip
    for (name, of), why in idle.items():
        if why and (name in told or (name in said and of not in told)):
            raise EvaluationError(f"{name}={getattr(made, name)} {why}")


PASSING = {"limit", "minutes", "report", "fail_under", "retry", "device"}
"""Settings that may change when a run is continued."""


def default_folder(suite: str, given: Mapping[str, Any]) -> Path:
    """Where a run goes that was not told: the same settings find their folder again, others get another one."""
    lasting = {name: value for name, value in given.items() if name not in PASSING}
    return Path("runs") / f"{suite}-{key_of(lasting)[:8]}"


def _load(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise EvaluationError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise EvaluationError(f"{file} must hold settings by name, not a {type(found).__name__}")
    settings: dict[str, Any] = {}
    for name, value in found.items():
        plain = "modes" if name == "mode" else str(name).replace("-", "_")  # as the command line calls it
        if plain in settings:
            raise EvaluationError(f"{file} sets {plain} twice, once as {name}: keep one of them")
        settings[plain] = value
    return settings


def _typed(name: str, value: Any) -> Any:
    match name:
        case "out":
            return Path(value)
        case "policies" | "modes":
            return tuple(split(value)) if isinstance(value, str) else tuple(_texts(name, value))
        case "tasks":
            return value if isinstance(value, str) else ",".join(_texts(name, value))
        case "chat" if isinstance(value, bool):
            return "on" if value else "off"  # YAML reads these words so
        case "model" | "device" | "dtype" | "chat" | "suite":
            return _text(name, value)
        case "shared" | "ceiling" | "oracle" | "golden" | "retry" | "report":
            if not isinstance(value, bool):
                raise EvaluationError(f"{name} is true or false, got {value!r}")
        case "minutes":
            return None if value is None else _float(name, value)
        case "budget":
            number = _float(name, value)
            if not number > 0 or (number > 1 and number % 1):
                raise EvaluationError(f"budget={value}: must be whole tokens, or a fraction between 0 and 1")
            return int(number) if number > 1 else number
        case "lengths":
            return tuple(dict.fromkeys(_integers(value)))
        case "samples" | "limit" | "seed" | "batch" | "few" | "judge_every":
            return None if value is None and name in ("limit", "few", "judge_every") else _integer(name, value)
        case "data":
            return {key: Path(path) for key, path in pairs(value).items()}
        case "fail_under":
            return {key: _float(f"{name} {key}", number) for key, number in pairs(value, last=True).items()}
    return value


def pairs(value: Any, *, last: bool = False) -> dict[str, Any]:
    """`["a=1", "b=2"]` or a mapping, as a mapping. `last`: names may hold equals signs themselves, as policies do.

    >>> pairs(["quest(budget=64):vt=50"], last=True)
    {'quest(budget=64):vt': '50'}
    """
    if isinstance(value, Mapping):
        if strange := [name for name in value if not isinstance(name, str)]:
            raise TypeError(f"its names are texts, and {strange[0]!r} is none")
        return dict(value)
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise TypeError("it is NAME=VALUE, a list of these, or names with their values")  # `build` names the setting
    found = [item.rpartition("=") if last else item.partition("=") for item in value]
    for item, (_, equals, _) in zip(value, found, strict=True):
        if not equals:
            raise EvaluationError(f"expected NAME=VALUE, got {item!r}")
    return {name: text for name, _, text in found}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise EvaluationError(f"{name} is text, got {value!r}")
    return value


def _texts(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) or not isinstance(value, Iterable):  # of a mapping the values would be passed over
        raise TypeError("it is a text or a list of texts")  # `build` names the setting
    return [_text(name, one) for one in value]


def _integers(value: Any) -> list[int]:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    try:
        if any(isinstance(part, bool | float) for part in parts):  # which `int` takes for whole
            raise TypeError
        return [int(part) for part in parts]
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"lengths are whole numbers of tokens, got {value!r}; write 4096,8192") from error


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise EvaluationError(f"{name} is a whole number, got {value!r}")
    return value


def _float(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"{name} is a number, got {value!r}") from error
