"""The pages on training: every block of Python runs, and every line of the shell is understood or run."""

import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal.runs
from blocks import DOCS, read_blocks, read_files, run_blocks
from shoal.errors import NotReached
from shoal.registry import Registry
from shoal.sync.config import list_kinds
from shoal.train.__main__ import main
from shoal.train.launch.local import fit_locally
from shoal.train.launch.overrides import spec_from_overrides
from shoal.train.launch.validate import validate_run
from shoal.train.spec import TrainSpec

PAGES = ["training.md", *sorted(f"training/{path.name}" for path in (DOCS / "training").glob("*.md"))]
FILES = {  # that the pages say to save, and the page with each as its first block
    "my_task.py": "training.md",
    "my_gan.py": "training/steps-of-your-own.md",
    "my_language_model.py": "training/losses.md",
}


def lines(page: str) -> list[str]:
    return [line.partition("  #")[0].strip() for block in read_blocks(page, "") for line in block.splitlines() if line]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the page's own Task, and the recipes."""
    monkeypatch.chdir(tmp_path)
    for name, page in FILES.items():
        (tmp_path / name).write_text(read_blocks(page)[0])
    (tmp_path / "jobs").symlink_to(DOCS.parent / "jobs")
    yield
    sys.modules.pop("shoal_task_my_task", None)


def run_of_the_page() -> str:
    """A run that `resume=RUN` can mean: it was stopped."""
    run_id = fit_locally(TrainSpec.parse({"task": "my_task.py:MyTask", "stop": {"epochs": 1}}), registers=False).run_id
    shoal.runs.reopen(run_id).close()
    return run_id


def test_the_python_of_the_training_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for page in PAGES:
        for block in read_blocks(page)[page == FILES["my_task.py"] :]:
            exec(compile(block, page, "exec"), {})
    said = capsys.readouterr().out
    assert "2 epochs" in said
    assert "accuracy" in said
    assert Registry().get("mine@champion").manifest.data


def test_the_python_of_the_page_of_tests_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for number, block in enumerate(read_files("testing.md").values()):
        (tmp_path / f"tests_{number}.py").write_text(f"import shoal, torch\n{block}")
        names = vars(importlib.import_module(f"tests_{number}"))
        for name, test in [*names.items()]:
            if name.startswith("test_"):
                given = {"tmp_path": tmp_path / name, "monkeypatch": monkeypatch}
                test(**{each: given[each] for each in inspect.signature(test).parameters})


@pytest.mark.parametrize(
    "page",
    [
        "data.md",
        "data/messages.md",
        "data/order.md",
        "libs/trees.md",
    ],  # tests/training/test_checkpointer has checkpoints.md
)
def test_the_python_of_the_other_pages_runs(page: str) -> None:
    run_blocks(page)


def test_what_the_training_page_starts_without_ray_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_id = run_of_the_page()
    started = [line for page in PAGES for line in lines(page) if line.startswith("python -m shoal.train ")]
    assert len(started) >= 4
    for line in started:
        words = [*shlex.split(line.replace("RUN", run_id))[3:], "threads=1", "stop.steps=30"]
        status, ended = (0, shoal.runs.Status.FINISHED)
        if "stop.target" in line:  # which takes more steps
            status, ended = NotReached.EXIT_STATUS, shoal.runs.Status.NOT_REACHED
        assert main(words) == status, (line, capsys.readouterr().err)
        assert shoal.runs.load("latest").status is ended


def test_what_the_training_page_starts_on_workers_fits() -> None:
    run_id = run_of_the_page()
    checked = 0
    for line in (line for page in PAGES for line in lines(page)):
        before, is_run, words = line.replace("RUN", run_id).partition("shoal run train ")
        if not is_run:
            before, is_run, words = line.partition("-m shoal.train ")
            is_run = is_run if before.startswith("torchrun") else ""
        if not is_run:
            before, is_run, words = line.partition("python jobs/train.py ")
        if is_run:
            extra = ["workers=2"] if before.startswith("torchrun") else []
            validate_run(spec_from_overrides(shlex.split(words) + extra))
            checked += 1
    assert checked >= 6


def test_the_fields_that_the_training_page_names_are_fields() -> None:
    known = TrainSpec.parse({"stop": {"convergence": {}}, "selective_backprop": {}}).to_yaml()
    known += "".join(TrainSpec.parse({"sync": kind}).to_yaml() for kind in list_kinds())
    text = "".join((DOCS / page).read_text() for page in PAGES)
    for words in re.findall(r"`((?:[a-z_]+\.)*[a-z_]+=[^`]+)`", text):
        for word in shlex.split(words):
            name, is_word, _ = word.partition("=")
            if is_word and name not in ("a.b", "hidden") and not name.startswith("args."):
                assert all(f"{part}:" in known for part in name.rstrip("><").split(".")), word
