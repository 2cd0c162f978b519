"""Serve a registered model and follow its alias: promote another version, and the endpoint flips to it.

    shoal run serve_apps/registered_model.py model=cartpole@champion
    shoal run serve_apps/registered_model.py model=cartpole@champion endpoint.num_replicas=2 endpoint.port=8000

It serves until it is stopped (Ctrl-C). `model_version` in the answers is the version in the registry.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.registered_model import RegisteredModelSpec, check_registered_model, serve_registered_model


def spec() -> RegisteredModelSpec:
    """The recipe: the champion of the demo."""
    return RegisteredModelSpec(model="cartpole@champion")


if __name__ == "__main__":
    job_main(spec(), serve_registered_model, job="registered_model", check=check_registered_model)
