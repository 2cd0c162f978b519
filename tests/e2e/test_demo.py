"""What the README promises, as a user would do it: the demo from start to finish, Ctrl-C, failure, resume."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shoal.runs
from shoal.client import Client
from shoal.cluster.processes import find_cluster_processes
from shoal.errors import RegistryError, RunError
from shoal.registry import Registry
from shoal_program import END_S, commands_with, shoal_command, shoal_program
from typed import typed
from waiting import wait_for, wait_until_none

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

ANSWER_S = 400.0
DEMO = ["run", "actor_learner", "--actors", "4"]
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture
def nothing_stays(own_home: Path) -> Iterator[None]:
    """No process that was started with this home stays (and so no port of one), and no temporary file."""
    before = _left_folders(own_home)
    yield
    wait_until_none(lambda: commands_with("SHOAL_HOME", str(own_home)), END_S, f"processes of {own_home}")
    assert list((own_home.parent / "tmp").iterdir()) == []
    # Somebody else's cluster has a folder, too, a moment before and after it has processes.
    wait_until_none(lambda: _left_folders(own_home) - before, END_S, "folders of clusters")


def _left_folders(home: Path) -> set[str]:
    """What clusters could have left in /tmp. Neither one that a living cluster uses counts, nor one of another home."""
    found = set()
    for path in Path("/tmp").iterdir():
        mark = path / "cluster-id"
        with suppress(OSError):  # it has just ended
            in_use = path.name.startswith("shoal-") and mark.exists() and find_cluster_processes(mark.read_text(), path)
            if path.name.startswith(("shoal-", "haproxy")) and not in_use and not _is_of_another(path, home):
                found.add(path.name)
    return found


def _is_of_another(folder: Path, home: Path) -> bool:
    """Whether a cluster that was up says that its home is another. Of one that never was, nobody knows."""
    try:
        environment = json.loads((folder / "cluster.json").read_text())["environment"]
    except FileNotFoundError:
        return False
    return not Path(environment["RAY_AUTH_TOKEN_PATH"]).is_relative_to(home)


def _accounting(run: shoal.runs.Run) -> dict[str, Any]:
    details: dict[str, Any] = run.events().query("kind == 'accounting'")["details"].iloc[-1]
    return details


@pytest.mark.soak
def test_the_demo_from_start_to_finish(own_home: Path, nothing_stays: None) -> None:
    status, output = shoal_command(*DEMO)
    assert status == 0, output
    run = shoal.runs.load("latest")
    assert run.status is shoal.runs.Status.FINISHED

    champion = Registry().get("cartpole@champion")
    assert champion.ref == "cartpole@1"
    assert champion.manifest.run_id == run.id
    assert champion.manifest.metrics["mean_return_100"] >= 475
    played = re.search(r"mean return ([0-9.]+) over 20 episodes played through the endpoint", output)
    assert played is not None, output
    assert float(played[1]) >= 475

    for name in ("report.html", "learning_curve.png", "spec.yaml"):
        assert (run.folder / name).stat().st_size > 0
        assert name == "spec.yaml" or str(run.folder / name) in output
    assert list((run.folder / "tensorboard").iterdir())
    metrics = run.metrics()
    assert metrics["return/mean_100"].max() >= 475
    accounting = _accounting(run)
    dropped = sum(accounting["dropped"].values())
    assert accounting["received"] == accounting["consumed"] + dropped
    assert accounting["queued"] == 0
    assert {endpoint.state for endpoint in run.endpoints()} == {"closed"}
    versions = run.versions()["version"].tolist()
    assert versions == list(range(1, len(versions) + 1))
    for command in (("runs",), ("runs", run.id), ("report", run.id), ("models", "show", "cartpole@champion")):
        status, output = shoal_command(*command)
        assert status == 0, output
        assert run.id in output


def test_the_endpoint_answers_while_actors_teach_it_and_ctrl_c_ends_it_all(own_home: Path, nothing_stays: None) -> None:
    question = np.zeros((1, 4), np.float32)
    seen: set[int] = set()
    with shoal_program(*DEMO, "target_return=1000", f"max_wall_s={4 * ANSWER_S:g}") as program:
        program.wait_for_line("learning")
        run = shoal.runs.load("latest")
        url = next(endpoint.address for endpoint in run.endpoints() if endpoint.kind == "inference")
        with Client(url, token=(own_home / "token").read_text(), timeout_s=ANSWER_S) as client:
            # Actors and learner do not wait for the replica, which says 503 until it has staged its first version.
            wait_for(lambda: client.ready("cartpole"), ANSWER_S, "a first version")

            def ask() -> bool:
                seen.add(client.infer("cartpole", question).version)
                return len(seen) >= 5

            wait_for(ask, ANSWER_S, "five versions from the endpoint")
        program.interrupt()
        assert program.wait() == 130
        assert "Traceback" not in program.said
        assert f"resume={run.id}" in program.said.partition("learning")[2]
    assert shoal.runs.load("latest").status is shoal.runs.Status.STOPPED


@pytest.mark.soak
def test_a_run_that_misses_its_target_says_so_and_goes_on_where_it_was(cluster: EmbeddedCluster) -> None:
    status, output = shoal_command(*DEMO, "max_wall_s=2", "target_return=499.9")
    assert status == 3
    assert "the target is 499.9" in output
    run = shoal.runs.load("latest")
    assert run.status is shoal.runs.Status.NOT_REACHED
    registry = Registry()
    assert registry.get("cartpole").manifest.run_id == run.id
    with pytest.raises(RegistryError, match="champion"):
        registry.get("cartpole@champion")
    assert f"resume={run.id}" in output
    recorded = run.versions()
    before = recorded["version"].max()
    received = _accounting(run)["received"]

    status, output = shoal_command(*DEMO, f"resume={run.id}", "target_return=60", "max_wall_s=600")
    assert status == 0, output
    again = shoal.runs.load("latest")
    assert again.id == run.id
    assert again.status is shoal.runs.Status.FINISHED
    versions = again.versions()
    kept = versions[versions["version"] <= before].reset_index(drop=True)
    assert kept.equals(recorded)  # not one of the old versions was published again as something else
    assert versions["version"].max() > before
    assert _accounting(again)["balanced"]
    assert _accounting(again)["received"] > received


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env=Pendulum-v1", "algorithm=dqn"], ["env = 'Pendulum-v1'", "Discrete", "algorithm=sac"]),
        (["learner.batch_stepz=1"], ["did you mean 'learner.batch_steps'?"]),
    ],
    ids=["an environment that does not fit", "a wrong word"],
)
def test_what_is_wrong_is_said_before_anything_starts(own_home: Path, words: list[str], said: list[str]) -> None:
    result = typed("run actor_learner", *words)
    assert isinstance(result.exception, RunError)
    assert [each for each in said if each not in str(result.exception)] == []
    assert "starting a Ray cluster" not in result.output
    assert "Traceback" not in str(result.exception)
