"""Checks a version that was just registered: another process builds it from what is stored, and it answers an example.

So what an endpoint would refuse is known at once, while the code is at hand, and does not become the champion. Called
by the registry.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from shoal.registry.model_code import OURS
from shoal.registry.version import ModelVersion

VARIABLE = "SHOAL_VERIFY"  # 0: no version is checked
MAX_BYTES = 2**30  # of weights, of which the check has a copy
TIMEOUT_S = 120.0


def find_load_error(version: ModelVersion, suspect: str, *, with_code: bool) -> str:
    """Why an endpoint would refuse the version; "" where it would not, or was not tried: it takes as long as the start
    of Python and torch.

    suspect:   a tensor that is not finite, as only that of a mask may be: such a version is tried
    with_code: so is one with code of the user's, or of other packages: Shoal's own is installed wherever it is served
    """
    model = version.manifest.model
    is_own = "source" in model.kwargs or (model.code is not None and bool(model.code.files))
    is_own = is_own or (model.factory != "" and not model.factory.startswith(f"{OURS}."))
    if not (suspect or (with_code and is_own)) or os.environ.get(VARIABLE) == "0":
        return ""
    if version.manifest.size_bytes > MAX_BYTES:
        return suspect and f"{suspect!r} is not finite"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as elsewhere:  # where none of the user's files are
        command = [sys.executable, "-m", "shoal.loaded", version.ref, version.store.url]
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
