"""Checks a version that was just registered: another process builds it from what is stored, and it answers an example.

So what an endpoint would refuse is known when the run ends, while the code is at hand. Called by the process that
writes the record.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from shoal.registry import ModelVersion

VARIABLE = "SHOAL_VERIFY"  # 0: no version is checked
MAX_BYTES = 2**30  # of weights, of which the check has a copy
TIMEOUT_S = 120.0


def find_load_error(version: ModelVersion) -> str:
    """Why the version cannot be loaded elsewhere; "" where it can, or was not tried.

    Only a version with code of the user's is tried: all other code is installed wherever Shoal is. It takes as long as
    the start of Python and torch.
    """
    code = version.manifest.model.code
    is_own = "source" in version.manifest.model.kwargs or (code is not None and bool(code.files))
    if not is_own or version.manifest.size_bytes > MAX_BYTES or os.environ.get(VARIABLE) == "0":
        return ""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as elsewhere:  # where none of the user's files are
        command = [sys.executable, "-m", "shoal.loaded", version.ref]
        try:
            ended = subprocess.run(
                command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"it did not answer an example within {TIMEOUT_S:.0f} s"
    if ended.returncode == 0:
        return ""
    lines = ended.stderr.strip().splitlines()
    return lines[-1] if lines else f"its process ended with status {ended.returncode}"
