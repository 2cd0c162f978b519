"""Classify pictures of ten kinds of clothing: serves the model that `shoal run lenet` registers.

    shoal run lenet                                                   # trains it, and registers fashion@champion
    shoal run serve_apps/image_classifier.py                          # serves it until Ctrl-C
    shoal serve deploy serve_apps/image_classifier.yaml               # the same, and stays until `shoal serve delete`
    shoal predict fashion --image shoe.png --white 255
    python serve_apps/image_classifier_client.py

The endpoint takes pixels of 0 to 255 and returns probabilities: the recipe's Task names the preprocessing of pixels,
and the YAML file the postprocessing of logits. The endpoint follows the alias: train again, and it flips.
"""

from pathlib import Path

from shoal.cluster.job_main import job_main
from shoal.flows.serving import serve_models
from shoal.flows.serving_spec import ServingSpec, check, load_serving_spec


def spec() -> ServingSpec:
    """The recipe, from the YAML file."""
    return load_serving_spec(Path(__file__).with_suffix(".yaml"))


if __name__ == "__main__":
    job_main(spec(), serve_models, job="image_classifier", check=check)
