"""Writes one of each durable file, as the present release writes it, for later releases to load.

    python tests/release_files.py tests/fixtures/release_0_1     once, before the release's formats change

Databases are stored as SQL text. `load_home` makes a folder for $SHOAL_HOME of them.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
SECRET = "not-recorded"


def load_home(release: str, home: Path) -> Path:
    """Copy a release's files to `home`, its databases from their text."""
    shutil.copytree(FIXTURES / release, home, dirs_exist_ok=True)
    for text in home.rglob("*.sqlite.sql"):
        with closing(sqlite3.connect(text.with_suffix(""))) as database:
            database.executescript(text.read_text())
        text.unlink()
    return home


def dump_database(path: Path) -> None:
    """Replace a database by its text."""
    with closing(sqlite3.connect(path)) as database:
        version = database.execute("PRAGMA user_version").fetchone()[0]
        lines = [*database.iterdump(), f"PRAGMA user_version = {version};"]
    path.with_name(f"{path.name}.sql").write_text("\n".join(lines) + "\n")
    for each in path.parent.glob(f"{path.name}*"):
        if each.suffix != ".sql":
            each.unlink()


def write_runs() -> None:
    """A run of each kind, with its spec."""
    from shoal import runs
    from shoal.flows.actor_learner_spec import ActorLearnerSpec
    from shoal.flows.policies_spec import PoliciesSpec
    from shoal.flows.serving_spec import ServingSpec
    from shoal.libs.batch_predict.flow import BatchPredictSpec
    from shoal.libs.population.loop.spec import RLPopulationSpec
    from shoal.libs.population.spec import PopulationSpec
    from shoal.libs.stream.spec import StreamSpec
    from shoal.libs.sweep.spec import SweepSpec
    from shoal.runs import RunKind
    from shoal.train.spec import TrainSpec

    space = {"optimizer.learning_rate": "log(1e-3, 1e-1)"}
    specs = {
        "training": (RunKind.TRAINING, TrainSpec(task="lenet").override(["parallel=ddp", "workers=2", "seed=5"])),
        "loop": (
            RunKind.LOOP,
            ActorLearnerSpec().override(["algorithm=ppo", f"endpoint.keys=[{{name: lab, key: {SECRET}}}]"]),
        ),
        "policies": (RunKind.LOOP, PoliciesSpec.parse({"env": "tag", "policies": {"it": {"agents": ["it"]}}})),
        "rl_population": (RunKind.POPULATION, RLPopulationSpec().override(["members=3"])),
        "population": (RunKind.POPULATION, PopulationSpec(task="lenet").override(["evolution=pbt", "members=8"])),
        "sweep": (RunKind.SWEEP, SweepSpec(train=TrainSpec(task="lenet"), space=space).override(["train.seed=3"])),
        "stream": (RunKind.STREAM, StreamSpec().override(["online.hidden=8", f"mqtt.password={SECRET}"])),
        "serving": (
            RunKind.SERVING,
            ServingSpec(models=["tiny@champion"]).override(["endpoint.model.max_batch_size=4"]),
        ),
        "prediction": (RunKind.PREDICTION, BatchPredictSpec(model="tiny@1")),
    }
    for name, (kind, spec) in specs.items():
        with runs.create(name, spec.to_record(), name, command=f"shoal run {name}", kind=kind) as run:
            run.log(1, {"loss": 0.5, "return/mean_100": 7.0})
            run.record_event("began", step=1)
            run.record_weights(1, 1, "ab", 1.0)
            run.record_model("tiny", 1, ["champion"])
            run.record_endpoint("gateway", "gateway", "tcp://127.0.0.1:5555", "ready")


def write_files(home: Path) -> None:
    """A ledger, a registered model, checkpoints of both kinds, and the state of an endpoint."""
    import numpy as np
    import torch

    from shoal.checkpoint import Checkpointer, files
    from shoal.registry import ModelFactory, Registry, Signature
    from shoal.rl.experience.segment_ledger import LEDGER_NAME, Ledger
    from shoal.serve.controller.rollout import FOLLOWING
    from shoal.serve.controller.state import ControllerState, Deployment, Event, ModelState, StateFile
    from shoal.weights import WeightSnapshot
    from shoal.wire import DropReason

    ledger = Ledger(home / "runs/loop" / LEDGER_NAME)
    for seq in range(3):
        ledger.record_received(("a", 1), seq)
    ledger.record_received(("b", 7), 0, DropReason.NON_FINITE)
    ledger.acknowledge(ledger.open_lease("learner", [("a", 1)]), [None])
    ledger.open_lease("learner", [("a", 1), ("a", 1)])
    ledger.quarantine("c", "claims too much")
    ledger.close()

    weights = WeightSnapshot.of(1, {"w": np.arange(3, dtype=np.float32)})
    tensor = {"datatype": "FP32", "shape": [-1, 3]}
    signature = Signature.parse({"inputs": [{"name": "x", **tensor}], "outputs": [{"name": "y", **tensor}]})
    model = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 3})
    for _ in range(2):
        Registry().register("tiny", weights, model=model, signature=signature, run_id="training", metrics={"loss": 0.5})
    Registry().rollback("tiny")

    state = {"model": {"w": torch.arange(3.0)}, "step": 4}
    with Checkpointer(home / "runs/training/checkpoints", asynchronous=False) as checkpointer:
        checkpointer.save(4, state, {"note": "hello"}, plan="ddp", best=True)
    files.save(home / "runs/loop/checkpoints", 4, {"w": torch.arange(3.0), "version": 9})

    deployment = Deployment("tiny", str(Path("/registry")), "champion", {"max_batch_size": 4})
    models = {"tiny": ModelState(deployment), "live": ModelState(Deployment("live"), FOLLOWING, retained=3)}
    file = StateFile(home / "endpoints/digits-1.json")
    file.save(ControllerState("a1", 7, 1.0, models, ["r1"], [Event(1, 1.0, "deploy", "tiny", 1)], 1))
    file.store_weights("live", WeightSnapshot.of(3, {"w": np.arange(3, dtype=np.float32)}))


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["SHOAL_HOME"] = folder
        write_runs()
        write_files(home)
        for database in home.rglob("*.sqlite"):
            dump_database(database)
        left_out = shutil.ignore_patterns("tensorboard", "runs.lock", ".lock", ".registering", "token")
        shutil.copytree(home, target, ignore=left_out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
