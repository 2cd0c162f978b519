"""Films: what they show, how long and how large they are, and that playing and filming change nothing."""

import errno
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from PIL import Image

from random_policy import register_random
from registered import arrays_of
from shoal.actor.environment import make_environment
from shoal.client import Answer
from shoal.errors import ConfigError, MissingExtra
from shoal.extend.registry import LocalModel, find_version
from shoal.extend.rl import make_policy
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check, describe_policy_model, inspect_environment
from shoal.libs.films import filmed_game
from shoal.libs.films.command import PlayedGame
from shoal.libs.films.episode import MAX_FRAMES, WIDTH, Camera
from shoal.libs.films.film_file import draw_film
from shoal.libs.films.filmed_game import FilmedGame
from shoal.libs.films.players import EndpointPlayer, LocalPlayer, describe_outputs
from typed import said

LENGTH = 60


class Blinks(gymnasium.Env[Any, Any]):
    """Shows how far it is, in red; ends after LENGTH steps; each reward is the action."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.num_steps = render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.num_steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        return self._observe(), float(action), self.num_steps == LENGTH, False, {}

    def render(self) -> Any:
        picture = np.zeros((400, 600, 3), np.uint8)
        picture[..., 0] = 4 * self.num_steps
        return picture

    def _observe(self) -> np.ndarray:
        return np.array([self.num_steps / LENGTH, 0.5, 1], np.float32)


BLINKS = f"{Path(__file__).name}:Blinks"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


def read_film(path: Path) -> tuple[list[np.ndarray], int]:
    """Its pictures, and its milliseconds."""
    film = Image.open(path)
    pictures = []
    milliseconds = 0
    for index in range(getattr(film, "n_frames", 1)):
        film.seek(index)
        film.load()
        milliseconds += film.info["duration"]
        pictures.append(np.asarray(film.convert("RGB")))
    return pictures, milliseconds


def test_play_films_the_game_of_a_registered_policy_and_prints_its_returns(tmp_path: Path) -> None:
    register_random(BLINKS, "algorithm=ppo", "hidden=[8]")
    film = tmp_path / "film.webp"
    plain = said("play game --episodes 2")
    filmed = said("play game@1 --episodes 2 --record", str(film))
    assert filmed.splitlines()[:-1] == plain.splitlines()
    episode = next(line for line in plain.splitlines() if line.startswith("episode 2"))
    assert f"in {LENGTH} steps, terminated" in episode
    assert "over 2 episodes" in plain
    pictures, milliseconds = read_film(film)
    assert len(pictures) == 2 * (LENGTH // 2 + 1)  # 25 a second of 50
    assert milliseconds == pytest.approx(2 * (1000 * LENGTH / 50 + 1000), abs=100)
    reds = [int(each[50, WIDTH // 2, 0]) for each in pictures[: LENGTH // 2 + 1]]
    np.testing.assert_array_equal(reds, 4 * np.arange(0, LENGTH + 1, 2))
    panels = [each[200:] for each in pictures]
    assert np.ptp(panels[5].astype(int) - panels[9]) > 100, "what is beneath moves with the steps"


def test_an_endpoint_plays_as_the_registered_version_does() -> None:
    """A recurrent policy: its states are the player's to keep, and begin with each episode."""
    register_random("CartPole-v1", "core=gru", "algorithm=ppo", "hidden=[8]")
    served, asked = LocalModel(find_version("game")), list[Any]()

    class Served:
        def metadata(self, model: str) -> Any:
            return served.signature

        def infer(self, model: str, inputs: Any, **options: Any) -> Answer:
            asked.append((model, options))
            return Answer(served.predict(inputs), 3, model)

    here = LocalPlayer(LocalModel(find_version("game")), "best")
    endpoint = EndpointPlayer(Served(), "game", 3, "best")  # type: ignore[arg-type]
    ours, theirs = (
        [PlayedGame("CartPole-v1", make_environment("CartPole-v1"), player).play(n, 5 + n, 50) for n in range(2)]
        for player in (here, endpoint)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.returns == other.returns
        np.testing.assert_allclose(one.film.probabilities, other.film.probabilities, rtol=1e-4)
        np.testing.assert_allclose(one.film.values, other.film.values, rtol=1e-4)
        np.testing.assert_allclose(one.film.probabilities.sum(1), 1, rtol=1e-6)
    assert endpoint.name == "game@3"
    assert asked[0] == ("game", {"version": 3, "parameters": {"action": "best"}})


def test_agents_may_have_policies_of_their_own() -> None:
    env = "shoal.libs.games.pursuit:Pursuit"
    register_random(env, "algorithm=ppo", "hidden=[8]")
    words = ["game", "--episodes", "1", "--max-steps", "7"]
    printed = said("play", *words, "--agent", "second=game@1")
    assert "first " in printed
    assert "in 7 steps, not ended" in printed
    with pytest.raises(ConfigError, match=r"no agent of .*there are first, second"):
        said("play", *words, "--agent", "third=game")


def test_actions_between_bounds_and_boards_are_drawn(tmp_path: Path) -> None:
    """A game without pictures: the observation is one itself, or a chart is drawn."""
    random, count = np.random.default_rng(0), 9
    numbers = {"actions": random.normal(size=(count, 2)).astype(np.float32), "rewards": np.zeros(count)}
    boards = random.integers(0, 2, (count, 4, 5, 2)).astype(np.float32)
    for observations in (random.normal(size=(count + 1, 4)), random.normal(size=(count, 90)), boards):
        drawn = draw_film(tmp_path / "film.webp", title="a game", observations=observations, **numbers)
        pictures, _ = read_film(tmp_path / "film.webp")
        assert drawn == len(pictures) == count
        assert np.ptp(pictures[0].astype(int) - pictures[6]) > 100
    shown = pictures[3][:256, 0:WIDTH]
    np.testing.assert_allclose(shown[32::64, 32::64, 0] > 128, boards[3, :, :, 0] > 0.5)


def test_a_film_is_bounded_whatever_is_played(tmp_path: Path) -> None:
    taken = list[int]()
    camera = Camera(lambda: taken.append(0) or np.zeros((8, 8, 3)), 50.0)  # type: ignore[func-returns-value]
    for step in range(10_000):
        camera.take(step)
    camera.take(10_000, is_last=True)
    steps = list(camera.frames)
    assert MAX_FRAMES // 2 < len(steps) <= MAX_FRAMES + 1
    assert len(set(np.diff(steps[:-1]).tolist())) == 1
    assert (steps[0], steps[-1]) == (0, 10_000)
    assert len(taken) < 4 * MAX_FRAMES
    count = 2000
    odd = {"observations": np.full((count, 3), np.nan), "actions": np.zeros(count, int), "rewards": np.ones(count)}
    assert MAX_FRAMES // 2 < draw_film(tmp_path / "film.webp", title="long", **odd) <= MAX_FRAMES
    assert (tmp_path / "film.webp").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--record", "film.gif"], "is no film"),
        (["--record", "nowhere/film.webp"], "there is no folder"),
        (["--agent", "prey"], "is not AGENT=MODEL"),
        (["--env", "nothing:here"], "env"),
    ],
)
def test_what_cannot_be_played_or_written_is_refused_first(words: list[str], says: str) -> None:
    register_random(BLINKS, "algorithm=ppo", "hidden=[8]")
    with pytest.raises(ConfigError, match=says):
        said("play game", *words)


def test_mp4_needs_pyav(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra, match="av is not installed: pip install 'CHECKOUT\\[films\\]'"):
        said("play game --record", str(tmp_path / "film.mp4"))


def test_choices_have_probabilities_each_and_masked_ones_none() -> None:
    shown = describe_outputs({"logits": np.array([0, -np.inf, 0, 1, 1]), "value": np.array(2.0)}, [3, 2])
    np.testing.assert_allclose(shown["probabilities"], [0.5, 0, 0.5, 0.5, 0.5])
    assert describe_outputs({"q_values": np.array([1.0, 3.0])}, [])["value"] == 3


class _Client:
    """Of a run, as far as an actor's films need it; its weights are newer at each look."""

    inference = "local"
    actor_id = "an/actor"
    run_id = "run-1"
    published_version = 0

    def __init__(self, spec: ActorLearnerSpec) -> None:
        self.spec, _ = inspect_environment(spec)
        model: Any = describe_policy_model(spec, self.spec)[0].build()
        self._weights = arrays_of(model)
        self.version = 0

    def received_weights(self, than: int) -> Any:
        self.version += 1
        return self.version, self._weights


@pytest.mark.parametrize("env", [BLINKS, "shoal.libs.games.pursuit:Pursuit"])
def test_an_actor_films_every_second_episode(env: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The game goes on as without films; as many stay as there may be, of the whole time."""
    monkeypatch.setattr(filmed_game, "MAX_SHARE", 1.0)
    monkeypatch.setattr(filmed_game, "MAX_FILMS", 4)
    client = _Client(ActorLearnerSpec(env=env).override(["algorithm=ppo", "hidden=[4]"]))
    plain, filmed = make_environment(env), make_environment(env, draws=True)
    filmed = FilmedGame(filmed, [client], str(tmp_path), 2)  # type: ignore[list-item]
    for episode in range(11):
        shown, wanted = filmed.reset(seed=episode)[0], plain.reset(seed=episode)[0]
        np.testing.assert_equal(shown, wanted)
        ended = False
        while not ended:
            action = dict.fromkeys(shown, 1) if isinstance(shown, dict) else 1
            result, other = filmed.step(action), plain.step(action)
            np.testing.assert_equal(result, other)
            ended = all(result[2].values()) or all(result[3].values()) if isinstance(shown, dict) else result[2]
    films = sorted(tmp_path.iterdir())
    assert [each.name.split("-")[1] for each in films] == ["e000001", "e000005", "e000009"]
    assert all(each.name.endswith("-an-actor.webp") for each in films)
    assert films[0].name.startswith("v0000")
    pictures, _ = read_film(films[0])
    assert len(pictures) > 10


def test_films_of_an_actor_take_a_share_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client(ActorLearnerSpec(env=BLINKS).override(["algorithm=ppo", "hidden=[4]"]))
    now = [100.0]
    monkeypatch.setattr(filmed_game.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(filmed_game, "write_film", lambda path, _: path.touch() or now.__setitem__(0, now[0] + 2.0))
    game = FilmedGame(Blinks("rgb_array"), [client], str(tmp_path), 1)  # type: ignore[list-item]
    for _ in range(4):
        game.reset()
        for _ in range(LENGTH):
            game.step(1)
        now[0] += 2.9
    assert len(list(tmp_path.iterdir())) == 2, "after two seconds for a film it rests for six"


def test_a_full_disk_ends_the_films_and_not_the_game(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(path: Path, episodes: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(filmed_game, "write_film", write)
    client = _Client(ActorLearnerSpec(env=BLINKS).override(["algorithm=ppo", "hidden=[4]"]))
    game = FilmedGame(Blinks("rgb_array"), [client], str(tmp_path), 1)  # type: ignore[list-item]
    for _ in range(2):
        game.reset()
        assert [game.step(1)[2] for _ in range(LENGTH)][-1]
    (warned,) = [each.getMessage() for each in caplog.records]
    assert "No space left" in warned


def test_an_actor_that_starts_again_thins_out_its_earlier_films(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filmed_game, "MAX_FILMS", 4)
    monkeypatch.setattr(filmed_game, "write_film", lambda path, _: path.touch())
    earlier = [f"v000000-e{number:06d}-r-1.5-an-actor.webp" for number in range(4)]
    others = ["v000000-e000000-r1-other-an-actor.webp", "notes.txt"]
    for name in earlier + others:
        (tmp_path / name).touch()
    client = _Client(ActorLearnerSpec(env=BLINKS).override(["algorithm=ppo", "hidden=[4]"]))
    game = FilmedGame(Blinks(), [client], str(tmp_path), 1)  # type: ignore[list-item]
    game.reset()
    for _ in range(LENGTH):
        game.step(1)
    left = {each.name for each in tmp_path.iterdir()}
    assert left > {earlier[0], earlier[2], *others}
    assert len(left) == 5
    assert game._every == 2


def test_a_run_films_the_first_of_its_actors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shoal.flows import actor_processes

    started = list[list[str]]()
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: started.append(command))
    actor_processes.ActorProcesses(tmp_path, {}).start(2, "tcp://127.0.0.1:1", BLINKS, record_every=50)
    assert started[0][-4:] == ["--record", str(tmp_path / "films"), "--record-every", "50"]
    assert "--record" not in started[1]


def test_a_run_whose_films_nothing_could_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shoal.libs.films.filmed_game", None)
    with pytest.raises(ConfigError, match="record"):
        check(ActorLearnerSpec(env="CartPole-v1", record_every=50))


def test_policies_of_films_are_those_of_actors() -> None:
    """The wrapper computes what the actor's policy computes."""
    client = _Client(ActorLearnerSpec(env=BLINKS).override(["algorithm=ppo", "hidden=[4]"]))
    thoughts = filmed_game._Thoughts(client)  # type: ignore[arg-type]
    thoughts.reset()
    policy = make_policy(client.spec.policy)
    policy.load(1, client._weights)
    observation = np.array([0.1, 0.5, 1], np.float32)
    _, log_probability = policy.act(observation)
    found = thoughts.find(observation, None)["probabilities"]
    assert np.isclose(found, np.exp(log_probability)).any()


def test_an_episode_without_end_is_filmed_as_far_as_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.libs.films.episode.MAX_STEPS", 10)
    client = _Client(ActorLearnerSpec(env=BLINKS).override(["algorithm=ppo", "hidden=[4]"]))
    game = FilmedGame(Blinks(), [client], str(tmp_path), 1)  # type: ignore[list-item]
    game.reset()
    for _ in range(30):
        game.step(1)
    (film,) = tmp_path.iterdir()
    assert "-r10-" in film.name
    player = LocalPlayer(
        LocalModel(find_version(register_random(BLINKS, "algorithm=ppo", "hidden=[8]") and "game")), "best"
    )
    played = PlayedGame(BLINKS, Blinks(), player).play(0, 0, 50)
    assert played.num_steps == LENGTH
    assert (played.outcome, played.film.num_steps, played.film.outcome) == ("terminated", 10, "")


def test_an_actor_with_record_plays_a_filmed_game(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shoal.actor import __main__ as program

    played = list[Any]()

    class Connected:
        inference, actor_id = "local", "a"

        def __init__(self, *arguments: Any, **options: Any) -> None:
            played.append(self)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setenv("SHOAL_TOKEN", "secret")
    monkeypatch.setattr(program, "ActorClient", Connected)
    monkeypatch.setattr(program, "play", lambda environments, *_, **__: played.extend(environments))
    words = ["--connect", "tcp://127.0.0.1:1", "--env", BLINKS, "--envs", "2"]
    assert program.main([*words, "--record", str(tmp_path), "--record-every", "7"]) == 0
    client, filmed, other = played
    assert isinstance(filmed, FilmedGame)
    assert (filmed._folder, filmed._every, filmed._client) == (str(tmp_path), 7, client)
    assert (filmed.render_mode, other.render_mode) == ("rgb_array", None)
    assert program.main([*words, "--record", "--record-every", "0"]) == 0
    assert not isinstance(played[-1], FilmedGame), "further processes of an actor take no films"
