"""Shoal on Kubernetes: manifests for KubeRay. Pure: reads specs, returns documents; talks to no cluster."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "kube",
    verbs={
        "kube": ("shoal.libs.kube.command:kube", "Write manifests of Kubernetes for a job, an endpoint or a cluster.")
    },
)
