"""Changes how many replicas an endpoint of this host's cluster has: a line on standard input is a number.

Says "attached" first, and "asked" after each line. Serve is asked itself: the endpoint has a fixed number.
"""

import sys
from typing import Any

import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def scale(name: str, number: int) -> None:
    """Ask Serve for so many replicas of an endpoint; returns at once. This process is attached to the cluster."""
    deployment = DeploymentID(name="replica", app_name=name)

    def apply(it: Any) -> None:
        it.deployment_state_manager.set_target_num_replicas(deployment, number)

    controller: Any = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
    ray.get(controller.__ray_call__.remote(apply))


def main(name: str) -> None:
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    _say("attached")
    for line in sys.stdin:
        scale(name, int(line))
        _say("asked")


if __name__ == "__main__":
    main(sys.argv[1])
