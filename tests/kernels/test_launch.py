"""Kernels launched as on a GPU: Triton's own launcher, compiled and called, over a driver that only looks at the launch.

Neither the interpreter nor compiling ahead of time goes this way: arguments are packed, tensors' addresses asked for, and
shared memory and the grid are compared with what a chip has.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = ["kivi, 4 bits", "bounds", "fetch"]
DRIVER = r"""
#include "cuda.h"
static int launches, refused, early;
int launched(void) { return launches; }
int not_launched(void) { return refused; }
int launched_early(void) { return early; }
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "refused"; return 0; }
CUresult cuDriverGetVersion(int *v) { *v = 13000; return 0; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return 0; }
CUresult cuModuleUnload(CUmodule m) { return 0; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *c) { *c = 0; return 0; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
CUresult cuCtxGetLimit(size_t *n, CUlimit l) { *n = 0; return 0; }
CUresult cuCtxSetLimit(CUlimit l, size_t n) { return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return 0; }
CUresult cuDeviceGetAttribute(int *n, CUdevice_attribute a, CUdevice d) {
    *n = a == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 227 << 10 : 1024;
    return 0;
}
CUresult cuFuncGetAttribute(int *n, CUfunction_attribute a, CUfunction f) {
    *n = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return 0;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int n) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = (CUmodule)2; return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { *f = (CUfunction)3; return 0; }
CUresult cuPointerGetAttribute(void *x, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)x = p; return 0; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **given, void **more) {
    int bad = !c->gridDimX || c->gridDimY > 65535 || c->gridDimZ > 65535 || c->sharedMemBytes > 227 << 10;
    refused += bad;
    launches += !bad;
    for (unsigned i = 0; i < c->numAttrs; i++)
        early += c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                 && c->attrs[i].value.programmaticStreamSerializationAllowed;
    return bad ? CUDA_ERROR_INVALID_VALUE : 0;
}
"""
RUN = """
import ctypes, json, sys
from types import SimpleNamespace
driver_library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime.driver import driver
from kvengine.kernels.gpu import compiling_for
from kvengine.kernels.gpu.ahead import cases
from kvengine.kernels.gpu.stream import join_kernel
driver.set_active(SimpleNamespace(
    utils=CudaUtils(), launcher_cls=CudaLauncher, get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0, get_current_stream=lambda device: 0,
))
found, early, wanted = {}, {}, json.loads(sys.argv[2])
compiling_for.set(90)
for name, call in cases().items():
    if not wanted or name in wanted:
        before = driver_library.launched(), driver_library.launched_early()
        call()
        found[name] = driver_library.launched() - before[0]
        early[name] = driver_library.launched_early() - before[1]
x, refused = torch.zeros(4), False
options = dict(SINKS=False, BOTH=False, LENGTHS=False, LENGTHS2=False, ROWS=1, BLOCK=16, BLOCK2=16, DIM=1, BLOCK_D=1,
               SHARES=32, enable_fp_fusion=True, PDL=False)
try:  # the control
    join_kernel[(1, 65536)](*(x, x, x, x, 16, 1) * 2, x, x, x, 1, 1, **options)
except RuntimeError:
    refused = True
print(json.dumps({"found": found, "early": early, "refused": refused and driver_library.not_launched() == 1}))
"""

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is launched by the interpreter"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]


def launched(tmp_path: Path, only: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """How many launches each case makes, and how many of them may begin before what was launched before has ended."""
    import triton

    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    build = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        f"-I{include}",
        str(source),
        "-o",
        str(library),
        "-Wl,-soname,libcuda.so.1",
    ]
    subprocess.run(build, check=True)
    environment = os.environ | {"TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-P", "-c", RUN, str(library), json.dumps(only)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["refused"]
    return said["found"], said["early"]


def test_some_kernels_are_launched(tmp_path: Path) -> None:
    found, early = launched(tmp_path, CASES)
    assert set(found) == set(CASES) and all(found.values()), found
    assert early == found | {"fetch": 0}


@pytest.mark.slow
def test_every_kernel_is_launched(tmp_path: Path) -> None:
    found, _ = launched(tmp_path, [])
    assert set(CASES) < set(found) and all(found.values()), found
