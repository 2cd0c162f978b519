"""What the console reads of the record and of films, writes beside it, and sends as it comes."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import shoal.runs
from console_rig import open_console
from shoal import runs
from shoal.extend.runs import Panel, RunPanels
from shoal.extend.serve import read_audit_log
from shoal.home import home
from shoal.libs.console import live, run_data
from shoal.libs.console.curves import CurveCache, RunCurves
from shoal.libs.console.live import MAX_ANONYMOUS_STREAMS, MAX_STREAMS, RunFeed, WatchedRun
from shoal.rl.experience.segment_ledger import LEDGER_NAME, Ledger
from shoal.runs.curves import MetricHistory, thin
from shoal.runs.record.removal import remove_runs


@pytest.fixture
def client() -> TestClient:
    return open_console()


@pytest.fixture
def recorder() -> Iterator[runs.RunRecorder]:
    with runs.create("train", "task: lenet\noptimizer:\n  learning_rate: 0.1\n", "one") as recorder:
        yield recorder


def test_runs_are_listed_with_their_notes_and_pinned_metrics(client: TestClient, recorder: runs.RunRecorder) -> None:
    recorder.log(1, {"train/loss": 0.5, "hidden": math.nan})
    recorder.flush()
    changed = client.patch("/api/runs/one", json={"note": "as before", "tags": [" paper ", "paper"], "archived": True})
    assert changed.json() == {"note": "as before", "tags": ["paper"], "archived": True}
    assert client.patch("/api/runs/one", json={"archived": False}).json()["note"] == "as before"
    (row,) = client.get("/api/runs", params={"metrics": ["train/loss", "hidden", "none"]}).json()
    assert row["values"] == {"train/loss": 0.5, "hidden": None}
    assert (row["tags"], row["archived"], row["status"], row["best"]) == (
        ["paper"],
        False,
        "running",
        ["train/loss", 0.5],
    )
    assert "@" in row["owner"]
    assert client.get("/api/metrics").json() == ["hidden", "train/loss"]
    assert client.get("/api/runs/one").json()["fields"] == {"task": "lenet", "optimizer.learning_rate": 0.1}


def test_a_page_has_what_judges_the_run_and_each_command_of_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = "task: lenet\nstop:\n  target:\n    metric: accuracy\n    value: 0.9\n"
    with runs.create("train", spec, "one", command="shoal run lenet") as run:
        run.log(1, {"validation/loss": 0.5})
    monkeypatch.setenv("SHOAL_COMMAND", "shoal run lenet resume=one")
    runs.reopen("one").close()
    described = client.get("/api/runs/one").json()
    commands = ["shoal run lenet", "shoal run lenet resume=one"]
    assert described["commands"] == commands
    assert described["targets"] == {"validation/accuracy": 0.9}
    assert described["criteria"][:3] == ["validation/accuracy", "validation/loss", "return/mean_100"]
    panels = client.get("/api/runs/one/panels").json()["panels"]
    assert panels[-1]["commands"][-2:] == commands


@pytest.mark.parametrize(
    "changes", [{"tags": "paper"}, {"tags": [""]}, {"note": "a" * 10_001}, {"archived": 1}, {"id": "x"}]
)
def test_what_is_no_note_is_refused(client: TestClient, recorder: runs.RunRecorder, changes: dict[str, object]) -> None:
    answer = client.patch("/api/runs/one", json=changes)
    assert answer.status_code == 400
    assert next(iter(changes)) in answer.json()["error"]


def test_a_run_is_removed_as_the_command_does(client: TestClient, recorder: runs.RunRecorder) -> None:
    assert "still running" in client.delete("/api/runs/one").json()["error"]
    recorder.finish(runs.Status.FINISHED)
    assert client.delete("/api/runs/on").status_code == 400  # the beginning of a name removes nothing
    assert client.delete("/api/runs/one").json() == {"removed": "one"}
    assert client.get("/api/runs").json() == []
    assert not (home() / "runs" / "one").exists()
    refused, abbreviated, done = read_audit_log(home())
    assert ("still running" in refused["error"], abbreviated["result"], done["result"]) == (True, "failed", "done")
    assert (done["by"], done["action"], done["change"]) == ("administrator (console)", "remove", {"run": "one"})


def test_an_actor_is_released_once(client: TestClient, recorder: runs.RunRecorder) -> None:
    ledger = Ledger(recorder.folder / LEDGER_NAME)
    ledger.quarantine("actor-3", "claims too much")
    ledger.commit()
    ledger.close()
    assert client.get("/api/runs/one/panels").json()["quarantined"] == {"actor-3": "claims too much"}
    assert client.post("/api/runs/one/release", json={"actor": "actor-3"}).json() == {"released": "actor-3"}
    assert "none" in client.post("/api/runs/one/release", json={"actor": "actor-3"}).json()["error"]
    assert [(each["action"], each["change"], each["result"]) for each in read_audit_log(home())] == [
        ("release", {"run": "one", "actor": "actor-3"}, "done"),
        ("release", {"run": "one", "actor": "actor-3"}, "failed"),
    ]


def test_output_is_read_on(client: TestClient, recorder: runs.RunRecorder) -> None:
    (recorder.folder / "logs").mkdir()
    path = recorder.folder / "logs" / "driver.log"
    path.write_bytes(b"<script>alert(1)</script>\nincompl")
    (recorder.folder / "actor-0.log").write_bytes(b"x\n")
    first = client.get("/api/runs/one/log").json()
    assert (first["process"], first["processes"]) == ("driver", ["driver", "actor-0"])
    assert first["text"] == "<script>alert(1)</script>\n"
    with path.open("ab") as file:
        file.write(b"ete\n")
    assert client.get("/api/runs/one/log", params={"after": first["end"]}).json()["text"] == "incomplete\n"
    assert client.get("/api/runs/one/log", params={"process": "../../token"}).json()["text"] == ""


def test_events_come_with_their_problems_in_words(client: TestClient, recorder: runs.RunRecorder) -> None:
    recorder.record_event("checkpoint_failed", error="the disk is full")
    recorder.record_event("checkpoint_failed", of="a user's own")
    first, second = client.get("/api/runs/one/events").json()
    assert first["message"] == "a checkpoint could not be written, training goes on: the disk is full"
    assert (second["message"], second["details"]) == ("", {"of": "a user's own"})
    assert client.get("/api/runs/one/events", params={"after": first["number"]}).json() == [second]


def test_curves_are_read_on_and_values_of_earlier_steps_are_found(recorder: runs.RunRecorder) -> None:
    cache, run = CurveCache(), runs.load("one")

    def log(step: int, **values: float) -> None:
        recorder.log(step, values)
        recorder.flush()

    def read() -> dict[str, tuple[list[int], list[float]]]:
        return {name: (each.steps.tolist(), each.values.tolist()) for name, each in cache.read(run).items()}

    log(1, loss=4.0)
    log(2, loss=3.0)
    assert read() == {"loss": ([1, 2], [4.0, 3.0])}
    log(3, loss=2.0)
    log(2, accuracy=0.5)  # an evaluation ends later than the step that it is of
    assert read() == {"loss": ([1, 2, 3], [4.0, 3.0, 2.0]), "accuracy": ([2], [0.5])}
    log(1, loss=5.0)
    log(3, accuracy=0.6)
    assert read() == {"loss": ([1, 2, 3], [5.0, 3.0, 2.0]), "accuracy": ([2, 3], [0.5, 0.6])}


def test_a_sample_waits_for_no_other_page(recorder: runs.RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.log(1, {"loss": 4.0})
    recorder.flush()
    cache = CurveCache()
    run = runs.load("one")
    samples = []
    monkeypatch.setattr(RunCurves, "extend", lambda self, run: samples.append(cache.sample(run)))  # meanwhile
    cache.read(run)
    assert [list(sample) for sample in samples] == [["loss"]]
    monkeypatch.undo()
    cache.read(run)
    assert cache.sample(run) is None


def test_a_thinned_curve_has_its_peaks_and_its_ends() -> None:
    values = np.zeros(10_000)
    values[[1234, 7777]] = 9.0, -9.0
    values[5000] = math.nan
    curve = MetricHistory(np.arange(10_000), np.arange(10_000.0), values)
    whole = thin(curve, 100, -math.inf, math.inf)
    assert len(whole["steps"]) <= 102
    assert {0, 1234, 7777, 9999} <= set(whole["steps"])
    assert thin(curve, 100, 10, 12)["steps"] == [9, 10, 11, 12, 13]


def test_a_feed_has_each_value_once(recorder: runs.RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POLL_S", 0.0)
    feed = RunFeed(WatchedRun("one"))
    assert feed.find_news() == {"status": "running", "incarnation": 1, "curves": {}}
    for step in (1, 2, 3):
        recorder.log(step, {"loss": float(step)})
    recorder.flush()
    news = feed.find_news()
    assert (news["curves"]["loss"]["steps"], news["curves"]["loss"]["values"]) == ([1, 2, 3], [1.0, 2.0, 3.0])
    assert feed.find_news() is None
    recorder.log(2, {"accuracy": 0.5})
    recorder.flush()
    assert list((feed.find_news() or {})["curves"]) == ["accuracy"]
    recorder.finish(runs.Status.FINISHED)
    remove_runs([runs.load("one")])
    assert (feed.find_news() or {})["status"] == "removed"


def test_streams_are_bounded_and_some_are_left_for_who_has_logged_in(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_streams", {object() for _ in range(MAX_STREAMS)})
    assert client.get("/api/stream").status_code == 503
    assert client.get("/api/runs").status_code == 200
    monkeypatch.setattr(live, "_streams", {object() for _ in range(MAX_ANONYMOUS_STREAMS)})
    answer = open_console(logged_in=False).get("/api/stream")
    assert (answer.status_code, answer.headers["connection"]) == (503, "close")


def test_what_a_library_draws_is_drawn_again_after_a_new_event(
    client: TestClient, recorder: runs.RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Panel] = []

    def draw(run: runs.Run) -> list[Panel]:
        drawn.append(Panel(title=f"members {len(drawn)}", header=["member"], rows=[["<b>1</b>"], [("2", "best")]]))
        return drawn[-1:]

    def read() -> dict[str, object]:
        shown = client.get("/api/runs/one/panels").json()["panels"]
        return next(each for each in shown if each["title"].startswith("members"))

    monkeypatch.setattr(run_data, "find_optional", lambda kind, _: RunPanels(panels=draw))
    assert read()["rows"] == [["<b>1</b>"], [["2", "best"]]]
    assert read()["title"] == "members 0"
    recorder.record_event("round")
    assert read()["title"] == "members 1"


def test_the_cost_of_a_step_and_its_checkpoints(client: TestClient, recorder: runs.RunRecorder) -> None:
    recorder.record_event("cost_measured", memory_peak=1024.0)
    recorder.log(7, {"step/seconds": 0.5, "wait/data": 0.25})
    recorder.flush()
    (recorder.folder / "checkpoints" / "step-000000007").mkdir(parents=True)
    (recorder.folder / "checkpoints" / "step-000000007" / "a").write_bytes(b"12345")
    found = {each["title"]: each for each in client.get("/api/runs/one/panels").json()["panels"]}
    assert found["a step"]["counts"][1] == ["waits for data", 0.25, "25.0%", ""]
    assert found["cost and memory"]["header"] == ["", "predicted", "measured", "off by"]
    assert found["cost and memory"]["rows"] == [["peak memory of a rank", "-", "1 KiB", "-"]]
    assert found["checkpoints"]["rows"] == [["7", "5 B"]]


FILMS = ("v000100-e000200-r-1.5e+06-actor-0.webp", "v000001-e000001-r22-a_b.webp")
SMALL = "v000000-e000001-r1.5e-05-actor-0.webp"


@pytest.fixture
def folder() -> Path:
    """Of the run `filmed`: two films, and what is none."""
    with shoal.runs.recording("", "job", begun="started", kind=shoal.runs.RunKind.LOOP, run_id="filmed") as recorder:
        films = recorder.folder / "films"
    films.mkdir(parents=True)
    for name in (*FILMS, SMALL, "secret.txt", "v1-e1-r1-a.png", "film.webp"):
        (films / name).write_bytes(b"RIFF" + name.encode())
    (films / "v000002-e000002-r1-link.webp").symlink_to("/etc/passwd")
    (films / "v000003-e000003-r1-folder.webp").mkdir()
    return films


def test_films_are_listed_by_version_and_sent_as_pictures(client: TestClient, folder: Path) -> None:
    listed = client.get("/api/runs/filmed/films").json()
    small = listed.pop(0)
    assert (small["return"], small["actor"]) == ("1.5e-05", "actor-0")
    assert [each["name"] for each in listed] == list(reversed(FILMS))
    assert {name: listed[1][name] for name in ("version", "episode", "return", "actor")} == {
        **{"version": 100, "episode": 200},
        **{"return": "-1.5e+06", "actor": "actor-0"},
    }
    sent = client.get(f"/api/runs/filmed/films/{FILMS[0].replace('+', '%2B')}")
    assert (sent.status_code, sent.headers["content-type"]) == (200, "image/webp")
    assert sent.headers["x-content-type-options"] == "nosniff"
    assert sent.content == b"RIFF" + FILMS[0].encode()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "secret.txt",
            "film.webp",
            "v1-e1-r1-a.png",
            "v000002-e000002-r1-link.webp",
            "v000003-e000003-r1-folder.webp",
        ),
        *("v9-e9-r9-none.webp", "..%2Fspec.yaml", "..%2ffilms%2f" + FILMS[1], "%2Fetc%2Fpasswd", FILMS[1] + "%0A"),
        "v1-e1-r1-a%00.webp",
    ],
)
def test_nothing_else_is_sent(client: TestClient, folder: Path, name: str) -> None:
    (folder.parent / "spec.yaml").write_text("secret: 1")
    assert client.get(f"/api/runs/filmed/films/{name}").status_code == 404


def test_sheets_of_predictions_are_listed_and_sent(client: TestClient, folder: Path) -> None:
    samples = folder.parent / "samples"
    samples.mkdir()
    for name in ("e00002.00-s000000020", "e00001.00-s000000010"):
        (samples / f"{name}.json").write_text('{"fixed": []}')
    (samples / "e00001.00-s000000010.webp").write_bytes(b"RIFF")
    (samples / "e00003.00-s000000030.json").symlink_to("/etc/passwd")
    (samples / "notes.json").write_text("{}")
    listed = client.get("/api/runs/filmed/samples").json()
    assert [(each["epoch"], each["step"], each["drawn"]) for each in listed] == [(1, 10, True), (2, 20, False)]
    sent = client.get("/api/runs/filmed/samples/e00001.00-s000000010.webp")
    assert (sent.status_code, sent.headers["content-type"]) == (200, "image/webp")
    assert client.get("/api/runs/filmed/samples/e00002.00-s000000020").json() == {"fixed": []}
    for name in ("e00002.00-s000000020.webp", "e00003.00-s000000030", "notes", "..%2Fspec", "notes.json"):
        assert client.get(f"/api/runs/filmed/samples/{name}").status_code == 404
