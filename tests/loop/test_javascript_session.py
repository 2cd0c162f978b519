"""The JavaScript client at a scripted gateway: an older one, connections that break or fall silent, a run that ends."""

import json
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedOK
from websockets.sync.server import ServerConnection, serve

from waiting import start_thread

CLIENT = Path(__file__).parents[2] / "clients" / "javascript" / "index.js"
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None, reason="needs Node.js 20.11 or newer: apt-get install nodejs"
)
SPEC = {
    "observation": {"dtype": "float32", "shape": [1]},
    "action": {"dtype": "int64", "shape": [], "low": 0, "high": 9},
    "segment_length": 8,
    "policy": {"kind": "any", "activation": "", "layers": []},
}
WELCOME = {
    "kind": "welcome", "protocol": 1, "run_id": "run-1", "spec": SPEC, "next_seq": 0, "send_limit": 1,
    "weights_version": 1, "heartbeat_s": 0.1, "timeout_s": 0.3, "max_message_bytes": 2**20, "inference": "remote",
    "settings": {"gravity": 9}, "settings_version": 1,
}  # fmt: skip
PROGRAM = """
const { connect } = await import(process.argv[1]);
const settings = [];
const onSettings = (values, version) => settings.push([version, values.gravity]);
const run = await connect([process.argv[2]], 'token', { inference: 'remote', actorId: 'me', onSettings });
for (const agent of ['a', 'b']) run.begin(agent);
const first = await Promise.all([run.act('a', [0]), run.act('b', [1])]);
const lost = await run.act('a', [2], 5);
await run.end('b', [3], 1, { truncated: true });
run.begin('b');
const last = await run.act('b', [4]);
console.log(JSON.stringify({ first, lost, last, settings, reconnects: run.reconnects, finished: run.finished }));
"""


class Peer:
    """One connection of the client."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection

    def send(self, **header: Any) -> None:
        text = json.dumps(header).encode()
        self.connection.send(struct.pack("<I", len(text)) + text)

    def expect(self, kind: str) -> dict[str, Any]:
        """The header of the next message, which is of this kind, but for pings."""
        while True:
            message = self.connection.recv(timeout=60)
            assert isinstance(message, bytes)
            header: dict[str, Any] = json.loads(message[4 : 4 + struct.unpack_from("<I", message)[0]])
            if header["kind"] != "ping":
                assert header["kind"] == kind, header
                return header

    def answer(self, asked: dict[str, Any], action: int | None, reason: str = "") -> None:
        self.send(kind="action", episode=asked["episode"], step=asked["step"], action=action, version=1, reason=reason)


@contextmanager
def gateway(script: list[Any]) -> Iterator[str]:
    """A server whose n-th connection is handled by the n-th function; their errors fail the test."""
    errors, todo = list[Exception](), iter(script)

    def handle(connection: ServerConnection) -> None:
        try:
            peer = Peer(connection)
            assert peer.expect("hello")["actor_id"] == "me"
            peer.send(**WELCOME)
            next(todo)(peer)
        except Exception as error:  # noqa: BLE001 - the test raises it
            errors.append(error)

    with serve(handle, "127.0.0.1", 0) as server:
        thread = start_thread(server.serve_forever)
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()
    assert not errors, errors
    assert next(todo, None) is None, "fewer connections than the script has"


def test_a_session_outlives_its_connections() -> None:
    def know_no_rows(peer: Peer) -> None:
        assert peer.expect("acts")["episodes"] == [0, 1]
        peer.send(kind="error", code="unknown_kind", message="acts", fatal=False)
        asked = [peer.expect("act") for _ in range(2)]
        assert [each["settings"] for each in asked] == [1, 1]
        peer.answer(asked[0], 6)  # not the other one: then the connection breaks

    def stay_silent(peer: Peer) -> None:
        assert (asked := peer.expect("act"))["episode"] == 1
        assert asked["step"] == 0
        with pytest.raises(ConnectionClosedOK):  # pings, without an answer
            peer.expect("nothing")

    def end_the_run(peer: Peer) -> None:
        peer.answer(peer.expect("act"), 7)
        peer.answer(peer.expect("act"), None, "unknown_episode")
        again = peer.expect("act")
        assert (again["episode"], again["step"], again["reward"]) == (2, 0, 5)
        peer.send(kind="settings", version=2, values={"gravity": 3})
        peer.answer(again, 8)
        ended = peer.expect("act")
        assert (ended["truncated"], ended["terminated"], ended["episode"], ended["step"]) == (True, False, 1, 1)
        peer.answer(ended, None)
        assert peer.expect("act")["settings"] == 2
        peer.send(kind="bye", reason="over", finished=True)
        with pytest.raises(ConnectionClosedOK):
            peer.expect("nothing")

    with gateway([know_no_rows, stay_silent, end_the_run]) as address:
        command = ["node", "--experimental-websocket", "--input-type=module", "-e", PROGRAM, str(CLIENT), address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "first": [6, 7], "lost": 8, "last": None, "settings": [[1, 9], [2, 3]], "reconnects": 2, "finished": True,
    }  # fmt: skip


NOT_AWAITED = "agent a: the action before has not come yet: await it"
MISUSE = """
const { LocalPlayer, Run, connect } = await import(process.argv[1]);
const settings = [];
const onSettings = (values) => settings.push(values.gravity);
const run = await connect([process.argv[2]], 'token', { inference: 'remote', actorId: 'me', onSettings });
const say = (error) => error.message;
let idle;
const waiting = new Promise((log) => (idle = new Run('ws://127.0.0.1:65535', 'token', { log })));
idle.connect(idle.player).catch(say);
run.begin('a');
const first = run.act('a', [300]);
const said = [await run.act('a', [1]).catch(say), await first, await run.act('a', [0.5]).catch(say)];
said.push(await run.end('a', [1]).catch(say));
const local = new LocalPlayer({ hello: {}, spec: run.spec, until: () => new Promise(() => {}) }); // without weights
local.begin('a');
local.act('a', [1]);
said.push(await Promise.resolve().then(() => local.act('a', [2])).catch(say));
run.begin('b');
const asked = run.act('b', [1]);
await run.leave('done', 0);
console.log(JSON.stringify({ said, last: [await asked, await run.act('b', [1])], settings, waiting: await waiting }));
await idle.leave();
const { WebSocketTransport } = await import(process.argv[1].replace('index.js', 'lib/transport.js'));
await new Promise((onClose) => new WebSocketTransport('ws://127.0.0.1:65535', { onClose }));
"""


def test_what_a_game_does_wrong_is_an_error_and_it_has_no_answers_after_it_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_off(peer: Peer) -> None:
        assert peer.expect("act")["episode"] == 0
        monkeypatch.setitem(WELCOME, "run_id", "run-2")
        monkeypatch.setitem(WELCOME, "settings", {"gravity": 12})

    def reject_the_end(peer: Peer) -> None:
        peer.answer(peer.expect("act"), 7)
        peer.answer(peer.expect("act"), None, "invalid")
        assert peer.expect("act")["episode"] == 1
        assert peer.expect("bye")["reason"] == "done"

    spec = SPEC | {"observation": {"dtype": "uint16", "shape": [1]}}
    monkeypatch.setitem(WELCOME, "spec", spec)
    with gateway([break_off, reject_the_end]) as address:
        command = ["node", "--experimental-websocket", "--input-type=module", "-e", MISUSE, str(CLIENT), address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "said": [
            NOT_AWAITED, 7, "invalid: observation[0] of agent a: 0.5 is no uint16",
            "invalid: agent a: the gateway took no step", NOT_AWAITED,
        ],
        "last": [None, None], "settings": [9, 12],
        "waiting": "ws://127.0.0.1:65535 does not answer yet, and is tried again",
    }  # fmt: skip
