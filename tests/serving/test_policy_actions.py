"""Whether an endpoint takes a policy's best actions or samples: by the version, the option, or the request."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from serving.replica_set import Asked, ReplicaSet, ask, until
from shoal.errors import ConfigError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import describe_policy_model, mix_policies
from shoal.registry import ModelFactory, Registry, Signature
from shoal.rl.learner import model_arrays
from shoal.rl.spec import experience_spec
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.model.action_sampler import make_sampler
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

gymnasium = pytest.importorskip("gymnasium")
SPACES = gymnasium.spaces
OBSERVATION = SPACES.Box(-1, 1, (2,), np.float32)
LOGITS = np.log([0.2, 0.3, 0.5])


def describe(action_space: Any, *words: str) -> tuple[ModelFactory, Signature]:
    spec = ActorLearnerSpec(hidden=(4,)).override(list(words))
    return describe_policy_model(spec, experience_spec(OBSERVATION, action_space, spec))


def constant_policy(version: int, logits: np.ndarray = LOGITS) -> WeightSnapshot:
    """Its logits do not depend on the observation."""
    factory, _ = describe(SPACES.Discrete(len(logits)))
    model: Any = factory.build()
    with torch.no_grad():
        model.policy[-1].weight.zero_()
        model.policy[-1].bias.copy_(torch.tensor(logits))
    return WeightSnapshot.of(version, model_arrays(model))


def register(action: str) -> None:
    factory, signature = describe(SPACES.Discrete(3))
    Registry().register("policy", constant_policy(1), model=factory.update({"action": action}), signature=signature)


async def act(endpoint: ReplicaSet, num_rows: int = 1, **parameters: object) -> Asked:
    tensor = {"name": "observation", "datatype": "FP32", "shape": [num_rows, 2], "data": [0.0] * 2 * num_rows}
    body = {"inputs": [tensor], "outputs": [{"name": "action"}], "parameters": parameters}
    return await ask(next(iter(endpoint.replicas.values())), "POST", "/v2/models/policy/infer", body)


def actions_of(answer: Asked) -> list[int]:
    assert answer.status == 200, answer.body
    found: list[int] = answer.body["outputs"][0]["data"]
    return found


async def draw(endpoint: ReplicaSet, **parameters: object) -> Counter[int]:
    return Counter([each for _ in range(25) for each in actions_of(await act(endpoint, 40, **parameters))])


def is_like_logits(found: Counter[int]) -> bool:
    return all(abs(found[index] / 1000 - share) < 0.08 for index, share in enumerate((0.2, 0.3, 0.5)))


async def test_a_request_or_a_version_says_how_the_policy_acts_and_a_seed_repeats_it() -> None:
    register("best")
    register("sampled")

    async with ReplicaSet("policy@1") as endpoint:
        await endpoint.start()
        assert await draw(endpoint) == {2: 1000}
        assert is_like_logits(await draw(endpoint, action="sampled"))
        first, again, other = [actions_of(await act(endpoint, 40, action="sampled", seed=seed)) for seed in (7, 7, 8)]
        assert first == again != other
        wrong: tuple[dict[str, object], ...] = ({"action": "greedy"}, {"seed": -1}, {"seed": 1.5}, {"seed": True})
        for parameters in wrong:
            answer = await act(endpoint, **parameters)
            assert answer.status == 400
            assert next(iter(parameters)) in answer.body["error"]
        await endpoint.administer("deploy", "policy", version=2, reason="it is mixed")
        assert is_like_logits(await draw(endpoint))
        assert await draw(endpoint, action="best") == {2: 1000}


async def test_a_shadow_draws_the_same_actions() -> None:
    register("sampled")
    register("sampled")

    async with ReplicaSet("policy@1") as endpoint:
        await endpoint.start()
        await endpoint.administer("shadow", "policy", version=2, percent=100)
        await draw(endpoint)

        def shadowed() -> Any:
            return next(each for each in endpoint.status.describe_model("policy")["versions"] if each["version"] == 2)

        await until(lambda: shadowed()["compared"] == 25)
        assert shadowed()["disagreed"] == 0


def sample(space: Any, outputs: dict[str, np.ndarray], *words: str) -> np.ndarray:
    factory, signature = describe(space, *words)
    sampler = make_sampler(factory, signature, "sampled")
    assert sampler is not None
    return sampler.act(outputs, InferCall({}, 1, seed=1))["action"]


def test_independent_choices_are_drawn_each_by_its_own_logits() -> None:
    logits = np.tile(np.log([0.9, 0.1, 0.2, 0.3, 0.5]), (4000, 1))
    drawn = sample(SPACES.MultiDiscrete([2, 3]), {"action": np.zeros((4000, 2), np.int64), "logits": logits})
    assert drawn.shape == (4000, 2)
    assert np.bincount(drawn[:, 0]) / 4000 == pytest.approx([0.9, 0.1], abs=0.03)
    assert np.bincount(drawn[:, 1]) / 4000 == pytest.approx([0.2, 0.3, 0.5], abs=0.03)


@pytest.mark.parametrize("words", [(), ("algorithm=sac",)])
def test_numbers_are_drawn_from_the_squashed_gaussian_within_the_bounds(words: tuple[str, ...]) -> None:
    shape = (4000, 1)
    outputs = {"action": np.zeros(shape, np.float32), "mean": np.full(shape, 0.5), "log_std": np.full(shape, -1.0)}
    drawn = sample(SPACES.Box(-2, 2, (1,), np.float32), outputs, *words)
    u = np.arctanh(drawn / 2.0)
    assert (u.mean(), u.std()) == pytest.approx((0.5, np.exp(-1)), abs=0.03)


def test_an_option_of_the_endpoint_replaces_what_the_version_says() -> None:
    factory, signature = describe(SPACES.Discrete(3))
    outputs = {"action": np.full(40, 2), "logits": np.tile(LOGITS, (40, 1))}
    for version, option, is_best in (("sampled", "best", True), ("best", "sampled", False), ("sampled", None, False)):
        sampler = make_sampler(factory.update({"action": version}), signature, option)
        assert sampler is not None
        assert (sampler.act(outputs, InferCall({}, 40)) is outputs) is is_best


def test_values_of_actions_are_no_distribution() -> None:
    factory, signature = describe(SPACES.Discrete(3), "algorithm=dqn")
    assert make_sampler(factory, signature, None) is None
    with pytest.raises(ConfigError, match="action"):
        make_sampler(factory, signature, "sampled")


def test_a_network_of_the_users_own_may_be_an_argument_of_another_kind() -> None:
    for network in ("resnet18", None, 3, {"depth": 2}):
        model = ModelFactory(factory="net:Net", kwargs={"network": network})
        assert make_sampler(model, Signature(inputs=[], outputs=[]), None) is None


def test_a_mixture_plays_one_member_from_the_beginning_of_an_episode_to_its_end() -> None:
    factory, signature = describe(SPACES.Discrete(3))
    certain = [constant_policy(version, 9.0 * np.eye(3)[version - 1]) for version in (1, 2, 3)]
    mixed, described, snapshot = mix_policies(factory, signature, certain)
    loaded = Predictor(mixed, described, ModelOptions(max_batch_size=300)).load(snapshot)
    observations, states = np.zeros((300, 2), np.float32), np.zeros((300, 1), np.float32)
    first = loaded.predict_batch([{"observation": observations, "state": states}])[0]
    assert np.bincount(first["action"]) / 300 == pytest.approx([1 / 3] * 3, abs=0.1)
    assert (first["next_state"][:, 0] == first["action"] + 1).all()
    then = loaded.predict_batch([{"observation": observations, "state": first["next_state"]}])[0]
    assert (then["action"] == first["action"]).all()
    assert then["logits"][0].tolist() == pytest.approx(9.0 * np.eye(3)[first["action"][0]])


def test_a_mixture_of_recurrent_policies_has_their_states() -> None:
    factory, signature = describe(SPACES.Discrete(3), "core=gru", "core_size=5")
    members = [WeightSnapshot.of(version, model_arrays(factory.build())) for version in (1, 2)]  # type: ignore[arg-type]
    mixed, described, snapshot = mix_policies(factory, signature, members)
    assert [each.shape for each in described.inputs] == [[-1, 2], [-1, 6]]
    inputs = {"observation": np.ones((2, 2), np.float32), "state": np.array([[1] + [0.1] * 5, [2] + [0.1] * 5], "f4")}
    found = Predictor(mixed, described, ModelOptions()).load(snapshot).predict_batch([inputs])[0]
    for row, member in enumerate(members):
        own = Predictor(factory, signature, ModelOptions()).load(member)
        alone = own.predict_batch([{"observation": inputs["observation"][:1], "state": inputs["state"][:1, 1:]}])[0]
        assert found["logits"][row] == pytest.approx(alone["logits"][0], abs=1e-6)
        assert found["next_state"][row, 1:] == pytest.approx(alone["next_state"][0], abs=1e-6)
