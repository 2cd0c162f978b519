"""What a new user types wrongly: each answer names what is wrong and what helps, without a traceback or a cluster."""

import os
import sys
from pathlib import Path

import pytest

from shoal.cli.commands import cluster
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.config.field_help import format_field_help, list_argument_help, list_field_help
from shoal.errors import ConfigError, ShoalError
from shoal.extend import RLSpec
from shoal.recipes import find_packaged, is_recipe, stage_package
from shoal.train.__main__ import main as train_here
from shoal.train.spec import TrainSpec
from typed import typed

TASK = "import shoal\nclass Line(shoal.Task):\n    pass\n"
TRIES = {
    "rnu": "no such command 'rnu'. did you mean 'run'",
    "sweeep lenet": "did you mean 'sweep'",
    "models shwo x": "did you mean 'show'",
    "serve deplyo x": "did you mean 'deploy'",
    "runs shwo": "there is no run 'shwo'",
    "run": "Missing argument 'JOB'",
    "run lennet": "did you mean 'lenet'",
    "run adir": "jobs: acrobot",
    "run my_tsk.py": "'my_tsk.py': is not a file. did you mean 'my_task.py'",
    "run my_task.py": "shoal run train task=my_task.py:Line stop.epochs=3",
    "run my_task.py:Line": "train it: shoal run train task=my_task.py:Line stop.epochs=3",
    "run lennet --help": "did you mean 'lenet'",
    "run train --all": "No such option '--all'",
    "run train --actors x": "'x' is not a valid integer",
    "run train --actors -1": "-1 is not in the range",
    "run train --env NOPE": "env = 'NOPE': is not set in this process",
    "run train --runtime-env no.yaml": "runtime_env = 'no.yaml': cannot be read",
    "run train --runtime-env bad.yaml": "give a file of YAML",
    "run train --inference here": "'here' is not one of 'local', 'remote'",
    "run train --address nowhere": "address = 'nowhere': is not the URL of a dashboard",
    "run train resume=": "resume = '': names no run",
    "run train resume=nope": "there is no run 'nope'",
    "status --address http://127.0.0.1:1": "see that a cluster is up there; --address",
    "runs latest": "start one with `shoal run`",
    "runs latest --follow --json": "needs one run, and no --json",
    "runs --limit 0": "0 is not in the range",
    "runs rm nope": "there is no run 'nope'",
    "runs prune": "needs --keep, --older-than, or both",
    "runs prune --older-than 30x": "older-than = '30x': is no age",
    "runs track nope --to mlfow": "did you mean 'mlflow'",
    "release nope actor-1": "there is no run 'nope'",
    "report nope": "there is no run 'nope'",
    "compare a b": "there is no run 'a'",
    "models show nope": "there is no model 'nope'",
    "models show a/b": "model = 'a/b'",
    "models add": "Missing argument",
    "models promote nope@1": "there is no model 'nope'",
    "models rollback nope": "there is no model 'nope'",
    "models rm nope@1": "there is no model 'nope'",
    "serve deploy nope": "`shoal models list` shows what there is",
    "serve deploy no.yaml": "cannot be read",
    "serve deploy bad.yaml": "give a file of YAML",
    "serve status": "no endpoint is up",
    "serve promote nope": "no endpoint is up",
    "serve canary nope@2 --percent 200": "200.0 is not in the range",
    "serve delete nope": "no endpoint is up",
    "predict nope --input 1": "no endpoint is up",
    "sweep": "task = '': is missing",
    "sweep my_task.py:Line": "space = {}: is empty",
    "sweep my_task.py:Line a=lgo(1,2)": "'lgo' is no distribution",
    "sweep my_task.py:Line a=log(2,1)": "is not below the upper end",
    "sweep --resume nope": "there is no run 'nope'",
    "up --cpus 0": "0 is not in the range",
    "up --object-store-gib nan": "is not finite",
    "down --timeout-s 0": "is not in the range",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shoal_home: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setattr("shoal.cli.commands.run_session.start_cluster", lambda: pytest.fail("a cluster was started"))
    Path("my_task.py").write_text(TASK)
    Path("bad.yaml").write_text("a: [")
    Path("adir").mkdir()
    return tmp_path


@pytest.mark.parametrize("line", TRIES)
def test_a_mistake_is_named_with_what_helps(line: str) -> None:
    result = typed(line, stdin="")
    assert result.exit_code
    assert isinstance(result.exception, ShoalError | SystemExit), result.exception
    error = result.output if isinstance(result.exception, SystemExit) else str(result.exception)
    assert TRIES[line] in error


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("leraning_rate=1", "'optimizer.learning_rate'"),
        ("optimizer.learnig_rate=1", "'optimizer.learning_rate'"),
        ("optimizer.name=adm", "'adam'"),
        ("parallel=fsdpp", "'fsdp'"),
        ("track=mlflo", "'mlflow'"),
    ],
)
def test_the_nearest_field_or_choice_is_named(override: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {nearest}"):
        TrainSpec().override([override])


def test_what_is_not_near_is_not_suggested() -> None:
    with pytest.raises(ConfigError, match=r"'cuda'$"):
        TrainSpec().override(["device=gpu"])


def test_the_help_of_a_job_has_a_line_for_each_field() -> None:
    class Own:
        """hidden: units of the layer"""

        def __init__(self, hidden: int = 4, *, names: list[str]) -> None: ...

    spec = TrainSpec.parse({"task": "lenet", "batch_size": 7, "sync": {"kind": "diloco"}})
    lines = format_field_help([*list_argument_help(Own, {}), *list_field_help(spec)]).splitlines()
    split = {line.split()[0]: line.split()[1:] for line in lines}
    assert split["args.hidden"] == ["4", "integer", "units", "of", "the", "layer"]
    assert split["args.names"] == ["needed", "list", "of", "text"]
    assert split["batch_size"][:4] == ["7", "integer,", ">=", "1"]
    assert split["optimizer.name"][1:6] == ["adam", "|", "adamw", "|", "sgd"]
    assert split["stop.target"][:6] == ["null", "{metric,", "direction,", "value}", "or", "null"]
    assert split["sync.kind"][1:4] == ["all_reduce", "|", "parameter_server"]
    assert split["sync.transport"][1:4] == ["auto", "|", "shared_memory"]
    (algorithm,) = [each for each in list_field_help(RLSpec()) if each.path == "algorithm.name"]
    assert {"impala", "ppo", "dqn"} <= set(algorithm.type.split(" | "))


def test_the_help_of_a_training_here_is_of_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sloped.py").write_text(
        "import shoal\nclass Line(shoal.Task):\n    def __init__(self, slope: float = 2.0):\n        pass\n"
    )
    assert train_here(["task=sloped.py:Line", "batch_size=7", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "args.slope" in shown
    assert "batch_size               7" in shown
    assert train_here(["task=nowhere", "-h"]) == 1


def test_help_that_is_read_in_part_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does
    with open(writing, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        assert train_here(["--help"]) == 0


def test_a_field_within_a_group_is_meant_by_no_field_without_one() -> None:
    with pytest.raises(ConfigError, match=r"no such field. fields are"):
        TrainSpec().override(["model.depht=3"])


def test_a_cluster_that_is_up_says_what_a_shell_needs(monkeypatch: pytest.MonkeyPatch, shoal_home: Path) -> None:
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/a b/token", "RAY_OTHER": "1"}
    handle = ClusterHandle("127.0.0.1:1", "http://127.0.0.1:2", "secret", environment, Path("/tmp"))
    monkeypatch.setattr(cluster, "find_running_cluster", lambda: handle)
    assert typed("up --shell").output.splitlines() == [
        *("export RAY_ADDRESS=127.0.0.1:1", "export RAY_API_SERVER_ADDRESS=http://127.0.0.1:2"),
        *("export RAY_AUTH_MODE=token", "export RAY_AUTH_TOKEN_PATH='/a b/token'", f"export SHOAL_HOME={shoal_home}"),
    ]


def test_the_recipes_travel_with_the_package(tmp_path: Path) -> None:
    package = stage_package(tmp_path / "staged")
    assert (package / "recipes/jobs/lenet.py").read_text() == (find_packaged("jobs") / "lenet.py").read_text()
    assert (package / "recipes/__main__.py").is_file()
    assert is_recipe(find_packaged("jobs") / "lenet.py")
    assert not is_recipe(Path("my_task.py"))
