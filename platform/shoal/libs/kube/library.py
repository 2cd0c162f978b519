"""The verb of this library."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "kube",
    verbs={
        "kube": ("shoal.libs.kube.command:kube", "Write manifests of Kubernetes for a job, an endpoint or a cluster.")
    },
)
