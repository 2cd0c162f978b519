"""A program in a Python of its own, to its end."""

import subprocess
import sys
from typing import Any


def run_python(program: str, *arguments: str, **options: Any) -> str:
    """What it prints. A program that fails fails the test with its errors. options: of `subprocess.run`"""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout
