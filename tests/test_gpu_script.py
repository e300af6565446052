"""The script that measures on a GPU: what it starts is there, and what it concludes follows from what was measured."""

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from layout import ROOT

from kvengine.kernels.codecs import encode_kivi, encode_zipcache


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look for theirs
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu() -> ModuleType:
    return script("gpu")


def kernels(batch: int, length: int, **ms: float) -> list[dict[str, Any]]:
    names = {"full": "full, pages", "kivi": "kivi 4 bits", "quest": "quest 2048", "host": "2048 values from the host",
             "low": "low-rank keys 2048", "peer": "flashinfer"}  # fmt: skip
    return [
        {"case": names[name], "batch": batch, "length": length, "ms": x, "of_copy": 1.8, "over_full": ms["full"] / x}
        for name, x in ms.items()
    ]


def test_targets_follow_from_the_rows(gpu: ModuleType, tmp_path: Path) -> None:
    rows = kernels(1, gpu.LONG, full=10.0, kivi=2.5, quest=1.0, low=1.0, host=1.0, peer=5.0)
    rows += kernels(8, gpu.LONG, full=80.0, kivi=20.0, quest=8.0, low=10.0, host=30.0)
    rows += kernels(32, 4096, full=10.0, kivi=2.5, quest=1.0, low=1.0, host=1.0)
    (tmp_path / "kernels_cuda.json").write_text(json.dumps({"rows": rows}))
    model = [{"what": "`full`", "how": how, "context": at, "speedup": 2.5} for how in ("eager", "replayed")
             for at in (8192, gpu.LONG)]  # fmt: skip
    (tmp_path / "end_to_end.json").write_text(json.dumps({"rows": model, "machine": "a chip"}))
    gpu.targets(tmp_path, "gpu.py")
    found = json.loads((tmp_path / "gpu_targets.json").read_text())["rows"]
    reached = [(row["wanted"], row["reached"]) for row in found]
    first = [(">= 0.67", 0.9), (">= 1", 0.5), (">= 9", 10.0), (">= 3", 4.0)]  # a copy writes what it has read
    assert reached == [*first, (">= 9", 10.0), (">= 3", 4.0), ("> 1", 2.0), (">= 0.9", 0.9), (">= 2.2", 2.5)]


def test_it_names_cases_that_are_measured(gpu: ModuleType) -> None:
    source = "".join((ROOT / "benchmarks" / f"{name}.py").read_text() for name in ("kernels", "peers"))
    for case in ("full, pages", "quest 2048", "low-rank keys 2048", "2048 values from the host", "flashinfer"):
        assert f'"{case}"' in source, case


def test_missing_files_and_cases_are_left_out(gpu: ModuleType, tmp_path: Path) -> None:
    """After one part alone, or when a case has failed."""
    rows = kernels(8, gpu.LONG, full=80.0, quest=8.0)
    (tmp_path / gpu.KERNELS).write_text(json.dumps({"rows": rows, "machine": "a chip"}))
    gpu.targets(tmp_path, "gpu.py")
    found = json.loads((tmp_path / "gpu_targets.json").read_text())
    assert [row["wanted"] for row in found["rows"]] == [">= 9"] and found["machine"] == "a chip"


def test_what_is_reached_is_told_without_a_gpu(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of files that several commands have brought home."""
    (tmp_path / gpu.KERNELS).write_text(json.dumps({"rows": kernels(8, gpu.LONG, full=80.0, quest=8.0)}))
    monkeypatch.setattr("sys.argv", ["gpu.py", "--only", "targets", "--out", str(tmp_path)])
    gpu.main()
    assert [row["reached"] for row in json.loads((tmp_path / "gpu_targets.json").read_text())["rows"]] == [10.0]


def test_a_case_that_failed_takes_no_other_with_it(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What others are compared with included: their times are there all the same, and so is why a shape is not."""
    measured, shapes = script("kernels"), iter((["full, pages", "kivi 4 bits"], ["kivi 4 bits"], None))

    def measure(batch: int, length: int, *rest: object) -> list[Any]:
        if (names := next(shapes)) is None:
            raise RuntimeError("an illegal memory access was encountered")
        rows = {name: measured.Row(name, "bfloat16", batch, length, 2.0, 1.0, 3.0, 100) for name in names}
        measured.compare(rows)
        return list(rows.values())

    out = tmp_path / gpu.KERNELS
    monkeypatch.setattr(measured, "measure", measure)
    monkeypatch.setattr(measured, "draw", lambda rows, file: None)
    given = ["--lengths", str(gpu.LONG), "7", "8", "--dtypes", "bfloat16", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["kernels.py", *given])
    with pytest.raises(SystemExit, match="not all was measured"):
        measured.main()
    found = json.loads(out.read_text())
    assert [row["over_full"] for row in found["rows"]] == [1.0, 1.0, 0.0]
    assert [row["of_copy"] for row in found["rows"]] == [0.0] * 3
    assert "illegal memory access" in found["skipped"][0]
    gpu.targets(tmp_path, "gpu.py")


def options(gpu: ModuleType, only: tuple[str, ...], dry: bool = False) -> Namespace:
    return Namespace(only=only, dry=dry, batches=["1"], lengths=["4096"], contexts="8192", minutes=None)


def test_red_tests_stop_it(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "run", lambda *given, **named: 1)
    with pytest.raises(SystemExit, match="Nothing was measured"):
        gpu.tests(tmp_path, False)
    with pytest.raises(
        SystemExit,
        match=r"/kernels\.py, \S+/prefill\.py, \S+/end_to_end\.py, \S+/gpu_tune\.py, \S+/growth\.py failed",
    ):
        gpu.measure(tmp_path, options(gpu, gpu.PARTS))
    with pytest.raises(SystemExit, match=r"^benchmarks/end_to_end\.py failed"):
        gpu.measure(tmp_path, options(gpu, ("model",)))


def test_what_is_reached_is_written_after_each_part(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next may be cut off."""

    def run(command: list[str], minutes: float | None = None) -> int:
        assert not (tmp_path / gpu.KERNELS).exists() or (tmp_path / "gpu_targets.json").exists()
        (tmp_path / gpu.KERNELS).write_text(json.dumps({"rows": kernels(1, 8, full=1.0), "machine": "a chip"}))
        return 0

    monkeypatch.setattr(gpu, "run", run)
    gpu.measure(tmp_path, options(gpu, ("kernels", "model")))


def test_failures_are_told_of_before_time_is_up(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What failed is printed when all is done: a kernel that never ends, or hundreds that fail, must not put that off."""
    commands: list[list[str]] = []
    monkeypatch.setattr(gpu, "run", lambda command, *rest: bool(commands.append(command)))
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    gpu.tests(tmp_path, False)
    assert len(commands) == 2
    for command in commands:
        assert {"--maxfail", "--timeout", "-n"} <= set(command)
        assert command[command.index("--timeout-method") + 1] == "thread"  # a signal waits for the call to end


class Cuda:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.asked.append(name) or self

    def elapsed_time(self, end: object) -> float:
        return 1.0


def test_a_launch_is_queued_before_its_time_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, cuda = script("peers"), Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    assert peers.between_events(lambda: cuda.asked.append("call")) == 1.0
    assert cuda.asked == ["Event", "Event", "_sleep", "record", "call", "record", "synchronize"]


def test_a_call_that_cannot_be_captured_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = script("peers")
    called: list[None] = []

    @contextmanager
    def capture(graph: object) -> Iterator[None]:
        yield
        raise error

    monkeypatch.setattr(torch, "cuda", Cuda())
    torch.cuda.graph = capture  # type: ignore[assignment,misc]
    error: Exception = RuntimeError("operation not permitted")
    assert peers.captured(lambda: called.append(None)) is not None
    assert "not captured" in capsys.readouterr().out
    error = torch.OutOfMemoryError("none left")
    with pytest.raises(torch.OutOfMemoryError):
        peers.captured(lambda: called.append(None))
    assert len(called) == 4


def test_a_case_that_takes_too_much_memory_is_left_out_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = script("peers")

    def captured(call: Any) -> Any:
        if call == "large":
            raise torch.OutOfMemoryError("none left")
        return f"{call}, recorded"

    monkeypatch.setattr(peers, "captured", captured)
    monkeypatch.setattr(torch, "cuda", Cuda())
    found = {"full": (1, "full"), "sdpa": (1, "large"), "kivi": (2, "kivi")}
    peers.capture(found)
    assert found == {"full": (1, "full, recorded"), "kivi": (2, "kivi, recorded")}
    assert "FAILED sdpa: OutOfMemoryError" in capsys.readouterr().out


def test_a_run_that_is_cut_off_keeps_its_log(gpu: ModuleType, tmp_path: Path) -> None:
    """The log is there while the tests run."""
    log = tmp_path / "log.txt"
    assert gpu.run(["-c", f"print('begun', flush=True); assert 'begun' in open({str(log)!r}).read()"], log) == 0


def test_a_script_that_hangs_leaves_the_others_their_time(gpu: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert gpu.run(["-c", "print('begun', flush=True); import time; time.sleep(100)"], log, minutes=0.05) == 124
    assert log.read_text() == "begun\n"


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 K tokens of 32 sequences fit into 141 GB and not into 80; the cases fit into what is asked for."""
    measured = script("kernels")
    probe = 2 * 32 * measured.HEADS * 262144 * measured.DIM * 2
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(79e9), int(80e9)))
    with pytest.raises(measured.TooLarge, match="79 GB are free"):
        measured.check_memory("cuda", probe)
    with monkeypatch.context() as earlier:  # what torch has of the device's memory, and does not use
        earlier.setattr(torch.cuda, "memory_reserved", lambda: int(70e9))
        earlier.setattr(torch.cuda, "memory_allocated", lambda: int(1e9))
        measured.check_memory("cuda", probe)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(140e9), int(141e9)))
    measured.check_memory("cuda", probe)
    x = measured.inputs(1, 2048, torch.bfloat16, "cpu")
    known = {t.data_ptr(): t.nbytes for t in x.values()}
    for _, call in measured.cases(x, 1).values():
        known |= {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors(call)}
    stock = 2 * x["k"].nbytes  # on a CPU alone, stock attention has a copy of its own
    assert sum(known.values()) - stock <= measured.SHARE * 2 * x["k"].nbytes


def tensors(x: object) -> list[torch.Tensor]:
    """Those that a call keeps."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (dict, list, tuple)):
        return [t for y in (x.values() if isinstance(x, dict) else x) for t in tensors(y)]
    if isinstance(x, partial):
        return tensors([x.func, x.args, x.keywords])
    return tensors([cell.cell_contents for cell in getattr(x, "__closure__", None) or ()])


def test_pages_are_encoded_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script("kernels")
    pages = {name: torch.randn(7, 16, 32) for name in "kv"}
    salient = torch.rand(7, 16).argsort(1) < 6
    at_once = [measured.encoded(pages, *how) for how in ((encode_kivi, 4, 16), (encode_zipcache, (4, 2), salient))]
    monkeypatch.setattr(measured, "AT_ONCE", 3)
    parts = [measured.encoded(pages, *how) for how in ((encode_kivi, 4, 16), (encode_zipcache, (4, 2), salient))]
    for one, other in zip(at_once, parts, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_peers_that_are_missing_or_broken_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("nvcc was not found")

    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=broken))
    x = {"q": torch.zeros(2, 4, 1, 16), "k": torch.zeros(2, 64, 16), "v": torch.zeros(2, 64, 16)}
    found = script("peers").peers(x, 1, 2, 16)
    assert set(found) == {"2048 values from the host", "2048 values from the host, half there"}
    said = capsys.readouterr().out
    assert "left out flash-attn: ModuleNotFoundError" in said and "left out flashinfer: RuntimeError: nvcc" in said


def test_settings_are_compared_with_what_is_launched_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which need not be the first of them; a case that cannot be made takes no other with it."""
    pytest.importorskip("triton")
    tune, ms = script("gpu_tune"), iter((2.0, 4.0, 1.0))
    tried = {name: (tune.kivi, "kivi_kernel", ((8, 3, 1), (6, 3, 1))) for name in ("too large", "KIVI, 4 bits")}

    def call(what: str, *shape: object) -> Any:
        if what == "too large":
            raise torch.OutOfMemoryError("none left")

    for name, value in {"TRIED": tried, "call": call, "timed": lambda step, device: next(ms)}.items():
        monkeypatch.setattr(tune, name, value)
    monkeypatch.setattr("sys.argv", ["gpu_tune.py", "--dry", "--out", str(tmp_path / "out.json")])
    tune.main()
    assert [row["gain"] for row in json.loads((tmp_path / "out.json").read_text())["all"]] == [0.5, 2.0]


@pytest.mark.parametrize("what", ["full", "KIVI, 4 bits", "TurboQuant, 4 bits", "Quest, bounds"])
def test_what_is_tuned_reads_no_memory_twice(what: str) -> None:
    pytest.importorskip("triton")
    read = tensors(script("gpu_tune").call(what, 1, 128, "cpu"))
    assert len({x.data_ptr() for x in read}) == len(read) > 3


def test_what_targets_speak_of_is_measured_first(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured, shapes = script("kernels"), list[tuple[int, int]]()

    def measure(batch: int, length: int, *rest: object) -> list[Any]:
        shapes.append((batch, length))
        return [measured.Row("copy", "bfloat16", batch, length, 2.0, 1.0, 3.0, 100)]

    monkeypatch.setattr(measured, "measure", measure)
    monkeypatch.setattr(measured, "draw", lambda rows, file: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a chip")
    given = [
        "--device",
        "cuda",
        "--dtypes",
        "bfloat16",
        "--batches",
        "1",
        "8",
        "32",
        "--lengths",
        "4096",
        "8192",
        "131072",
    ]
    monkeypatch.setattr("sys.argv", ["kernels.py", *given, "--out", str(tmp_path / "out.json")])
    measured.main()
    assert shapes[:3] == [(32, 4096), (1, gpu.LONG), (8, gpu.LONG)] and len(set(shapes)) == len(shapes) == 9


def test_prompts_are_written_length_by_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts, out = script("prefill"), tmp_path / "out.json"
    row = {"way": "dense", "length": 8, "ms": 1.0, "speed": 1.0, "ideal": 1.0, "error": None}

    def at(length: int, *rest: object) -> list[dict[str, Any]]:
        if length == 16:
            assert json.loads(out.read_text())["rows"] == [row], "it could be cut off here"
            raise RuntimeError("out of resource: shared memory")
        return [row | {"length": length}]

    monkeypatch.setattr(prompts, "at", at)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a chip")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("sys.argv", ["prefill.py", "--device", "cuda", "--lengths", "8,16,32", "--out", str(out)])
    with pytest.raises(SystemExit, match="not all was measured"):
        prompts.main()
    found = json.loads(out.read_text())
    assert [r["length"] for r in found["rows"]] == [8, 32] and "shared memory" in found["failed"][0]


def test_a_candidate_that_fails_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = script("end_to_end"), tmp_path / "out.json"
    options = ["--device", "cpu", "--shape", "tiny", "--lengths", "40", "--steps", "2", "--stacks", "nonsense", "full"]
    monkeypatch.setattr("sys.argv", ["end_to_end.py", *options, "--out", str(out)])
    with pytest.raises(SystemExit, match="`nonsense` failed"):
        model.main()
    found = json.loads(out.read_text())
    assert [row["what"] for row in found["failed"]] == ["`nonsense`"]
    assert [row["how"] for row in found["rows"]] == ["–", "–", "eager", "replayed"]
    assert all(row["speedup"] > 0 for row in found["rows"])


def test_stock_is_timed_with_and_without_what_plans_for_each_length(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, allowed = script("end_to_end"), list[bool]()
    timed = model.timed

    def noted(*given: Any) -> Any:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return timed(*given)

    monkeypatch.setattr(model, "timed", noted)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with torch.no_grad():
        rows = [*model.stock(model.random_model("tiny", "cpu", 99), torch.full((1, 40), 11), 3, "cuda", False)]
    assert allowed == [True, False] * 2 and torch.backends.cuda.cudnn_sdp_enabled()
    assert [r["what"].split(", ")[1:] for r in rows] == [
        [name, f"{kind} cache"] for kind in ("growing", "static") for name in ("sdpa", "sdpa without cuDNN")
    ]


LACKING = (
    "wonderwords", "beartype", "faiss", "redis", "hiredis", "obstore", "zstandard", "starlette", "uvicorn", "ipykernel",
    "nbclient", "pytest_randomly", "constriction",
)  # fmt: skip
"""What the machine need not have."""
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({LACKING!r}))"


@pytest.mark.slow
def test_it_needs_no_more_than_it_says(gpu: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    marked = [str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py") if gpu.MARK in p.read_text()]
    assert {Path(p).name for p in marked} >= {"test_compiled.py", "test_fetch_pages.py"}
    imports = "import sys; sys.path.append('benchmarks'); import kernels, end_to_end, peers, plot_kernels, redis"
    collect = ["-m", "pytest", "-q", "--collect-only", "-m", "gpu", *marked, "tests/kernels"]
    for command, expected in (
        (collect, "tests/test_compiled.py::test_a_graph"),
        (["-c", imports], "import of redis halted"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        assert expected in said, said[-3000:]


@pytest.mark.slow
def test_a_dry_run_reaches_the_end(gpu: ModuleType, tmp_path: Path) -> None:
    assert gpu.run(["benchmarks/gpu.py", "--dry", "--out", str(tmp_path)]) == 0
    model = json.loads((tmp_path / "end_to_end.json").read_text())["rows"]
    assert {row["how"] for row in model} == {"–", "eager", "replayed", "replayed, fused"}
