"""Starts the server of an exported folder as a process, for its test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.libs.export.runtime.self_test import Ask

TIMEOUT_S = 120.0


@contextmanager
def start_server(folder: Path) -> Iterator[Ask]:
    """Start `server.py` on a free port."""
    environment = os.environ | {"HOST": "127.0.0.1", "PORT": "0"}
    command = [sys.executable, "server.py"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            name, _, address = line.strip().partition(" is served at ")
            assert address, f"server.py has not started: {line}"

            def ask(content: Any) -> tuple[int, dict[str, Any]]:
                return _post(f"{address}/v2/models/{name}/infer", content)

            yield ask
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def _post(url: str, content: Any) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, json.dumps(content).encode(), TIMEOUT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
