"""The test of an exported folder: it starts the handler, and compares its answers with the stored ones.

Run by the folder's `test_folder.py`. Needs no Docker, and no network beyond loopback.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.libs.export.runtime.model import DESCRIPTION_FILE, ModelDescription, measure_difference

EXAMPLES_FILE = "examples.json"
Ask = Callable[[Any], tuple[int, dict[str, Any]]]  # from the body of an inference to the status and the answer


def run_self_test(folder: Path, start: Callable[[Path], AbstractContextManager[Ask]]) -> str:
    """Compare every example; returns one line with the largest difference. Raises AssertionError.

    start: starts the folder's handler for the time of a context
    """
    description = msgspec.json.decode((folder / DESCRIPTION_FILE).read_bytes(), type=ModelDescription)
    examples = msgspec.json.decode((folder / EXAMPLES_FILE).read_bytes())
    largest = 0.0
    with start(folder) as ask:
        for number, example in enumerate(examples, start=1):
            status, answer = ask(example["request"])
            assert status == 200, f"example {number}: {status} {answer}"
            wanted = example["answer"]
            assert answer | {"outputs": []} == wanted | {"outputs": []}, f"example {number}: {answer}"
            difference = measure_difference(_read_outputs(wanted), _read_outputs(answer))
            assert difference <= description.tolerance, f"example {number} differs by {difference:g}"
            largest = max(largest, difference)
        status, answer = ask({"inputs": []})
        assert status == 422, f"a request without inputs: {status} {answer}"
    model, allowed = f"{description.name}@{description.version}", f"{description.tolerance:g} is allowed"
    return f"{model}: {len(examples)} examples differ by {largest:g}, {allowed}"


def _read_outputs(answer: dict[str, Any]) -> dict[str, np.ndarray]:
    """The outputs of an answer in JSON, which has null for NaN."""
    arrays = {}
    for tensor in answer["outputs"]:
        dtype = np.float64 if "FP" in tensor["datatype"] else object
        arrays[f"{tensor['name']} {tensor['datatype']}"] = np.array(tensor["data"], dtype).reshape(tensor["shape"])
    return arrays
