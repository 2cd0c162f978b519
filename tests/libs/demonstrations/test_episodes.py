"""Whole episodes that a gateway records: what is recorded, what is not, who reads it, and people who show how."""

import json
import math
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from click.testing import Result
from demonstration_case import ACTOR, make_site, read_all

import shoal
import shoal.runs
from rl_setting import EXPERIENCE, TOKEN, segment, serving
from rl_setting import EXPERIENCE as OTHER_MODEL
from shoal.actor.game import EpisodeActor
from shoal.errors import ConfigError, StoreError
from shoal.libs.demonstrations.episodes import EpisodeCollector
from shoal.libs.demonstrations.files import Demonstration
from shoal.libs.demonstrations.recorder import copy_source
from shoal.libs.demonstrations.shown import MAX_OFFLINE_STEPS, Shown
from shoal.rl.experience.demonstrations import DemonstrationSite
from shoal.rl.local_loop import LocalLoop
from shoal.rl.part_specs import RecordSpec
from shoal.rl.spec import RLSpec, policy_spec
from shoal.store.folder import FolderStore
from shoal.wire import DropReason, Segment
from sign_game import SignGame
from typed import typed
from waiting import wait_for

CLIENT = Path(__file__).parents[3] / "clients" / "javascript"


def end(length: int, total: float, episode_length: int, **fields: object) -> Segment:
    return segment(length, terminated=True, episode_return=total, episode_length=episode_length, **fields)


def record(site: DemonstrationSite, *segments: Segment, **spec: object) -> dict[str, int]:
    recorder = EpisodeCollector(site, RecordSpec.parse({"share": 1.0, **spec}))
    for each in segments:
        recorder.add(ACTOR, each, 2, {"gravity": 9.5})
    recorder.close()
    return recorder.get_counts()


def cut(first: int, length: int, **fields: object) -> Segment:
    """Steps of a long episode, from step `first` on."""
    steps = np.arange(first, first + length + 1, dtype=np.float32)
    return segment(length, observations=np.repeat(steps[:, None], 4, axis=1) / 100, **fields)


# -- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_an_episode_is_recorded_as_it_was_played(tmp_path: Path, inference: str) -> None:
    with serving(tmp_path, record="100%") as parts:
        parts.gateway.set_settings({"gravity": 9.5, "seed": 4})
        with shoal.connect(parts.address, token=TOKEN, inference=inference) as actor:
            actions: list[list[int]] = [[], []]
            for step in range(20):  # 16 of a segment, of two agents at once
                for agent, chosen in enumerate(actions):
                    is_held = step in (3, 4)
                    taken = actor.act([step / 10, agent, 0, 0], episode=agent, taken=1 if is_held else None)
                    chosen.append(1 if is_held else taken)
                    actor.reward(step / 4, episode=agent)
            for agent in range(2):
                actor.end_episode([2.0, agent, 0, 0], episode=agent, truncated=agent == 1)
            wait_for(lambda: parts.gateway.stats()["recorded"]["recorded"] == 2)
    found = list(read_all(tmp_path / "episodes").values())
    assert [each.segment.actions.tolist() for each in found] == actions
    for number, (info, whole) in enumerate(found):
        np.testing.assert_allclose(whole.observations[:, 0], np.arange(21) / 10, rtol=1e-6)
        assert set(whole.observations[:, 1]) == {number}
        assert whole.rewards.tolist() == [step / 4 for step in range(20)]
        assert whole.versions.tolist() == [1, 1, 1, 0, 0, *[1] * 15]
        assert (info.behaviours, info.lengths) == (("", "human", ""), (3, 2, 15))
        assert (info.settings, info.values) == (1, {"gravity": 9.5, "seed": 4})
        assert (info.terminated, info.truncated, info.episode_return) == (number == 0, number == 1, 47.5)


def test_what_is_not_whole_is_not_recorded(tmp_path: Path) -> None:
    whole = [cut(0, 8), cut(8, 8), cut(16, 4, terminated=True, episode_return=20.0, episode_length=20)]
    under_way = cut(8, 4, terminated=True, episode_return=12.0, episode_length=12)
    other_agent = [cut(0, 8), cut(50, 8), cut(8, 4, terminated=True, episode_return=12.0, episode_length=12)]
    shown = end(8, 8.0, 8, behaviour="human")
    counts = record(make_site(tmp_path), under_way, *whole, whole[0], whole[2], *other_agent, shown, end(8, 8.0, 8))
    assert counts == {"episodes": 3, "recorded": 3, "skipped": 2, "failed": 0}
    assert sorted(each.info.num_steps for each in read_all(tmp_path / "episodes").values()) == [8, 12, 20]
    moved = end(8, 12.0, 8, episode=5)  # under a new number, since its gateway was lost: 4 were earned before
    assert record(make_site(tmp_path / "moved"), moved, end(8, 8.0, 8, episode=6))["recorded"] == 1


def test_a_share_is_drawn_by_episode_and_the_folder_is_bounded(tmp_path: Path) -> None:
    recorder = EpisodeCollector(make_site(tmp_path), RecordSpec(share=0.5, newest=3))
    chosen = 0
    for number in range(2000):
        before = len(recorder._open)
        recorder.add(ACTOR, segment(1, episode=number), 0, {})
        chosen += len(recorder._open) - before
    recorder.close()
    assert 850 < chosen < 1150  # the standard deviation is 22
    segments = [end(8, 8.0, 8) for _ in range(5)]
    assert record(make_site(tmp_path / "newest"), *segments, newest=3) == {
        "episodes": 3,
        "recorded": 5,
        "skipped": 0,
        "failed": 0,
    }
    assert [name[-6:] for name in read_all(tmp_path / "newest/episodes")] == ["000003", "000004", "000005"]
    (tmp_path / "newest/episodes/.policy-a-000006.safetensors-0123456789abcdef").write_bytes(b"of a killed gateway")
    record(make_site(tmp_path / "newest"), end(8, 8.0, 8), newest=3)  # goes on counting
    assert [path.name[-18:-12] for path in sorted((tmp_path / "newest/episodes").iterdir())] == [
        "000004",
        "000005",
        "000006",
    ]
    tiny = record(
        make_site(tmp_path / "tiny"), *[cut(8 * each, 8, terminated=each == 39) for each in range(40)], max_mb=0.002
    )
    assert tiny["skipped"] == 1  # an episode that is too long is given up


def test_a_full_disk_costs_episodes_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = EpisodeCollector(make_site(tmp_path), RecordSpec(share=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(type(recorder._files.store), "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        recorder.add(ACTOR, end(8, 8.0, 8), 0, {})
        wait_for(lambda: recorder.get_counts()["failed"] == 1)
    recorder.add(ACTOR, end(8, 8.0, 8), 0, {})
    recorder.close()
    assert recorder.get_counts() == {"episodes": 1, "recorded": 1, "skipped": 0, "failed": 1}


def test_a_store_that_was_away_has_them_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "store"))
    monkeypatch.setattr("shoal.libs.demonstrations.recorder.RETRY_S", 0.01)
    site, write, problems = replace(make_site(tmp_path), name="run-1"), FolderStore.write, [StoreError("is away")] * 3

    def write_later(store: FolderStore, key: str, content: bytes | Path) -> None:
        if problems and "run-1" in store.url:
            raise problems.pop()
        write(store, key, content)

    monkeypatch.setattr(FolderStore, "write", write_later)
    assert record(site, end(8, 8.0, 8))["failed"] == 0
    record(site, end(8, 8.0, 8), newest=1)  # another gateway, of which the first one's goes
    assert [name[-6:] for name in read_all(tmp_path / "store/runs/run-1/episodes")] == ["000002"]


def test_episodes_wait_for_the_disk_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.libs.demonstrations.episodes.MAX_OPEN_BYTES", 1000)
    recorder, may_write = EpisodeCollector(make_site(tmp_path), RecordSpec(share=1.0)), threading.Event()
    write = recorder._files.write
    monkeypatch.setattr(recorder._files, "write", lambda made: (may_write.wait(30), write(made))[1])
    for _ in range(10):
        recorder.add(ACTOR, end(8, 8.0, 8), 0, {})  # of 336 bytes
    may_write.set()
    recorder.close()
    assert recorder.get_counts() == {"episodes": 3, "recorded": 3, "skipped": 7, "failed": 0}


def test_the_segments_of_an_episode_come_back_as_they_were() -> None:
    random = np.random.default_rng(0)

    def draw(length: int, **fields: object) -> Segment:
        masks, state = random.random((length + 1, 3)) < 0.5, random.normal(size=(1, 5)).astype(np.float32)
        return segment(length, extras={"masks": masks, "state": state}, **fields)

    pieces = [draw(1), draw(16, behaviour="human"), draw(3, truncated=True, episode_return=20.0, episode_length=20)]
    for before, after in pairwise(pieces):
        after.observations[0], after.extras["masks"][0] = before.observations[-1], before.extras["masks"][-1]
    joined = Demonstration.join(ACTOR, 3, pieces)
    payload = joined.to_bytes()
    for piece, (info, read) in zip(pieces, Demonstration.from_bytes(payload).split(), strict=True):
        for name in ("observations", "actions", "rewards", "log_probabilities", "versions"):
            np.testing.assert_array_equal(getattr(read, name), getattr(piece, name))
        for name in piece.extras:
            np.testing.assert_array_equal(read.extras[name], piece.extras[name])
        ends = "terminated", "truncated", "episode_return", "episode_length", "behaviour"
        assert [getattr(read, name) for name in ends] == [getattr(piece, name) for name in ends]
        assert info.num_steps == piece.num_steps
    with pytest.raises(ValueError, match="is no demonstration"):
        Demonstration.from_bytes(payload[:-9])
    wrong = Demonstration(msgspec.structs.replace(joined.info, lengths=(1, 16, 9)), joined.segment).to_bytes()
    with pytest.raises(ValueError, match="not as long"):
        Demonstration.from_bytes(wrong)


def test_nonsense_in_the_field_is_named() -> None:
    def read(*overrides: str) -> RecordSpec:
        return RLSpec().override(overrides).gateway.record

    assert read("gateway.record.max_mb=4", "gateway.record=0.5%") == RecordSpec(share=0.005, max_mb=4.0)
    assert read("gateway.record=50") == RecordSpec(share=1.0, newest=50)
    assert read() == RecordSpec(share=0.0)
    for nonsense in ("101%", "0", "-1", "1.5", "some", "true"):
        with pytest.raises(ConfigError, match=r"gateway\.record.* = '?.*(is neither a share, as 1%|less than)"):
            read(f"gateway.record={nonsense}")


# -- who reads it -----------------------------------------------------------------------------------------------------


def test_a_run_learns_from_the_episodes_of_another_before_any_game(tmp_path: Path) -> None:
    record(
        make_site(tmp_path / "before"), cut(0, 8), cut(8, 8, terminated=True, episode_return=16.0, episode_length=16)
    )
    source = str(tmp_path / "before/episodes")
    spec = RLSpec(hidden=(8,)).override(
        [f"demonstrations={source}", "algorithm=dqn", "learner.take_timeout_s=0.05", "demonstrations.updates=3"]
    )
    experience = msgspec.structs.replace(EXPERIENCE, policy=spec.algorithm.describe_policy(spec.hidden))
    with LocalLoop(spec, experience, tmp_path / "run", TOKEN) as loop:
        wait_for(lambda: loop.learner.version == 2)
        assert loop.learner.stats()["steps"] == 0
    assert len(list((tmp_path / "run/demonstrations").glob("*.safetensors"))) == 2
    shown = Shown(make_site(tmp_path / "run", updates=MAX_OFFLINE_STEPS + 1))
    shown.advance(0)
    shown.close()
    assert [shown.take_offline_steps() for _ in range(3)] == [MAX_OFFLINE_STEPS, 1, 0]
    wide = msgspec.structs.replace(EXPERIENCE, observation=msgspec.structs.replace(EXPERIENCE.observation, shape=(5,)))
    with pytest.raises(ConfigError, match=r"demonstrations.source.*observations: \[9, 4\], expected \[9, 5\]"):
        copy_source(make_site(tmp_path / "other", wide, source=source))


@pytest.fixture
def recorded() -> str:
    """A run with an episode that returns 8, one that returns -8, and one that was under way when its gateway began."""
    with shoal.runs.create("job", "env: CartPole-v1") as run:
        pass
    assert "has recorded no episodes: gateway.record=1%" in call(run.id).output
    poor = end(8, -8.0, 8, rewards=np.full(8, -1.0, np.float32))
    record(make_site(run.folder), end(4, 12.0, 12), end(8, 8.0, 8, actions=np.arange(8) % 2), poor)
    return run.id


def call(*words: str) -> Result:
    return typed("episodes", *words)


def test_the_command_lists_exports_and_takes_the_good_ones_along(tmp_path: Path, recorded: str) -> None:
    listed = call(recorded).output.splitlines()
    assert listed[1].split() == ["policy", "2", "2", "16", "0"]
    assert listed[-1].startswith("left out, of those drawn: at least 1")
    name = listed[4].split()[0]
    exported = json.loads(call(recorded, "--export", name).stdout)
    assert exported["actions"] == [0, 1] * 4
    assert exported["spec"]["observation"] == {"dtype": "float32", "shape": [4]}
    assert (len(exported["observations"]), len(exported["observations"][0])) == (9, 4)
    assert (exported["settings"], exported["settings_version"], exported["return"]) == ({"gravity": 9.5}, 2, 8.0)
    assert call(recorded, "--film", name).output.splitlines()[-1].startswith("terminated")
    assert "1 episodes in" in call(recorded, "--above", "0", "--out", str(tmp_path / "good")).output
    assert isinstance(call(recorded, "--export", "nothing").exception, ConfigError)
    assert not call(recorded, "--export", name, "--out", str(tmp_path / "episode.json")).output
    assert json.loads((tmp_path / "episode.json").read_text()) == exported
    assert "the highest return is 8" in str(call(recorded, "--above", "8").exception)
    site = make_site(tmp_path / "next", source=f"{recorded}/episodes")
    copy_source(site)
    assert len(list((tmp_path / "next/demonstrations").glob("*.safetensors"))) == 2
    assert "dropped 1 of 2" in call(recorded, "--drop", name).output


REPLAY = """
import { readFileSync } from 'node:fs';
const { replay } = await import(process.argv[1]);
const onSettings = ({ gravity }) => console.log(gravity);
const run = replay(readFileSync(process.argv[2], 'utf8'), { onSettings, log: console.log });
const { observations } = run.episode;
const actions = [];
for (let step = 0; !run.finished; step++) {
  run.begin('hero');
  if (step === 8) await run.end('hero', observations[step], 1);
  else actions.push(await run.act('hero', process.argv[3] === `${step}` ? [9, 9, 9, 9] : observations[step], 1));
}
console.log(actions.join(''), run.divergedAt, await run.act('hero', observations[0]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_a_game_in_node_replays_it(tmp_path: Path, recorded: str) -> None:
    path = tmp_path / "episode.json"
    path.write_text(call(recorded, "--export", call(recorded).output.splitlines()[4].split()[0]).stdout)

    def play(step: str) -> str:
        command = ["node", "--input-type=module", "-e", REPLAY, str(CLIENT / "index.js"), str(path), step]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert play("-").splitlines() == ["9.5", "01010101 null null"]
    assert play("3").splitlines()[1].startswith("step 3: the observation is [9,9,9,9], and [")
    assert play("3").splitlines()[2] == "01010101 3 null"
    path.write_text("{}")
    with pytest.raises(subprocess.CalledProcessError):
        play("-")


# -- people and scripts that show how: what they do is kept and learnt from, never taken for the policy's


PAGE = Path(__file__).parents[3] / "docs/games/demonstrations.md"
LOOP = RLSpec(hidden=(16,)).override(["learner.batch_steps=64", "learner.take_timeout_s=0.1"])
SHOWN = msgspec.structs.replace(OTHER_MODEL, policy=policy_spec(LOOP.hidden))


def play_by_hand(actor: EpisodeActor, num_episodes: int, *, is_perfect: bool = True) -> None:
    """Each step of the game by its rule, or by the policy."""
    game = SignGame()
    for seed in range(num_episodes):
        (observation, _), is_over = game.reset(seed=seed), False
        while not is_over:
            action = actor.act(observation, taken=int(observation[0] > 0) if is_perfect else None)
            observation, reward, _, is_over, _ = game.step(action)
            actor.reward(reward)
        actor.end_episode(observation, truncated=True)


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_perfect_play_by_hand_solves_no_run_and_is_kept(tmp_path: Path, inference: str) -> None:
    with LocalLoop(LOOP, SHOWN, tmp_path / "run", TOKEN, target_return=7.0) as loop:
        with shoal.connect(loop.address, token=TOKEN, inference=inference, behaviour="script") as actor:
            play_by_hand(actor, 110)
            with pytest.raises(ConfigError, match="the behaviour of this actor is script"):
                actor.act(np.zeros(4, np.float32))
        wait_for(lambda: loop.gateway.stats()["demonstrations"]["episodes"] == 110)
        stats = loop.gateway.stats()
        assert stats["solved_s"] is None
        assert (stats["episodes"], stats["steps"], stats["first_segment_at"]) == (0, 0, None)
        assert stats["segments"]["dropped"] == {DropReason.DEMONSTRATION: 110}
        assert stats["segments"]["balanced"]
        assert stats["quarantined"] == {}
        assert math.isnan(stats["mean_return"])
    shown = read_all(tmp_path / "run/demonstrations").values()
    assert len(shown) == 110
    assert {(each.info.behaviour, each.info.episode_return) for each in shown} == {("script", 8.0)}
    assert all(((each.segment.observations[:-1, 0] > 0) == each.segment.actions).all() for each in shown)


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_a_person_takes_the_controls_and_gives_them_back_in_one_episode(tmp_path: Path, inference: str) -> None:
    with serving(tmp_path) as parts, shoal.connect(parts.address, token=TOKEN, inference=inference) as actor:
        for step in range(7):
            held = step in (2, 3, 4)
            assert not held or actor.act([step / 10] * 4, taken=1) == 1
            if not held:
                actor.act([step / 10] * 4)
            actor.reward(float(step))
        actor.end_episode([0.7] * 4)
        wait_for(lambda: parts.ledger.get_totals().received == 3)
        batch = parts.take()
        assert batch.lengths.tolist() == [2, 2]
        assert batch.rewards.tolist() == [0.0, 1.0, 5.0, 6.0]
        assert batch.versions.tolist() == [1] * 4
        np.testing.assert_allclose(batch.log_probabilities, np.log(0.5), rtol=1e-5)
        np.testing.assert_allclose(batch.observations[:, 0], [0.0, 0.1, 0.2, 0.5, 0.6, 0.7], rtol=1e-6)
        assert batch.terminated.tolist() == [False, True]
        stats = parts.gateway.stats()
        assert (stats["steps"], stats["episodes"]) == (4, 0)  # its return is not the policy's
        (shown,) = read_all(tmp_path / "demonstrations").values()
        assert shown.info.behaviour == "human"
        assert shown.segment.actions.tolist() == [1, 1, 1]
        assert shown.segment.rewards.tolist() == [2.0, 3.0, 4.0]
        np.testing.assert_allclose(shown.segment.observations[:, 0], [0.2, 0.3, 0.4, 0.5], rtol=1e-6)
        play_by_hand(actor, 1, is_perfect=False)
        wait_for(lambda: parts.gateway.stats()["episodes"] == 1)


def test_the_script_of_the_page_shows_twenty_episodes(tmp_path: Path) -> None:
    class Game(SignGame):
        is_on = False

        def restart(self) -> np.ndarray:
            self.is_on = True
            return self.reset(seed=1)[0]

        def tick(self, action: int) -> tuple[np.ndarray, float]:
            observation, reward, _, is_over, _ = self.step(action)
            self.is_on = not is_over
            return observation, reward

    block = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    with serving(tmp_path) as parts:
        connect = SimpleNamespace(connect=partial(shoal.connect, token=TOKEN))
        names = {"shoal": connect, "game": Game(), "my_rule": lambda observation: int(observation[0] > 0)}
        exec(compile(block.replace("tcp://127.0.0.1:5555", parts.address), "demonstrations.md", "exec"), names)
        counts = parts.gateway.stats()["demonstrations"]
    assert counts == {"segments": 20, "steps": 160, "episodes": 20}
    assert {each.info.episode_return for each in read_all(tmp_path / "demonstrations").values()} == {8.0}


@pytest.mark.parametrize("inference", ["local", "remote"])
def test_who_leaves_in_the_middle_of_an_episode_has_shown_all_steps(tmp_path: Path, inference: str) -> None:
    with serving(tmp_path) as parts:
        with shoal.connect(parts.address, token=TOKEN, inference=inference) as actor:
            for step in range(4):
                actor.act([step / 10] * 4, taken=step % 2)
        wait_for(lambda: parts.ledger.get_totals().received == 1)
        assert parts.gateway.stats()["actors"][0]["lag"] == 0
    (shown,) = read_all(tmp_path / "demonstrations").values()
    assert shown.segment.actions.tolist() == [0, 1, 0]  # the last has no outcome
