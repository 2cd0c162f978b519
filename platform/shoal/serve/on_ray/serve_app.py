"""An application of Ray Serve: `import_path: shoal.serve.on_ray.serve_app:build` in a `serve deploy` file.

Called by Serve, in a process of the cluster. The ports are those of the file (`http_options`), and the address is the
endpoint's `host`, once the application has started; the cluster must have been started with the variables of
`cluster.ingress.serve_environment` (`shoal up` does). Such an endpoint's changes are in its audit log and its status;
it has no driver to write a run record.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, SecretStr
from ray import serve
from ray.serve.context import _get_global_client

from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.home import load_access_token
from shoal.serve.controller.config import build_controller_config
from shoal.serve.on_ray.controller_actor import RayControllerClient
from shoal.serve.on_ray.deployment import build_application, prepare_ingress_on_head
from shoal.serve.on_ray.ingress_front import adopt_front, prepare_front
from shoal.serve.on_ray.ownership import list_driver_endpoints
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import model_from_ref
from shoal.serve.spec.reach import EVERY_NODE, require_one_address

IMPORT_PATH = "shoal.serve.on_ray.serve_app:build"

ANY_ADDRESS = "0.0.0.0"


class AppSpec(Spec):
    """The `args` of the application.

    models:   references: name@version, name@alias (followed), or name for the present newest version
    endpoint: as for `shoal serve deploy`; its default name is its first model's. Callers send the access token
              ($SHOAL_TOKEN, or $SHOAL_HOME/token) or one of its keys
    """

    models: list[str] = Field(min_length=1)
    endpoint: dict[str, Any] = Field(default_factory=dict)


def list_file_endpoints() -> dict[str, dict[str, Any]]:
    """The `endpoint` of each application of Shoal in the files that Serve has, by the application's name; the one that
    is being built is among them."""
    client = _get_global_client(raise_if_no_controller_running=False)
    applications = {} if client is None else client.get_serve_details()["applications"]
    configs = {name: each.get("deployed_app_config") or {} for name, each in applications.items()}
    return {
        name: (config.get("args") or {}).get("endpoint") or {}
        for name, config in configs.items()
        if config.get("import_path") == IMPORT_PATH
    }


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application. Raises ConfigError for invalid args, RegistryError for missing models, ClusterError
    without HAProxy."""
    prepare_ingress_on_head()
    app = AppSpec.parse(args)
    if app.endpoint.get("token") is not None:
        raise ConfigError(
            "endpoint.token", "...", "would be in a file", "set $SHOAL_TOKEN where the cluster is started"
        )
    models = [model_from_ref(ref) for ref in app.models]
    defaults = {"name": models[0].name, "num_cpus": 0.5}
    spec = EndpointSpec.parse({**defaults, **app.endpoint, "token": SecretStr(load_access_token())})
    if spec.ingress == EVERY_NODE:
        _require_every_node(spec)
    require_one_address(list_file_endpoints() | {spec.name: app.endpoint})
    is_alone = not list_driver_endpoints().active
    spec = prepare_front(spec, {}) if is_alone else adopt_front(spec)  # the ports are Serve's
    setting, live = build_controller_config(spec, models)
    return build_application(spec, live, RayControllerClient(setting))


def _require_every_node(spec: EndpointSpec) -> None:
    """Raises ConfigError where Serve's file does not put an ingress on each node with a replica, and replicas within
    its reach."""
    client = _get_global_client(raise_if_no_controller_running=False)
    details = {} if client is None else client.get_serve_details()
    location, host = details.get("proxy_location"), details.get("http_options", {}).get("host")
    if (location, host) != ("EveryNode", ANY_ADDRESS):
        problem = f"needs other settings of Serve than proxy_location: {location} and http_options.host: {host}"
        remedy = f"write proxy_location: EveryNode and host: {ANY_ADDRESS}, or use `shoal serve deploy`"
        raise ConfigError("endpoint.ingress", spec.ingress, problem, remedy)
