"""Where and with what `benchmarks/kernels.py` measures."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from kvengine.kernels import dispatch


def last_level() -> int:
    """Bytes of the processor's last-level cache; 128 MiB where the system does not say."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(file.read_text().strip().removesuffix("K")) << 10 for file in sizes), default=128 << 20)


def processor() -> str:
    """The processor's name in brackets; nothing where the system does not say."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((f" ({line.split(':')[1].strip()})" for line in lines if line.startswith("model name")), "")


def machine(device: str, cpu_time: bool) -> dict[str, str]:
    """Where and with what this was measured."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    cpu = processor().strip(" ()") or platform.processor()
    chip = torch.cuda.get_device_name() if device == "cuda" else f"{cpu}, {torch.get_num_threads()} threads"
    return {
        "commit": commit,
        "machine": chip,
        "clock": "processor" if cpu_time else "wall",
        "torch": torch.__version__,
        "backends": json.dumps(dispatch.info()),
    }
