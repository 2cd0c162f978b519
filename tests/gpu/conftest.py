"""What is true on a CUDA device alone: every test of this folder is skipped without one.

SHOAL_GPU_TESTS_ON_CPU=1 runs them on the CPU instead, to try their mechanics.
"""

import os
from pathlib import Path

import pytest
import torch

IS_ON_CPU = os.environ.get("SHOAL_GPU_TESTS_ON_CPU") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or IS_ON_CPU:
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> str:
    return "cpu" if IS_ON_CPU else "cuda"
