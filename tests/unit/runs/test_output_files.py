"""What processes print, in the folder of their run; a driver's output as lines of JSON."""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

import shoal.runs
from shoal.errors import ConfigError, RunError
from shoal.runs import output_files
from shoal.runs.output_files import OutputCopier, OutputReader
from shoal.train.spec import TrainSpec
from typed import said
from waiting import wait_for


@pytest.fixture
def run_id() -> Iterator[str]:
    with shoal.runs.create("train", "{}") as run:
        yield run.id


def read(folder: Path) -> list[tuple[str, str]]:
    return OutputReader(folder).read_new_lines(is_over=True)


def test_output_is_copied_as_it_grows_without_rays_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "COPY_S", 0.01)
    folder = tmp_path / "run"
    driver = tmp_path / "job-driver-x.log"
    worker = tmp_path / "worker-a-01-7.out"
    driver.write_text("begun\nhalf a li")
    worker.write_text(":job_id:01\n:actor_name:Trainer\nhello\n")
    copier = OutputCopier(folder, lambda: {driver: "driver", worker: "worker-7"})
    assert not folder.exists()  # the run is not recorded yet
    folder.mkdir()
    wait_for(lambda: read(folder) == [("driver", "begun"), ("worker-7", "hello")])
    with driver.open("a") as file:
        file.write("ne\nTraceback, and no more")
    copier.close()
    copier.close()
    assert [line for name, line in read(folder) if name == "driver"] == [
        "begun",
        "half a line",
        "Traceback, and no more",
    ]


def test_a_process_that_prints_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "MAX_BYTES", 100)
    (tmp_path / "loud").write_text("line\n" * 50)
    OutputCopier(tmp_path, lambda: {tmp_path / "loud": "loud"}).close()
    assert [line for _, line in read(tmp_path)] == ["line"] * 20 + ["", "... the rest is left out"]


def test_logs_shows_the_newest_run_with_its_actors(run_id: str) -> None:
    folder = shoal.runs.load(run_id).folder
    (folder / "logs").mkdir()
    (folder / "logs" / "driver.log").write_text("begun\n")
    serve = "INFO 2026-11-28 17:57:52 proxy 127.0.0.1 -- Got it\nINFO 2026-11-28 17:57:52 controller 7 -- Deploying\n"
    (folder / "logs" / "worker-7.log").write_text(serve)
    (folder / "actor-0.log").write_text("connected\n")
    assert said("logs") == "begun\nactor-0 | connected\n"
    assert said("logs", run_id, "--of", "actor-0") == "connected\n"
    with pytest.raises(RunError, match="actor-9 has printed nothing: actor-0, driver, worker-7"):
        said("logs", run_id, "--of", "actor-9")


def test_logs_follows_to_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with shoal.runs.create("train", "{}") as run:
        log, lines = run.folder / "actor-0.log", iter(["two\n", ""])
        log.write_text("one\n")

        def go_on(seconds: float) -> None:
            with log.open("a") as file:
                file.write(text := next(lines))
            if not text:
                run.finish("finished")

        monkeypatch.setattr("shoal.cli.commands.runs.time.sleep", go_on)
        assert said("logs --follow") == "actor-0 | one\nactor-0 | two\n"


def test_a_run_without_output_says_where_it_went(run_id: str) -> None:
    with pytest.raises(RunError, match="prints where it was started"):
        said("logs")


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
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(each["logger"], each["level"], each["message"]) for each in lines] == [
        ("stdout", "INFO", message) for message in ("one", "two", "100%", "begun and ended: é", "no end")
    ]
    assert all(datetime.fromisoformat(each["time"]).tzinfo is not None for each in lines)
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
