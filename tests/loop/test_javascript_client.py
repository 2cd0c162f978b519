"""The JavaScript client in Node against real gateways: it learns beside a Python actor, and outlives faults."""

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from catch_game import Catch
from gymnasium.spaces import Box, Discrete

from rl_setting import TOKEN, Parts, serving
from shoal.actor import ActorClient, play
from shoal.actor.environment import make_environment
from shoal.rl.gateway.listener import format_websocket_address
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec, policy_spec
from shoal.weights import WeightSnapshot
from shoal.wire import PolicySpec
from waiting import start_thread, wait_for

CLIENT = Path(__file__).parents[2] / "clients" / "javascript"
ENDLESS = ("--game", str(Path(__file__).parent / "endless_game.js"))
NODE = ["node", "--experimental-websocket"]  # Node.js 22 has it without
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None, reason="needs Node.js 20.11 or newer: apt-get install nodejs npm"
)
SPEC = RLSpec(env="catch_game:Catch-v0", hidden=(16,), segment_length=64).override(
    [
        "learner.batch_steps=256",
        "learner.max_batch_steps=512",
        "learner.take_timeout_s=0.1",
        "learner.publish_interval_s=0.02",
        "algorithm.learning_rate=0.01",
        "algorithm.discount=0.9",
        "gateway.websocket=0",
    ]
)


def playing(folder: Path | None = None, **fields: Any) -> AbstractContextManager[Parts]:
    return serving(folder, websocket=0, **fields)


def find_address(parts: Parts) -> str:
    return format_websocket_address(parts.gateway.listener, parts.spec.host)


@contextmanager
def node_actor(address: str, *options: str, token: str = TOKEN) -> Iterator[subprocess.Popen[str]]:
    """The ready actor of the Node client, playing its game for the run at `address`."""
    command = [*NODE, str(CLIENT / "actor.js"), "--connect", address, *options]
    environment = {**os.environ, "SHOAL_TOKEN": token}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_it_learns_in_one_run_together_with_a_python_actor(tmp_path: Path) -> None:
    catch = make_environment(SPEC.env)

    def play_in_python(address: str) -> None:
        with ActorClient(address, TOKEN, "python", timeout_s=60) as client:
            play(catch, client, seed=1)

    experience = experience_spec(catch.observation_space, catch.action_space, SPEC)

    with (
        LocalLoop(SPEC, experience, tmp_path / "run", TOKEN, target_return=2.0) as loop,
        node_actor(f"ws://127.0.0.1:65535|{loop.websocket_address}", "--actor-id", "node") as process,
    ):

        def count_steps(actor_id: str) -> int:
            return sum(each["steps"] for each in loop.gateway.stats()["actors"] if each["actor_id"] == actor_id)

        wait_for(lambda: count_steps("node") > 300)  # one alone may solve it before the other has begun
        python = start_thread(play_in_python, loop.address)
        wait_for(lambda: count_steps("python") > 300)
        assert loop.wait_until_solved(timeout_s=600) > 0
        actors = {each["actor_id"]: each for each in loop.gateway.stats()["actors"]}
        assert actors["node"]["invalid"] == {}
        loop.close()
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert "episodes" in output
        python.join()


def test_it_plays_with_the_policy_at_the_gateway_and_goes_on_at_one_that_has_restarted(tmp_path: Path) -> None:
    catch = make_environment(SPEC.env)
    experience = experience_spec(catch.observation_space, catch.action_space, SPEC)
    folder = tmp_path / "run"
    with LocalLoop(SPEC, experience, folder, TOKEN) as first:
        address = first.websocket_address
        with node_actor(address, "--actor-id", "node", "--inference", "remote") as process:
            wait_for(lambda: first.gateway.stats()["episodes"] > 20)
            first.gateway.close()
            first.learner.finish(30)
            first.ledger.close()
            with LocalLoop(SPEC, experience, folder, TOKEN) as second:
                assert second.websocket_address == address
                wait_for(lambda: any(actor["steps"] > 100 for actor in second.gateway.stats()["actors"]))
                assert second.gateway.stats()["remote_inference"]["actions"] > 100
                second.close()
                output, _ = process.communicate(timeout=600)
                assert process.returncode == 0, output
                assert "episodes" in output
            assert second.ledger.get_totals().is_balanced


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_it_takes_allowed_actions_alone(tmp_path: Path, inference: str) -> None:
    spaces = Box(-1, 1, (4,), np.float32), Discrete(3)
    experience = experience_spec(*spaces, SPEC, has_masks=True)
    game = str(Path(__file__).parent / "masked_game.js")
    with LocalLoop(SPEC, experience, tmp_path / "run", TOKEN) as loop:
        with node_actor(
            loop.websocket_address, "--game", game, "--inference", inference, "--actor-id", "node"
        ) as process:
            wait_for(lambda: loop.gateway.stats()["episodes"] > 50)
            (actor,) = loop.gateway.stats()["actors"]
            assert actor["invalid"] == {}
            loop.close()
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, output
        assert loop.ledger.get_totals().consumed > 0
        assert loop.ledger.get_totals().is_balanced


def test_its_policy_computes_what_the_platform_s_own_does() -> None:
    rng = np.random.default_rng(0)
    for activation in ("tanh", "relu"):
        spec = PolicySpec("mlp_categorical", activation, policy_spec((16, 8)).layers)
        sizes = [4, 16, 8, 3]
        arrays = {}
        for (weight, bias), inputs, outputs in zip(spec.layers, sizes[:-1], sizes[1:], strict=True):
            arrays[weight] = rng.normal(size=(outputs, inputs)).astype(np.float32)
            arrays[bias] = rng.normal(size=outputs).astype(np.float32)
        observations = rng.normal(size=(50, 4)).astype(np.float32)
        program = """
            import { readFileSync } from 'node:fs';
            const { MlpPolicy, parseSafetensors } = await import(process.argv[1]);
            const { spec, weights, observations } = JSON.parse(readFileSync(0));
            const policy = new MlpPolicy(spec);
            policy.load(1, parseSafetensors(Buffer.from(weights, 'base64')));
            console.log(JSON.stringify(observations.map((each) => policy.logProbabilities(each))));
        """
        asked = {
            "spec": msgspec.to_builtins(spec),
            "weights": base64.b64encode(WeightSnapshot.of(1, arrays).payload).decode(),
            "observations": observations.tolist(),
        }
        command = ["node", "--input-type=module", "-e", program, str(CLIENT / "index.js")]
        answer = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True).stdout
        hidden = observations.astype(np.float64)
        for index, (weight, bias) in enumerate(spec.layers):
            hidden = hidden @ arrays[weight].T + arrays[bias]
            if index < 2:
                hidden = np.tanh(hidden) if activation == "tanh" else np.maximum(hidden, 0)
        expected = hidden - np.log(np.exp(hidden).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(np.array(json.loads(answer)), expected, atol=2e-6)  # float32 between the layers


def test_it_comes_back_to_a_gateway_that_was_restarted_and_counts_each_segment_once(tmp_path: Path) -> None:
    with playing(tmp_path, queue_capacity=4) as parts, node_actor(find_address(parts), *ENDLESS) as process:
        wait_for(lambda: parts.ledger.get_totals().received == 4, what="segments up to the limit")
        address = find_address(parts)
        parts.gateway.close()
        with playing(tmp_path, queue_capacity=4) as again:
            assert find_address(again) == address
            wait_for(lambda: again.ledger.get_totals().received == 8, what="the segments that wait for credit")
            totals = again.ledger.get_totals()
            assert (totals.duplicates, totals.dropped) == (0, {"shutdown": 4})
            again.gateway.close(finished=True)
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, output


def test_a_segment_that_an_error_names_is_discarded_and_the_others_arrive() -> None:
    program = """
        const { SegmentBuilder, connect } = await import(process.argv[1]);
        const run = await connect(process.argv[2], process.argv[3], { actorId: 'node' });
        const builder = new SegmentBuilder(run.spec);
        const play = () => {
          builder.begin([0, 0, 0, 0]);
          builder.step({ action: 0, logProbability: -0.7, version: 1 }, 1, [0, 0, 0, 1]);
          return builder.pack({ terminated: true }, 1, 1);
        };
        const bad = play();
        bad.header.terminated = 1;
        for (const each of [play(), bad, play(), play()]) run.player.send(each);
        await run.leave('done', 20000);
        const { player, reconnects } = run;
        console.log(JSON.stringify({ isDrained: !player.isWaiting, drops: player.drops, reconnects }));
    """
    with playing() as parts:
        command = [*NODE, "--input-type=module", "-e", program, str(CLIENT / "index.js"), find_address(parts), TOKEN]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        said = json.loads(answer.stdout)
        assert (said["isDrained"], said["drops"], said["reconnects"]) == (True, {"malformed": 1}, 1)
        totals = parts.ledger.get_totals()
        assert (totals.received, totals.duplicates) == (3, 0)
        wait_for(lambda: not parts.gateway.stats()["actors"][0]["connected"], what="its bye")
        left = [details for _, kind, details in parts.gateway.take_events() if kind == "actor_left"]
        assert left[-1]["reason"] == "bye"


def test_what_a_person_does_is_a_demonstration_for_a_session_or_for_a_while(tmp_path: Path) -> None:
    program = """
        const { connect } = await import(process.argv[1]);
        const [address, token] = process.argv.slice(2);
        const play = async (options, isTaken) => {
          const run = await connect(address, token, options);
          run.begin('me');
          await run.act('me', [0, 0, 0, 0]);
          const show = (step) => (isTaken(step) ? { taken: 2 } : {});
          for (let step = 1; step < 9; step++) await run.act('me', [0, 0, 0, step / 10], 1, show(step));
          await run.end('me', [0, 0, 0, 1], 1, show(9));
          await run.leave();
        };
        await play({ behaviour: 'human', actorId: 'person' }, () => true);
        await play({ actorId: 'local' }, (step) => step === 4 || step === 5);
        await play({ actorId: 'remote', inference: 'remote' }, (step) => step === 4 || step === 5);
    """
    experience = experience_spec(Catch.observation_space, Catch.action_space, SPEC)
    with LocalLoop(SPEC, experience, tmp_path / "run", TOKEN) as loop:
        command = [*NODE, "--input-type=module", "-e", program, str(CLIENT / "index.js"), loop.websocket_address, TOKEN]
        subprocess.run(command, check=True, timeout=600)
        stats = loop.gateway.stats()
        assert stats["demonstrations"] == {"segments": 3, "steps": 9 + 2 + 2, "episodes": 1}
        assert (stats["steps"], stats["episodes"]) == (7 + 7, 0)  # an assisted episode's return is not the policy's
        assert all(each["invalid"] == {} for each in stats["actors"])
    assert loop.ledger.get_totals().is_balanced


def test_an_episode_that_its_gateway_has_lost_goes_on_as_one_in_which_a_person_has_acted() -> None:
    program = """
        const { RemotePlayer } = await import(process.argv[1]);
        const spec = { observation: { dtype: 'float32', shape: [1] }, action: { dtype: 'int64', shape: [] } };
        const posted = [];
        const session = { spec, isWelcomed: true, post: ({ step, taken }) => posted.push([step, taken ?? null]) };
        const player = new RemotePlayer(session);
        const answer = (episode, step, reason = '') => new Promise((resolve) => setTimeout(() => {
          player.onMessage({ kind: 'action', episode, step, action: 1, reason });
          resolve();
        }));
        player.begin('me');
        const play = async (taken, ...answers) => {
          const asked = player.act('me', [0], 1, { taken });
          for (const each of answers) await answer(...each);
          await asked;
        };
        await play(undefined, [0, 0]);
        await play(1, [0, 1]);
        await play(undefined, [0, 2, 'unknown_episode'], [1, 0]);
        console.log(JSON.stringify(posted));
    """
    command = [*NODE, "--input-type=module", "-e", program, str(CLIENT / "lib/remote.js")]
    ran = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert json.loads(ran.stdout) == [[0, None], [1, 1], [2, None], [0, 0]]  # any `taken` at step 0 says so


def test_another_game_than_the_run_learns_is_refused_by_its_spaces(tmp_path: Path) -> None:
    (tmp_path / "none.js").write_text("module.exports = class { reset() { return [0, 0, 0, 0]; } };")
    with playing() as parts:
        for game, inference, said in (
            (CLIENT / "catch" / "catch.js", "local", "3 choices"),
            (tmp_path / "none.js", "remote", "the game has no `spaces`"),
        ):
            with node_actor(find_address(parts), "--game", str(game), "--inference", inference) as process:
                output, _ = process.communicate(timeout=600)
                assert process.returncode == 1
                assert said in output


def test_a_machine_whose_clock_went_back_gives_a_larger_incarnation() -> None:
    with playing() as parts:
        future = 2**52
        key = ("robot", future)
        parts.ledger.open_account(key)
        with node_actor(find_address(parts), *ENDLESS, "--actor-id", "robot") as process:
            output, _ = process.communicate(timeout=600)
            assert f"stale_incarnation: incarnation {future} has been seen: use a larger one" in output
        with node_actor(find_address(parts), *ENDLESS, "--actor-id", "robot", "--incarnation", str(future + 1)):
            wait_for(lambda: parts.ledger.get_account(("robot", future + 1)).received > 0, 60, "its segments")


def test_its_help_names_every_option() -> None:
    shown = subprocess.run(["node", str(CLIENT / "actor.js"), "--help"], capture_output=True, text=True, check=True)
    options = re.search(r"options: \{(.*?)\n    \},", (CLIENT / "actor.js").read_text(), re.DOTALL)
    assert options is not None
    names = re.findall(r"^ +'?([a-z-]+)'?: \{", options[1], re.MULTILINE)
    assert len(names) == 8
    for name in names:
        assert f"--{name}" in shown.stdout
    wrong = subprocess.run(["node", str(CLIENT / "actor.js"), "--incarnation", "-1x"], capture_output=True, text=True)
    assert wrong.returncode == 1


def test_a_wrong_token_ends_it_with_the_reason() -> None:
    with playing() as parts, node_actor(find_address(parts), token="guess") as process:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 1
        assert "bad_token" in output


def test_curve_with_the_right_key_plays_and_with_a_wrong_one_names_the_key() -> None:
    assert (CLIENT / "node_modules" / "zeromq").is_dir(), "missing packages: npm ci --prefix clients/javascript"
    public, secret = zmq.curve_keypair()
    key = f"--server-key={public.decode()}"
    wrong = f"--server-key={zmq.curve_keypair()[0].decode()}"
    with serving(queue_capacity=2, curve=True, setting={"curve_keys": (public, secret)}) as parts:
        with node_actor(parts.address, *ENDLESS, key):
            wait_for(lambda: parts.ledger.get_totals().received == 2, what="segments over an encrypted connection")
        with node_actor(parts.address, "--give-up-after", "0.5", wrong) as process:
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 1
            assert "is the server key right?" in output
        with node_actor(parts.address, "--server-key=abc") as process:
            assert "server_key: abc has 3 characters, not 40" in process.communicate(timeout=600)[0]
