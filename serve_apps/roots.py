"""Find roots in photographs: serves the model that `shoal run roots` registers.

    shoal run roots                                                   # trains it, and registers roots@champion
    shoal run serve_apps/roots.py                                     # serves it until Ctrl-C
    shoal serve deploy serve_apps/roots.yaml                          # the same, and stays until `shoal serve delete`
    python serve_apps/roots_client.py photograph.jpg                  # writes photograph.mask.png

A request has the bytes of one file or several, PNG or JPEG of any size; the answer has a PNG of each, whose pixels are
the classes, and the length of each class in pixels. Pictures are computed in overlapping tiles.
"""

from pathlib import Path

from shoal.cluster.job_main import job_main
from shoal.flows.serving import serve_models
from shoal.flows.serving_spec import ServingSpec, check, load_serving_spec


def spec() -> ServingSpec:
    """The recipe, from the YAML file."""
    return load_serving_spec(Path(__file__).with_suffix(".yaml"))


if __name__ == "__main__":
    job_main(spec(), serve_models, job="roots", check=check)
