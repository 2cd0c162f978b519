"""The run record keeps what it was told, and runs are found in it."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import runs
from shoal.errors import ConfigError, RunError
from shoal.runs import RunRecorder, Status
from shoal.runs.record import provenance

DEADLINE_S = 15.0
SPEC = "environment: CartPole-v1\nlearner:\n  lr: 0.001\n"


@pytest.fixture
def run(shoal_home: Path) -> Iterator[RunRecorder]:
    made = runs.create("cartpole", SPEC, "one")
    yield made
    made.close()


# --- what is told comes back ---


def test_everything_told_comes_back(run: RunRecorder, shoal_home: Path) -> None:
    run.log(100, {"return/mean_100": 20.0, "learner/loss": math.nan})
    run.log(200, {"return/mean_100": math.inf})
    run.log(200, {"steps/total": 200})
    run.record_weights(1, 100, "aa", time.time())
    run.record_weights(2, 200, "bb", time.time())
    run.record_event("actor.joined", actor="a-1", path=Path("/x"), lag=3)
    run.record_endpoint("gateway", "gateway", "tcp://127.0.0.1:5000", "starting")
    run.record_endpoint("gateway", "gateway", "tcp://127.0.0.1:5000", "ready")
    run.record_model("cartpole", 1, ("champion",))
    run.finish(Status.FINISHED)

    seen = runs.load("one")
    assert (seen.id, seen.job, seen.status, seen.spec, seen.error) == ("one", "cartpole", "finished", SPEC, None)
    assert seen.folder == shoal_home / "runs" / "one"
    assert (seen.folder / "spec.yaml").read_text() == SPEC
    assert seen.finished_at is not None
    assert 0 <= seen.duration_s < DEADLINE_S
    metrics = seen.metrics()
    assert metrics.index.tolist() == [100, 200]
    assert metrics.columns.tolist() == ["time", "learner/loss", "return/mean_100", "steps/total"]
    assert metrics["return/mean_100"].tolist() == [20.0, math.inf]
    assert metrics["learner/loss"].isna().all()
    assert metrics["time"].between(0, DEADLINE_S).all()
    assert metrics["time"].is_monotonic_increasing
    latest = seen.latest()
    assert math.isnan(latest.pop("learner/loss"))
    assert latest == {"return/mean_100": math.inf, "steps/total": 200.0}
    assert seen.versions()[["version", "step", "sha256"]].to_numpy().tolist() == [[1, 100, "aa"], [2, 200, "bb"]]
    [event] = seen.events().to_dict("records")
    assert (event["kind"], event["details"]) == ("actor.joined", {"actor": "a-1", "path": "/x", "lag": 3})
    assert seen.endpoints() == [runs.EndpointRecord("gateway", "gateway", "tcp://127.0.0.1:5000", "ready")]
    assert seen.models()[["name", "version"]].to_numpy().tolist() == [["cartpole", 1]]
    assert seen.best() == ("return/mean_100", 20.0)  # the best finite one


def test_a_run_of_nothing_reads_as_empty_tables(run: RunRecorder) -> None:
    seen = runs.load("one")
    assert seen.metrics().empty
    assert seen.metrics().columns.tolist() == ["time"]
    assert seen.events().empty
    assert seen.versions().empty
    assert seen.models().empty
    assert (seen.latest(), seen.endpoints(), seen.best()) == ({}, [], None)


def test_to_dict_is_strict_json(run: RunRecorder) -> None:
    run.log(1, {"loss": math.nan, "accuracy": 0.5})
    run.flush()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    told = json.loads(json.dumps(runs.load("one").to_dict()), parse_constant=refuse)
    assert told["latest"] == {"loss": None, "accuracy": 0.5}
    assert told["best"] == {"name": "accuracy", "value": 0.5}
    assert told["status"] == "running"


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 0.75), ("loss", 0.25), ("return/mean_100", 0.75)])
def test_the_best_of_a_sweep_is_that_of_its_best_trial(run: RunRecorder, metric: str, best: float) -> None:
    for trial, value in enumerate((0.5, 0.75, 0.25)):
        run.log(1, {f"trial-{trial:03d}/{metric}": value, f"trial-{trial:03d}/step": 9.0})
    run.flush()
    found = runs.load("one").best()
    assert found[0].endswith(f"/{metric}")
    assert found[1] == best


def test_what_is_no_part_of_the_history_is_the_newest_and_may_be_the_best(run: RunRecorder) -> None:
    run.log(1, {"loss": 3.0})
    run.log(2, {"loss": 1.0}, in_history=False)
    run.log(3, {"loss": 2.0, "gap": 0.5}, in_history=False)
    run.flush()
    seen = runs.load("one")
    assert (seen.latest(), seen.best()) == ({"loss": 2.0, "gap": 0.5}, ("loss", 1.0))
    assert seen.metrics()["loss"].to_dict() == {1: 3.0}
    assert seen.metrics().columns.tolist() == ["time", "loss"]
    run.log(4, {"loss": 5.0})
    run.flush()
    assert (seen.latest()["loss"], seen.metrics()["loss"].to_dict()) == (5.0, {1: 3.0, 4: 5.0})


# --- finding runs ---


def test_runs_are_found_by_id_beginning_or_latest() -> None:
    assert runs.list_runs() == []
    for run_id in ("20260101-000000-aaaa", "20260101-000000-bbbb", "20270101-000000-cccc"):
        runs.create("job", "", run_id).close()
    assert runs.load("latest").id.endswith("cccc")
    assert runs.load("2027").id.endswith("cccc")
    assert runs.load("20260101-000000-b").id.endswith("bbbb")
    assert [each.id[-4:] for each in runs.list_runs(limit=2)] == ["cccc", "bbbb"]
    with pytest.raises(RunError, match=r"begins 2 runs.*type more"):
        runs.load("2026")
    with pytest.raises(RunError, match=r"did you mean .*20270101-000000-cccc.*shoal runs"):
        runs.load("20270101-000000-cccd")
    with pytest.raises(RunError, match=r"no run 'nope': the newest is 20270101-000000-cccc\. `shoal runs`"):
        runs.load("nope")
    with pytest.raises(RunError, match="no run ''"):
        runs.load("")


@pytest.mark.parametrize("run_id", ["../up", "a/b", "latest", ".x", " "])
def test_an_id_cannot_leave_its_folder(run_id: str) -> None:
    with pytest.raises(ConfigError, match="run_id"):
        runs.create("job", "", run_id)


def test_an_id_is_given_once_and_made_ids_sort_by_time(run: RunRecorder) -> None:
    with pytest.raises(RunError, match="already"):
        runs.create("job", "", "one")
    with runs.create("job", "") as made:
        assert len(made.id) == len("20261120-064501-3f2a")
        assert made.id.startswith("20")


def test_the_git_revision_is_recorded_and_its_absence_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunRecorder
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    runs.create("job", "", "outside").close()
    assert (runs.load("outside").git_revision, runs.load("outside").git_dirty) == (None, False)
    repository = tmp_path / "repository"
    repository.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    (repository / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True, timeout=DEADLINE_S)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    monkeypatch.chdir(repository)
    runs.create("job", "", "clean").close()
    assert (runs.load("clean").git_revision, runs.load("clean").git_dirty) == (head.stdout.strip(), False)
    (repository / "file").write_text("2")
    runs.create("job", "", "dirty").close()
    assert (runs.load("dirty").git_revision, runs.load("dirty").git_dirty) == (head.stdout.strip(), True)


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ({"evaluation/return": 900.0, "return/mean_100": 5.0}, ("return/mean_100", 5.0)),
        ({"a/return": 900.0, "return/mean_100": math.nan}, None),
        ({"a/return": 900.0, "loss": 1.0}, ("a/return", 900.0)),
    ],
)
def test_a_run_is_judged_by_its_mean_return_when_there_is_one(
    run: RunRecorder, values: dict[str, float], best: tuple[str, float] | None
) -> None:
    run.log(1, values)
    run.flush()
    assert runs.load("one").best() == best


# --- the command ---


@pytest.mark.parametrize(
    "word",
    [
        *("endpoint.token=hush", "endpoint.token=a=hush", "token=hush", "--token=hush", "endpoint={token: hush}"),
        *("args.password=hush", "args.api_key=hush", "args={secret: hush}"),
    ],
)
def test_a_token_is_not_recorded(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_COMMAND", raising=False)
    monkeypatch.setattr("sys.argv", ["/bin/shoal", "run", "x", word, "num_tokens=7"])
    runs.create("job", "", "one").close()
    command = runs.load("one").command
    assert "hush" not in command
    assert shlex.split(command) == ["shoal", "run", "x", f"{word.partition('=')[0]}=***", "num_tokens=7"]


def as_ray_has_it(value: str) -> str:
    """A variable of a job's environment, in the job."""
    return re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))


def test_words_with_secrets_reach_a_job_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["models=a", "endpoint.keys=[{name: ada, key: S3CRET}]", "endpoint.port=80", "endpoint={token: S3CRET}"]
    words.append("args.password=a$HOME${HOME}${NOBODYS}$$b")
    shown, variables = provenance.split_secrets(words)
    assert shown == ["models=a", "endpoint.keys=***", "endpoint.port=80", "endpoint=***", "args.password=***"]
    for name, value in variables.items():
        monkeypatch.setenv(name, as_ray_has_it(value))
    assert provenance.restore_secrets(shown) == words
    assert provenance.restore_secrets(["other=***"]) == ["other=***"]
    assert provenance.split_secrets(words[:1]) == (words[:1], {})


def test_the_command_of_a_job_is_recorded_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "shoal run x 'args.path=$HOME/${HOME}/${NOBODYS}'"
    for name, value in provenance.make_command_variable(line).items():
        monkeypatch.setenv(name, as_ray_has_it(value))
    runs.create("job", "", "one").close()
    assert runs.load("one").command == line


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("cd /x && exec python a.py b=1", "cd /x && exec python a.py b=1"),
        ("python a.py 'endpoint.keys=[{key: S3CRET}]' b=1", "python a.py 'endpoint.keys=***' b=1"),
        ("python a.py b=1 'it", "python a.py b=1 'it"),
        ("python a.py --token S3CRET b=1", "python a.py --token '***' b=1"),
        ("python a.py --token", "python a.py --token"),
        ("python a.py 'endpoint.keys=[{key: S3CRET}]", "python a.py '***"),
    ],
)
def test_the_command_of_a_job_is_shown_without_secrets(line: str, shown: str) -> None:
    assert provenance.mask_command_line(line) == shown


def test_of_a_group_those_are_told_who_are_there(run: RunRecorder) -> None:
    run.log(1, {"lagging": 1.0})
    run.log_group(1, "lag", {"a": 1.0, "b": 2.0})
    run.flush()
    assert runs.load("one").latest() == {"lagging": 1.0, "lag/a": 1.0, "lag/b": 2.0}
    run.log_group(2, "lag", {"a": 3.0})
    run.log_group(3, "lag", {"b": 4.0})
    run.flush()
    assert runs.load("one").latest() == {"lagging": 1.0, "lag/b": 4.0}
    run.log_group(4, "lag", {})
    run.flush()
    assert runs.load("one").latest() == {"lagging": 1.0}
    assert list(runs.load("one").metrics().columns) == ["time", "lagging"]


@pytest.mark.parametrize(
    ("job", "kind", "spec", "name"),
    [
        ("train", runs.RunKind.TRAINING, "args: {}\ntask: my_task.py:MyTask\n", "MyTask"),
        ("train", runs.RunKind.TRAINING, "task: jobs/lenet.py\n", "lenet"),
        ("train", runs.RunKind.TRAINING, "task: lenet\n", "lenet"),
        ("train", runs.RunKind.TRAINING, "task: 'my tasks/tides.py:Tides'\n", "Tides"),
        ("train", runs.RunKind.TRAINING, "task: company.tasks:Tides\n", "Tides"),
        ("train", runs.RunKind.TRAINING, "task: ''\n", "train"),
        ("ablate", runs.RunKind.TRAINING, "task: lenet\n", "ablate lenet"),
        ("population", runs.RunKind.POPULATION, "task: lenet\n", "population lenet"),
        ("sweep", runs.RunKind.SWEEP, "loop: null\ntrain:\n  args: {}\n  task: lenet\n", "sweep lenet"),
        ("sweep", runs.RunKind.SWEEP, "loop:\n  recipe: pong\ntrain:\n  task: ''\n", "sweep pong"),
        ("tides", runs.RunKind.TRAINING, "task: jobs/tides.py\n", "tides"),
        ("stream", runs.RunKind.STREAM, "task: x\n", "stream"),
        ("train", runs.RunKind.TRAINING, "args:\n  data: in/orders.csv\nname: '{data}'\ntask: table\n", "orders"),
        ("train", runs.RunKind.TRAINING, "optimizer:\n  name: adamw\ntask: lenet\n", "lenet"),
        ("sweep", runs.RunKind.SWEEP, "train:\n  args: {}\n  name: orders\n  task: table\n", "sweep orders"),
        ("serve", runs.RunKind.SERVING, "endpoint:\n  port: 1\n  name: shop\nmodels: [a]\n", "serve shop"),
        ("cartpole", None, "[: no yaml", "cartpole"),
    ],
)
def test_a_run_is_called_by_its_name_or_by_what_it_trains(
    job: str, kind: runs.RunKind | None, spec: str, name: str
) -> None:
    runs.create(job, spec, "one", kind=kind).close()
    assert runs.load("one").to_dict()["name"] == name


def test_another_connection_does_not_release_the_locks_of_a_process(shoal_home: Path) -> None:
    """A process that closes any descriptor of a file loses its locks on it (POSIX): another process would then take
    itself for the last one, and remove the log that this one writes to."""
    with runs.create("train", "", "one") as run:
        runs.load("one")
        write = "import shoal.runs; shoal.runs.create('train', '', 'two').close()"
        subprocess.run([sys.executable, "-c", write], check=True, timeout=300)
        assert (shoal_home / "runs.sqlite-wal").exists()
        run.record_event("still")
    assert {each.id for each in runs.list_runs()} == {"one", "two"}
    assert "still" in runs.load("one").last_events()


def test_of_several_versions_of_a_model_one_is_its_champion() -> None:
    with runs.create("train", "", "several") as run:
        run.record_model("cartpole", 1, ("champion",))
        run.record_model("cartpole", 2, ("champion", "candidate"))
        run.record_model("cartpole", 3, ("champion",))
        run.record_model("other", 1, ("champion",))
    found = runs.load("several")
    aliases = [[], ["candidate"], ["champion"], ["champion"]]
    assert found.models()["aliases"].tolist() == aliases
    models = found.to_dict()["models"]
    assert isinstance(models, list)
    assert [each["aliases"] for each in models] == aliases
