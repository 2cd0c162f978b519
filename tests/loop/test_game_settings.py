"""What a run tells its games: at welcome and on change, by hand and by rules, how returns are counted by it; and what
the first game tells a run."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import shoal
from loop.test_spaces_loop import EXPERIENCE, SPEC, SignGame
from rl_setting import TOKEN, segment, serving
from shoal.actor import ActorClient, play
from shoal.actor.remote import RemoteClient, run_remote_actor
from shoal.errors import ConfigError, Refused
from shoal.rl.first_game import FirstGame
from shoal.rl.gateway.actor_stats import ActorProgress, RunProgress
from shoal.rl.gateway.game_settings import advance_settings, begin_settings, parse_settings, read_settings
from shoal.rl.local_loop import LocalLoop
from shoal.rl.part_specs import SettingsRule
from shoal.rl.spec import RLSpec
from shoal.runs.event_messages import format_warning
from shoal.wire import MessageLimits, Segment, decode, encode, pack_segment, unpack_segment
from shoal.wire.messages import ErrorMessage, Hello, Ping, SegmentMessage
from typed import typed
from waiting import start_thread, wait_for


class ToldGame(SignGame):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []

    def apply_settings(self, settings: dict[str, Any]) -> None:
        self.told.append(dict(settings))


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_a_game_is_told_at_welcome_and_on_change_and_returns_are_counted_by_version(
    inference: str, tmp_path: Path
) -> None:
    game = ToldGame()

    def run(address: str) -> None:
        with (RemoteClient if inference == "remote" else ActorClient)(address, TOKEN, "one") as client:
            run_remote_actor(game, client) if isinstance(client, RemoteClient) else play(game, client)

    spec = SPEC.override(["settings.gravity=9.8"])
    with LocalLoop(spec, EXPERIENCE, tmp_path / "run", TOKEN) as loop:
        stats = loop.gateway.stats
        thread = start_thread(run, loop.address)
        wait_for(lambda: stats()["by_settings"].get(1, {}).get("episodes", 0) >= 3)
        loop.change_settings({"gravity": 9.8})  # as before: nobody is told again
        loop.change_settings({"gravity": 1, "mode": "moon"})
        wait_for(lambda: stats()["by_settings"].get(2, {}).get("episodes", 0) >= 3 and len(game.told) > 1)
        assert (
            stats()["episodes_in_window"] <= stats()["by_settings"][2]["episodes"]
        )  # those before are not in the mean
        events = [details for _, kind, details in loop.gateway.take_events() if kind == "settings_changed"]
    thread.join(60)
    assert game.told == [{"gravity": 9.8}, {"gravity": 1, "mode": "moon"}]
    assert [each["version"] for each in events] == [1, 2]
    assert events[1]["episodes_before"] >= 3
    assert "mode=moon" in format_warning("settings_changed", events[1])
    with LocalLoop(spec, EXPERIENCE, tmp_path / "run", TOKEN) as again:  # a gateway that has restarted
        assert again.gateway.stats()["settings_version"] == 3
        assert again.gateway.stats()["by_settings"][2]["episodes"] >= 3


def test_the_first_welcome_has_the_settings_and_after_a_restart_those_that_were_told_last(tmp_path: Path) -> None:
    with serving(tmp_path, setting={"settings": {"gravity": 9}}) as first:
        assert (first.gateway.stats()["settings"], first.gateway.stats()["settings_version"]) == ({"gravity": 9}, 1)
        first.gateway.set_settings({"gravity": 1})
    with serving(tmp_path, setting={"settings": {"gravity": 9}}) as again:
        assert (again.gateway.stats()["settings"], again.gateway.stats()["settings_version"]) == ({"gravity": 1}, 2)


@pytest.mark.parametrize(("said", "version"), [(1, 1), (None, 2), (3, 2), (-1, 2)])
def test_an_episode_is_counted_with_the_settings_that_its_game_names(said: int | None, version: int) -> None:
    progress, actor = RunProgress(), ActorProgress("one", 1)
    progress.change_settings({"gravity": 9})
    progress.change_settings({"gravity": 1})
    actor.settings = 2
    episode = segment(2, terminated=True, episode_return=1.0, episode_length=2, settings=said or 0)
    progress.record_segment(actor, unpack(episode))
    assert progress.by_settings == {version: (1, 1.0)}  # of versions that there are
    assert len(progress.returns) == version - 1


def unpack(sent: Segment) -> Segment:
    """As it arrives."""
    header, *frames = pack_segment(sent, 0)
    message = decode([header, *frames], MessageLimits())
    assert isinstance(message, SegmentMessage)
    return unpack_segment(message, frames, EXPERIENCE)


def test_rules_come_into_force_one_after_the_other_and_stay(tmp_path: Path) -> None:
    rules = [SettingsRule(above=10, set={"gravity": 12}), SettingsRule(above=20, set={"gravity": 15, "wind": True})]
    begin_settings(tmp_path)
    sent: dict[str, Any] = {"gravity": 9.8}
    found = []
    for mean_return in (-math.inf, 9, 10, 0, 30):
        sent = advance_settings(tmp_path, {"gravity": 9.8}, rules, mean_return, sent)
        found.append(sent["gravity"])
    assert found == [9.8, 9.8, 12, 12, 15]
    begin_settings(tmp_path)  # resumed
    assert read_settings(tmp_path) == ({"gravity": 15, "wind": True}, 2)


def test_a_rule_takes_no_return_of_earlier_settings(tmp_path: Path) -> None:
    rules = [SettingsRule(above=10, set={"gravity": 12}), SettingsRule(above=20, set={"gravity": 15})]
    begin_settings(tmp_path)
    sent = {"gravity": 9.8}  # as the counts say that came before the gateway had sent those of the first rule
    assert [advance_settings(tmp_path, sent, rules, 30, sent)["gravity"] for _ in range(2)] == [12, 12]


def test_a_gateway_that_is_killed_after_a_change_counts_no_return_of_earlier_settings(tmp_path: Path) -> None:
    with serving(tmp_path, heartbeat_s=20.0) as parts:
        state = parts.gateway._state
        episode = segment(2, terminated=True, episode_return=1.0, episode_length=2)
        state.progress.record_segment(ActorProgress("one", 1), episode)
        state.change_settings({"gravity": 9})
        known = {name: parts.ledger.get_fact(name) or "" for name in ("progress", "settings")}
    restored = RunProgress()
    restored.restore(known["progress"])
    assert (known["settings"], list(restored.returns), restored.by_settings) == (
        '[1, {"gravity": 9}]',
        [],
        {0: (1, 1.0)},
    )


def test_a_loop_without_a_job_follows_no_rules_and_says_so(tmp_path: Path) -> None:
    spec = SPEC.override(["rules=[{above: 3, set: {gravity: 12}}]"])
    with pytest.raises(ConfigError, match=r"rules = .*shoal run actor_learner"):
        LocalLoop(spec, EXPERIENCE, tmp_path / "run", TOKEN)


def test_settings_are_typed() -> None:
    assert parse_settings(("a=1", "b=1.5", "c=true", "d=moon", 'e="1"')) == {
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": "moon",
        "e": "1",
    }
    assert parse_settings(("a=100000000000000000000",)) == {"a": 1e20}  # beyond what travels as an integer
    for wrong in ("gravity", "=1", "a=[1]", "a=null", "a=NaN", "a=-Infinity", "a=1e999", "a=\udcff"):
        with pytest.raises(ValueError, match=r"NAME=VALUE|a finite number|surrogates"):
            parse_settings((wrong,))
    spec = RLSpec().override(["settings.gravity=9.8", "rules=[{above: 100, set: {gravity: 12}}]"])
    assert spec.settings == {"gravity": 9.8}
    assert spec.rules[0].set == {"gravity": 12}
    with pytest.raises(ConfigError, match=r"settings\.gravity"):
        RLSpec().override(["settings.gravity=.nan"])


def test_settings_are_changed_from_the_command_line() -> None:
    with shoal.runs.create("loop", "", "one") as run:
        begin_settings(run.folder)
        assert typed("set one gravity=9 mode=moon").exit_code == 0
        assert typed("set one gravity=8").exit_code == 0
        assert read_settings(run.folder)[0] == {"gravity": 8, "mode": "moon"}
        wrong = typed("set one gravity")
        assert wrong.exit_code == 2
        assert "NAME=VALUE" in wrong.output
    assert typed("set one gravity=7").output == "run one once it is resumed: gravity=7\n"
    with shoal.runs.create("train", "", "two"):
        refused = typed("set two gravity=9")
        assert "has no games" in str(refused.exception)


# -- a run that takes its spaces from the first game that joins, and keeps them


ASKING = RLSpec(env="ask", hidden=(8,), gateway={"websocket": 0})
OFFERS = {"name": "catch", "observation": [4], "action": 3}
WAIT_S = 60.0


@contextmanager
def waiting(folder: Path) -> Iterator[tuple[list[str], list[LocalLoop]]]:
    """A loop that another thread opens: where it waits for a game, and the loop once it has begun."""
    said, loops = list[str](), list[LocalLoop]()

    def run() -> None:
        loop = LocalLoop.open(ASKING, folder, TOKEN, say=said.append)
        loop.start()
        loops.append(loop)

    thread = start_thread(run)
    try:
        wait_for(lambda: said, WAIT_S)
        assert "waiting for a game that brings its spaces, at\n    tcp://127.0.0.1:" in said[0]
        yield [word for word in said[0].split() if "://" in word], loops
    finally:
        thread.join(WAIT_S)
        loops[0].close()


def ask(socket: Any, **message: Any) -> dict[str, Any]:
    socket.send(json.dumps(message))
    answer: dict[str, Any] = json.loads(socket.recv(WAIT_S))
    return answer


def join(socket: Any, token: str = TOKEN, **fields: Any) -> dict[str, Any]:
    return ask(
        socket, kind="hello", protocol=1, token=token, actor_id="me", incarnation=1, inference="remote", **fields
    )


def test_a_game_that_is_typed_by_hand_brings_the_spaces_of_the_run(tmp_path: Path) -> None:
    with waiting(tmp_path / "run") as ((_, address), loops):
        with connect(address) as game:
            assert ask(game, kind="ping")["code"] == "hello_required"
            assert join(game, "x", offers=OFFERS)["code"] == "bad_token"
            refused = join(game)
            assert (refused["code"], refused["fatal"]) == ("no_spaces", False)
            assert '"offers": {"observation": [4], "action": 3}' in refused["message"]
            for offers, problem in (
                ({"observation": [4]}, "action = None: is missing"),
                ({"observation": [2, 2], "action": 3}, "observes float32 [2, 2]"),
                ({"observation": [4], "action": {"dtype": "int32", "high": 2}}, "action.dtype: this game has int32"),
            ):
                refused = join(game, offers=offers)
                assert (refused["code"], refused["fatal"]) == ("wrong_spaces", True)
                assert problem in refused["message"]
            answer = join(game, offers=OFFERS)
            assert (answer["kind"], answer["finished"]) == ("bye", False)
            with pytest.raises(ConnectionClosed):
                game.recv(WAIT_S)
        wait_for(lambda: loops, WAIT_S)
        assert loops[0].websocket_address == address
        with connect(address) as game:
            assert join(game, offers={"observation": [5], "action": 3})["code"] == "wrong_spaces"
            assert join(game, offers=OFFERS)["spec"]["observation"]["shape"] == [4]
            assert ask(game, kind="act", episode=0, step=0, observation=[0, 0, 0, 0])["action"] in (0, 1, 2)
    with LocalLoop.open(ASKING, tmp_path / "run", TOKEN, say=pytest.fail) as loop:
        assert (loop.websocket_address, loop.gateway.experience.action.high) == (address, 2)


def test_a_client_of_zeromq_brings_them_and_is_welcomed_by_the_same_call(tmp_path: Path) -> None:
    with waiting(tmp_path / "run") as ((address, _), _):
        with ActorClient(address, TOKEN, "brings", offers=OFFERS) as client:
            assert client.spec.action.high == 2
        other = ActorClient(address, TOKEN, "other", offers={"observation": [5], "action": 3})
        with pytest.raises(Refused, match=r"wrong_spaces.*observation.shape: this game has \[5\], and the run \[4\]"):
            other.connect()
        other.close()


def test_what_comes_without_spaces_is_answered_and_a_gateway_that_cannot_listen_is_refused(tmp_path: Path) -> None:
    game = FirstGame(ASKING.update({"gateway": {"websocket": None}}), tmp_path / "run", TOKEN)
    with zmq.Context() as context:
        for number, message in enumerate((Hello(1, TOKEN, "a", 1), Ping(), Hello(2, TOKEN, "b", 1))):
            with context.socket(zmq.DEALER) as socket:
                socket.connect(game.format_addresses()[0])
                socket.send(encode(message))
                assert game.wait(0.1) == ("", "")
                answer = decode(socket.recv_multipart(), MessageLimits())
                assert isinstance(answer, ErrorMessage)
                assert answer.code == ("no_spaces", "hello_required", "bad_version")[number]
        game.close()
    elsewhere = ASKING.update({"gateway": {"host": "192.0.2.1", "curve": True, "websocket": None}})
    with pytest.raises(ConfigError, match=r"gateway.host"):
        FirstGame(elsewhere, tmp_path, TOKEN, zmq.curve_keypair())
