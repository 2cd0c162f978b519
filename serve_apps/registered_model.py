"""Serve a registered model and follow its alias: promote another version, and the endpoint flips to it.

    shoal run serve_apps/registered_model.py models=cartpole@champion
    shoal run serve_apps/registered_model.py models=cartpole@champion endpoint.num_replicas=2 endpoint.port=8000

It serves until it is stopped (Ctrl-C). `model_version` in the answers is the version in the registry.
"""

from shoal.cluster.job_main import job_main
from shoal.flows.serving import serve_models
from shoal.flows.serving_spec import ServingSpec, check


def spec() -> ServingSpec:
    """The recipe: the champion of the demo."""
    return ServingSpec(models=["cartpole@champion"])


if __name__ == "__main__":
    job_main(spec(), serve_models, job="registered_model", check=check)
