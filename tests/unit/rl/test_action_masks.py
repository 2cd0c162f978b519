"""Action masks: what actors sample, what the learner makes of it, and what is refused for which reason."""

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from registered import arrays_of
from rl_setting import segment
from shoal.actor.environment import make_environment
from shoal.actor.policy import make_policy
from shoal.errors import ConfigError, InvalidSegment
from shoal.flows.rl_policy import describe_policy_model, inspect_environment
from shoal.libs.games.tictactoe import TicTacToe
from shoal.models.action_distribution import mask_logits
from shoal.plugins.find import load_reference
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.algorithms.segments import to_tensors
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec, MessageLimits, Segment, decode, pack_segment, unpack_segment
from shoal.wire.action_masks import MASKS, find_choices, read_mask

FLAT = Box(-2, 2, (4,), np.float32)
SPACES = {"choices": Discrete(5), "several": MultiDiscrete([2, 3])}  # both with masks of 5
MASK = np.array([0, 1, 0, 1, 1], np.bool_)
WORDS = ["algorithm.learning_starts=1", "algorithm.batch_size=8", "algorithm.samples_per_insert=1"]


def make_run(name: str, space: str = "choices", core: str | None = None) -> tuple[RLSpec, ExperienceSpec, Any]:
    spec = RLSpec(segment_length=8, hidden=(8,), core=core)  # type: ignore[arg-type]
    spec = spec.override([f"algorithm={name}", *(WORDS if name == "dqn" else [])])
    experience = experience_spec(FLAT, SPACES[space], spec, has_masks=True)
    torch.manual_seed(0)
    algorithm = make_algorithm(spec, experience)
    with torch.no_grad():
        for each in algorithm.model.parameters():
            each.add_(torch.randn_like(each))
    return spec, experience, algorithm


def make_segment(experience: ExperienceSpec, algorithm: Any, seed: int = 0) -> tuple[Segment, Any]:
    """Eight steps, each with a mask at random, as an actor plays them; and the actor's policy."""
    random = np.random.default_rng(seed)
    policy = make_policy(experience.policy, seed, action_shape=experience.action.shape)
    policy.load(1, arrays_of(algorithm.model))
    masks = random.random((9, 5)) < 0.6
    masks[:, 1] = masks[:, 4] = True  # at least one choice of each number
    observations = random.uniform(-2, 2, (9, 4)).astype(np.float32)
    played = [policy.act(each, mask=mask) for each, mask in zip(observations[:8], masks, strict=False)]
    actions = np.array([action for action, _ in played])
    log_probabilities = np.array([each for _, each in played], np.float32)
    made = segment(8, observations=observations, actions=actions, log_probabilities=log_probabilities)
    return replace(made, extras={MASKS: masks}), policy


def receive(sent: Segment, experience: ExperienceSpec) -> Segment:
    frames = pack_segment(sent, 0)
    return unpack_segment(decode(frames, MessageLimits()), frames[1:], experience)  # type: ignore[arg-type]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", ["impala", "ppo"])
def test_the_learner_finds_the_log_probability_that_the_actor_sent(name: str, space: str) -> None:
    """Over many draws: each is allowed, each allowed choice is drawn, and none of the ratios differs from 1."""
    _, experience, algorithm = make_run(name, space)
    for seed in range(20):
        sent, _ = make_segment(experience, algorithm, seed)
        batch = to_tensors(ExperienceBatch.from_segments(1, [receive(sent, experience)]))
        assert batch.masks is not None
        with torch.no_grad():
            outputs = mask_logits(algorithm.model(batch.observations)[0], batch.masks)
        log_pi, _ = algorithm.model.distribution.evaluate(outputs[:8], batch.actions)
        np.testing.assert_allclose(log_pi, batch.log_probabilities, atol=1e-4)


@pytest.mark.parametrize("name", ["impala", "ppo", "dqn"])
def test_each_allowed_action_is_sampled_and_no_other(name: str) -> None:
    _, experience, algorithm = make_run(name)
    _, policy = make_segment(experience, algorithm)
    policy._base = 0.5
    with np.errstate(all="raise"):
        drawn = [policy.act(np.full(4, 0.1, np.float32), mask=MASK) for _ in range(300)]
    counts = np.bincount([action for action, _ in drawn], minlength=5)
    assert not counts[~MASK].any()
    assert (counts[MASK] > 0).all()
    probabilities = {action: np.exp(log_probability) for action, log_probability in drawn}
    assert sum(probabilities.values()) == pytest.approx(1)


def test_the_entropy_is_that_of_the_allowed_actions_and_no_gradient_reaches_the_others() -> None:
    _, _, algorithm = make_run("impala")
    logits = torch.randn(2, 5, requires_grad=True)
    masks = torch.from_numpy(np.stack([MASK, np.eye(5, dtype=np.bool_)[3]]))
    log_pi, entropies = algorithm.model.distribution.evaluate(mask_logits(logits, masks), torch.tensor([1, 3]))
    allowed = torch.softmax(logits[0, MASK], -1).detach().numpy()
    np.testing.assert_allclose(entropies.detach(), [-(allowed * np.log(allowed)).sum(), 0.0], atol=1e-6)
    np.testing.assert_allclose(log_pi.detach(), [np.log(allowed[0]), 0.0], atol=1e-6)
    (log_pi.sum() + entropies.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[~masks].any()


@pytest.mark.parametrize("name", ["impala", "ppo", "dqn"])
def test_a_batch_with_masks_is_learned_from(name: str) -> None:
    _, experience, algorithm = make_run(name)
    sent, _ = make_segment(experience, algorithm)
    ended = replace(sent, terminated=True, episode_return=8.0, episode_length=8)
    ended = replace(ended, extras={MASKS: sent.extras[MASKS] & (np.arange(9) < 8)[:, None]})  # none after the end
    batch = ExperienceBatch.from_segments(1, [receive(each, experience) for each in (sent, ended)])
    assert algorithm.is_usable(batch)
    for metrics in algorithm.update(batch):
        assert np.isfinite(list(metrics.values())).all()


def test_the_target_of_dqn_values_an_allowed_action() -> None:
    """Of one number that no mask allows the value is huge: no target has it."""
    _, experience, algorithm = make_run("dqn")
    with torch.no_grad():
        for each in (algorithm.model, algorithm._target):
            each.advantage[-1].bias[0] = 1e6
    sent, _ = make_segment(experience, algorithm)
    masks = sent.extras[MASKS].copy()
    masks[:, 0] = False
    batch = ExperienceBatch.from_segments(1, [replace(sent, actions=np.full(8, 4), extras={MASKS: masks})])
    free = ExperienceBatch.from_segments(1, [replace(sent, actions=np.full(8, 4), extras={MASKS: masks | True})])
    masked, unmasked = (np.abs(algorithm.learn(algorithm.make_trial(each), is_trial=True)[1]) for each in (batch, free))
    assert masked.max() < 1e5 < unmasked.max()
    algorithm._replay.insert(batch)
    sample = algorithm._replay.sample(16, 1, 0.9, 0.0)
    np.testing.assert_array_equal(sample.next_masks, masks[sample.rows + 1])
    assert not sample.next_masks[:, 0].any()
    q = algorithm.model(torch.from_numpy(sample.next_observations))
    chosen = mask_logits(q, torch.from_numpy(sample.next_masks)).argmax(-1)
    expected = (
        sample.returns
        + sample.discounts
        * algorithm._target(torch.from_numpy(sample.next_observations))[torch.arange(16), chosen].detach().numpy()
    )
    np.testing.assert_allclose(algorithm._compute_targets(sample), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (np.ones(4, np.int8), "invalid_shape"),
        (np.ones(5), "invalid_dtype"),
        (np.full(5, 2), "invalid_range"),
        (np.zeros(5, np.int8), "invalid_range"),
        (np.array([1, 1, 0, 0, 0], np.int8), "invalid_range"),  # none for the second number
        ("all", "invalid_dtype"),
    ],
)
def test_an_actor_refuses_a_mask_by_reason(mask: Any, reason: str) -> None:
    with pytest.raises(InvalidSegment) as caught:
        read_mask(mask, (2, 3))
    assert caught.value.reason == reason


def test_a_mask_of_a_dict_observation_moves_to_info() -> None:
    environment = make_environment("shoal.libs.games:TicTacToe-v0")
    assert environment.observation_space == Box(0, 1, (18,), np.uint8)
    observation, info = environment.reset(seed=1)
    assert observation.shape == (18,)
    assert info["action_mask"].sum() in (8, 9)
    _, _, _, _, info = environment.step(int(np.flatnonzero(info["action_mask"])[0]))
    assert info["action_mask"].sum() in (6, 7)
    experience, _ = inspect_environment(RLSpec(env="shoal.libs.games:TicTacToe-v0"))
    assert find_choices(experience) == (9,)


def test_the_mask_beside_several_parts_leaves_a_flat_box_of_them() -> None:
    class Parts(TicTacToe):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = Dict({**self.observation_space.spaces, "turn": Discrete(2)})

        def _observe(self) -> dict[str, Any]:
            return {**super()._observe(), "turn": 1}

    gymnasium.register("MaskedParts-v0", Parts)
    assert make_environment("MaskedParts-v0").reset(seed=0)[0].shape == (20,)


def test_masks_in_info_are_found_where_the_run_is_checked() -> None:
    experience, _ = inspect_environment(RLSpec(env="Taxi-v4"))
    assert find_choices(experience) == (6,)
    assert find_choices(inspect_environment(RLSpec())[0]) == ()


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_continuous_actions_take_no_masks(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"masks are for choices, not for continuous actions.*every algorithm but sac"
    ):
        experience_spec(FLAT, Box(-1, 1, (2,)), RLSpec(algorithm=name), has_masks=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "space"), [("ppo", "choices"), ("dqn", "choices"), ("impala", "several")])
def test_an_endpoint_takes_masks(name: str, space: str) -> None:
    spec, experience, algorithm = make_run(name, space)
    _, signature = describe_policy_model(spec, experience)
    assert [(each.name, each.datatype, each.shape) for each in signature.inputs][1:] == [
        ("action_mask", "BOOL", [-1, 5])
    ]
    observations, masks = torch.randn(64, 4), torch.rand(64, 5) < 0.5
    masks[:, 1] = masks[:, 4] = True
    answers = algorithm.model.predict(observations, masks)
    chosen = answers["action"].reshape(64, -1) + torch.tensor([0, 2] if space == "several" else [0])
    assert masks.gather(1, chosen).all()
    assert load_reference(spec.algorithm.model_factory) is type(algorithm.model)


@pytest.mark.parametrize("name", ["impala", "ppo", "r2d2"])
def test_an_endpoint_of_a_policy_that_remembers_takes_states_and_masks(name: str) -> None:
    spec, experience, algorithm = make_run(name, core="gru")
    _, signature = describe_policy_model(spec, experience)
    assert [each.name for each in signature.inputs] == ["observation", "state", "action_mask"]
    masks = torch.rand(64, 5) < 0.5
    masks[:, 1] = True
    inputs = {"observation": torch.randn(64, 4), "state": torch.randn(64, 64), "action_mask": masks}
    answers = algorithm.model.predict(**inputs)
    assert answers.keys() == {each.name for each in signature.outputs}
    assert masks.gather(1, answers["action"][:, None]).all()
    free = algorithm.model.predict(**{**inputs, "action_mask": masks | True})
    torch.testing.assert_close(answers["next_state"], free["next_state"])
    assert (answers["action"] != free["action"]).any()
