"""What processes print is copied into the folder of their run, and shown from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import shoal.runs
from shoal.cli.commands.runs import logs
from shoal.errors import RunError
from shoal.runs import output_files
from shoal.runs.output_files import OutputCopier, OutputReader
from waiting import wait_for


@pytest.fixture
def run_id() -> Iterator[str]:
    with shoal.runs.create("train", "{}") as run:
        yield run.id


def read(folder: Path) -> list[tuple[str, str]]:
    return OutputReader(folder).read_new_lines(is_over=True)


def test_output_is_copied_as_it_grows_without_rays_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "COPY_S", 0.01)
    folder, driver, worker = tmp_path / "run", tmp_path / "job-driver-x.log", tmp_path / "worker-a-01-7.out"
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
    said = CliRunner().invoke(logs, [], catch_exceptions=False).output
    assert said == "begun\nactor-0 | connected\n"
    assert CliRunner().invoke(logs, [run_id, "--of", "actor-0"]).output == "connected\n"
    with pytest.raises(RunError, match="actor-9 has printed nothing: actor-0, driver, worker-7"):
        CliRunner().invoke(logs, [run_id, "--of", "actor-9"], catch_exceptions=False)


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
        assert CliRunner().invoke(logs, ["--follow"]).output == "actor-0 | one\nactor-0 | two\n"


def test_a_run_without_output_says_where_it_went(run_id: str) -> None:
    with pytest.raises(RunError, match="prints where it was started"):
        CliRunner().invoke(logs, [], catch_exceptions=False)
