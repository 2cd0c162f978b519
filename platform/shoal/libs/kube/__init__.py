"""Shoal on Kubernetes: manifests for KubeRay. Pure: reads specs, returns documents; talks to no cluster."""
