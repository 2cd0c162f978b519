"""The platform's algorithms are what `shoal.extend` expects of a user's."""

from shoal.extend.contracts import AlgorithmContract
from shoal.rl.algorithm_config import ImpalaConfig, PPOConfig


class TestImpala(AlgorithmContract):
    config = ImpalaConfig()


class TestPPO(AlgorithmContract):
    config = PPOConfig(epochs=1, minibatches=1)
