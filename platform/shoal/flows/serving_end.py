"""End a detached endpoint of a cluster: `python -m shoal.flows.serving_end name=shop`.

Called by `shoal serve delete`, as a job of the cluster. An endpoint that a driver keeps up ends with it instead.
"""

from __future__ import annotations

from shoal.cluster.job_main import job_main
from shoal.config import Spec


class EndSpec(Spec):
    """The endpoint to end."""

    name: str = ""


def end(spec: EndSpec, job: str) -> None:
    """End it when its pending requests are answered. Raises ClusterError."""
    from shoal.serve.on_ray.shared_cluster import end_endpoint  # imports Serve, which takes a second

    end_endpoint(spec.name)


if __name__ == "__main__":
    job_main(EndSpec(), end, job="serve_end")
