"""GRPO, RLOO and REINFORCE++ against an implementation without parts, rows or masks: token by token, in float64."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from shoal.errors import SpecMismatch
from shoal.libs.agents.algorithm import arrange_segments, hash_tensors
from shoal.libs.agents.baselines import compute_advantages
from shoal.libs.agents.config import PolicyGradientTextConfig, describe_tokens
from shoal.rl.algorithms.algorithm import NonFiniteLoss, make_algorithm
from shoal.rl.experience.queue import ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.learner import Learner
from shoal.rl.learner_group import HubLink, LearnerHub
from shoal.rl.learner_replica import LearnerReplica
from shoal.rl.spec import RLSpec
from shoal.weights import WeightStore
from shoal.wire import Segment
from waiting import wait_for

VOCABULARY, VERSION = 40, 5
EXPERIENCE = describe_tokens(VOCABULARY, 64)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
GROUPS = [[1.0, 0.0, 0.5], [0.25, 1.0]]  # rewards
LENGTHS = [9, 5, 12, 3, 7]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As a learner has: for a tiny network, several wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 50,000 parameters."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def make_spec(folder: Path, name: str = "grpo", **fields: Any) -> RLSpec:
    algorithm = {"name": name, "pretrained": str(folder), **fields}
    return RLSpec(learner={"device": "cpu", "publish_interval_s": 0}, algorithm=algorithm)  # type: ignore[arg-type]


def make(folder: Path, name: str = "grpo", **fields: Any) -> Any:
    algorithm = make_algorithm(make_spec(folder, name, **fields), EXPERIENCE)
    algorithm.version = VERSION
    return algorithm


def make_segment(random: np.random.Generator, length: int, reward: float, advantage: float) -> Segment:
    """Two tokens of a prompt, then answers; of a long one, there is a masked answer in the middle, and what follows has
    a smaller advantage than the episode."""
    tokens = random.integers(0, VOCABULARY, length + 1).astype(np.int32)
    trains = np.arange(length + 1) >= 1
    trains[-1] = False
    trains[5:7] = False
    log_mu = np.where(trains[:-1], random.normal(-3.7, 0.5, length), 0.0).astype(np.float32)
    rewards = np.zeros(length, np.float32)
    rewards[-1] = reward
    versions = np.full(length, VERSION - (length > 8), np.int64)
    advantages = np.full(length + 1, advantage, np.float32)
    advantages[7:-1] -= 0.125
    extras = {"trains": trains, "advantage": advantages}
    return Segment(tokens, tokens[1:], rewards, log_mu, versions, terminated=True, extras=extras)


def make_segments(config: PolicyGradientTextConfig, seed: int = 0) -> list[Segment]:
    random = np.random.default_rng(seed)
    rewards = [reward for group in GROUPS for reward in group]
    advantages = np.concatenate([compute_advantages(np.array(group), config.baseline) for group in GROUPS])
    return [make_segment(random, *each) for each in zip(LENGTHS, rewards, advantages, strict=True)]


def make_batch(algorithm: Any, seed: int = 0) -> ExperienceBatch:
    segments = make_segments(algorithm._config, seed)
    prepared: ExperienceBatch = algorithm.prepare(ExperienceBatch.from_segments(1, segments))
    return prepared


def update(algorithm: Any, batch: ExperienceBatch) -> dict[str, float]:
    (metrics,) = algorithm.update(batch)
    return dict(metrics)


def weights(algorithm: Any) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in algorithm.model.state_dict().items()}


def open_network(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def naive_log_pi(network: Any, segment: Segment, temperature: float) -> torch.Tensor:
    tokens = torch.from_numpy(segment.observations.astype(np.int64))
    logits = network(input_ids=tokens[None]).logits[0] / temperature
    return torch.stack([logits[at].log_softmax(0)[tokens[at + 1]] for at in range(segment.num_steps)])


def naive_loss(network: Any, reference: Any, segments: list[Segment], config: Any) -> torch.Tensor:
    episodes = [float(each.extras["advantage"][-1]) for each in segments]
    mean, deviation = (np.mean(episodes), np.std(episodes)) if config.name == "reinforce_pp" else (0.0, 1.0)
    losses = []
    for segment in segments:
        advantages = (segment.extras["advantage"] - mean) / deviation
        log_pi = naive_log_pi(network, segment, config.temperature)
        log_reference = naive_log_pi(reference, segment, config.temperature).detach()
        for at in np.flatnonzero(segment.extras["trains"]):
            ratio = (log_pi[at] - float(segment.log_probabilities[at])).exp()
            gain = ratio * float(advantages[at])
            if config.name != "rloo":
                high = 1 + (config.clip_high or config.clip)
                gain = torch.minimum(gain, ratio.clamp(1 - config.clip, high) * float(advantages[at]))
            weight = min(1.0, config.rho_bar / ratio.item())
            distance = log_reference[at] - log_pi[at]
            losses.append(-weight * gain + config.kl_cost * (distance.exp() - distance - 1))
    return torch.stack(losses).sum() / len(losses)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("grpo", {}),
        ("grpo", {"scale_advantages": False, "clip_high": 0.4, "kl_cost": 0.3, "temperature": 0.8, "rho_bar": 1.1}),
        ("rloo", {"rho_bar": 1.2}),
        ("reinforce_pp", {"minibatch_tokens": 1000}),
    ],
)
def test_the_gradient_is_that_of_a_naive_implementation(name: str, fields: dict[str, Any], folder: Path) -> None:
    algorithm = make(folder, name, **{"minibatch_tokens": 20, "max_grad_norm": 1e9, **fields})
    algorithm.model.double()
    if algorithm._reference is not None:
        algorithm._reference.double()
    network, reference = open_network(folder), open_network(folder)
    torch.manual_seed(8)
    with torch.no_grad():
        for mine, theirs in zip(algorithm.model.parameters(), network.parameters(), strict=True):
            theirs += 0.03 * torch.randn_like(theirs)
            mine.copy_(theirs)
    config, segments = algorithm._config, make_segments(algorithm._config)
    batch = make_batch(algorithm)
    ratios = algorithm.compute_log_ratios(batch)
    loss = naive_loss(network, reference, segments, config)
    loss.backward()
    metrics = update(algorithm, batch)
    assert metrics["learner/loss"] == pytest.approx(loss.item(), rel=1e-5)
    gradients = torch.cat([each.grad.flatten() for each in algorithm.model.parameters()])
    expected = torch.cat([each.grad.flatten() for each in network.parameters()])
    assert (gradients - expected).norm() < 1e-5 * expected.norm()
    assert metrics["learner/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-5)

    log_pi = torch.cat([naive_log_pi(network, each, config.temperature) for each in segments]).detach().numpy()
    trains = np.concatenate([each.extras["trains"][:-1] for each in segments])
    assert np.allclose(ratios, np.where(trains, log_pi - batch.log_probabilities, 0), atol=1e-5)
    assert metrics["agents/ratio_max"] == pytest.approx(np.exp(ratios.max()), rel=1e-4)
    same = trains & (batch.versions == VERSION)
    assert metrics["agents/logprob_diff_mean"] == pytest.approx(np.abs(ratios[same]).mean(), rel=1e-4)
    assert metrics["agents/logprob_diff_max"] == pytest.approx(np.abs(ratios[same]).max(), rel=1e-4)
    assert metrics["agents/token_lag_mean"] == pytest.approx(1 - same.sum() / trains.sum())
    assert (metrics["agents/token_lag_max"], metrics["agents/trained_tokens"]) == (1.0, trains.sum())
    assert metrics["agents/reward"] == pytest.approx(0.55)
    assert 3.0 < metrics["agents/entropy"] < np.log(VOCABULARY)
    assert (metrics["agents/clip_share"] > 0) == (name != "rloo")
    assert ("agents/kl" in metrics) == (config.kl_cost > 0)


def test_the_batch_after_a_step_has_no_token_of_the_present_weights(folder: Path) -> None:
    """The newest version is then of the weights before: a difference says nothing about the sampler."""
    algorithm = make(folder)
    assert "agents/logprob_diff_max" in update(algorithm, make_batch(algorithm))
    assert "agents/logprob_diff_max" not in update(algorithm, make_batch(algorithm))
    algorithm.version += 1
    assert "agents/logprob_diff_max" not in update(algorithm, make_batch(algorithm)), "the tokens are of older versions"


def test_rows_of_several_segments_are_learnt_as_padded_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, is_chosen = np.array(LENGTHS), np.ones(5, bool)
    assert arrange_segments(lengths, is_chosen, 40, is_packed=True) == [[[2], [0, 3], [4, 1]]]
    assert arrange_segments(lengths, is_chosen, 20, is_packed=False) == [[[2]], [[0], [4]], [[1], [3]]]
    packed = make(folder, minibatch_tokens=40)
    monkeypatch.setattr("shoal.libs.hf.tasks.PACKABLE", ())
    padded = make(folder, minibatch_tokens=20)
    assert (packed._is_packed, padded._is_packed) == (True, False)
    metrics = [update(each, make_batch(each)) for each in (packed, padded)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)
    for one, other in zip(packed.model.parameters(), padded.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_batch_without_a_signal_changes_nothing(folder: Path) -> None:
    algorithm = make(folder)
    before, batch = weights(algorithm), make_batch(algorithm)
    batch.extras["advantage"][:] = 0
    metrics = update(algorithm, batch)
    assert (metrics["agents/zero_advantage_share"], metrics["learner/grad_norm"]) == (1.0, 0.0)
    batch.extras["trains"][:] = False
    assert list(algorithm.update(batch)) == []
    assert all(torch.equal(each, before[name]) for name, each in weights(algorithm).items())


def test_a_segment_that_is_not_finite_costs_no_step(folder: Path) -> None:
    algorithm = make(folder)
    before, batch = weights(algorithm), make_batch(algorithm)
    batch.extras["advantage"][sum(LENGTHS[:2]) + 2 + 3] = np.inf  # of the third one
    with pytest.raises(NonFiniteLoss, match="learner/loss"):
        list(algorithm.update(batch))
    assert all(torch.equal(each, before[name]) for name, each in weights(algorithm).items())
    is_usable = [algorithm.is_usable(batch.select(one)) for one in np.eye(5, dtype=bool)]
    assert is_usable == [True, True, False, True, True]


@pytest.mark.parametrize("fields", [{"kl_cost": 0.1}, {"lora": {"rank": 2}}])
def test_a_resumed_learner_continues_bit_for_bit(fields: dict[str, Any], folder: Path) -> None:
    first, resumed = make(folder, **fields), make(folder, **fields)
    update(first, make_batch(first))
    resumed.load_state_dict(torch.load(io.BytesIO(first.serialize()), weights_only=True))
    for seed in (1, 2):
        metrics = [update(each, make_batch(each, seed)) for each in (first, resumed)]
        assert metrics[0]["learner/loss"] == metrics[1]["learner/loss"]
    assert all(torch.equal(each, weights(first)[name]) for name, each in weights(resumed).items())


def test_a_resumed_learner_needs_the_reference_that_it_began_with(folder: Path, tmp_path: Path) -> None:
    algorithm = make(folder, kl_cost=0.1)
    other = open_network(folder).float()
    with torch.no_grad():
        other.lm_head.weight[0] += 1
    other.save_pretrained(tmp_path)
    with pytest.raises(SpecMismatch, match="other weights than the reference"):
        make(tmp_path, kl_cost=0.1).load_state_dict(algorithm.state_dict())
    make(tmp_path, kl_cost=0.1, reference=f"{folder}/").load_state_dict(algorithm.state_dict())


def test_the_reference_of_adapters_is_their_base(folder: Path) -> None:
    """The network with the adapters off, as another one with the weights of the base."""
    fields = {"lora": {"rank": 2}, "learning_rate": 1e-2, "kl_cost": 0.3}
    one, other = make(folder, **fields), make(folder, reference=f"{folder}/", **fields)
    assert one._reference is one.model
    other.model.load_state_dict(weights(one))
    for seed in range(3):
        metrics = [update(each, make_batch(each, seed)) for each in (one, other)]
        assert metrics[0] == metrics[1]
    assert metrics[0]["agents/kl"] > 0
    assert all("lora_" in name and torch.equal(each, weights(other)[name]) for name, each in weights(one).items())
    changed = make(folder, **fields)
    next(changed.model.buffers())[0] += 1
    changed._reference_sha256 = hash_tensors(dict(changed.model.named_buffers()))
    with pytest.raises(SpecMismatch, match="other weights than the reference"):
        changed.load_state_dict(one.state_dict())


def test_it_learns_to_say_what_is_rewarded(folder: Path) -> None:
    """Token 7, after any prompt."""
    algorithm = make(folder, learning_rate=5e-3)
    torch.manual_seed(0)
    for _ in range(25):
        tokens = torch.randint(0, VOCABULARY, (4, 1)).repeat_interleave(8, 0)
        log_mu = torch.zeros(32, 0)
        for _ in range(4):
            with torch.no_grad():
                places = torch.ones_like(tokens).cumsum(1) - 1
                is_last = places == places.max()
                log_pi = algorithm.model(tokens, places, is_last).log_softmax(-1)
            chosen = log_pi.exp().multinomial(1)
            tokens, log_mu = torch.cat([tokens, chosen], 1), torch.cat([log_mu, log_pi.gather(1, chosen)], 1)
        rewards = (tokens[:, 1:] == 7).float().mean(1).numpy()
        advantages = [compute_advantages(each, "group_mean_std") for each in rewards.reshape(4, 8)]
        segments = []
        for row, log_probabilities, reward, advantage in zip(
            tokens.numpy().astype(np.int32), log_mu.numpy(), rewards, np.concatenate(advantages), strict=True
        ):
            extras = {"trains": np.array([True] * 4 + [False]), "advantage": np.full(5, advantage)}
            given = np.array([0, 0, 0, reward], np.float32)
            versions = np.full(4, VERSION, np.int64)
            segments.append(Segment(row, row[1:], given, log_probabilities, versions, extras=extras))
        metrics = update(algorithm, algorithm.prepare(ExperienceBatch.from_segments(1, segments)))
    assert metrics["agents/reward"] > 0.8


def test_two_learners_have_the_weights_of_one(folder: Path) -> None:
    spec = make_spec(folder, "reinforce_pp", minibatch_tokens=16, learning_rate=1e-3)
    one, hub = make_algorithm(spec, EXPERIENCE), LearnerHub("127.0.0.1")
    two = make_algorithm(spec, EXPERIENCE)
    one.version = two.version = VERSION
    two.group = hub
    addresses = [hub.address]
    replica = LearnerReplica(spec, EXPERIENCE)
    thread = threading.Thread(target=replica.run, args=[lambda: HubLink(addresses.pop()) if addresses else None])
    thread.start()
    wait_for(lambda: hub._admit() or hub.pids)
    for seed in range(3):
        batch = make_batch(one, seed)
        expected = update(one, batch)
        found = update(two, hub.distribute(batch, two.serialize))
        assert hub.num_learners == 2
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    hub.close()
    thread.join(30)
    assert not thread.is_alive()
    for name, each in weights(one).items():
        for other in (two, replica._algorithm):  # Adam's quotients of float32 sums in another order
            torch.testing.assert_close(weights(other)[name], each, rtol=1e-4, atol=2e-5)


def test_a_learner_that_dies_takes_its_segments_with_it(folder: Path) -> None:
    """The others' gradient is that of their own segments, divided by their own tokens."""
    one, two, hub = make(folder), make(folder), LearnerHub("127.0.0.1")
    two.group, link = hub, HubLink(hub.address)
    wait_for(lambda: hub._admit() or hub.pids)
    batch = make_batch(one)
    share = hub.distribute(batch, two.serialize)
    link.close()
    found = update(two, share)
    assert 0 < hub.lost.sum() < len(batch.lengths)
    assert found == pytest.approx(update(one, batch.select(~hub.lost)), rel=1e-5)
    assert all(torch.equal(each, weights(one)[name]) for name, each in weights(two).items())
    hub.close()


def test_a_learner_takes_all_that_is_queued_as_one_step(folder: Path, tmp_path: Path) -> None:
    queue, store = ExperienceQueue(64, Ledger()), WeightStore()
    spec = make_spec(folder).override([f"gateway.queue_capacity={len(LENGTHS)}"])
    learner = Learner(spec, EXPERIENCE, queue, store, tmp_path)
    segments = make_segments(learner.spec.algorithm)  # type: ignore[arg-type]
    for seq, segment in enumerate(segments, 1):
        segment.versions[:] = 1
        queue.put(("agent", 1), seq, segment)
    assert learner.step()
    stats = learner.stats()
    assert (stats["updates"], stats["consumed"], stats["weights_version"]) == (1, 5, 2)
    assert stats["metrics"]["agents/trained_tokens"] == sum(each.extras["trains"].sum() for each in segments)
    assert stats["metrics"]["agents/token_lag_max"] == 0.0
    assert stats["metrics"]["agents/logprob_diff_max"] > 0
    assert learner.snapshot().tensors().keys() == open_network(folder).state_dict().keys()
    queue.ledger.close()


def test_computing_in_bf16_leaves_the_weights_in_fp32(folder: Path) -> None:
    fp32, bf16 = make(folder), make(folder, precision="bf16")
    metrics = [update(each, make_batch(each)) for each in (fp32, bf16)]
    assert metrics[0] != metrics[1]
    assert metrics[0] == pytest.approx(metrics[1], rel=0.1, abs=0.02)
    assert {each.dtype for each in bf16.model.parameters()} == {torch.float32}


def test_a_learner_goes_on_with_another_rate_and_range(folder: Path) -> None:
    algorithm = make(folder)
    spec = make_spec(folder).override(["algorithm.learning_rate=1e-4", "algorithm.clip=null"])
    algorithm.configure(spec.algorithm)
    assert update(algorithm, make_batch(algorithm))["agents/clip_share"] == 0
    assert [each["lr"] for each in algorithm._optimizer.param_groups] == [1e-4]
    spec = RLSpec().override(["algorithm=rloo", "algorithm.pretrained=./m", "algorithm.lora.rank=4"])
    assert spec.algorithm.lora == {"rank": 4}  # type: ignore[attr-defined]
    assert spec.batch_limits[0] == 1


def test_the_advantages_of_a_group() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 0.1])
    centred = rewards - 0.4
    assert np.allclose(compute_advantages(rewards, "group_mean_std"), centred / (np.std(rewards, ddof=1) + 1e-4))
    others = [np.delete(rewards, at).mean() for at in range(4)]
    assert np.allclose(compute_advantages(rewards, "leave_one_out"), rewards - others)
    for baseline in ("group_mean", "global"):
        assert np.allclose(compute_advantages(rewards, baseline), centred)
    for baseline in ("group_mean_std", "group_mean", "leave_one_out", "global"):
        assert not compute_advantages(np.full(7, 0.1), baseline).any()
    assert compute_advantages(np.array([3.0]), "global").tolist() == [3.0]
    assert compute_advantages(np.array([3.0]), "leave_one_out").tolist() == [0.0]
