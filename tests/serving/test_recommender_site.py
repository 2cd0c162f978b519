"""The film site: a rating is in the next page, one version a request, a deadline for the towers, a locked database."""

import io
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from http.cookies import SimpleCookie
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from chromium import Chromium
from leftovers import children_of
from registered import tensors
from serving.fake_host import FakeHost, FakeModel
from serving.film_site import SITE, Session, browse, count_rows, find_url, rate, read_page, run_manage
from serving.served_here import served
from shoal.errors import ConfigError, DataError, InferenceError
from shoal.libs.stream.messages import Message
from shoal.sources.source import StreamState
from stream_contract import check_source
from waiting import wait_for


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


def test_other_sites_and_other_hosts_are_refused(home: Path) -> None:
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


# -- the processes of the film site: kills, a locked database, bad starts, a browser, Ctrl-C


def test_killed_processes_lose_no_rating_and_learn_none_twice(own_home: Path) -> None:
    from films.versions import open_version, read_current, read_log

    before = count_rows(own_home)
    web = run_manage(own_home, "web", "--port", "0")
    session = Session(find_url(web))
    for film in range(1, 6):
        assert f'data-film="{film}"' in session.rate(film, 4).partition('id="rated"')[2]
    web.kill()
    web.communicate()
    assert count_rows(own_home) == before + 5

    number = read_current(own_home / "models")
    retraining = run_manage(own_home, "retrain", "--every", "0")
    wait_for(lambda: any((own_home / "models").glob(".draft/*")) or read_current(own_home / "models") != number)
    retraining.kill()
    retraining.communicate()
    last = run_manage(own_home, "retrain", "--once")
    assert last.communicate()[1] == ""
    current = read_current(own_home / "models")
    assert current is not None
    log, version = read_log(own_home / "models", current), open_version(own_home / "models", current)
    with closing(sqlite3.connect(own_home / "ratings.sqlite")) as connection:
        newest = connection.execute("SELECT max(id) FROM films_rating GROUP BY viewer_id, film_id").fetchall()
    assert sorted(log.row) == sorted(row for (row,) in newest)
    assert version.num_ratings == len(newest)
    assert log.last_row == before + 5


def test_web_process_and_retraining_need_neither_torch_nor_scipy(own_home: Path) -> None:
    program = (
        "import sys, django; django.setup(); import films.urls, waitress, films.management.commands.retrain;"
        " print([name for name in ('torch', 'scipy', 'ray') if name in sys.modules])"
    )
    environment = {**os.environ, "RECOMMENDER_HOME": str(own_home), "DJANGO_SETTINGS_MODULE": "films.settings"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=SITE, env=environment, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_bad_starts_are_one_line(own_home: Path, tmp_path: Path) -> None:
    from films.management.commands.load import Command

    with pytest.raises(ConfigError, match="there are films already"):
        Command().handle(folder="", if_empty=False)
    process = run_manage(tmp_path / "new", "start", "--data", str(tmp_path))
    _, errors = process.communicate()
    assert process.returncode == 1
    assert re.fullmatch(r"error: data = '.*movies.csv': cannot be read: No such file or directory.*\n", errors)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = run_manage(own_home, "web", "--port", str(taken.getsockname()[1]))
        _, errors = process.communicate()
    assert process.returncode == 1
    assert re.fullmatch(r"error: port = \d+: the site cannot listen there: Address already in use.*\n", errors)


def test_a_site_without_a_version_says_so_as_it_starts(own_home: Path) -> None:
    (own_home / "models" / "CURRENT").unlink()
    process = run_manage(own_home, "web", "--port", "0")
    said, errors = process.communicate(timeout=600)
    assert (process.returncode, said) == (1, "")
    assert re.fullmatch(r"error: models = '.*': there is no version of the factors yet.*retrain --once.*\n", errors)


def test_readers_that_wait_are_no_lines_on_the_terminal(own_home: Path) -> None:
    web = run_manage(own_home, "web", "--port", "0")
    session = Session(find_url(web))
    with ThreadPoolExecutor(30) as pool:
        pages = [each.result() for each in [pool.submit(session.get) for _ in range(90)]]
    web.terminate()
    assert web.communicate()[1] == ""
    assert all("Films for you" in page for page in pages)


def test_readers_do_not_wait_for_a_locked_database_and_errors_are_logged(own_home: Path) -> None:
    web = run_manage(own_home, "web", "--port", "0")
    url = find_url(web)
    sessions = [Session(url) for _ in range(9)]
    forms = [session.fill_form(1, 4) for session in sessions]
    database = sqlite3.connect(own_home / "ratings.sqlite", isolation_level=None)
    with closing(database) as lock, ThreadPoolExecutor(8) as pool:
        lock.execute("BEGIN IMMEDIATE")
        raters = [pool.submit(each.exchange, "rate", form) for each, form in zip(sessions[:8], forms[:8], strict=True)]
        assert "Films for you" in sessions[8].get()  # the lock is held until this page has come
        assert [rater.result()[0] for rater in raters] == 8 * [503]
        lock.execute("ROLLBACK")
        assert 'data-film="1"' in sessions[0].rate(1, 4).partition('id="rated"')[2]
        lock.execute("ALTER TABLE films_film RENAME TO films_gone")
    assert sessions[0].exchange()[0] == 500
    web.terminate()
    errors = web.communicate()[1]
    assert len(re.findall("ERROR django.request: Service Unavailable: /rate", errors)) == 8
    assert "ERROR django.request: Internal Server Error: /\nTraceback" in errors
    assert "no such table: films_film" in errors


def test_the_retraining_is_started_again_more_and_more_slowly(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    from films.management.commands import start

    processes: list[SimpleNamespace] = []

    def begin(*words: str) -> SimpleNamespace:
        processes.append(SimpleNamespace(returncode=None, stdin=io.BytesIO()))
        processes[-1].poll = lambda process=processes[-1]: process.returncode
        return processes[-1]

    monkeypatch.setattr(start, "_start", begin)
    retraining = start.Retraining("--every", "5")
    now_s = time.monotonic()
    delays = []
    for worked_s in (1.0, 1.0, 1.0, 100.0, 1.0):
        now_s += worked_s
        assert retraining.check(now_s - 0.1) == ""
        processes[-1].returncode = -signal.SIGKILL
        line = retraining.check(now_s)
        delays.append(float(re.search("killed by SIGKILL; the site goes on .* next start in (.*) s", line)[1]))
        for moment_s in (now_s + delays[-1] - 0.01, now_s + delays[-1]):
            assert len(processes) == len(delays)
            assert retraining.check(moment_s) == ""
        now_s += delays[-1]
        assert len(processes) == len(delays) + 1
    assert delays == [1.0, 2.0, 4.0, 0.0, 1.0]
    assert start.find_delay(1000) == start.MAX_DELAY_S


@pytest.mark.soak
def test_a_killed_retraining_is_started_again_and_the_site_stays(own_home: Path) -> None:
    site = run_manage(own_home, "start", "--port", "0", "--every", "0.1")
    session = Session(find_url(site))

    (killed,) = children_of(site.pid, " retrain")
    os.kill(killed, signal.SIGKILL)
    assert site.stderr is not None
    assert "the retraining ended, killed by SIGKILL; the site goes on" in site.stderr.readline()
    version = json.loads(session.get("status"))["version"]
    session.rate(1, 4)
    wait_for(lambda: json.loads(session.get("status"))["version"] > version, what="a version by the next retraining")
    assert children_of(site.pid, " retrain") != [killed]
    site.send_signal(signal.SIGINT)
    site.communicate(timeout=600)
    assert site.returncode == 0


def test_a_reader_rates_in_a_browser_and_all_ends_with_ctrl_c(own_home: Path, tmp_path: Path) -> None:
    """`manage.py start`, as `make recommender` calls it: a click changes the page, and a version learns from it."""
    if shutil.which("chromium") is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    site = run_manage(own_home, "start", "--port", "0", "--every", "0.1")
    chromium = Chromium(tmp_path / "profile")
    try:
        url = find_url(site)
        children = psutil.Process(site.pid).children(recursive=True)
        assert len(children) == 2
        first = "document.querySelector('#recommended tr')?.dataset.film"
        chromium.call("Page.navigate", url=url)
        wait_for(lambda: chromium.run(first), what="the page")
        before = chromium.run(first)
        version = int(chromium.run("document.querySelector('#version').textContent"))
        chromium.run("document.querySelectorAll('#recommended button')[0].click()")  # one star
        own = "document.querySelector('#rated tr')?.dataset.film"
        wait_for(lambda: chromium.run(own) == before, what="the rating on the next page")
        assert chromium.run(first) != before
        status = Session(url)
        wait_for(lambda: json.loads(status.get("status"))["version"] > version, what="a version with the rating")
        chromium.call("Page.reload")
        shown = "Number(document.querySelector('#version')?.textContent)"
        wait_for(lambda: (chromium.run(shown) or 0) > version, what="the version on the page")
        assert chromium.run(own) == before
    finally:
        chromium.close()
        site.send_signal(signal.SIGINT)
        said, errors = site.communicate(timeout=600)
    assert (site.returncode, errors) == (0, "")
    assert said.endswith("ending\n")
    assert not any(child.is_running() for child in children)
