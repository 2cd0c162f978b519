"""HAProxy's configuration, from the template in Ray Serve's files, without importing Ray."""

import runpy
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import jinja2

_TEMPLATES = "ray/serve/_private/haproxy_templates.py"
_HEALTH_CHECK = {
    "health_path": "/-/healthz",
    "default_server_directive": "default-server fastinter 250ms downinter 250ms fall 2 rise 2 inter 1s check",
    "grpc_healthcheck_request_hex": "00",
    "grpc_healthcheck_expect_hex": "00",
}


def serves_config(
    folder: Path,
    port: int,
    replica_port: int = 0,
    grpc_port: int = 0,
    grpc_replica_port: int = 0,
    fallback_port: int = 0,
) -> str:
    """What Serve writes for an application with one replica; without one, before it is deployed. 0: none.

    fallback_port: of Serve's own proxy; with it the application is there without a replica, too
    """
    templates = runpy.run_path(str(distribution("ray").locate_file(_TEMPLATES)))
    environment = jinja2.Environment()
    environment.filters["haproxy_fmt"] = repr
    config = _config(folder, port, grpc_port)
    backends = [_backend("http-app", replica_port, fallback_port)] if replica_port or fallback_port else []
    has_grpc = grpc_replica_port or (fallback_port and not replica_port)
    grpc_backends = [_backend("grpc-app", grpc_replica_port, fallback_port)] if has_grpc else []
    route_info = SimpleNamespace(
        healthy=True, status=200, health_message="success", routes_message="{}", routes_content_type="application/json"
    )

    def rules(name: str, of: list[SimpleNamespace]) -> str:
        template = environment.from_string(templates[name])
        return template.render(config=config, backends=of, health_info=route_info)

    return environment.from_string(templates["HAPROXY_CONFIG_TEMPLATE"]).render(
        config=config,
        backends=backends,
        grpc_backends=grpc_backends,
        backends_with_health_config=[{"backend": each, "health_config": _HEALTH_CHECK} for each in backends],
        grpc_backends_with_health_config=[{"backend": each, "health_config": _HEALTH_CHECK} for each in grpc_backends],
        healthz_rules=rules("HAPROXY_HEALTHZ_RULES_TEMPLATE", backends),
        grpc_healthz_rules=rules("HAPROXY_GRPC_HEALTHZ_RULES_TEMPLATE", grpc_backends),
        route_info=route_info,
    )


def _config(folder: Path, port: int, grpc_port: int) -> SimpleNamespace:
    return SimpleNamespace(
        log_target="127.0.0.1:514",
        socket_path=f"{folder}/a.sock",
        server_state_base=str(folder),
        server_state_file=f"{folder}/server-state",
        error_file_path=f"{folder}/500.http",
        frontend_host="127.0.0.1",
        frontend_port=port,
        grpc_enabled=grpc_port != 0,
        grpc_frontend_host="127.0.0.1",
        grpc_frontend_port=grpc_port,
        stats_port=8404,
        stats_uri="/stats",
        metrics_port=9101,
        metrics_uri="/metrics",
        maxconn=6656,
        nbthread=1,
        bufsize=32768,
        h2_max_frame_size=16384,
        h2_be_initial_window_size=65536,
        h2_be_max_concurrent_streams=100,
        h2_fe_initial_window_size=65536,
        h2_fe_max_concurrent_streams=100,
        enable_hap_optimization=True,
        hard_stop_after_s=20,
        close_spread_time_s=None,
        timeout_connect_s=5,
        timeout_client_s=30,
        timeout_server_s=60,
        timeout_http_request_s=None,
        timeout_http_keep_alive_s=5,
        timeout_queue_s=None,
        retry_on="conn-failure empty-response",
        retries=3,
        tcp_nodelay=True,
        balance_algorithm="leastconn",
        observe_mark_down_enabled=True,
        observe_error_limit=1,
        is_head=True,
        health_check_endpoint="/-/healthz",
        metrics_enabled=False,
    )


def _backend(name: str, port: int, fallback_port: int = 0) -> SimpleNamespace:
    timeouts = ("connect", "server", "client", "http_request", "queue", "http_keep_alive", "tunnel")
    return SimpleNamespace(
        name=name,
        app_name="app",
        path_prefix="/",
        servers=[SimpleNamespace(name="replica", host="127.0.0.1", port=port)] if port else [],
        fallback_server=SimpleNamespace(name="serve", host="127.0.0.1", port=fallback_port) if fallback_port else None,
        ingress_request_router_servers=[],
        **{f"timeout_{each}_s": None for each in timeouts},
    )
