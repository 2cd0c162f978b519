"""The film site: a rating is in the next page, one version a request, a deadline for the towers, a locked database."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from registered import tensors
from serving.fake_host import FakeHost, FakeModel
from serving.film_site import browse, rate, read_page
from serving.served_here import served
from shoal.errors import DataError, InferenceError
from shoal.libs.stream.messages import Message
from shoal.sources.source import StreamState
from stream_contract import check_source


def test_a_rating_is_in_the_very_next_page(home: Path) -> None:
    from films.factorisation import fold_in, score
    from films.models import Rating
    from films.recommend import current_version

    client, history = browse(), dict[int, float]()
    before, own, _ = read_page(client.get("/").content.decode())
    assert own == []
    for stars in (1, 5, 2, 5):
        film = before[0]
        assert rate(client, film, stars).status_code == 302
        history[film] = stars
        after, own, number = read_page(client.get("/").content.decode())
        assert own == list(history)[::-1]
        items = current_version().get().items
        films = np.array(list(history)) - 1
        expected = score(items, fold_in(items, films, np.array(list(history.values()), float)))
        order = [film for film in (np.argsort(-expected, kind="stable") + 1).tolist() if film not in history]
        assert after == order[:20] != before[:20]
        assert number == current_version().get().number
        before = after
    assert rate(client, own[0], 1).status_code == 302  # the newest rating of a film counts
    assert read_page(client.get("/").content.decode())[1] == own
    viewer = client.session["viewer"]
    assert Rating.objects.filter(viewer_id=viewer).count() == 5


def test_two_first_ratings_on_their_way_are_of_one_viewer(home: Path) -> None:
    from films.models import Viewer

    first, second = browse(), browse()
    films, own, _ = read_page(first.get("/").content.decode())
    assert own == []
    second.cookies = SimpleCookie(first.cookies.output([], "", "; "))  # before either is answered
    before = Viewer.objects.count()
    assert [rate(client, film, 4).status_code for client, film in ((first, films[0]), (second, films[1]))] == [302, 302]
    assert Viewer.objects.count() == before + 1
    for client in (first, second):
        assert read_page(client.get("/").content.decode())[1] == films[1::-1]


def test_a_locked_database_rejects_ratings_and_shows_pages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import connection

    from films import write_lock

    monkeypatch.setattr(write_lock, "FIRST_WAIT_MS", 3)
    client, waits = browse(), []

    def read_wait() -> int:
        with connection.cursor() as cursor:
            return int(cursor.execute("PRAGMA busy_timeout").fetchone()[0])

    (film, other, *_), _, _ = read_page(client.get("/").content.decode())
    with closing(sqlite3.connect(home / "ratings.sqlite", isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            answer = rate(client, film, 4)
            assert (answer.status_code, answer["Retry-After"]) == (503, "5")
            assert "Nothing was stored" in answer.content.decode()
            assert read_page(client.get("/").content.decode())[1] == []
            waits.append(read_wait())
        lock.execute("ROLLBACK")
    for each in (film, other):
        assert rate(client, each, 4).status_code == 302
        waits.append(read_wait())
    assert waits == [3, write_lock.LATER_WAIT_MS, write_lock.LATER_WAIT_MS, 3]
    assert read_page(client.get("/").content.decode())[1] == [other, film]


@pytest.mark.parametrize(
    ("film", "stars", "status"),
    [
        ("1", "6", 400),
        ("1", "0", 400),
        ("x", "3", 400),
        ("1", "", 400),
        ("1:2", "3", 400),
        ("999", "3", 404),
        ("-1", "3", 404),
        (str(2**63), "3", 404),
    ],
)
def test_what_is_no_rating_is_refused(film: str, stars: str, status: int, home: Path) -> None:
    from films.models import Rating

    client, before = browse(), Rating.objects.count()
    client.get("/")
    assert rate(client, film, stars).status_code == status
    assert Rating.objects.count() == before


def test_other_sites_and_other_hosts_are_refused(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = browse()
    client.get("/")
    assert client.post("/rate", {"rating": "1:3"}).status_code == 403
    assert client.get("/", HTTP_HOST="films.example").status_code == 400
    assert client.get("/rate").status_code == 405
    key = home / "secret_key"
    assert len(key.read_text()) > 50
    assert key.stat().st_mode & 0o077 == 0


def test_a_title_is_text_and_no_html(home: Path) -> None:
    from films.models import Film

    client = browse()
    film = read_page(client.get("/").content.decode())[0][0]
    before = Film.objects.get(id=film)
    Film.objects.filter(id=film).update(title="<script>a & b</script>", genres="<i>'\"")
    escaped = "&lt;script&gt;a &amp; b&lt;/script&gt;"
    assert f"<td>{escaped}<br><small>&lt;i&gt;&#x27;&quot;</small></td>" in client.get("/").content.decode()
    rate(client, film, 3)
    assert f'<tr data-film="{film}"><td>{escaped}</td><td>3</td></tr>' in client.get("/").content.decode()
    before.save()


def test_each_page_has_one_version_while_versions_swap(home: Path) -> None:
    """The orders of even and odd versions are opposite: a page that used two would have neither."""
    from django.db import connections
    from films.recommend import current_version
    from films.versions import RatingLog, read_log, write_version

    items, log = current_version().get().items, read_log(home / "models", current_version().get().number)
    assert isinstance(log, RatingLog)
    biases = np.linspace(-1.0, 1.0, items.num_items)
    vectors = np.zeros_like(items.vectors)
    sides = []
    for sign in (1, -1):
        vectors[:, -1] = sign * biases
        sides.append(replace(items, vectors=vectors.copy()))
    ended = threading.Event()

    def read_pages() -> list[tuple[list[int], int]]:
        client, pages = browse(), []
        while not ended.is_set():
            films, _, number = read_page(client.get("/").content.decode())
            pages.append((films, number))
        connections.close_all()
        return pages

    first = write_version(home / "models", sides[0], log)
    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read_pages) for _ in range(2)]
        for swap in range(1, 16):
            write_version(home / "models", sides[swap % 2], log)
        ended.set()
        pages = [page for reader in readers for page in reader.result()]
    seen = {number for _, number in pages}
    assert len(seen) > 2
    for films, number in pages:
        is_rising = (number - first) % 2 == 0
        assert films == (list(range(150, 130, -1)) if is_rising else list(range(1, 21))), number
    write_version(home / "models", items, log)


# -- the log as a stream


def test_the_log_keeps_the_contract_of_sources_and_goes_on_when_someone_rates(home: Path) -> None:
    from django.db import transaction
    from films.models import Rating
    from films.rating_source import PUBLISHER, RatingSource

    rows = Rating.objects.order_by("id").values_list("viewer_id", "film_id", "stars", "timestamp", "id")
    expected = [
        Message(str(viewer), (stars, film), time_s, PUBLISHER, row) for viewer, film, stars, time_s, row in rows
    ]
    check_source(RatingSource, expected)
    source = RatingSource()
    assert source.example() == expected[0]
    last = expected[-1].sequence
    source.open(StreamState(sequences={PUBLISHER: last}))
    client = browse()
    film = read_page(client.get("/").content.decode())[0][0]
    with ThreadPoolExecutor(1) as pool:
        rating = pool.submit(lambda: source.poll(8, 60.0).messages)
        rate(client, film, 4)
        (message,) = rating.result()
    assert (message.values, message.sequence, source.num_delivered) == ((4.0, float(film)), last + 1, 1)
    with transaction.atomic():
        Rating.objects.all().delete()
        with pytest.raises(DataError, match=r"films_rating.*has no row yet"):
            source.example()
        transaction.set_rollback(True)


# -- the towers, behind an endpoint


def towers(compute: Any = None) -> FakeModel:
    """Scores the film with the highest id best."""
    return FakeModel(
        "movies",
        tensors(history=("INT64", [-1, -1]), ratings=[-1, -1], candidates=("INT64", [-1, -1])),
        tensors(scores=[-1, -1]),
        compute or (lambda inputs: {"scores": inputs["candidates"].astype(np.float32)}),
    )


HISTORY = np.array([3, 4]), np.array([5.0, 1.0]), np.array([10, 30, 20])


def test_the_towers_order_the_candidates(home: Path) -> None:
    from films.rerank import Reranker

    model = towers()
    with served(FakeHost(model), token=None) as (url, _):
        reranker = Reranker(url, "movies", deadline_s=60.0)
        found = reranker.rerank(*HISTORY)
        assert (found.order.tolist(), found.outcome, found.version) == ([1, 2, 0], "reranked", 7)
        assert model.calls[0].inputs["history"].tolist() == [[3, 4] + 48 * [0]]
        assert model.calls[0].inputs["ratings"].tolist() == [[5.0, 1.0] + 48 * [0.0]]
        assert reranker.rerank(HISTORY[0][:0], HISTORY[1][:0], HISTORY[2]).outcome == "off"
        with closing(Reranker(url, "films", deadline_s=60.0)) as other:
            assert other.rerank(*HISTORY).outcome == "rejected"
        model.error = InferenceError(503, "not now")
        assert reranker.rerank(*HISTORY).order.tolist() == [0, 1, 2]
        assert reranker.counts() == {"reranked": 1, "off": 1, "rejected": 1}
        reranker.close()


def test_a_late_endpoint_leaves_the_first_order_and_is_counted_on_the_page(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    from films.rerank import Reranker

    from films import recommend

    model = towers()
    model.hold = asyncio.Event()  # it never answers
    client = browse()
    first = read_page(client.get("/").content.decode())[0]
    rate(client, first[0], 5)
    expected = read_page(client.get("/").content.decode())[0]
    with served(FakeHost(model), token=None) as (url, _):
        slow = Reranker(url, "movies", deadline_s=0.015)
        monkeypatch.setattr(recommend, "reranker", lambda: slow)
        monkeypatch.setattr("films.views.reranker", lambda: slow)
        for count in (1, 2):
            text = client.get("/").content.decode()
            assert read_page(text)[0] == expected
            assert f"late {count}" in text
            assert "(late)" in text
    text = client.get("/").content.decode()  # the endpoint is down now
    assert read_page(text)[0] == expected
    assert "late 2, absent 1" in text
    slow.close()
