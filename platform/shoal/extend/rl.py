"""Reinforcement learning, for libraries: algorithms, specs and normalization."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.actor.agent_streams import AgentsEpisode, is_parallel
    from shoal.actor.client import ActorClient
    from shoal.actor.environment import PICTURES, open_environment, translate_environment_errors
    from shoal.actor.exchange import ReceivedWeights
    from shoal.actor.policy import make_policy
    from shoal.rl.algorithm_config import AlgorithmConfig, AnyAlgorithmConfig
    from shoal.rl.algorithms.actor_critic import find_non_finite
    from shoal.rl.algorithms.algorithm import (
        Algorithm,
        Metrics,
        NonFiniteLoss,
        find_device,
        make_algorithm,
        restore_optimizer,
        set_learning_rate,
    )
    from shoal.rl.algorithms.normalization import Normalizer
    from shoal.rl.algorithms.segments import to_observations
    from shoal.rl.experience.demonstrations import DemonstrationSite
    from shoal.rl.experience.quarantine import read_run_quarantine, release_in_run
    from shoal.rl.experience.queue import ExperienceBatch
    from shoal.rl.gateway.listener import Listener, Received, StoreSegment
    from shoal.rl.gateway.state import GatewaySetting, GatewayState
    from shoal.rl.learner_group import SINGLE, LearnerGroup, SampleShard
    from shoal.rl.part_specs import DemonstrationsSpec, GatewaySpec, LearnerSpec, RecordSpec
    from shoal.rl.ray_workers import ActorLearnerWorkers
    from shoal.rl.spec import RLSpec, describe_encoder, network_kwargs
    from shoal.wire.segment import Segment

__getattr__ = load_on_demand(__name__)
