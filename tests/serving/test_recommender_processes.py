"""The processes of the film site: kills, a locked database, bad starts, a browser, Ctrl-C."""

from __future__ import annotations

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
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from chromium import Chromium
from leftovers import children_of
from serving.film_site import SITE, Session, count_rows, find_url, run_manage
from shoal.errors import ConfigError
from waiting import wait_for


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
