"""`make test-shapes` checks what signatures state while the tests run; here, that every module can be checked at all."""

import subprocess
import sys
from pathlib import Path

EVERY_MODULE = """
import importlib, pkgutil, sys
from jaxtyping import install_import_hook
with install_import_hook("kvengine", "support_types.checked"):
    import kvengine
    for module in pkgutil.walk_packages(kvengine.__path__, "kvengine."):
        if not module.name.endswith("__main__") and "triton" not in module.name.split("."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "kvengine").startswith("kvengine"):
                    raise
print(sum(name.startswith("kvengine") for name in sys.modules))
"""


def test_every_signature_can_be_checked_at_run_time() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", EVERY_MODULE],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 150
