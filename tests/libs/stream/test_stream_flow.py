"""`shoal run stream`, without Ray: the record, the registered versions, going on after a signal, and the endpoint."""

import asyncio
import math
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import shoal.runs
from serving.replica_set import ask, serving_one
from shoal.errors import ConfigError, DataError
from shoal.libs.stream.flow import check_stream, format_stream_line, run_stream, stream_main
from shoal.libs.stream.spec import CommitSpec, OnlineSpec, StreamSpec
from shoal.registry import Registry
from shoal.serve.spec.model_source import EndpointModel, RegisteredModel
from waiting import start_thread, wait_for

ROOT = Path(__file__).parents[3]
SMALL = OnlineSpec(hidden=4, num_steps=4)


def write_csv(path: Path, count: int) -> None:
    rows = [f"{math.sin(at / 3) + at % 7 / 70},{at}" for at in range(count)]
    path.write_text("\n".join(["value,time", *rows]) + "\n")


@pytest.mark.usefixtures("drawn_report")
def test_files_are_learnt_recorded_registered_and_answered(
    tmp_path: Path, shoal_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_csv(tmp_path / "a.csv", 120)
    spec = StreamSpec(files=(str(tmp_path / "*.csv"),), online=SMALL, name="tides", max_messages=80)
    spec = spec.model_copy(update={"commit": CommitSpec(max_batch=8)})
    run_id = run_stream(spec)
    run = shoal.runs.load(run_id)
    assert (run.kind, run.status) == (shoal.runs.RunKind.STREAM, shoal.runs.Status.FINISHED)
    assert run.latest()["stream/updates"] == 79
    assert "prequential/mae" in (run.folder / "report.html").read_text()
    assert run_stream(spec.model_copy(update={"resume": run_id, "max_messages": None})) == run_id
    trained = shoal.runs.load(run_id).last_events()["trained"]
    assert trained["steps"] == 120
    assert trained["metrics"]["mae"] < trained["metrics"]["as_now"]
    assert re.search(r"going on after batch 1[1-9]; 0 batches", capsys.readouterr().out)  # 10 of messages, and pauses

    version = Registry().get("tides@champion")
    assert version.version >= 2
    network = version.manifest.model.build()
    assert isinstance(network, torch.nn.Module)
    network.load_state_dict({name: torch.from_numpy(each) for name, each in version.snapshot().tensors().items()})
    history = np.sin(np.arange(9) / 3).astype(np.float32)
    expected = network(torch.from_numpy(history)[None]).item()

    async def answer() -> float:
        source = RegisteredModel("tides", Registry().location)
        async with serving_one(EndpointModel("tides", source, "champion")) as (_, replica):
            tensor = {"name": "values", "shape": [1, 9], "datatype": "FP32", "data": history.tolist()}
            answered = await ask(replica, "POST", "/v2/models/tides/infer", {"inputs": [tensor]})
            assert answered.status == 200, answered.body
            (forecast,) = answered.body["outputs"][0]["data"]
            return float(forecast)

    assert asyncio.run(answer()) == pytest.approx(expected, abs=1e-6)


def test_a_run_with_its_own_broker_and_sensors_goes_on_after_a_signal(
    shoal_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped by SIGTERM, then resumed. What the broker holds meanwhile is learnt."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def main(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["stream.py", *words])
        stream_main(StreamSpec())

    def stop() -> None:
        wait_for(lambda: any(run.latest().get("stream/updates") for run in shoal.runs.list_runs()), what="updates")
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = start_thread(stop)
    with pytest.raises(SystemExit) as ended:
        main(
            "resume=auto", "online.hidden=4", "online.num_steps=4", "sensors=20", "rate_hz=20", "commit.interval_s=0.2"
        )
    stopping.join()
    assert ended.value.code == 130
    assert "/s in batches of" in capsys.readouterr().out
    run = shoal.runs.load("latest")
    before = run.last_events()["trained"]["steps"]
    for other in (StreamSpec(name="other"), StreamSpec().override(["mqtt.value_field=humidity"])):
        shoal.runs.create("stream", other.to_record(), kind=shoal.runs.RunKind.STREAM).close()
    main("resume=auto", f"max_messages={before + 50}")
    trained = shoal.runs.load(run.id).last_events()["trained"]
    assert trained["steps"] >= before + 50
    assert shoal.runs.load(run.id).latest()["stream/missing"] == 0
    assert Registry().get("stream@champion").manifest.run_id == run.id


def test_what_could_not_work_is_rejected_before_anything_starts() -> None:
    with pytest.raises(DataError, match="no such file"):
        check_stream(StreamSpec(files=("nowhere.csv",)))
    with pytest.raises(ConfigError, match="learn_every=17"):
        OnlineSpec(learn_every=17)


def test_a_line_says_only_what_is_known() -> None:
    line = format_stream_line(10, {"stream/per_s": 5.0, "stream/duplicates": 2.0, "stream/missing": 0.0})
    assert line == "10 messages | 5/s | duplicates 2"


def test_the_python_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "libs" / "stream.md").read_text()
    (block,) = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    exec(compile(block, "streams.md", "exec"), {})
