"""Triton's own launcher, compiled and called, over a driver that only looks at the launch; each time in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
    static size_t known = 2;
    *f = (CUfunction)++known;
    return 0;
}
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
SET = """
import ctypes, json, sys
from types import SimpleNamespace
driver_library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime.driver import driver
driver.set_active(SimpleNamespace(
    utils=CudaUtils(), launcher_cls=CudaLauncher, get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0, get_current_stream=lambda device: 0,
))

def opened(given):
    "What a launcher was given: grid, stream and function; how to launch and with which memory; how many warps; arguments."
    if triton.__version__.startswith("3.6."):
        packed, arguments, scratches = given[9], given[13:], given[7:9]
    else:
        packed, arguments, scratches = given[7], given[15], given[11:13]
    return [*given[:5], [*given[5:7], *scratches], list(packed)], arguments
"""

needed = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is launched by the interpreter"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]
"""Marks of a test that launches."""


def said(script: str, given: Any, folder: Path) -> Any:
    """What the script prints last. It finds `given`, the driver as `driver_library`, and the launcher in place."""
    import triton

    source, library, run = folder / "driver.c", folder / "libcuda.so.1", folder / "run.py"
    source.write_text(DRIVER)
    run.write_text(SET + "given = json.loads(sys.argv[2])\n" + script)  # Triton wants to read its kernels' text
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    build = ["gcc", "-shared", "-fPIC", "-w", f"-I{include}", source, "-o", library, "-Wl,-soname,libcuda.so.1"]
    subprocess.run(build, check=True)
    run_of_all = folder.parents["PYTEST_XDIST_WORKER" in os.environ]  # whoever needs a kernel first compiles it
    environment = os.environ | {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(run_of_all / "triton")}
    command = [sys.executable, "-P", str(run), str(library), json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
