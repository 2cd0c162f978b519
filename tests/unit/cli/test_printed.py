"""What verbs print about a small home, as text and as JSON: that of golden/printed.json.

A change that is meant is written down by GOLDEN=write. Of this machine and this process nothing is compared.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from registered import LINEAR, constant, tensors
from shoal import runs
from shoal.cli.display import serve_display
from shoal.client import Client
from shoal.client.endpoint_status import (
    CertificateStatus,
    EndpointStatus,
    MetricStatus,
    ModelStatus,
    ReplicaStatus,
    ResidencyStatus,
    RolloutEvent,
    VersionStatus,
)
from shoal.cost.cost_table import MEASURED, PREDICTED
from shoal.registry import Registry, Signature, TensorSignature
from typed import draw_plain, typed

GOLDEN = Path(__file__).parent / "golden/printed.json"
NOW = 1_800_000_000.0
MACHINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+|\d\d:\d\d:00|(?<=process   ).*|(?<=git       ).*|(?<=packages   ).*"
OURS = (
    "command",
    "folder",
    "git_dirty",
    "git_revision",
    "heartbeat_at",
    "host",
    "location",
    "owner",
    "packages",
    "pid",
    "sha256",
)
FORWARDS = "serve simulate --latency 1:0.02,32:0.036 --rate 200 --deadline 0.1 --requests 2000"
COMMANDS = (
    *("runs", "runs --json", "runs --limit 1", "runs loop", "runs loop --json", "runs failed", "runs missing"),
    *(
        "runs prune --keep 1 --dry-run",
        "runs prune",
        "runs prune --keep 9",
        "runs rm loop",
        "runs rm loop failed --yes",
    ),
    *("runs loop --follow --json", "runs serving --follow", "logs loop", "release loop actor-0", "set loop gravity=9"),
    *("models list", "models list --json", "models list ranker", "models show ranker", "models show ranker --json"),
    *("models show ranker@1 --code", "models diff ranker@1 ranker@2", "models promote ranker@1", "models rm ranker@3"),
    *("models promote ranker@1 --alias old", "models rollback ranker", "models rm ranker@1 --yes", "models prune"),
    *("models prune --keep 1 --dry-run", "models prune --keep 1 --yes", "models rm nothing", "models add nothing.txt"),
    *("status", "status --json", "serve status", "serve status --json", "serve status --follow --json", "down"),
    *("compare loop failed --json", "compare loop failed --csv", "compare loop failed", "compare loop"),
    *("inspect training", "inspect training --json", FORWARDS, f"{FORWARDS} --json", "serve simulate"),
    *("demonstrations loop", "episodes loop --film nothing", "serve promote ranker@1", "serve rollback ranker"),
    *("serve set ranker deadline_s=1", "serve shadow ranker@2", "serve canary ranker@2 --percent 20", "serve deploy"),
    *("serve deploy ranker --into shop", "serve delete --model ranker --address local", "serve delete --model ranker"),
)
STATUS = EndpointStatus(
    "shop",
    time=NOW,
    started_at=NOW - 100.0,
    window_s=30.0,
    generation=4,
    owner="ann@here",
    lifetime="detached",
    grpc="127.0.0.1:8001",
    num_replicas=2,
    wanted="1 waits for a CPU",
    replicas=[ReplicaStatus("one", 1, 4, host="a"), ReplicaStatus("two", 2, 3, False, "no memory", host="b")],
    models=[
        ModelStatus(
            "ranker",
            phase="canary",
            source="ranker@champion",
            stable=1,
            candidate=2,
            versions=[
                VersionStatus(2, "candidate", 0.1, 20, 1, 2.0, 0.01, 0.02, 10, 1, {"age": {"beyond": 3, "gap": 1}}),
                VersionStatus(1, "stable", 0.9, 200, 0, 20.0, 0.005, 0.01),
            ],
            max_queued_rows=64,
            batch_rows=2.5,
            max_batch_rows=8,
            refused=7,
            requests=1220,
            errors=1,
            rows=4880,
            latency=[(1, 0.001), (8, 0.004)],
            last_failure="ValueError (a1b2)",
            metrics={"tokens": MetricStatus("Tokens written", 133.0), "gap": MetricStatus("Gap", None, 0.007, 0.02)},
        ),
        ModelStatus("policy", phase="live", source="loop", pinned=3, newest_percent=5.0),
        ModelStatus("cold", residency=ResidencyStatus(loads=2, load_s=0.2), source="cold", stable=1),
        ModelStatus("broken", "UNAVAILABLE", "its weights are away"),
    ],
    events=[RolloutEvent(NOW, "canary", "ranker", 2, "guard", "ann")],
    certificate=CertificateStatus(NOW, days_remaining=3.2, problem="no key"),
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three versions of a model, a run of each sort, and one that keeps an endpoint up."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("recorded")
        monkeypatch.setenv("SHOAL_HOME", str(folder))
        monkeypatch.setattr(time, "time", lambda: NOW)
        with record():
            yield folder


@contextmanager
def record() -> Iterator[None]:
    output = TensorSignature(name="y", datatype="FP32", shape=[-1, 2], columns=["left", "right"])
    for number, aliases in ((1, ["champion"]), (2, ["candidate"]), (3, ["champion"])):
        Registry().register(
            "ranker",
            constant(number),
            model=LINEAR.model_copy(update={"preprocess": "numpy:asarray"}),
            signature=Signature(inputs=tensors(x=[-1, 3]), outputs=[output]),
            run_id="training",
            metrics={"accuracy": 0.5 + number / 8},
            lineage={"base": "words@1", "rate": 0.5},
            aliases=aliases,
        )
    with runs.create(
        "cartpole", "target_return: 475\nresume: ''\n", "loop", command="shoal run cartpole --actors 2"
    ) as run:
        run.log(10, {"return/mean_100": 480.0, "learner/loss": 0.5, "actors/connected": 2, "steps/total": 900})
        run.record_event("actor.joined", at=1.5, actor="[bold]a-1[/]", seconds=25.5136, returns=[500.0] * 20)
        run.record_endpoint("gateway", "gateway", "tcp://127.0.0.1:5600", "closed")
        run.record_model("ranker", 2, ("champion",))
    with runs.create("cartpole", "target_return: 400\nresume: ''\n", "failed", command="shoal run cartpole a=1") as run:
        run.log(10, {"return/mean_100": 100.0, "learner/loss": 0.75})
        run.finish("failed", "ValueError: [/red]")
    with runs.create("train", "task: my.py:Net\nstop: {steps: 9}\n", "training", command="shoal run train") as run:
        run.log(4, {"validation/accuracy": 0.75, "train/loss": 0.5})
        for kind, factor in ((PREDICTED, 1), (MEASURED, 2)):
            run.record_event(kind, parameters=1000 * factor, memory_peak=3e8 * factor, step_s=0.012 * factor)
    with runs.create(
        "serve", "models: [ranker]\nendpoint: {}\n", "serving", command="shoal serve deploy ranker"
    ) as run:
        run.record_endpoint("shop", "inference", "http://127.0.0.1:8000", "ready")
        run.flush()
        yield


@pytest.fixture
def home(recorded: Path, shoal_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what was recorded, whose endpoint answers STATUS."""
    shutil.copytree(recorded, shoal_home)
    monkeypatch.setattr(time, "time", lambda: NOW + 1.0)
    monkeypatch.setattr(Client, "status", lambda client: STATUS)
    monkeypatch.setattr(Client, "rollout", lambda client, action, model, **options: STATUS.models[0])
    monkeypatch.setattr("shoal.cluster.attach.find_running_cluster", lambda: None)
    return shoal_home


@pytest.mark.parametrize("command", [*COMMANDS, "on a terminal"])
def test_a_verb_prints_what_it_printed(command: str, home: Path) -> None:
    if command in COMMANDS:
        result = typed(command)
        text = result.output + (f"{type(result.exception).__name__}: {result.exception}" if result.exception else "")
    else:
        text = draw()
    printed: Any = re.sub(MACHINE, "(ours)", text.replace(str(home), "HOME"))
    is_json = command.endswith("--json") and printed.startswith(("{", "["))
    printed = hide(json.loads(printed)) if is_json else printed.splitlines()
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(json.dumps({**known, command: printed}, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    else:
        assert printed == known[command]


def draw() -> str:
    return draw_plain(serve_display.render(STATUS, "http://127.0.0.1:8000", "a note"), 80)


def hide(value: Any) -> Any:
    """Without what is of this machine."""
    if isinstance(value, dict):
        return {name: "(ours)" if name in OURS else hide(each) for name, each in value.items()}
    return [hide(each) for each in value] if isinstance(value, list) else value
