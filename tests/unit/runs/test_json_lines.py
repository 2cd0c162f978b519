"""A driver's output and log as lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime

import pytest

from shoal.errors import ConfigError
from shoal.train.spec import TrainSpec

PROGRAM = """
import logging, subprocess, sys
from shoal.runs.json_lines import log_json, write_json_lines
write_json_lines()
logging.getLogger().addHandler(logging.StreamHandler())  # as Ray adds one
log_json()
print("one\\ntwo")
print("10%\\r", end="")
print("100%")
subprocess.run([sys.executable, "-c", ""], stdout=sys.stdout, stderr=sys.stderr, check=True)
print("begun", end=" ")
print("and ended: é")
print()
logging.getLogger("shoal.x").warning("of %d", 3)
print("error: it fails", file=sys.stderr)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("y").exception("caught")
sys.stdout.write("no end")
sys.stdout.close()
raise ValueError("untyped")
"""


def test_each_line_is_an_object() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(each["logger"], each["level"], each["message"]) for each in said] == [
        ("stdout", "INFO", message) for message in ("one", "two", "100%", "begun and ended: é", "no end")
    ]
    assert all(datetime.fromisoformat(each["time"]).tzinfo is not None for each in said)
    errors = [json.loads(line) for line in ended.stderr.splitlines()]
    found = [(each["logger"], each["level"], each["message"]) for each in errors]
    assert found[:3] == [
        ("shoal.x", "WARNING", "of 3"),
        ("stderr", "ERROR", "error: it fails"),
        ("y", "ERROR", "caught"),
    ]
    assert "ZeroDivisionError" in errors[2]["exception"]
    assert found[-1] == ("stderr", "ERROR", "ValueError: untyped")


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logs = 'xml'"):
        TrainSpec(task="t", logs="xml")  # type: ignore[arg-type]
