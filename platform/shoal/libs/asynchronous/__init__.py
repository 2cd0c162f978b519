"""Asynchronous and elastic training: parameter servers, local SGD, DiLoCo, workers that join, Hogwild, peers."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "asynchronous",
    extensions={
        "shoal.synchronizers": {
            "parameter_server": "shoal.libs.asynchronous.config:ParameterServerConfig",
            "local_sgd": "shoal.libs.asynchronous.config:LocalSGDConfig",
            "diloco": "shoal.libs.asynchronous.config:DiLoCoConfig",
        },
        "shoal.synchronizer_variants": {
            "elastic": "shoal.libs.asynchronous.config:ElasticConfig",
            "hogwild": "shoal.libs.asynchronous.config:HogwildConfig",
        },
        "shoal.launchers": {"replicas": "shoal.libs.asynchronous.replicas:launch_replicas"},
        "shoal.extend": {"PeerSync": "shoal.libs.asynchronous.peers:PeerSync"},
    },
)
