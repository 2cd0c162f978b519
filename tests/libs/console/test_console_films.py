"""The console gives a run's films away, and no other file."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

import shoal.runs
from shoal.libs.console.access import Access
from shoal.libs.console.server import build_app

FILMS = ("v000100-e000200-r-1.5e+06-actor-0.webp", "v000001-e000001-r22-a_b.webp")
SMALL = "v000000-e000001-r1.5e-05-actor-0.webp"


@pytest.fixture
def console() -> TestClient:
    return TestClient(build_app(Access("token", port=80)), base_url="http://localhost")


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


def test_films_are_listed_by_version_and_sent_as_pictures(console: TestClient, folder: Path) -> None:
    listed = console.get("/api/runs/filmed/films").json()
    small = listed.pop(0)
    assert (small["return"], small["actor"]) == ("1.5e-05", "actor-0")
    assert [each["name"] for each in listed] == list(reversed(FILMS))
    assert {name: listed[1][name] for name in ("version", "episode", "return", "actor")} == {
        **{"version": 100, "episode": 200},
        **{"return": "-1.5e+06", "actor": "actor-0"},
    }
    sent = console.get(f"/api/runs/filmed/films/{FILMS[0].replace('+', '%2B')}")
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
def test_nothing_else_is_sent(console: TestClient, folder: Path, name: str) -> None:
    (folder.parent / "spec.yaml").write_text("secret: 1")
    assert console.get(f"/api/runs/filmed/films/{name}").status_code == 404


def test_a_run_without_films_has_none(console: TestClient) -> None:
    with shoal.runs.recording("", "job", begun="started", kind=shoal.runs.RunKind.LOOP, run_id="plain"):
        pass
    assert console.get("/api/runs/plain/films").json() == []
    assert console.get("/api/runs/nowhere/films").status_code == 404


def test_sheets_of_predictions_are_listed_and_sent(console: TestClient, folder: Path) -> None:
    samples = folder.parent / "samples"
    samples.mkdir()
    for name in ("e00002.00-s000000020", "e00001.00-s000000010"):
        (samples / f"{name}.json").write_text('{"fixed": []}')
    (samples / "e00001.00-s000000010.webp").write_bytes(b"RIFF")
    (samples / "e00003.00-s000000030.json").symlink_to("/etc/passwd")
    (samples / "notes.json").write_text("{}")
    listed = console.get("/api/runs/filmed/samples").json()
    assert [(each["epoch"], each["step"], each["drawn"]) for each in listed] == [(1, 10, True), (2, 20, False)]
    sent = console.get("/api/runs/filmed/samples/e00001.00-s000000010.webp")
    assert (sent.status_code, sent.headers["content-type"]) == (200, "image/webp")
    assert console.get("/api/runs/filmed/samples/e00002.00-s000000020").json() == {"fixed": []}
    for name in ("e00002.00-s000000020.webp", "e00003.00-s000000030", "notes", "..%2Fspec", "notes.json"):
        assert console.get(f"/api/runs/filmed/samples/{name}").status_code == 404
