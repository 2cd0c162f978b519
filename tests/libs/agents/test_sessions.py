"""Sessions over HTTP: what an agent may do, how episodes end, and what becomes of each token."""

import itertools
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import agents_rig
import pytest
from agents_rig import (
    SESSIONS,
    Json,
    Reply,
    chat,
    end,
    find_url,
    make_spec,
    open_run,
    open_session,
    post,
    read_answer,
    read_counts,
    save_model,
)
from test_token_tree import make_tokenizer

from shoal.errors import ConfigError
from shoal.libs.agents.algorithm import TextPolicyGradient
from shoal.libs.agents.sessions.store import SessionStore
from shoal.rl.local_loop import LocalLoop
from shoal.weights import WeightStore

GROUPS = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), make_tokenizer())


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLoop]:
    """A run that has credit for all that these tests leave open."""
    spec = make_spec(model, max_version_lag=20, sessions={"group_s": 1.0})
    with open_run(spec, tmp_path_factory.mktemp("run")) as loop:
        yield loop


@pytest.fixture
def url(run: LocalLoop) -> str:
    return find_url(run)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_two_steps_are_learnt_and_each_token_has_its_account(model: Path, tmp_path: Path) -> None:
    def play(url: str, group: str, reward: float) -> None:
        session = open_session(url, group=group, group_size=2, task={"number": group})
        first = read_answer(chat(session, "ab"))
        chat(session, "ab", first, "cd")
        assert end(url, session, reward=reward).status == 200

    with open_run(make_spec(model), tmp_path) as loop, ThreadPoolExecutor(8) as threads:
        url = find_url(loop)
        games = [threads.submit(play, url, f"g{number // 2}", number % 2) for number in range(8)]
        for each in games:
            each.result()
        until(lambda: loop.gateway.stats()["sessions"].get("steps") == 2)
        assert loop.learner.stats()["updates"] == 2
        counts = read_counts(tmp_path)
        assert counts.keys() == {"sampled", "learned"}
        assert counts["sampled"] == counts["learned"] > 16
        assert loop.learner.stats()["metrics"]["agents/token_lag_max"] <= 1


def test_a_history_continues_the_tokens_that_were_sampled(url: str) -> None:
    session = open_session(url, purpose="eval")
    first = chat(session, "ab", max_tokens=5)
    second = chat(session, "ab", f" {read_answer(first)}\n", "cd")
    before = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    assert second["prompt_token_ids"][: len(before)] == before
    edited = chat(session, "ab", "another answer", "cd")
    assert edited["prompt_token_ids"][: len(before)] != before


def test_a_repetition_is_one_answer_and_an_equal_request_another(url: str) -> None:
    session = open_session(url, group_size=2, group=f"g{next(GROUPS)}")
    answers = [chat(session, "ab"), chat(session, "ab", headers={"x_stainless_retry_count": "1"}), chat(session, "ab")]
    ids = [each["id"] for each in answers]
    assert ids[0] == ids[1] != ids[2]
    assert end(url, session, reward=1.0).body["turns"] == 2


def test_a_stream_is_recorded_before_its_end(url: str) -> None:
    session = open_session(url, purpose="eval")
    body = {"model": "x", "messages": [{"role": "user", "content": "ab"}], "stream": True}
    with pytest.raises(ValueError, match=r"Extra data|Expecting value"):  # events, no JSON
        post(session["base_url"] + "/chat/completions", body, session["key"])
    ended = end(url, session, reward=0.0).body
    assert (ended["turns"], ended["tokens"]["sampled"] > 0) == (1, True)


def test_an_answer_that_no_disk_takes_is_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(url, purpose="eval")

    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    body = {"model": "x", "messages": [{"role": "user", "content": "ab"}]}
    with monkeypatch.context() as patch:
        patch.setattr(SessionStore, "_execute", refuse)
        refused = post(session["base_url"] + "/chat/completions", body, session["key"])
        assert (refused.status, "disk is full" in str(refused.body)) == (503, True)
        assert end(url, session, reward=1.0).status == 503
    chat(session, "ab", headers={"x_stainless_retry_count": "1"})
    assert end(url, session, reward=1.0).body["turns"] == 1


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ({}, 400, "give a reward"),
        ({"reward": 1.0, "failed": "both"}, 400, "give a reward"),
        ({"reward": "high"}, 400, "float"),
        ({"reward": 1e300}, 400, "reward"),
        ({"failed": "the shop was closed"}, 200, "failed"),
        ({"reward": 0.5, "truncated": True}, 200, "ended"),
    ],
)
def test_an_end_has_a_reward_or_a_reason(url: str, ending: Json, status: int, said: str) -> None:
    reply = end(url, open_session(url, purpose="eval"), **ending)
    assert reply.status == status
    assert said in str(reply.body)


def test_what_is_over_is_410_and_what_never_was_404(url: str) -> None:
    session = open_session(url, purpose="eval")
    first = end(url, session, reward=0.5)
    assert end(url, session, reward=0.5).body == first.body
    differs = end(url, session, reward=0.25)
    assert (differs.status, differs.body["error"]["code"]) == (422, "end_differs")
    body = {"model": "x", "messages": [{"role": "user", "content": "ab"}]}
    late = post(session["base_url"] + "/chat/completions", body, session["key"])
    assert (late.status, late.body["error"]["code"]) == (410, "session_over")
    assert late.headers["x-should-retry"] == "false"
    unknown = post(url + f"/s/s{'0' * 20}/v1/chat/completions", body, session["key"])
    assert (unknown.status, unknown.body["error"]["code"]) == (404, "session_unknown")


def test_a_key_opens_its_session_alone(url: str) -> None:
    own, other = open_session(url, purpose="eval"), open_session(url, purpose="eval")
    body = {"model": "x", "messages": [{"role": "user", "content": "ab"}]}
    for key in (other["key"], "", "shs_guessed"):
        assert post(own["base_url"] + "/chat/completions", body, key).status == 401
    assert post(url + SESSIONS, {}, own["key"]).status == 401
    assert end(url, own, reward=1.0).status == 200


def test_the_runs_sampling_wins(run: LocalLoop, url: str) -> None:
    def count() -> int:
        return int(run.gateway.stats()["sessions"].get("sampling_overridden", 0))

    before = count()
    session = open_session(url, group=f"g{next(GROUPS)}", group_size=2)
    chat(session, "ab", temperature=0, top_p=0.5)
    assert count() == before + 1
    chat(session, "ab")  # without a wish
    assert count() == before + 1


def test_a_session_expires_and_its_group_is_settled_without_it(run: LocalLoop, url: str, tmp_path: Path) -> None:
    group = f"g{next(GROUPS)}"
    silent = open_session(url, group=group, group_size=3, idle_s=0.3)
    for reward in (0.0, 1.0):
        session = open_session(url, group=group, group_size=3)
        chat(session, "ab")
        end(url, session, reward=reward)
    until(lambda: run.gateway.stats()["sessions"].get("expired"))
    late = end(url, silent, reward=1.0)
    assert (late.status, late.body["error"]["code"]) == (410, "session_over")
    assert "idle_s" in late.body["error"]["message"]


def test_openings_wait_for_credit_in_their_order(model: Path, tmp_path: Path) -> None:
    spec = make_spec(model, max_version_lag=0, sessions={"wait_s": 0.2})
    with open_run(spec, tmp_path) as loop:
        url = find_url(loop)
        for group in ("a", "b"):
            open_session(url, group=group, group_size=2)
        refused = post(url + SESSIONS, {"group": "c", "group_size": 2})
        assert (refused.status, refused.body["error"]["code"]) == (429, "no_credit")
        assert refused.headers["retry-after"] == "5"
        assert post(url + SESSIONS, {"group": "a", "group_size": 2}).status == 201  # its group has credit
        too_large = post(url + SESSIONS, {"group": "d", "group_size": 9})
        assert too_large.status == 400


def test_beyond_loopback_sessions_need_tls(model: Path) -> None:
    with pytest.raises(ConfigError, match="keys would be in clear"):
        make_spec(model, sessions={"host": "0.0.0.0"})
    make_spec(model, sessions={"host": "0.0.0.0", "advertise": "https://agents.example"})


def test_an_opening_is_repeated_by_its_idempotency_key(url: str) -> None:
    fields = {"group": f"g{next(GROUPS)}", "group_size": 1}
    replies: list[Reply] = [post(url + SESSIONS, fields, idempotency_key="once") for _ in range(2)]
    assert replies[0].body["id"] == replies[1].body["id"]
    chat(replies[1].body, "ab")


def play_group(url: str, rewards: Sequence[float] = (0.0, 1.0)) -> None:
    group = f"g{next(GROUPS)}"
    for session, reward in [(open_session(url, group=group, group_size=2), each) for each in rewards]:
        chat(session, "ab", max_tokens=2)
        end(url, session, reward=reward)


def play_step(url: str) -> None:
    play_group(url)
    play_group(url)


def test_an_evaluation_is_answered_by_one_version_while_others_are_learnt(model: Path, tmp_path: Path) -> None:
    def ask(session: Json) -> tuple[list[int], list[float]]:
        choice = chat(session, "ab", temperature=0, logprobs=True)["choices"][0]
        return [version for version, _ in choice["shoal"]["spans"]], [
            each["logprob"] for each in choice["logprobs"]["content"]
        ]

    with open_run(make_spec(model), tmp_path) as loop:
        url = find_url(loop)
        first = open_session(url, purpose="eval")
        pinned = first["version"]
        versions, before = ask(first)
        for step in (1, 2):
            play_step(url)
            until(lambda number=step: loop.gateway.stats()["weights_version"] == pinned + number)
        second, same = open_session(url, purpose="eval"), open_session(url, purpose="eval", version=pinned)
        assert (second["version"], same["version"]) == (pinned + 2, pinned)
        assert {*versions, *ask(first)[0], *ask(same)[0]} == {pinned}
        assert ask(first)[1] == ask(same)[1] == before != ask(second)[1]
        assert ask(second)[0] == [pinned + 2]

        unknown = post(url + SESSIONS, {"purpose": "eval", "version": pinned + 1})
        assert (unknown.status, f"it has {pinned}, {pinned + 2}" in unknown.body["error"]["message"]) == (404, True)
        assert post(url + SESSIONS, {"version": pinned}).status == 400
        for each in (first, same, second):
            end(url, each, reward=1.0)
        until(lambda: not loop.gateway._front._sampler._pinned)
        assert post(url + SESSIONS, {"purpose": "eval", "version": pinned}).status == 404


@pytest.mark.parametrize("lag", [0, 1])
def test_no_token_is_learnt_that_is_older_than_it_may_be(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    """Though weights come late, also behind a step that is empty, one that is dropped as a whole, and a restart."""
    lags: list[float] = []
    update, wait_newer = TextPolicyGradient.update, WeightStore.wait_newer

    def note(self: TextPolicyGradient, batch: Any) -> Iterator[Any]:
        for metrics in update(self, batch):
            lags.append(metrics["agents/token_lag_max"])
            yield metrics

    def wait_longer(self: WeightStore, version: int, timeout_s: float) -> Any:
        newer = wait_newer(self, version, timeout_s)
        if newer is not None and version:
            time.sleep(0.1)
        return newer

    monkeypatch.setattr(TextPolicyGradient, "update", note)
    monkeypatch.setattr(WeightStore, "wait_newer", wait_longer)
    algorithm = {"name": "grpo", "scale_advantages": False, "group_size": 2, "groups_per_step": 2}
    spec = make_spec(model, algorithm=algorithm, max_version_lag=lag)

    def play_steps(loop: LocalLoop, num: int, rewards: Sequence[float] = (0.0, 1.0)) -> None:
        before = loop.gateway.stats()["sessions"].get("steps", 0)
        with ThreadPoolExecutor(2 * (lag + 1)) as threads:
            for each in [threads.submit(play_group, find_url(loop), rewards) for _ in range(2 * num)]:
                each.result()
        until(lambda: loop.gateway.stats()["sessions"].get("steps", 0) == before + num)

    with open_run(spec, tmp_path) as loop:
        play_steps(loop, 2)
        play_steps(loop, 1, (1.0, 1.0))
        play_steps(loop, 1, (0.0, 1e30))
        play_steps(loop, 2)
        assert loop.gateway.stats()["segments"]["dropped"] == {"non_finite": 4}
        loop.learner.save()
    with open_run(spec, tmp_path) as loop:
        play_steps(loop, 2)
        assert "stale_consumption" not in loop.gateway.stats()["segments"]["dropped"]
    assert (len(lags), max(lags)) == (6, lag)


class KillableRun:
    """A run in a process of its own, at the same address after each start."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._command = [sys.executable, str(Path(agents_rig.__file__)), str(model), str(folder)]
        self.url = ""
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert self.url in ("", url)
        self.url = url
        return process

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def restart(self) -> None:
        self._process = self._start()

    def __enter__(self) -> "KillableRun":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def test_a_killed_gateway_continues_its_sessions_and_loses_no_token(model: Path, tmp_path: Path) -> None:
    with KillableRun(model, tmp_path) as run:
        sessions = [open_session(run.url, group="g", group_size=2) for _ in range(2)]
        first = [chat(each, "ab") for each in sessions]
        ended = end(run.url, sessions[0], reward=1.0).body
        run.kill()
        run.restart()
        again = chat(sessions[1], "ab", headers={"x_stainless_retry_count": "1"})
        assert again == first[1]
        assert end(run.url, sessions[0], reward=1.0).body == ended
        second = chat(sessions[1], "ab", read_answer(first[1]), "cd")
        before = [*first[1]["prompt_token_ids"], *first[1]["choices"][0]["token_ids"]]
        assert second["prompt_token_ids"][: len(before)] == before
        end(run.url, sessions[1], reward=0.0)
        for number in range(2):  # the step's second group
            session = open_session(run.url, group="h", group_size=2)
            chat(session, "ef")
            end(run.url, session, reward=number)
        until(lambda: read_counts(tmp_path).get("learned"))
        run.kill()
        counts = read_counts(tmp_path)
        assert counts["sampled"] == counts["learned"] + counts.get("no_signal", 0)
    with open_run(make_spec(model), tmp_path) as loop:
        shown = loop.gateway.stats()["sessions"]
        assert [shown[each] for each in ("opened", "ended", "answers", "steps", "reward")] == [4, 4, 5, 1, 0.5]


def test_a_step_that_was_queued_in_a_killed_gateway_is_queued_again(model: Path, tmp_path: Path) -> None:
    """The learner is paused, so that the step stays in the queue."""
    spec = make_spec(model)
    with open_run(spec, tmp_path) as loop:
        loop.learner.pause()
        play_step(find_url(loop))
        until(lambda: loop.gateway.stats()["queue_depth"] == 4)
        loop.learner.save()
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy"))
        loop.learner.resume()
    with open_run(spec, copy) as loop:
        until(lambda: loop.learner.stats()["updates"] == 1)
        until(lambda: read_counts(copy).get("learned"))
        counts = read_counts(copy)
        assert counts["sampled"] == counts["learned"]
        stats = loop.gateway.stats()
        assert stats["segments"]["dropped"] == {"gateway_crash": 4}
        sessions = stats["sessions"]
        assert (sessions["opened"], sessions["ended"], sessions["reward"]) == (4, 4, 0.5)  # of the earlier gateway
