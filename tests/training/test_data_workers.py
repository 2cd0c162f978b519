"""Worker processes give what the training process itself would make, and say how they died."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from data_sources import Counting, Deadly, Held, Leaving, Numbers, Refusing, Stream
from shoal.data import Loader, LoaderSpec
from shoal.data.workers.shm_transfer import receive
from shoal.errors import Closed, ConfigError, DataError
from waiting import wait_for

ONE = LoaderSpec(workers=1, prefetch=1)
TWO = LoaderSpec(workers=2, prefetch=3)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_workers_give_the_same_batches_and_end_with_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (
        Loader(Numbers(40), batch_size=4, seed=3) as inline,
        Loader(Numbers(40), batch_size=4, seed=3, spec=TWO) as loader,
    ):
        pids = set()
        for _ in range(2):  # epochs, without a new start of the workers
            for mine, theirs in zip(inline, loader, strict=True):
                assert torch.equal(mine["inputs"], theirs["inputs"])
                assert torch.equal(mine["noise"], theirs["noise"])
                assert inline.last_indices == loader.last_indices == mine["inputs"].tolist()
                pids |= set(theirs["pid"].tolist())
        assert sorted(pids) == sorted(loader._feed.pids())
        assert len(pids) == 2
        for pid in pids:
            for asked in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, torchrun, Slurm: they reach them too
                os.kill(pid, asked)  # and are not for them
        loader.seek(0, 8)  # what has been prefetched is of another place
        inline.seek(0, 8)
        batch = next(iter(loader))
        assert torch.equal(batch["noise"], next(iter(inline))["noise"])
        assert sorted(loader._feed.pids()) == sorted(pids)  # none was started anew
        batch["inputs"] += 1  # the memory is ours
        state = loader.state_dict()
        loader.close()
        loader.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert batch["inputs"].tolist() == [index + 1 for index in loader.last_indices or []]
        with pytest.raises(Closed):
            next(iter(loader))
    inline.load_state_dict(state)
    assert inline.position == 12
    assert not list(tmp_path.iterdir())


def test_a_worker_that_raises_or_dies_is_named_with_its_samples() -> None:
    with Loader(Deadly(12), batch_size=2, shuffle=False, spec=ONE) as loader:
        batches = iter(loader)
        assert [next(batches)["inputs"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(DataError, match=r"in samples 4, 5\): OSError: sector 5 is gone") as raised:
            next(batches)
        assert 'raise OSError("sector 5 is gone")' in str(raised.value.__cause__)  # where, in the worker
        (survivor,) = loader._feed.pids()
        loader.seek(0, 6)
        batches = iter(loader)
        assert next(batches)["inputs"].tolist() == [6, 7]
        with pytest.raises(
            DataError, match=rf"pid {survivor}\) was ended by SIGKILL while .* of samples 8, 9\. if memory"
        ):
            next(batches)
        loader.seek(0, 10)  # a new worker
        assert next(iter(loader))["inputs"].tolist() == [10, 11]
        assert loader._feed.pids() != [survivor]


@pytest.mark.soak
def test_a_batch_that_cannot_travel_is_named_and_so_is_how_a_worker_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data.workers.pool._EXIT_TIMEOUT_S", 120.0)  # however busy the machine is
    with Loader(Leaving(8), batch_size=2, shuffle=False, spec=ONE) as loader:
        with pytest.raises(DataError, match=r"of samples 0, 1 cannot be handed over .*TypeError: .*lock"):
            next(iter(loader))
        (worker,) = loader._feed.pids()
        assert os.sched_getscheduler(worker) == os.SCHED_BATCH  # on a busy core it waits, and training does not
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        loader.seek(0, 2)
        batches = iter(loader)
        assert next(batches)["inputs"].tolist() == [2, 3]
        with pytest.raises(DataError, match=rf"pid {worker}\) ended with exit code 3 while .* of samples 4, 5"):
            next(batches)


def test_arrays_of_the_dataset_are_in_memory_once_and_a_slow_worker_is_given_up() -> None:
    values = np.arange(4 * 2**20, dtype=np.float32).reshape(-1, 1024)  # 16 MiB
    with Loader(Held(values), batch_size=2, shuffle=False, spec=ONE) as loader:
        for batch, step in zip(loader, range(8), strict=False):
            assert torch.equal(batch, torch.from_numpy(values[2 * step : 2 * step + 2]))
        [pid] = loader._feed.pids()
        maps = [each for each in psutil.Process(pid).memory_maps(grouped=False) if "shoal-data" in each.path]
        assert max(each.size for each in maps) > values.nbytes
        assert sum(each.private_dirty for each in maps) < values.nbytes / 2
        os.kill(pid, signal.SIGSTOP)
        loader._feed._workers[0].connection.settimeout(0.1)  # type: ignore[union-attr]
        with pytest.raises(DataError, match=r"has made no batch for 600 s of samples .*raise loader.timeout_s"):
            for _ in loader:
                pass
        assert not psutil.pid_exists(pid)


SCRIPT = """
import os, sys, time
import torch
from shoal.data import Loader, LoaderSpec
from shoal.data.workers.shm_transfer import receive

class Mine:
    def __len__(self): return 4
    def __getitem__(self, index): return index

print("read", flush=True)
loader = Loader(Mine(), batch_size=2, shuffle=False, spec=LoaderSpec(workers=1))
if GUARD:
    for batch in loader:
        print(batch.tolist(), loader._feed.pids(), flush=True)
    time.sleep(60)
"""


def test_a_dataset_of_the_script_itself_and_no_worker_outlives_its_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("GUARD", '__name__ == "__main__"'))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(4)]
        assert [line.split(" [")[0].strip() for line in lines] == ["read", "read", "[0, 1]", "[2, 3]"]
        worker = int(lines[3].split("[")[2].strip("]\n"))
        process.kill()
        wait_for(lambda: has_ended(worker), what="end of the worker")
    script.write_text(SCRIPT.replace("GUARD", "True"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert 'put what starts the training under `if __name__ == "__main__":`' in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "shoal.errors.ConfigError: loader.workers = 1: asked for within a worker"
    )


@pytest.mark.parametrize(
    "where",
    [
        "after an answer",
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("before an answer", "after a request")),
    ],
)
def test_an_interruption_between_two_batches_mixes_none_up(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def interrupted(connection: socket.socket, *words: Any) -> Any:
        monkeypatch.undo()
        if where == "after an answer":
            receive(connection)
        raise KeyboardInterrupt

    with Loader(Numbers(16), batch_size=2, shuffle=False, spec=LoaderSpec(workers=1, prefetch=3)) as loader:
        batches = iter(loader)
        assert next(batches)["inputs"].tolist() == [0, 1]
        monkeypatch.setattr(
            f"shoal.data.workers.pool.{'send' if where == 'after a request' else 'receive'}", interrupted
        )
        with pytest.raises(KeyboardInterrupt):  # as in a notebook, which goes on with the same loader
            next(batches)
        assert [batch["inputs"].tolist() for batch in loader] == [[n, n + 1] for n in range(2, 16, 2)]


def test_what_cannot_be_handed_to_workers_is_refused_before_any_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"loader.workers = 2: the dataset cannot be handed to worker processes: .*lambda"
    ):
        Loader(Numbers(4), batch_size=2, collate=lambda samples: samples, spec=TWO)
    with pytest.raises(ConfigError, match=r"handed to worker processes: OSError: this file is of another process"):
        Loader(Refusing(4), batch_size=2, spec=TWO)


def test_an_iterable_resumes_from_its_state_under_any_number_of_workers() -> None:
    source = Stream(26, stateful=True)
    with Loader(source, batch_size=4, spec=TWO) as loader, Loader(source, batch_size=4) as inline:
        for mine, theirs in zip(inline, loader, strict=True):
            assert torch.equal(mine["inputs"], theirs["inputs"])
            assert torch.equal(mine["noise"], theirs["noise"])
        for _ in zip(range(3), loader, strict=False):
            pass
        asked = Counting.asked
        inline.load_state_dict(loader.state_dict())
        for mine, theirs in zip(inline, loader, strict=True):
            assert torch.equal(mine["inputs"], theirs["inputs"])
            assert torch.equal(mine["noise"], theirs["noise"])
        assert loader.epoch == inline.epoch == 2
        assert Counting.asked - asked == 26 - 12  # none was read over
