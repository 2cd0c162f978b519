"""R2D2's rescaling, targets, loss, priorities and sequences against NumPy oracles from the paper, and its updates."""

from pathlib import Path

import gymnasium
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from registered import arrays_of
from rl_setting import EXPERIENCE, random_batch
from shoal.actor.policy import make_policy
from shoal.errors import ConfigError
from shoal.libs.off_policy.r2d2 import R2D2, invert_rescaling, mix_errors, r2d2_loss, rescale
from shoal.libs.off_policy.sequence_replay import SequenceReplay, SequenceShape, find_starts, split_segments
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, add_core, experience_spec
from shoal.wire.action_masks import describe_masks

TOLERANCE = {"rtol": 5e-4, "atol": 5e-5}
EPSILON, SIZE = 1e-3, 5
NUM_ACTIONS = 2


def make_batch(seed: int, lengths: list[int], terminated: list[bool] | None = None) -> ExperienceBatch:
    states = np.random.default_rng(seed).uniform(-1, 1, (len(lengths), SIZE)).astype(np.float32)
    batch = random_batch(seed, lengths, terminated, extras={"state": states})
    batch.rewards[:] *= 3
    return batch


def add_masks(batch: ExperienceBatch) -> ExperienceBatch:
    """The batch with masks at random that allow one action at least, or none where an episode has terminated."""
    random, num_rows = np.random.default_rng(9), len(batch.observations)
    masks = np.eye(NUM_ACTIONS, dtype=np.bool_)[random.integers(0, NUM_ACTIONS, num_rows)]
    masks |= random.random((num_rows, NUM_ACTIONS)) < 0.2
    masks[(np.cumsum(batch.lengths + 1) - 1)[batch.terminated]] = False
    return ExperienceBatch(**{**vars(batch), "extras": {**batch.extras, "masks": masks}})


def make_r2d2(folder: Path | None = None, core: str = "gru", has_masks: bool = False, **fields: object) -> R2D2:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    algorithm = {"name": "r2d2", "replay_mb": 0.2, "sequence_length": 4, "burn_in": 2, "num_steps": 3, **fields}
    spec = RLSpec(hidden=(8, 6), core=core, core_size=SIZE, algorithm=algorithm)  # type: ignore[arg-type]
    policy, extras = add_core(spec.algorithm.describe_policy(spec.hidden), spec)  # type: ignore[arg-type]
    extras += (describe_masks(EXPERIENCE.action, ()),) if has_masks else ()
    experience = msgspec.structs.replace(EXPERIENCE, policy=policy, extras=extras)
    made = make_algorithm(spec, experience, folder)
    assert isinstance(made, R2D2)
    return made


# -- an oracle in NumPy: one step after the other ---------------------------------------------------------------------


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def advance(weights: dict[str, np.ndarray], observation: np.ndarray, h: np.ndarray) -> np.ndarray:
    """One step of a GRU (torch.nn.GRU's documentation), after the layer before it."""
    x = np.maximum(weights["trunk.0.weight"] @ observation + weights["trunk.0.bias"], 0)
    from_x = weights["core.rnn.weight_ih_l0"] @ x + weights["core.rnn.bias_ih_l0"]
    from_h = weights["core.rnn.weight_hh_l0"] @ h + weights["core.rnn.bias_hh_l0"]
    r = sigmoid(from_x[:SIZE] + from_h[:SIZE])
    z = sigmoid(from_x[SIZE : 2 * SIZE] + from_h[SIZE : 2 * SIZE])
    n = np.tanh(from_x[2 * SIZE :] + r * from_h[2 * SIZE :])
    return (1 - z) * n + z * h


def compute_q(weights: dict[str, np.ndarray], h: np.ndarray) -> np.ndarray:
    found = []
    for stream in ("value", "advantage"):
        hidden = np.maximum(weights[f"head.{stream}.0.weight"] @ h + weights[f"head.{stream}.0.bias"], 0)
        found.append(weights[f"head.{stream}.2.weight"] @ hidden + weights[f"head.{stream}.2.bias"])
    value, advantages = found
    return value + advantages - advantages.mean()


def unroll(weights: dict[str, np.ndarray], observations: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, ...]:
    """(values [T, A], states before each observation [T, S])."""
    values, states = [], []
    for observation in observations:
        states.append(state)
        state = advance(weights, observation, state)
        values.append(compute_q(weights, state))
    return np.array(values), np.array(states)


def h(x: float) -> float:
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + EPSILON * x


def h_inverse(x: float) -> float:
    return np.sign(x) * (((np.sqrt(1 + 4 * EPSILON * (abs(x) + 1 + EPSILON)) - 1) / (2 * EPSILON)) ** 2 - 1)


def expected_errors(r2d2: R2D2, batch: ExperienceBatch) -> list[np.ndarray]:
    """Of each sequence, in the order of the segments: the rescaled n-step double errors of its steps."""
    config, found = r2d2._config, []
    online, target = (
        {name: tensor.double().numpy() for name, tensor in network.state_dict().items()}
        for network in (r2d2.model, r2d2._target)
    )
    row = step = 0
    for number, length in enumerate(batch.lengths.tolist()):
        observations = batch.observations[row : row + length + 1].astype(np.float64)
        rewards, actions = batch.rewards[step : step + length], batch.actions[step : step + length]
        q, states = unroll(online, observations, batch.extras["state"][number].astype(np.float64))
        allowed = batch.extras.get("masks", np.ones((row + length + 1, NUM_ACTIONS), np.bool_))[row : row + length + 1]
        for first in range(0, length, config.sequence_length):
            begin = max(0, first - config.burn_in)
            target_q = np.full_like(q, np.nan)
            target_q[begin:], _ = unroll(target, observations[begin:], states[begin])
            errors = []
            for t in range(first, min(first + config.sequence_length, length)):
                end = min(t + config.num_steps, length)
                total = sum(config.discount ** (k - t) * float(rewards[k]) for k in range(t, end))
                if not (batch.terminated[number] and end == length):
                    best = np.where(allowed[end], q[end], -np.inf).argmax()
                    total += config.discount ** (end - t) * h_inverse(target_q[end, best])
                errors.append(h(total) - q[t, actions[t]])
            found.append(np.array(errors))
        row, step = row + length + 1, step + length
    return found


def perturb_target(r2d2: R2D2) -> None:
    with torch.no_grad():
        r2d2._target_parameters.add_(0.3 * torch.randn(r2d2._target_parameters.shape))


def list_errors(r2d2: R2D2, batch: ExperienceBatch) -> list[np.ndarray]:
    """The same as `expected_errors`, by the learner."""
    sequences, starts = r2d2._split(batch), find_starts(batch.lengths, r2d2._shape)
    with torch.no_grad():
        errors = r2d2._evaluate(sequences, torch.ones(1)).losses.errors.numpy()
    order = np.lexsort((starts.first_steps, starts.segments))
    return [errors[k, : sequences.num_trained[k]] for k in order]


# -- pure functions ---------------------------------------------------------------------------------------------------


@given(st.floats(-1e4, 1e4))
def test_the_inverse_undoes_the_rescaling(x: float) -> None:
    value = torch.tensor(x, dtype=torch.float64)
    assert rescale(value, EPSILON).item() == pytest.approx(h(x), rel=1e-12, abs=1e-12)
    assert invert_rescaling(rescale(value, EPSILON), EPSILON).item() == pytest.approx(x, rel=1e-8, abs=1e-8)
    single = torch.tensor(x, dtype=torch.float32)  # rounding of h(x) in float32 is all that is lost
    assert invert_rescaling(rescale(single, EPSILON), EPSILON).item() == pytest.approx(x, rel=1e-5, abs=1e-6)


def test_the_loss_is_half_the_weighted_squared_error_of_the_trained_steps() -> None:
    random = np.random.default_rng(4)
    q = torch.from_numpy(random.normal(size=(6, 5, 3))).requires_grad_()
    targets = random.normal(size=(6, 5))
    weights = random.random(6)
    num_trained = np.array([5, 1, 3, 5, 2, 4])
    actions = random.integers(0, 3, (6, 5))
    losses = r2d2_loss(q, *(torch.from_numpy(each) for each in (actions, targets, num_trained, weights)))
    total, gradient = 0.0, np.zeros((6, 5, 3))
    for b in range(6):
        for t in range(num_trained[b]):
            error = targets[b, t] - q[b, t, actions[b, t]].item()
            assert losses.errors[b, t].item() == pytest.approx(error, rel=1e-12)
            total += weights[b] * error**2 / 2 / 20
            gradient[b, t, actions[b, t]] = -weights[b] * error / 20
        assert not losses.errors[b, num_trained[b] :].any()
    assert losses.total.item() == pytest.approx(total, rel=1e-12)
    losses.total.backward()  # type: ignore[no-untyped-call]
    assert q.grad is not None
    np.testing.assert_allclose(q.grad.numpy(), gradient, rtol=1e-12)


def test_priorities_mix_the_largest_and_the_mean_error() -> None:
    errors = torch.tensor([[1.0, -3.0, 0.0], [-2.0, 0.0, 0.0]])
    np.testing.assert_allclose(
        mix_errors(errors, torch.tensor([3, 1]), 0.9), [0.9 * 3 + 0.1 * 4 / 3, 0.9 * 2 + 0.1 * 2], rtol=1e-6
    )


# -- sequences --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 23), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 6), st.integers(1, 5))
def test_sequences_train_each_step_once_and_overlap_by_the_burn_in(
    lengths: list[int], sequence_length: int, burn_in: int, num_steps: int
) -> None:
    shape = SequenceShape(sequence_length, min(burn_in, sequence_length), num_steps)
    batch, starts = make_batch(1, lengths), find_starts(np.array(lengths), shape)
    sequences = split_segments(batch, starts, np.zeros((len(starts.segments), SIZE), np.float32), shape)
    row_offsets = np.cumsum([0, *(length + 1 for length in lengths)])
    step_offsets = np.cumsum([0, *lengths])
    trained = []
    for k, (segment, first) in enumerate(zip(starts.segments, starts.first_steps, strict=True)):
        length, count = lengths[segment], sequences.num_steps[k]
        trained += [(segment, t) for t in range(first, first + sequences.num_trained[k])]
        begin = first - shape.burn_in if sequences.has_burn_in[k] else first
        assert starts.state_rows[k] == begin == (max(first - shape.burn_in, 0) if first else 0)
        rows = sequences.observations[k, shape.burn_in - (first - begin) : shape.burn_in + count + 1]
        expected = batch.observations[row_offsets[segment] + begin : row_offsets[segment] + first + count + 1]
        np.testing.assert_array_equal(rows, expected)
        steps = slice(step_offsets[segment] + first, step_offsets[segment] + first + count)
        np.testing.assert_array_equal(sequences.rewards[k, :count], batch.rewards[steps])
        assert not sequences.rewards[k, count:].any()
        num_trained = sequences.num_trained[k]
        np.testing.assert_array_equal(sequences.actions[k, :num_trained], batch.actions[steps][:num_trained])
        # n steps follow every trained one, unless the segment ends before.
        assert count == min(length - first, sequence_length + num_steps - 1)
        assert sequences.terminated[k] == (batch.terminated[segment] and first + count == length)
    assert sorted(trained) == [(segment, t) for segment, length in enumerate(lengths) for t in range(length)]


@pytest.mark.parametrize(("sequence_length", "burn_in"), [(4, 2), (4, 4), (4, 0), (3, 1), (40, 20)])
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("has_masks", [False, True])
def test_errors_are_those_of_an_oracle_that_takes_one_step_after_the_other(
    sequence_length: int, burn_in: int, num_steps: int, has_masks: bool
) -> None:
    fields = {"sequence_length": sequence_length, "burn_in": burn_in, "num_steps": num_steps, "discount": 0.9}
    r2d2 = make_r2d2(replay_mb=1, has_masks=has_masks, **fields)
    perturb_target(r2d2)
    batch = make_batch(5, [6, 1, 15, 4, 12], [True, False, False, True, True])
    batch = add_masks(batch) if has_masks else batch
    found, expected = list_errors(r2d2, batch), expected_errors(r2d2, batch)
    assert [len(each) for each in found] == [len(each) for each in expected]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), **TOLERANCE)


def test_masks_are_stored_with_the_observations_that_follow() -> None:
    """A drawn sequence has the errors that it had when it was inserted."""
    r2d2 = make_r2d2(has_masks=True)
    batch = add_masks(make_batch(5, [16, 7], [False, True]))
    perturb_target(r2d2)
    errors = np.concatenate(expected_errors(r2d2, batch))
    r2d2.insert(batch, r2d2._replay)
    _, sequences, _ = r2d2._replay.sample(200, 0.0)
    with torch.no_grad():
        found = r2d2._evaluate(sequences, torch.ones(1)).losses.errors.numpy()
    for row in found[np.arange(4) < sequences.num_trained[:, None]]:
        assert np.abs(errors - row).min() < 1e-3
    assert np.abs(np.concatenate(list_errors(r2d2, make_batch(5, [16, 7], [False, True]))) - errors).max() > 1e-2


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_the_stored_state_decides_the_errors(core: str) -> None:
    """A learner that starts sequences from zeros, or stores zeros, fails here: the trap of R2D2."""
    r2d2 = make_r2d2(core=core)
    batch = make_batch(5, [16], [False])
    size = SIZE if core == "gru" else 2 * SIZE
    states = np.random.default_rng(1).uniform(-1, 1, (2, 1, size)).astype(np.float32)
    one, other = (ExperienceBatch(**{**vars(batch), "extras": {"state": state}}) for state in states)
    first, second = list_errors(r2d2, one), list_errors(r2d2, other)
    assert np.abs(first[0] - second[0]).min() > 1e-4  # the sequence at the segment's begin, step by step
    assert np.abs(first[1] - second[1]).max() > 1e-4  # and those after it, whose states follow from the stored one
    r2d2.insert(one, r2d2._replay)
    _, sequences, _ = r2d2._replay.sample(200, 0.0)
    is_first = ~sequences.has_burn_in
    assert is_first.any()
    np.testing.assert_array_equal(sequences.states[is_first], np.repeat(states[0], is_first.sum(), 0))
    inner = sequences.states[~is_first]
    assert np.abs(inner).max(1).min() > 1e-3  # never zeros, either


def test_burn_in_has_no_gradient_and_changes_the_state_with_the_weights() -> None:
    r2d2 = make_r2d2(discount=0.0, num_steps=1)
    sequences = r2d2._split(make_batch(2, [8], [False]))
    only_second = type(sequences)(*(each[1:] for each in sequences if each is not None))
    assert only_second.has_burn_in.all()
    before = r2d2._evaluate(only_second, torch.ones(1)).losses.errors
    stored_state = torch.from_numpy(only_second.states)
    with torch.no_grad():
        r2d2._parameters.mul_(1.5)  # newer weights
    fresh = r2d2._evaluate(only_second, torch.ones(1))
    burned = r2d2.model.advance(torch.from_numpy(only_second.observations[:, :2]).transpose(0, 1), stored_state)
    q, _ = r2d2.model(torch.from_numpy(only_second.observations[:, 2:6]).transpose(0, 1), burned)
    np.testing.assert_allclose(fresh.q, q.detach().transpose(0, 1), **TOLERANCE)
    assert not torch.allclose(before, fresh.losses.errors)
    # The gradient is that of a sequence without burn-in which starts from the burned-in state.
    gradients = []
    without = only_second._replace(states=burned.detach().numpy(), has_burn_in=np.zeros(1, np.bool_))
    for each in (only_second, without):
        r2d2._parameters.grad.zero_()  # type: ignore[union-attr]
        r2d2._evaluate(each, torch.ones(1)).losses.total.backward()  # type: ignore[no-untyped-call]
        gradients.append(r2d2._parameters.grad.clone())  # type: ignore[union-attr]
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert gradients[0].abs().max() > 0


# -- the replay and the updates ---------------------------------------------------------------------------------------


def test_new_sequences_replace_the_oldest_and_a_ring_below_a_segment_is_refused() -> None:
    shape, random = SequenceShape(4, 2, 3), np.random.default_rng(0)
    replay = SequenceReplay(EXPERIENCE, shape, SIZE, 4000, 0.9, random)
    for seed in range(12):
        batch = make_batch(seed, [11])
        batch.rewards[:] = seed
        starts = find_starts(batch.lengths, shape)
        states = np.full((3, SIZE), seed, np.float32)
        replay.insert(split_segments(batch, starts, states, shape), np.ones(3))
    assert replay.num_drawable == replay.capacity < 36
    rows, sequences, weights = replay.sample(500, 0.6)
    assert set(rows) == set(range(36 - replay.capacity, 36))
    np.testing.assert_array_equal(sequences.states[:, 0], rows // 3)
    np.testing.assert_array_equal(sequences.rewards[:, 0], rows // 3)
    np.testing.assert_allclose(weights, 1.0)
    assert replay.num_steps == sum(4 if row % 3 < 2 else 3 for row in set(rows.tolist()))
    with pytest.raises(ConfigError, match=r"replay_mb.*a segment takes 4"):
        SequenceReplay(EXPERIENCE, shape, SIZE, 500, 0.9, random)


def test_steps_follow_what_was_inserted_and_priorities_follow_the_errors() -> None:
    r2d2 = make_r2d2(learning_starts=30, batch_size=2, samples_per_insert=2.0)
    assert list(r2d2.update(make_batch(1, [16]))) == []
    metrics = list(r2d2.update(make_batch(2, [16])))
    assert len(metrics) == 4  # 2 · 16 steps of 2 sequences of 4
    assert all(np.isfinite(list(each.values())).all() for each in metrics)
    assert metrics[-1]["learner/replay_steps"] == 32
    rows, _, _ = r2d2._replay.sample(64, 0.0)
    r2d2._replay.update_priorities(rows, np.where(rows == 3, 1.0, 0.0))
    drawn, _, _ = r2d2._replay.sample(64, 0.0)
    assert (drawn == 3).all()


@pytest.mark.parametrize("space", [gymnasium.spaces.Box(0, 255, shape, np.uint8) for shape in ((3,), (8, 8, 2))])
def test_bytes_rest_as_bytes_and_act_and_learn_as_numbers(space: gymnasium.spaces.Box) -> None:
    algorithm = {
        "name": "r2d2",
        "replay_mb": 1,
        "learning_starts": 1,
        "batch_size": 2,
        "sequence_length": 4,
        "burn_in": 2,
    }
    spec = RLSpec(hidden=(8, 6), core_size=SIZE, segment_length=16, algorithm=algorithm)  # type: ignore[arg-type]
    experience = experience_spec(space, gymnasium.spaces.Discrete(2), spec)
    r2d2 = make_algorithm(spec, experience)
    assert isinstance(r2d2, R2D2)
    observations = np.random.default_rng(1).integers(0, 256, (17, *space.shape), np.uint8)
    batch = ExperienceBatch(**{**vars(make_batch(1, [16])), "observations": observations})
    assert len(list(r2d2.update(batch))) == 8
    assert r2d2._replay.sample(1, 0)[1].observations.dtype == np.uint8

    r2d2.model.epsilon.zero_()
    policy, state = make_policy(experience.policy), torch.zeros(1, SIZE)
    policy.load(1, arrays_of(r2d2.model))
    for observation in observations:
        row = torch.from_numpy(observation[None].astype(np.float32))  # as an endpoint receives it
        predicted = r2d2.model.predict(row, state)
        state = predicted["next_state"].detach()
        assert policy.act(observation) == (predicted["action"].item(), 0.0)
        np.testing.assert_allclose(policy.get_extras()["state"], state[0], **TOLERANCE)


def test_a_restored_learner_goes_on_with_its_files(tmp_path: Path) -> None:
    fields = {"learning_starts": 16, "replay_on_disk": True, "batch_size": 2}
    first = make_r2d2(tmp_path, **fields)
    list(first.update(make_batch(1, [16])))
    second = make_r2d2(tmp_path, **fields)
    assert second._replay.num_steps == 16
    second.load_state_dict(first.state_dict())
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name])
    batch = make_batch(2, [16])
    np.testing.assert_array_equal(np.concatenate(list_errors(first, batch)), np.concatenate(list_errors(second, batch)))


def test_a_burn_in_above_the_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="burn_in = 5 is above sequence_length = 4"):
        RLSpec().override(["algorithm=r2d2", "algorithm.sequence_length=4", "algorithm.burn_in=5"])
