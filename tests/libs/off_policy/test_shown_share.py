"""A share of each sample is of what others have shown, from a replay of its own."""

from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
import torch

import shoal
from rl_setting import EXPERIENCE, TOKEN, random_batch, segment
from shoal.actor import ActorClient
from shoal.errors import InvalidSegment
from shoal.rl.algorithms.algorithm import NonFiniteLoss, make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, add_core, experience_spec
from shoal.wire import ExperienceSpec, Segment

SIZE, REWARD = 5, 77.0  # of the shown steps alone


class FakeShown:
    """Demonstrations that came without a gateway."""

    def __init__(self, share: float, *segments: Segment) -> None:
        self.share = share
        self.generation = 1
        self._segments = segments
        self.offline_steps, self.left_out = 0, list[Segment]()

    def leave_out(self, segments: list[Segment]) -> None:
        self.left_out += segments

    def take_offline_steps(self) -> int:
        return self.offline_steps

    def get_segments(self) -> tuple[Segment, ...]:
        return self._segments


def make_case(name: str) -> tuple[RLSpec, ExperienceSpec, dict[str, Any]]:
    """A spec, its experience, and what its segments have beyond observations and rewards."""
    algorithm = {"name": name, "replay_mb": 0.2, "batch_size": 8, "learning_starts": 8}
    if name == "sac":
        spec = RLSpec(hidden=(8,), algorithm=algorithm)  # type: ignore[arg-type]
        box = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        experience = experience_spec(gymnasium.spaces.Box(-10, 10, (4,), np.float32), box, spec)
        return spec, experience, {"actions": np.zeros((8, 2), np.float32)}
    if name == "dqn":
        return RLSpec(hidden=(8,), algorithm=algorithm), EXPERIENCE, {}  # type: ignore[arg-type]
    sequences = {"sequence_length": 4, "burn_in": 2, "num_steps": 3}
    spec = RLSpec(hidden=(8, 6), core="gru", core_size=SIZE, algorithm=algorithm | sequences)  # type: ignore[arg-type]
    policy, extras = add_core(spec.algorithm.describe_policy(spec.hidden), spec)  # type: ignore[arg-type]
    experience = msgspec.structs.replace(EXPERIENCE, policy=policy, extras=extras)
    return spec, experience, {"extras": {"state": np.ones((1, SIZE), np.float32)}}


@pytest.mark.parametrize("name", ["dqn", "r2d2", "sac"])
def test_a_quarter_of_a_sample_was_shown_and_has_priorities_of_its_own(name: str) -> None:
    torch.manual_seed(0)
    spec, experience, fields = make_case(name)
    algorithm: Any = make_algorithm(spec.override(["normalize_rewards=false"]), experience)
    algorithm.demonstrations = FakeShown(
        0.25, segment(behaviour="human", rewards=np.full(8, REWARD, np.float32), **fields)
    )
    assert algorithm.clone_demonstrations() is False
    algorithm.insert(random_batch(1, [8], **fields), algorithm._replay)
    arrays = algorithm.draw()[1].arrays
    returns = arrays["returns"] if "returns" in arrays else arrays["rewards"][:, 0]
    assert (np.abs(returns) > 50).tolist() == [False] * 6 + [True] * 2
    assert (algorithm.draw()[0] >= 0).tolist() == [True] * 6 + [False] * 2
    before = algorithm._shown._tree.total
    for seed in (2, 3):  # the errors of the first are those of the insertion
        *_, metrics = algorithm.update(random_batch(seed, [8], **fields))
    assert metrics["learner/demonstration_share"] == 0.25
    if name != "sac":  # which draws uniformly
        assert algorithm._shown._tree.total != before
    algorithm.demonstrations.generation, algorithm.demonstrations._segments = 2, ()  # all were dropped
    algorithm.clone_demonstrations()
    *_, metrics = algorithm.update(random_batch(4, [8], **fields))
    assert "learner/demonstration_share" not in metrics


@pytest.mark.parametrize("name", ["dqn", "r2d2", "sac"])
def test_it_learns_from_what_was_shown_alone_before_any_game_has_played(name: str) -> None:
    torch.manual_seed(0)
    spec, experience, fields = make_case(name)
    algorithm: Any = make_algorithm(spec, experience)
    algorithm.demonstrations = FakeShown(0.25, segment(behaviour="human", **fields))
    algorithm.demonstrations.offline_steps = 3
    before = [each.detach().clone() for each in algorithm.model.parameters()]
    assert algorithm.clone_demonstrations() is True
    assert any(not torch.equal(*each) for each in zip(before, algorithm.model.parameters(), strict=True))
    assert algorithm._replay.num_steps == 0
    algorithm.demonstrations.offline_steps = 0
    assert algorithm.clone_demonstrations() is False
    arrays = {"rewards": np.full(8, 77.0, np.float32)}
    algorithm.insert(random_batch(1, [8], **fields, **arrays), algorithm._replay)  # and then draws from both again
    algorithm.draw()


# -- what is not finite -----------------------------------------------------------------------------------------------


def spoil(place: int | None, **fields: Any) -> ExperienceBatch:
    """A segment within float32, one of whose numbers is huge: an observation, or with -1 what the end is valued by.

    None: its rewards are.
    """
    if place is None:
        return random_batch(1, [8], **fields, rewards=np.full(8, 3e38, np.float32))
    batch = random_batch(1, [8], [False], **fields)
    batch.observations[place] = 1e30
    return batch


@pytest.mark.parametrize(("name", "place"), [*product(["dqn", "sac"], [0, 3, -1, None]), ("r2d2", None)])
def test_a_segment_whose_loss_or_gradient_is_not_finite_is_not_inserted(name: str, place: int | None) -> None:
    torch.manual_seed(0)
    spec, experience, fields = make_case(name)
    algorithm: Any = make_algorithm(spec, experience)
    before = [each.detach().clone() for each in algorithm.model.parameters()]
    bad = spoil(place, **fields)
    with pytest.raises(NonFiniteLoss):
        list(algorithm.update(bad))
    assert not algorithm.is_usable(bad)
    assert algorithm._replay.num_steps == 0
    assert algorithm.is_usable(random_batch(2, [8], **fields))
    assert all(torch.equal(*each) for each in zip(before, algorithm.model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["dqn", "r2d2", "sac"])
def test_what_is_not_finite_any_more_leaves_the_replay_and_the_others_are_learnt(name: str) -> None:
    torch.manual_seed(0)
    spec, experience, fields = make_case(name)
    algorithm: Any = make_algorithm(spec, experience)
    algorithm.insert(random_batch(1, [8], **fields), algorithm._replay)
    num_drawable = algorithm._replay.num_drawable
    stored = algorithm._replay._arrays["rewards"]
    stored[0] = 3e38
    steps = [algorithm.take_step() for _ in range(20)]
    assert {} in steps
    assert all(np.isfinite(list(each.values())).all() for each in steps)
    assert algorithm._replay.num_drawable < num_drawable
    assert steps[-1]
    assert all(each.isfinite().all() for each in algorithm.model.parameters())


def test_weights_that_have_overflowed_stay_and_empty_the_replay() -> None:
    """What comes then is not usable either, and ends the run."""
    spec, experience, _ = make_case("dqn")
    algorithm: Any = make_algorithm(spec, experience)
    list(algorithm.update(random_batch(1, [8])))
    with torch.no_grad():
        algorithm._parameters.fill_(1e38)
    while algorithm._replay.num_drawable:
        assert algorithm.take_step() == {}
    assert (algorithm._parameters == 1e38).all()
    assert not algorithm.is_usable(random_batch(2, [8]))


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_of_what_was_shown_the_good_is_learnt_from(name: str) -> None:
    spec, experience, fields = make_case(name)
    algorithm: Any = make_algorithm(spec, experience)
    bad = segment(behaviour="human", **fields, observations=spoil(3, **fields).observations)
    good = segment(behaviour="human", **fields)
    algorithm.demonstrations = FakeShown(0.25, good, bad, good)
    algorithm.clone_demonstrations()
    assert algorithm._shown.num_steps == 16
    assert algorithm.demonstrations.left_out == [bad]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the policy in the bad game
@pytest.mark.parametrize("name", ["impala", "ppo", "dqn", "r2d2", "sac"])
def test_a_game_of_bad_numbers_does_not_end_the_run_of_the_others(name: str, tmp_path: Path) -> None:
    """Also in a run whose networks have no layer that saturates."""
    settings = {"normalize_observations": True, "learner": {"batch_steps": 16, "take_timeout_s": 0.1}}
    replayed = {} if name in ("impala", "ppo") else {"learning_starts": 8, "batch_size": 8}
    action = {"shape": [1], "low": -1, "high": 1} if name == "sac" else 2
    spec = RLSpec.model_validate(
        {"env": {"observation": [2], "action": action}, "algorithm": {"name": name, **replayed}, "segment_length": 8}
        | {"hidden": [8], "core_size": SIZE, **settings}
    )
    with (
        LocalLoop.open(spec, tmp_path / "run", TOKEN) as loop,
        shoal.connect(loop.address, token=TOKEN, actor_id="good", timeout_s=60) as good,
    ):

        def play(actor: ActorClient, seen: Any = 1.0, reward: Any = 1.0) -> None:
            for value in (1.0, seen, 1.0):
                actor.act(np.asarray([value, 1.0], None if isinstance(value, str) else np.float32))
                actor.reward(reward)
            actor.end_episode(np.float32([0, 0]))

        sent = [
            *({"seen": each} for each in (np.nan, np.inf, 1e30, None, "far")),
            *({"reward": each} for each in (np.nan, 1e30, None, "far")),
        ]
        for number, spoilt in enumerate(sent):
            with (
                shoal.connect(loop.address, token=TOKEN, actor_id=f"bad-{number}", timeout_s=60) as bad,
                suppress(InvalidSegment, TypeError, ValueError),
            ):
                play(bad, **spoilt)
            before, updates = loop.learner.counts["consumed"], loop.learner.updates
            while loop.learner.counts["consumed"] < before + 8 or loop.learner.updates == updates:
                play(good)
                assert loop.learner.error is None
        stats = loop.gateway.stats()
        blamed = {each["actor_id"]: dict(each["invalid"]) for each in stats["actors"] if each["invalid"]}
        assert "bad-6" in blamed  # the clients of the others send no NaN, infinity, null or text
        assert "good" not in blamed
        # In the others' networks it saturates; of a replay it is found if the step that brings it draws it.
        assert "bad-2" not in blamed or name in ("dqn", "sac")
        assert loop.learner.algorithm.normalizer.state_dict()["observations"]["mean"].abs().max() < 100
