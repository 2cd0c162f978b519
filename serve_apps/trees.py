"""Guess hidden nodes of Python's syntax trees: serves the model that `shoal run trees` registers.

    shoal run trees                                                   # trains it, and registers trees@champion
    shoal run serve_apps/trees.py                                     # serves it until Ctrl-C
    shoal serve deploy serve_apps/trees.yaml                          # the same, and stays until `shoal serve delete`
    python serve_apps/trees_client.py "total = sum(x * x for x in values)"

A request has one or more trees, `tokens` and `parents` [trees, nodes], padded with -1. The answer has the logits of
each node, [trees, nodes, kinds]. Requests with trees of any size share a forward. A tree with a cycle, two roots or a
missing parent is rejected with 422, which names tree and node; the other requests of its batch are answered.
"""

from pathlib import Path

from shoal.cluster.job_main import job_main
from shoal.flows.serving import serve_models
from shoal.flows.serving_spec import ServingSpec, check, load_serving_spec


def spec() -> ServingSpec:
    """The recipe, from the YAML file."""
    return load_serving_spec(Path(__file__).with_suffix(".yaml"))


if __name__ == "__main__":
    job_main(spec(), serve_models, job="trees", check=check)
