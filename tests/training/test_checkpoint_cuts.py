"""An upload that ends at any byte leaves the checkpoint before it, or the new one, complete."""

import os
import random
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bucket_server import BUCKET, bucket_environment
from cutting_proxy import CuttingProxy
from programs import RanksFailed, run_ranks
from shoal.checkpoint import Checkpointer
from shoal.errors import CheckpointError
from shoal.parallel import World
from shoal.store.objects import ObjectStore
from training.checkpoint_states import assert_equal, newest, state_of

__all__ = ["bucket_environment"]

TIMEOUT_S = 120.0
WIDTH = 5000  # of a state of 100 KB


def save(folder: Path, url: str, *steps: int) -> None:
    with Checkpointer(folder, store=ObjectStore(url)) as checkpointer:
        checkpointer.latest()
        for step in steps:
            checkpointer.save(step, state_of(step, WIDTH))
            checkpointer.finish_uploads(TIMEOUT_S)


def save_until_killed(world: World, folder: Path, url: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    (folder / "pid").write_text(str(os.getpid()))
    save(folder / "a", url, 2)


def require_complete(folder: Path, url: str) -> int:
    """On a host without files; returns the step."""
    with Checkpointer(folder, store=ObjectStore(url)) as checkpointer:
        found, state = newest(checkpointer), state_of(0, WIDTH)
        assert found.damaged == []
        checkpointer.load(found, state)
        assert_equal(state, state_of(found.step, WIDTH))
        checkpointer.save(3, state)  # goes on, and leaves nothing of the upload that was cut
        checkpointer.finish_uploads(TIMEOUT_S)
    keys = {entry.key.rpartition("/")[0] for entry in ObjectStore(url).list_entries()}
    assert len(keys - {f"step-{step:09d}" for step in (1, 2, 3)}) == 2
    return found.step


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, bucket_environment: dict[str, str]) -> tuple[str, int]:
    for name, value in bucket_environment.items():
        monkeypatch.setenv(name, value)
    parts = urlsplit(bucket_environment["AWS_ENDPOINT_URL"])
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


NUM_CUTS = [pytest.param(1, id="one"), pytest.param(50, marks=pytest.mark.soak, id="many")]


@pytest.mark.parametrize("num_cuts", NUM_CUTS)
@pytest.mark.parametrize("kind", ["cut", "killed"])
def test_an_upload_that_ends_at_a_byte_leaves_a_complete_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bucket_environment: dict[str, str],
    target: tuple[str, int],
    num_cuts: int,
    kind: str,
) -> None:
    direct = bucket_environment["AWS_ENDPOINT_URL"]

    def url_of(name: str, endpoint: str) -> str:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        return f"s3://{BUCKET}/{tmp_path.name}/{name}"

    with CuttingProxy(target) as proxy:
        save(tmp_path / "counted" / "a", url_of("counted", direct), 1)
        save(tmp_path / "counted" / "a", url_of("counted", proxy.url), 2)
        total = proxy.num_bytes
    draw, steps = random.Random(7), []
    for index, limit in enumerate(sorted(draw.sample(range(1, total), num_cuts))):
        folder, name = tmp_path / str(index), f"{kind}{index}"
        save(folder / "a", url_of(name, direct), 1)
        kill = (
            (lambda folder=folder: os.kill(int((folder / "pid").read_text()), signal.SIGKILL))
            if kind == "killed"
            else int
        )
        with CuttingProxy(target, limit, kill) as proxy:
            url = url_of(name, proxy.url)
            if kind == "killed":
                with pytest.raises(RanksFailed):
                    run_ranks(save_until_killed, 1, folder, url, bucket_environment | {"AWS_ENDPOINT_URL": proxy.url})
            else:
                with pytest.raises(CheckpointError, match="of step 2 are not in"):
                    save(folder / "a", url, 2)
        steps.append(require_complete(folder / "b", url_of(name, direct)))
    assert set(steps) <= {1, 2}
    assert steps[0] == 1
