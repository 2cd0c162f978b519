"""A job, an endpoint and a cluster as documents for KubeRay: RayJob, RayService, RayCluster; Services, a Secret; and
the console, a Deployment.

Below them the pods of a RayCluster: the containers, what they mount, and how they begin and end.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import yaml

from shoal.errors import ConfigError
from shoal.extend.cluster import RETRIED, RUN_ID
from shoal.extend.runs import make_run_id
from shoal.extend.serve import EndpointSpec
from shoal.libs.kube.spec import DRIVER_GROUP, SPOT_NODES, KubeSpec, PodSpec, WorkerGroup

Document = dict[str, Any]

HOME, TLS_FOLDER = "/var/lib/shoal", "/etc/shoal/tls"
SERVE_PORT = 8000
GCS_PORT = 6379
DASHBOARD_PORT = 8265
METRICS_PORT = 8080
HEAD_METRICS_PORTS = (44217, 44227)  # of the autoscaler and of the dashboard
CONSOLE_PORT = 8267
DRIVER_RESOURCE = "shoal_driver"
NAME_LABEL = "shoal/name"  # of all pods; KubeRay gives them no label with the name of their RayJob
PART_LABEL = "shoal/part"  # of the console's pod
# KubeRay puts its own command, `ulimit ...; ray start ...`, behind this and "&&". Ray and all its workers inherit it.
SET_ENVIRONMENT = 'set=$(python -m shoal.cluster.host_environment) && eval "$set" || exit 1'
# Serve moves replicas to other nodes, Ray places nothing more here, and the raylet ends once nothing runs here.
# Without a head, as at the end of a job, there is nothing to wait for.
DRAIN = (
    "timeout 30 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'Kubernetes removes the pod'"
    " --deadline-remaining-seconds {drain_s} && timeout {drain_s} bash -c 'while pgrep -x raylet; do sleep 1; done'"
)
END_GRACE_S = 30  # beyond `drain_s`, for the end of Ray
API = "ray.io/v1"
# What Pod Security's profile *restricted* asks of each container.
RESTRICTED: Document = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
HEAD_AWAY_S = 600  # KubeRay sets it for Redis alone
IMPORT_PATH = "shoal.serve.on_ray.serve_app:build"
CERTIFICATE, KEY = f"{TLS_FOLDER}/tls.crt", f"{TLS_FOLDER}/tls.key"


def make_job(spec: KubeSpec, program: Sequence[str]) -> list[Document]:
    """A RayJob that runs a program, with a cluster of its own, and the Service of its gateway if it has one.

    program: its words; paths are those of the image, or of `working_dir`
    """
    groups = [_make_worker_group(spec, group) for group in spec.all_groups]
    words, entry = list(program), {}
    if spec.gateway_port:
        groups.insert(0, _make_driver_group(spec))
        host = spec.gateway_host or f"{spec.name}-gateway.{spec.namespace}.svc"
        words += ["gateway.host=0.0.0.0", "gateway.curve=true", f"gateway.port={spec.gateway_port}"]
        words.append(f"gateway.advertise={host}:{spec.gateway_port}")
        entry = {"entrypointResources": json.dumps({DRIVER_RESOURCE: 1})}
    job: Document = {
        "entrypoint": shlex.join(words),
        **entry,
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": spec.keep_s,
        "rayClusterSpec": _make_cluster_spec(spec, groups, {}, spec.gateway_port),
        "submitterPodTemplate": _make_submitter(spec),
    }
    runtime_env: Document = {}
    if spec.deadline_s:
        job["activeDeadlineSeconds"] = spec.deadline_s
    if spec.working_dir:
        runtime_env["working_dir"] = spec.working_dir
    if spec.retries:  # each is a new cluster, whose job goes on with the run of this id
        job["backoffLimit"] = spec.retries
        runtime_env["env_vars"] = {RUN_ID: make_run_id(), RETRIED: "1"}
    if runtime_env:
        job["runtimeEnvYAML"] = yaml.safe_dump(runtime_env)
    documents = [_wrap(spec, API, "RayJob", job)]
    if spec.gateway_port:
        selector = {NAME_LABEL: spec.name, "ray.io/group": DRIVER_GROUP}
        documents.append(_make_service(spec, f"{spec.name}-gateway", selector, spec.gateway_port))
    return documents


def make_endpoint(spec: KubeSpec, models: Sequence[str], fields: dict[str, Any]) -> list[Document]:
    """A RayService that serves registered models, with an ingress on each pod that has a replica.

    Raises ConfigError for fields that cannot be served so.

    models: references, as for `shoal serve deploy`
    fields: of the endpoint
    """
    if not models:
        raise ConfigError("models", [], "is empty", "name a registered model, as in digits@champion")
    reach: dict[str, Any] = {"host": "0.0.0.0", "ingress": "every_node"}
    if spec.tls_secret:
        reach["tls"] = {"certificate": CERTIFICATE, "key": KEY, **fields.get("tls", {})}
    for name in ("host", "ingress", "port"):
        if name in fields:
            raise ConfigError(f"endpoint.{name}", fields[name], "is the same for all pods", "leave it out")
    if not spec.tls_secret and "tls" in fields:
        problem, remedy = "names files that no pod has", "give kube.tls_secret, a Secret of the type kubernetes.io/tls"
        raise ConfigError("endpoint.tls", fields["tls"], problem, remedy)
    own = {"name": spec.name, "num_cpus": 0.5, **fields, **reach}
    parsed = EndpointSpec.parse(own)
    require_no_secrets(parsed, fields)
    require_pods(parsed, spec)
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": SERVE_PORT},
        "applications": [
            {
                "name": own["name"],
                "import_path": IMPORT_PATH,
                "route_prefix": "/",
                "args": {"models": list(models), "endpoint": own},
            }
        ],
    }
    groups = [_make_worker_group(spec, group, _probe(parsed)) for group in spec.all_groups]
    service = {"metadata": {"annotations": spec.service_annotations}, "spec": {"type": spec.service_type}}
    endpoint = {
        "serveConfigV2": yaml.safe_dump(config, sort_keys=False),
        "excludeHeadPodFromServeSvc": True,  # it computes nothing, so it has no replica and no ingress
        "serveService": service,
        "rayClusterConfig": _make_cluster_spec(spec, groups, {"serve": SERVE_PORT}, SERVE_PORT),
    }
    return [_wrap(spec, API, "RayService", endpoint), *_make_budgets(spec, has_replicas=True)]


def make_cluster(spec: KubeSpec) -> list[Document]:
    """A RayCluster that stays, for `shoal run --address` and `shoal serve deploy --address`."""
    groups = [_make_worker_group(spec, group) for group in spec.all_groups]
    content = _make_cluster_spec(spec, groups, {"serve": SERVE_PORT}, SERVE_PORT)
    return [_wrap(spec, API, "RayCluster", content), *_make_budgets(spec)]


def make_console(spec: KubeSpec, names: Sequence[str], cluster: str) -> list[Document]:
    """A Deployment of one console. With `tls_secret` it listens for others, behind a Service; else at its pod's
    loopback, to which `kubectl port-forward` leads.

    names:   by which browsers reach it, beside the Service's
    cluster: a RayCluster of the namespace that it shows, by its name; "": none
    """
    pod = spec.head.model_copy(update={"cpus": 1, "memory": "2Gi"})  # on machines that the head may have, too
    container, reach = {**_make_container(spec, pod, "head", 0), "name": "console"}, list[str]()
    if spec.tls_secret:
        service = [f"{spec.name}{suffix}" for suffix in ("", f".{spec.namespace}", f".{spec.namespace}.svc")]
        reach = ["--host=0.0.0.0", f"--certificate={CERTIFICATE}", f"--key={KEY}"]
        reach += [f"--name={each}" for each in (*names, *service)]
    container["command"] = ["python", "-m", "shoal", "console", f"--port={CONSOLE_PORT}", *reach]
    container["ports"] = [{"name": "console", "containerPort": CONSOLE_PORT}]
    # Kubernetes itself reaches no loopback of a pod.
    check = {"command": ["bash", "-c", f"</dev/tcp/127.0.0.1/{CONSOLE_PORT}"]}
    container["readinessProbe"] = {"exec": check, "periodSeconds": 5, "timeoutSeconds": 2}
    if cluster:
        address = f"http://{cluster}-head-svc.{spec.namespace}.svc:{DASHBOARD_PORT}"
        token = {"secretKeyRef": {"name": _get_secret_name(spec), "key": "auth_token"}}
        container["env"].append({"name": "RAY_API_SERVER_ADDRESS", "value": address})
        container["env"].append({"name": "RAY_AUTH_TOKEN", "valueFrom": token})
    template = _make_template(spec, pod, container)
    template["spec"]["restartPolicy"] = "Always"
    selector = {NAME_LABEL: spec.name, PART_LABEL: "console"}
    template["metadata"]["labels"] |= selector
    content: Document = {"replicas": 1, "selector": {"matchLabels": selector}, "template": template}
    deployment = _wrap(spec, "apps/v1", "Deployment", {**content, "strategy": {"type": "Recreate"}})
    return [deployment, *([_make_service(spec, spec.name, selector, CONSOLE_PORT)] if spec.tls_secret else [])]


def make_secret(spec: KubeSpec, ray_token: str, shoal_token: str) -> Document:
    """The Secret with both tokens."""
    values = {"auth_token": ray_token, "shoal_token": shoal_token}
    metadata = _make_metadata(spec, _get_secret_name(spec))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": values}


def require_no_secrets(endpoint: EndpointSpec, fields: dict[str, Any]) -> None:
    """Raises ConfigError for a token or a key in the fields of an endpoint: the manifest would show it."""
    if "token" in fields:
        raise ConfigError("endpoint.token", "***", "would be in the manifest", "leave it out: it is in the Secret")
    for number, key in enumerate(endpoint.keys):
        if not key.key.get_secret_value().startswith("sha256:"):
            remedy = 'give its hash: `printf %s "$KEY" | sha256sum` behind sha256:'
            raise ConfigError(f"endpoint.keys.{number}.key", "***", "would be in the manifest", remedy)


def require_pods(endpoint: EndpointSpec, spec: KubeSpec) -> None:
    """Raises ConfigError for an endpoint with a replica, or a worker of one, that no pod holds, or more than all do."""
    share = min(1.0, 1 / endpoint.most_replicas) if endpoint.needs_cuda else 0.0
    needs = {"cpus": endpoint.num_cpus, "gpus": share if endpoint.num_gpus is None else endpoint.num_gpus}
    for kind, need in needs.items():
        most = max(getattr(group, kind) for group in spec.all_groups)
        if need > most:
            problem = f"is more than the {most} {kind[:3].upper()}s of a pod"
            remedy = f"give kube.workers.{kind}={math.ceil(need)}" + (f", or at most {most}" if most else "")
            raise ConfigError(f"endpoint.num_{kind}", need, problem, remedy)
    num_places = 0.0
    for group in spec.all_groups:
        in_pod = min(
            (int(getattr(group, kind) / need + 1e-9) for kind, need in needs.items() if need), default=math.inf
        )
        num_places += in_pod * (group.max if spec.autoscale else group.min)
    if endpoint.least_replicas * endpoint.num_workers > num_places:
        field = "num_replicas" if endpoint.scale is None else "scale.min"
        size = f"{needs['cpus']:g} CPUs and {needs['gpus']:g} GPUs"
        problem = f"is more than all pods hold: {num_places:g} processes of {size}"
        raise ConfigError(f"endpoint.{field}", endpoint.least_replicas, problem, "give kube.workers.max more")


def _probe(endpoint: EndpointSpec) -> Document:
    """Ready while the ingress of the pod answers; a pod without a replica, or one that is being left, is not."""
    check: Document = {"httpGet": {"path": "/v2/health/ready", "port": SERVE_PORT}}
    if endpoint.tls is not None:
        check["httpGet"]["scheme"] = "HTTPS"
        if endpoint.tls.client_ca:
            check = {"tcpSocket": {"port": SERVE_PORT}}  # Kubernetes has no certificate to show
    return {**check, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2}


def _make_service(spec: KubeSpec, name: str, selector: dict[str, str], port: int) -> Document:
    """One that leads to the pods with these labels."""
    metadata = _make_metadata(spec, name, spec.service_annotations)
    ports = [{"name": "shoal", "port": port, "targetPort": port}]
    service = {"type": spec.service_type, "selector": selector, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service}


def _make_budgets(spec: KubeSpec, has_replicas: bool = False) -> list[Document]:
    """How many pods stay when others are evicted: a head whose GCS would end with it, and of workers with replicas all
    but one of those that are always there. As `minAvailable`: Kubernetes knows no total of a custom resource's pods."""
    workers = sum(group.min for group in spec.all_groups)
    least = {"head": int(not spec.has_lasting_gcs), "worker": workers - 1 if has_replicas else 0}
    budgets = []
    for role, number in least.items():
        if number > 0:
            selector = {"matchLabels": {NAME_LABEL: spec.name, "ray.io/node-type": role}}
            budget = _wrap(spec, "policy/v1", "PodDisruptionBudget", {"minAvailable": number, "selector": selector})
            budget["metadata"]["name"] = f"{spec.name}-{role}"
            budgets.append(budget)
    return budgets


def _wrap(spec: KubeSpec, api: str, kind: str, content: Document) -> Document:
    return {"apiVersion": api, "kind": kind, "metadata": _make_metadata(spec, spec.name), "spec": content}


def _make_metadata(spec: KubeSpec, name: str, annotations: Mapping[str, str] = MappingProxyType({})) -> Document:
    labels = {"app.kubernetes.io/name": "shoal", **spec.labels}
    metadata: Document = {"name": name, "namespace": spec.namespace, "labels": labels}
    if found := {**spec.annotations, **annotations}:
        metadata["annotations"] = found
    return metadata


# -- pods -------------------------------------------------------------------------------------------------------------


def _make_worker_group(spec: KubeSpec, group: WorkerGroup, readiness: Document | None = None) -> Document:
    """A worker group. readiness: the probe of pods that serve"""
    container = _make_container(spec, group, "worker", group.gpus)
    if readiness is not None:
        container["readinessProbe"] = readiness
    container["lifecycle"] = {"preStop": {"exec": {"command": ["bash", "-c", DRAIN.format(drain_s=spec.drain_s)]}}}
    template = _make_template(spec, group, container)
    template["spec"]["terminationGracePeriodSeconds"] = spec.drain_s + END_GRACE_S
    if group.spot:
        labels, taint = SPOT_NODES[group.spot]
        template["spec"]["nodeSelector"] = {**labels, **group.node_selector}
        accepted = [{"key": taint, "operator": "Exists", "effect": "NoSchedule"}] if taint else []
        template["spec"]["tolerations"] = [*accepted, *_list_tolerations(group)]
    return {
        "groupName": group.name,
        "replicas": group.min,
        "minReplicas": group.min,
        "maxReplicas": group.max if spec.autoscale else group.min,
        "rayStartParams": {"num-gpus": str(group.gpus)},  # KubeRay counts those of some resources only
        "template": template,
    }


def _make_driver_group(spec: KubeSpec) -> Document:
    """One pod for the driver of a job and its gateway, of the head's size, at which a Service points."""
    size = {name: getattr(spec.head, name) for name in PodSpec.model_fields}
    group = _make_worker_group(
        spec, WorkerGroup.model_construct(**size, name=DRIVER_GROUP, gpus=0, min=1, max=1, spot="")
    )
    group["rayStartParams"]["resources"] = f"'{{\"{DRIVER_RESOURCE}\": 1}}'"
    return group


def _make_submitter(spec: KubeSpec) -> Document:
    """The pod that submits a job, of which KubeRay adds the command."""
    limits = {"cpu": "1", "memory": "1Gi"}
    resources = {"limits": limits, "requests": {"cpu": "500m", "memory": "200Mi"}}
    template = _make_template(
        spec, PodSpec(), {"name": "ray-job-submitter", "image": spec.image, "resources": resources, "volumeMounts": []}
    )
    del template["spec"]["volumes"][0]  # it has no home
    return template


def _make_cluster_spec(spec: KubeSpec, groups: list[Document], ports: dict[str, int], served_port: int) -> Document:
    """The spec of a RayCluster: with the token of the Secret, and with the autoscaler where it is on.

    Its head has Ray's own servers, and no CPU for work. ports: of the head by name, in addition to Ray's; served_port:
    of workers, at which others may connect where the network is closed, 0: none
    """
    container = _make_container(spec, spec.head, "head", 0)
    ports = {"gcs": GCS_PORT, "dashboard": DASHBOARD_PORT, "metrics": METRICS_PORT, **ports}
    container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    cluster = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token", "secretName": _get_secret_name(spec)},
        "enableInTreeAutoscaling": spec.autoscale,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _make_template(spec, spec.head, container),
        },
        "workerGroupSpecs": groups,
    }
    if spec.autoscale:
        options = {"version": "v2", "idleTimeoutSeconds": spec.idle_s, "securityContext": RESTRICTED}
        cluster["autoscalerOptions"] = options
    if spec.gcs_claim:
        cluster["gcsFaultToleranceOptions"] = {"backend": "rocksdb", "storage": {"claimName": spec.gcs_claim}}
    elif spec.redis:
        cluster["gcsFaultToleranceOptions"] = {"backend": "redis", "redisAddress": spec.redis}
    if spec.is_closed:  # but among its own pods, and to the operator
        open_ports = [{"ports": [{"port": served_port}]}] if served_port else []
        cluster["networkPolicy"] = {
            "mode": "DenyAllIngress",
            "head": {
                "ingressRules": [
                    {"ports": [{"port": port} for port in (METRICS_PORT, *HEAD_METRICS_PORTS)]},
                    {
                        "from": [{"podSelector": {"matchLabels": {PART_LABEL: "console"}}}],
                        "ports": [{"port": DASHBOARD_PORT}],
                    },
                ]
            },
            "worker": {"ingressRules": [{"ports": [{"port": METRICS_PORT}]}, *open_ports]},
        }
    return cluster


def _get_secret_name(spec: KubeSpec) -> str:
    """The Secret with the tokens."""
    return spec.secret or f"{spec.name}-tokens"


def _make_container(spec: KubeSpec, pod: PodSpec, role: str, gpus: int) -> Document:
    token = {"secretKeyRef": {"name": _get_secret_name(spec), "key": "shoal_token"}}
    variables = {"SHOAL_HOME": HOME, **({"SHOAL_STORE": spec.store} if spec.store else {}), **spec.variables}
    if spec.has_lasting_gcs:
        variables.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(HEAD_AWAY_S))
    if not gpus:
        variables["NVIDIA_VISIBLE_DEVICES"] = "void"  # an image of CUDA sees all GPUs of its machine otherwise
    limits: Document = {"cpu": str(pod.cpus), "memory": pod.memory, **({spec.gpu_resource: str(gpus)} if gpus else {})}
    if pod.disk:
        limits["ephemeral-storage"] = pod.disk
    container: Document = {
        "name": f"ray-{role}",
        "image": spec.image,
        "command": [SET_ENVIRONMENT],
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            {"name": "SHOAL_TOKEN", "valueFrom": token},
        ],
        "resources": {"limits": limits, "requests": dict(limits)},
        "volumeMounts": [{"name": "home", "mountPath": HOME}],
    }
    if spec.credentials:
        container["envFrom"] = [{"secretRef": {"name": spec.credentials}}]
    if spec.tls_secret:
        container["volumeMounts"].append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
    return container


def _make_template(spec: KubeSpec, pod: PodSpec, container: Document) -> Document:
    claim = {"persistentVolumeClaim": {"claimName": spec.home_claim}} if spec.home_claim else {"emptyDir": {}}
    volumes: list[Document] = [{"name": "home", **claim}]
    if spec.tls_secret:
        volumes.append({"name": "tls", "secret": {"secretName": spec.tls_secret}})
    container["securityContext"] = dict(RESTRICTED)
    if spec.read_only:
        container["securityContext"]["readOnlyRootFilesystem"] = True
        container["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"})
        container.setdefault("env", []).append({"name": "HOME", "value": "/tmp"})
        volumes.append({"name": "tmp", "emptyDir": {}})
    container["volumeMounts"] += spec.mounts
    pod_spec: Document = {
        "containers": [container],
        "volumes": volumes,
        "restartPolicy": "Never",
        "securityContext": {
            **{"runAsUser": 1000, "fsGroup": 1000},
            **{name: RESTRICTED[name] for name in ("runAsNonRoot", "seccompProfile")},
        },
    }
    if spec.service_account:
        pod_spec["serviceAccountName"] = spec.service_account
    if spec.pull_secrets:
        pod_spec["imagePullSecrets"] = [{"name": name} for name in spec.pull_secrets]
    if pod.node_selector:
        pod_spec["nodeSelector"] = dict(pod.node_selector)
    if pod.tolerations:
        pod_spec["tolerations"] = _list_tolerations(pod)
    for name, value in spec.pod.items():
        pod_spec[name] = [*pod_spec.get(name, []), *value] if isinstance(value, list) else value
    for each in pod_spec.get("initContainers", []):
        each["securityContext"] = {**each.get("securityContext", {}), **RESTRICTED}
    metadata: Document = {"labels": {**spec.labels, NAME_LABEL: spec.name}}
    if spec.annotations:
        metadata["annotations"] = dict(spec.annotations)
    return {"metadata": metadata, "spec": pod_spec}


def _list_tolerations(pod: PodSpec) -> list[Document]:
    return [each.model_dump(exclude_unset=True) for each in pod.tolerations]
