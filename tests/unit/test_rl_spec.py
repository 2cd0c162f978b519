"""What a loop's spec refuses before anything listens."""

from __future__ import annotations

import gymnasium
import pytest

from shoal.errors import ConfigError
from shoal.rl.spec import GatewaySpec, RLSpec, experience_spec


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
def test_a_host_beyond_loopback_needs_encryption(host: str) -> None:
    with pytest.raises(ConfigError, match="curve=true"):
        GatewaySpec.parse({"host": host})
    assert GatewaySpec.parse({"host": host, "curve": True}).curve


def test_actions_that_do_not_count_from_zero_are_refused() -> None:
    box, spec = gymnasium.spaces.Box(-1, 1, (4,)), RLSpec()
    assert experience_spec(box, gymnasium.spaces.Discrete(3), spec).action.high == 2
    with pytest.raises(ConfigError, match="starts at 1"):
        experience_spec(box, gymnasium.spaces.Discrete(3, start=1), spec)
