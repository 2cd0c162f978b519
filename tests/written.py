"""Writes what this release leaves on disk as tests/written/VERSION.zip, which later releases read.

    python tests/written.py        once for each release: docs/architecture/release.md

`training/test_written.py` reads every archive that is there.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from pathlib import Path

import shoal
from rl_setting import EXPERIENCE, segment
from shoal.libs.stream.flow import run_stream
from shoal.libs.stream.spec import StreamSpec
from shoal.rl.experience.group_commit import GroupCommit
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.experience.segment_log import SegmentLog
from shoal.store.folder import FolderStore
from shoal.testing import Loop

FOLDER = Path(__file__).parent / "written"
NUM_STEPS, NUM_MESSAGES, NUM_LEARNT, NUM_BATCHES = 300, 40, 24, 2
LINE = """
import shoal, torch

class Line(shoal.Task):
    def model(self): return torch.nn.Linear(1, 1)
    def data(self): return shoal.Data(train=[(torch.tensor([i / 100]), torch.tensor([i / 50 + 1])) for i in range(100)])
    def loss(self, outputs, batch): return ((outputs - batch[1]) ** 2).mean()
"""
GAME = ["hidden=[8]", "learner.batch_steps=64", "segment_length=16", "gateway.record=100%"]


def fill(home: Path) -> None:
    """Leave a run, its model and its checkpoint, a stream, a loop, and experience in a store, in $SHOAL_HOME."""
    Path("line.py").write_text(LINE)
    shoal.fit("line.py:Line", name="line", stop={"steps": NUM_STEPS}, optimizer={"learning_rate": 0.05}, say=None)
    Path("waves.csv").write_text("value,time\n" + "".join(f"{math.sin(at / 3)},{at}\n" for at in range(NUM_MESSAGES)))
    words = ["files=[waves.csv]", "online.hidden=4", "online.num_steps=4", "commit.max_batch=8", "name=waves"]
    run_stream(StreamSpec().override([*words, f"max_messages={NUM_LEARNT}"]))
    with Loop("CartPole-v1", home / "loop", *GAME) as loop:
        loop.start_actor(seed=1)
        loop.learn(NUM_BATCHES)
        loop.learner.save()
    queue = ExperienceQueue(64, Ledger())
    commit = GroupCommit(SegmentLog(FolderStore(home / "store"), EXPERIENCE), queue)
    for seq in range(3):
        queue.put(("actor", 1), seq, segment())
    commit.close()  # alone: what a gateway that is lost has acknowledged and not learnt


def main() -> None:
    """Write the archive of this release."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["SHOAL_HOME"] = folder
        fill(Path(folder))
        for path in [*Path().rglob("report.html"), *Path().rglob("*.png"), *Path().glob("*token")]:
            path.unlink()  # pages, and what is of this machine
        shutil.make_archive(str(FOLDER / shoal.__version__), "zip", folder)


if __name__ == "__main__":
    main()
