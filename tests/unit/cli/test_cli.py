"""The command line as a whole: what a job gets of its environment, and an interruption while a verb is loaded."""

import errno
import os
from pathlib import Path

import pytest

from shoal.cli import cli, main
from shoal.cli.support.jobs import job_environment
from shoal.cluster.embedded_cluster import _cluster_environment
from shoal.errors import ConnectionLost
from typed import typed


def test_workers_whose_folder_is_another_find_what_is_found_where_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["lib", "", "/there"]))
    monkeypatch.setenv("SHOAL_HOME", "kept")
    expected = os.pathsep.join([str(tmp_path / "lib"), str(tmp_path), "/there"])
    for environment in (job_environment("one", "shoal run x"), _cluster_environment(Path("/tmp/one"), "one", {}, {})):
        assert environment["PYTHONPATH"] == expected
        assert environment["SHOAL_HOME"] == str(tmp_path / "kept")
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in job_environment("one", "shoal run x")


def test_ctrl_c_while_a_verb_is_loaded_ends_as_any_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    result = typed("runs")
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), "/a/b: Permission denied"),
        (OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"), "a and b: Invalid cross-device link"),
        (TimeoutError("/a/lock is held by another"), "/a/lock is held by another"),
        (TimeoutError(), "TimeoutError"),
        (ConnectionLost("nobody answers"), "nobody answers"),
    ],
)
def test_what_the_system_refuses_is_said_in_a_line(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", refused)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: {said}\n"
