"""`shoal runs` and `shoal models`, as a user types them."""

import json
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from shoal import runs
from shoal.cli.commands.run_session import RunArguments
from shoal.cli.commands.run_session import RunSession as Session
from shoal.cli.support.console import make_literal_console
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.jobs import JobHandle
from shoal.errors import ClusterError, ConnectionLost, RunError, ShoalError
from shoal.flows.actor_processes import ActorProcesses
from shoal.home import home
from typed import said, typed


def record(run_id: str, status: str = "finished") -> None:
    with runs.create("cartpole", "a: 1\nresume: ''\n", run_id, command="shoal run cartpole a=1 --actors 4") as run:
        run.log(10, {"return/mean_100": 480.0, "learner/loss": 0.5})
        run.record_endpoint("gateway", "gateway", "tcp://127.0.0.1:5600", "closed")
        run.record_model("cartpole", 2, ("champion",))
        run.record_event(
            "actor.joined", at=1.5, actor="[bold]a-1[/nonsense]", seconds=25.513599157, returns=[500.0] * 20
        )
        run.finish(status, "ValueError: [/red]" if status == "failed" else None)


def test_without_records_it_says_how_to_make_one() -> None:
    assert "no runs yet" in said("runs")
    assert "shoal run --help" in said("runs")
    assert "no models yet" in said("models list")
    assert json.loads(said("runs --json")) == []
    assert json.loads(said("models list --json")) == []


def test_a_run_that_ended_before_its_time_can_be_gone_on_with(shoal_home: Path) -> None:
    record("one")
    assert "resume=" not in said("runs one")
    with runs.create("odd job", "resume: ''\n", "two", command="python jobs/odd.py") as run:
        assert "resume=" not in said("runs two")
        with closing(sqlite3.connect(shoal_home / "runs.sqlite")) as connection, connection:
            connection.execute("UPDATE runs SET heartbeat_at = 0")
        assert "lost" in said("runs two")
        assert "  shoal console --open\n  shoal run 'odd job' resume=two\n" in said("runs two")
        run.finish("stopped")
    assert "  shoal console --open\n  shoal run 'odd job' resume=two\n" in said("runs two")


@pytest.mark.parametrize(
    ("job", "spec", "command", "expected"),
    [
        ("serve", "models: [m]", "shoal serve deploy m", "shoal serve deploy m"),
        ("batch_predict", "data: x", "shoal batch-predict m x", "shoal batch-predict m x"),
        ("image_classifier", "models: [m]", "shoal run image_classifier a=1", "shoal run image_classifier a=1"),
        ("ablate", "resume: ''", "shoal ablate lenet", "shoal ablate lenet"),
        ("train", "resume: ''", "shoal run lenet a=1", "shoal run lenet resume=one a=1"),
        (
            "x",
            "resume: ''",
            "shoal run x.py --env A=1 --inference remote",
            "shoal run x.py --inference remote --env A=1 resume=one",
        ),
        ("train", "resume: ''", "python -m shoal.train task=lenet", "python -m shoal.train resume=one task=lenet"),
        (
            "train",
            "resume: ''",
            "python -u -m shoal.train task=lenet resume=x",
            "python -m shoal.train resume=one task=lenet",
        ),
        ("train", "resume: ''", "python jobs/lenet.py", "shoal run train resume=one"),
        (
            "Net",
            "task: HOME/tasks/net_1.py:Net\nresume: ''",
            "python net.py",
            'shoal.fit(..., resume="one")  # the same call in the same program',
        ),
        ("x", "resume: ''", "shoal run x --envs 2 a.token=*** resume=two", "shoal run x --envs 2 resume=one"),
        ("actor_learner", "resume: ''", "python jobs/actor_learner.py", "shoal run actor_learner resume=one"),
        ("sweep", "resume: ''", "shoal sweep lenet a=1 --address local", "shoal sweep --resume one --address local"),
        ("mine", "[: no yaml", "shoal run mine.py", "shoal run mine.py"),
        *(
            (
                "train",
                f"{{task: t, stop: {{{stop}}}}}",
                f"shoal run train {word}=1",
                f"shoal run train resume=one {word}={more}",
            )
            for stop, word, more in (
                ("epochs: 3.0", "stop.epochs", "6"),
                ("steps: 1000000", "stop.steps", "2000000"),
                ("convergence: {metric: loss}", "stop.convergence.patience", "6"),
            )
        ),
    ],
)
def test_what_cannot_be_resumed_begins_again(job: str, spec: str, command: str, expected: str) -> None:
    limit = spec.partition("stop: {")[2].partition(":")[0]  # which came before the target
    with runs.create(job, spec.replace("HOME", str(home())), "one", command=command) as run:
        run.record_event("trained", reason=limit)
        run.finish("not reached" if limit else "stopped")
    assert f"  shoal console --open\n  {expected}\n" in said("runs one")


@pytest.mark.parametrize(
    ("typed_words", "command"),
    [
        (RunArguments("x", (), 0), "shoal run x"),
        (RunArguments("x", ("endpoint.keys=[{name: a, key: hush}]",), 0), "shoal run x 'endpoint.keys=***'"),
        (RunArguments("x", ("endpoint={keys: [{key: hush}]}",), 0), "shoal run x 'endpoint=***'"),
        (RunArguments("x", ("a=b c", "endpoint.token=hush"), 4), "shoal run x --actors 4 'a=b c' 'endpoint.token=***'"),
        (RunArguments("x", (), 4, None, 8), "shoal run x --actors 4 --envs 8"),
        (RunArguments("j/x.py", ("a=1",), 0, "local"), "shoal run j/x.py --address local a=1"),
    ],
)
def test_the_command_of_a_run_can_be_pasted(typed_words: RunArguments, command: str) -> None:
    assert typed_words.to_command_line() == command


def a_session(*words: str) -> Session:
    return Session(RunArguments("x", words, 2), Path("x.py"), Console(quiet=True), plain=True)


def test_a_resumed_run_is_not_shown_with_what_its_earlier_life_said(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[str] = []

    def start(words: list[str], *, stdin: int, **_: object) -> SimpleNamespace:
        assert "--lifeline" in words
        assert stdin == subprocess.PIPE
        connected.append(words[words.index("--connect") + 1])
        return SimpleNamespace(poll=lambda: None)

    with runs.create("x", "target_return: 475\n", "one") as run:
        run.record_endpoint("gateway", "gateway", "tcp://old", "ready")
        run.record_event("gateway_ready", address="tcp://old", env="E", server_key="")
        run.record_event("solved", seconds=1.0, steps=2)
        run.log(1, {"return/mean_100": 480.0})
    monkeypatch.setattr("subprocess.Popen", start)
    session = a_session("resume=on")
    assert session.run_id == "one"
    session._read_record()
    assert session._view is None  # the job has not begun its new life
    with runs.reopen("one") as again:
        session._read_record()
        assert (session._view.phase, session._view.metrics, connected) == ("starting the endpoint", {}, [])
        again.record_event("gateway_ready", address="tcp://new", env="E", server_key="")
        again.record_endpoint("gateway", "gateway", "tcp://new", "ready")
        session._read_record()
        assert (session._view.phase, connected) == ("waiting for actors", ["tcp://new"] * 2)
        again.log(2, {"return/mean_100": 100.0})
        again.flush()
        session._read_record()
        assert session._view.phase == "learning"
        again.record_event("solved", seconds=1.0, steps=2)
        for mean in (480.0, 470.0, 480.0):  # it stays solved though actors explore
            again.log(3, {"return/mean_100": mean})
            again.flush()
            session._read_record()
            assert session._view.phase == "solved; playing through the endpoint"
        again.record_event("tried", passes=False, reason="version 7 returned 480")
        session._read_record()
        assert session._view.phase == "solved; learning on until a trial passes"
        assert "version 7 returned 480: learning goes on" in session._view.notes
        again.record_event("tried", passes=True, reason="")
        session._read_record()
        assert (session._view.phase, session._view.notes) == ("solved; playing through the endpoint", ())
        again.finish("stopped")
    assert session.format_resume_hint() == "Go on with: shoal run x --actors 2 resume=one"


def test_all_words_are_said_again() -> None:
    with runs.create("x", "target_return: 475", "one"):
        pass
    session = a_session("resume=one", "target_return=7")
    session._read_record()
    assert session.format_resume_hint() == "Go on with: shoal run x --actors 2 resume=one target_return=7"
    with runs.reopen("one") as again:
        session._read_record()
        again.record_model("m", 3, ())
        again.finish("stopped")
    hint = "It has registered m@3. Go on with: shoal run x --actors 2 resume=one target_return=7"
    assert session.format_resume_hint() == hint
    with runs.reopen("one"):
        pass
    assert session.format_resume_hint() == "The run has finished: shoal runs one"


@pytest.mark.parametrize(
    ("spec", "words"), [("resume: ''", "Go on with: shoal run x --actors 2 resume="), ("a: 1", "")]
)
def test_what_cannot_be_resumed_is_not_said_to_go_on(spec: str, words: str) -> None:
    session = a_session("a=1")
    with runs.create("x", spec, session.run_id) as run:
        session._read_record()
        run.finish("failed", "why")
    assert session.format_resume_hint() == (words and f"{words}{session.run_id} a=1")


def test_what_a_run_has_named_is_said_as_it_is(
    shoal_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # as by `make demo`
    with runs.create("x", "task: t", "one") as run:
        run.record_event("trained", detail="ended [by hand]", seconds=1.0, kept=3, metrics={"recall[a]": 0.5})
        run.record_event("solved", seconds=1.0, steps=2)
        run.record_event("evaluated", mean_return=1.0, returns=[1.0], requests=2)
        run.record_model("m", 1, ["champion[x]"])
    session = a_session()
    session._console, session.run_id = make_literal_console(), "one"
    session._print_summary()
    printed = capsys.readouterr().out
    for word in ("ended [by hand] after 1.0 s", "evaluated recall[a] 0.5", "registered m@1 (champion[x])"):
        assert word in printed
    assert "mean return 1 over 1 episodes played through the endpoint's HTTP interface (2 requests)\n" in printed
    assert f"what next:\n  source {sys.prefix}/bin/activate\n  shoal runs one\n" in printed


def test_where_no_actor_is_left_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.display.run_view.REFRESH_S", 0.0)
    with runs.create("x", "target_return: 475", "one") as run:
        pass
    session = a_session("resume=one")
    session._job = SimpleNamespace(poll_outcome=lambda: None)  # type: ignore[assignment]
    session._job_log = SimpleNamespace(read_new_lines=lambda is_over: [])  # type: ignore[assignment]
    with runs.reopen("one") as again:
        (run.folder / "actor-0.log").write_text("RuntimeError: motor burnt\n")
        session._actors = actors = ActorProcesses(run.folder, {})
        actors._actors = [SimpleNamespace(poll=lambda: 1), SimpleNamespace(poll=lambda: None)]
        assert not session._poll()
        actors._actors.pop()
        with pytest.raises(RunError, match=r"no actor is left.*\n.*motor burnt\nGo on with"):
            session._poll()
        again.log(1, {"steps/total": 5.0})  # others may come back to what has begun
        again.flush()
        assert not session._poll()


def test_lines_that_come_with_the_first_metrics_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.display.run_view.REFRESH_S", 0.0)
    lines = [["sessions are opened at http://h"], ["step 2"]]
    with runs.create("x", "target_return: 475", "one", kind=runs.RunKind.LOOP) as run:
        run.log(1, {"steps/total": 5.0})
        run.flush()
        session = a_session("env=CartPole-v1")
        session.run_id = "one"
        session._job = SimpleNamespace(poll_outcome=lambda: None)  # type: ignore[assignment]
        session._job_log = SimpleNamespace(read_new_lines=lambda is_over: lines.pop(0))  # type: ignore[assignment]
        assert not session._poll()
        assert not session._poll()
    assert session._printed_lines == ["sessions are opened at http://h"]


def test_a_command_whose_endpoint_answers_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    with runs.create("x", "models: [m@1]", "one", kind=runs.RunKind.SERVING) as run:
        session = a_session("models=m@1")
        session.run_id = "one"
        monkeypatch.setattr(session._reporter, "wait_for", waits.append)
        session._read_record()
        assert not waits
        run.record_endpoint("m", "inference", "http://h", "ready")
        session._read_record()
        assert waits == [""]


@pytest.mark.parametrize("error", [ConnectionLost("http://h: refused"), ClusterError("http://h answered 500: refused")])
def test_a_cluster_that_has_ended_is_said_with_how_to_go_on(
    error: ShoalError, shoal_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*arguments: object, **more: object) -> object:
        raise error

    with runs.create("x", "target_return: 475", "one") as run:
        run.finish("stopped")
    session = a_session("resume=one")
    monkeypatch.setattr("shoal.cli.commands.run_session.ray_jobs.submit", lambda *arguments, **more: None)
    monkeypatch.setattr("shoal.cluster.jobs.JobHandle.status", gone)
    monkeypatch.setattr("shoal.cluster.jobs.JobHandle.stop_quietly", lambda job: None)
    with (
        pytest.raises(RunError, match=r"the cluster has ended.*refused\nGo on with: shoal run x"),
        ExitStack() as stack,
    ):
        session.run(ClusterHandle("127.0.0.1:1", "http://127.0.0.1:2", "token", {}, temp_dir=shoal_home), stack)


@pytest.mark.parametrize(("file", "shown"), [("job_main(...)", "endpoint.token=***"), ("", "endpoint.token=hush")])
def test_the_job_is_told_what_the_user_typed(
    shoal_home: Path, file: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def submit(cluster: object, entrypoint: list[str], *, env: dict[str, str], **_: object) -> None:
        assert entrypoint[2:] == ["a=b c", shown]  # what reads its words by itself finds no secrets elsewhere
        told.append(env["SHOAL_COMMAND"])
        raise RunError("enough")

    monkeypatch.setattr("shoal.cli.commands.run_session.validate_overrides", lambda path, words, variables: {})
    monkeypatch.setattr("shoal.cli.commands.run_session.ray_jobs.submit", submit)
    monkeypatch.setattr(JobHandle, "stop_quietly", lambda job: None)
    cluster = ClusterHandle("127.0.0.1:1", "http://127.0.0.1:2", "token", {})
    shoal_home.mkdir(exist_ok=True)
    monkeypatch.chdir(shoal_home)
    Path("x.py").write_text(file)
    with ExitStack() as stack, pytest.raises(RunError, match="enough"):
        a_session("a=b c", "endpoint.token=hush").run(cluster, stack)
    assert told == ["shoal run x --actors 2 'a=b c' 'endpoint.token=***'"]


def test_an_interruption_while_a_job_is_submitted_ends_the_job(
    shoal_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    asked: list[tuple[str, str]] = []

    def submit(*_: object, submission_id: str, **__: object) -> None:
        begun.append(submission_id)
        raise KeyboardInterrupt

    def ask(client: object, method: str, path: str) -> None:
        asked.append((method, path))
        raise RunError("Ray knows no such job")  # the request was interrupted before it was there

    monkeypatch.setattr("shoal.cli.commands.run_session.validate_overrides", lambda path, words, variables: {})
    monkeypatch.setattr("shoal.cli.commands.run_session.ray_jobs.submit", submit)
    monkeypatch.setattr("shoal.cluster.jobs.request_json", ask)
    cluster = ClusterHandle("127.0.0.1:1", "http://127.0.0.1:2", "token", {})
    with pytest.raises(KeyboardInterrupt), ExitStack() as stack:
        a_session().run(cluster, stack)
    assert asked == [("POST", f"/api/jobs/{begun[0]}/stop")]


@pytest.mark.parametrize(
    ("job", "words", "problem"),
    [
        ("actor_learner", ["algorithm=ppo", "algorithm.synchronous=true"], "does not pause while the learner updates"),
        ("actor_learner", ["--envs", "2"], "is for actors that run the policy themselves"),
    ],
)
def test_remote_inference_that_a_run_cannot_have_is_refused_before_anything_starts(
    job: str, words: list[str], problem: str, shoal_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> None:
        pytest.fail("a cluster starts")

    monkeypatch.setattr("shoal.cli.commands.run_session.start_cluster", start)
    monkeypatch.setattr("shoal.cli.commands.run_session.find_cluster", lambda address: None)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    result = typed("run", job, *words, "--actors", "1", "--inference", "remote")
    assert isinstance(result.exception, ShoalError)
    assert problem in str(result.exception)
