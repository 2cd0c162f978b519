"""The main function of a job, as far as it goes without a cluster: what a run that is resumed is told."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal import runs
from shoal.cluster.job_main import job_main
from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check
from shoal.flows.serving_spec import ServingSpec

KEYS = "endpoint.keys=[{name: lab, key: hush}]"


def a_run(*words: str, status: str = "stopped") -> str:
    """A run that has learnt something."""
    spec = ActorLearnerSpec().override(words)
    with runs.create("actor_learner", spec.to_yaml(), "one") as run:
        (run.folder / "checkpoints/step-00000001").mkdir(parents=True)
        run.finish(status)
    return run.id


def resumed(run_id: str, *words: str) -> ActorLearnerSpec:
    """What the job makes of the words, as `--check` has it."""
    seen: list[ActorLearnerSpec] = []

    def look(spec: ActorLearnerSpec) -> None:
        check(spec)
        seen.append(spec)

    arguments = [f"resume={run_id}", *words, "--check"]
    job_main(ActorLearnerSpec(), lambda spec, job: None, "actor_learner", look, lambda typed: arguments)
    return seen[0]


def test_a_run_whose_endpoint_has_keys_is_resumed_with_the_keys_given_again() -> None:
    spec = resumed(a_run(KEYS, "eval_episodes=3"), KEYS)
    assert spec.eval_episodes == 3
    assert [key.key.get_secret_value() for key in spec.endpoint.keys] == ["hush"]


def test_it_is_said_which_secret_a_resumed_run_needs_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        resumed(a_run(KEYS))
    assert "give it again, as in endpoint.keys=..." in capsys.readouterr().err


def test_what_does_not_fit_is_refused_also_where_there_are_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        resumed(a_run(KEYS), KEYS, "hidden=[8]")
    assert "error: hidden = [8]: run one has learnt with [64, 64]" in capsys.readouterr().err


def test_a_run_that_has_reached_its_target_is_not_resumed_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run_id = a_run(KEYS, status="finished")
    with pytest.raises(SystemExit):
        resumed(run_id, KEYS)
    assert "error: resume = 'one': has ended already, with the target_return of 475" in capsys.readouterr().err
    for more in ("target_return=490", "eval_episodes=100", "target_return=null"):
        assert resumed(run_id, KEYS, more).resume == run_id


def test_a_run_without_a_target_goes_on_for_its_time_again() -> None:
    run_id = a_run("target_return=null", status="finished")
    assert resumed(run_id).resume == run_id


def test_help_says_what_was_typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["serve_apps/mine.py", "--help"])
    for module, typed in (
        (None, "python serve_apps/mine.py"),
        ("shoal.libs.stream.__main__", "python -m shoal.libs.stream"),
    ):
        main = SimpleNamespace(__spec__=module and SimpleNamespace(name=module))
        monkeypatch.setitem(sys.modules, "__main__", main)
        job_main(ActorLearnerSpec(), lambda spec, job: None, "mine")
        assert capsys.readouterr().out.startswith(f"usage: {typed} [field=value ...]\n")


@pytest.mark.parametrize("spec", [ActorLearnerSpec(), ServingSpec()])
def test_an_access_token_is_in_no_spec_that_is_recorded(spec: Spec) -> None:
    with pytest.raises(ConfigError, match=r"endpoint.*: its token is the access token: set \$SHOAL_TOKEN"):
        spec.override(["endpoint.token=hush"])


def test_a_model_that_is_not_there_is_missed_before_a_cluster_is() -> None:
    app = Path(__file__).parents[3] / "serve_apps" / "registered_model.py"
    words = [sys.executable, str(app), "models=absent@champion", "--check"]
    looked = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert (looked.returncode, looked.stdout) == (1, "")
    assert looked.stderr.startswith("error: there is no model 'absent'")


@pytest.mark.parametrize("algorithm", ["dqn", "sac"])
def test_a_replay_larger_than_the_free_disk_is_refused_before_anything_starts(
    algorithm: str, shoal_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100 * 2**20))
    env = "CartPole-v1" if algorithm == "dqn" else "Pendulum-v1"
    words = [f"env={env}", f"algorithm={algorithm}", "algorithm.replay_mb=150"]
    check(ActorLearnerSpec().override(words))  # in memory
    spec = ActorLearnerSpec().override([*words, "algorithm.replay_on_disk=true"])
    with pytest.raises(ConfigError, match=r"algorithm.replay_mb = 150.0: is larger than the 100 MiB that are free in"):
        check(spec)
    check(spec.override(["algorithm.replay_mb=99"]))
    run_id = a_run(f"env={env}", f"algorithm={algorithm}")
    replay = runs.load(run_id).folder / "checkpoints" / "replay"
    replay.mkdir(parents=True)
    (replay / "rows.bin").write_bytes(bytes(60 * 2**20))  # of a resumed run: it has its space already
    (runs.load(run_id).folder / "checkpoints/step-00000001").rmdir()
    check(spec.override([f"resume={run_id}"]))
