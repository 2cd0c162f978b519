"""Pods of a RayCluster: the containers, what they mount, and how they begin and end."""

from __future__ import annotations

from typing import Any

from shoal.libs.kube.spec import DRIVER_GROUP, SPOT_NODES, KubeSpec, PodSpec, WorkerGroup

Document = dict[str, Any]

HOME, TLS_FOLDER = "/var/lib/shoal", "/etc/shoal/tls"
SERVE_PORT, GCS_PORT, DASHBOARD_PORT, METRICS_PORT = 8000, 6379, 8265, 8080
DRIVER_RESOURCE = "shoal_driver"
NAME_LABEL = "shoal/name"  # of all pods; KubeRay gives them no label with the name of their RayJob
# KubeRay puts its own command, `ulimit ...; ray start ...`, behind this and "&&". Ray and all its workers inherit it.
SET_ENVIRONMENT = 'set=$(python -m shoal.cluster.host_environment) && eval "$set" || exit 1'
# Serve moves replicas to other nodes, Ray places nothing more here, and the raylet ends once nothing runs here.
# Without a head, as at the end of a job, there is nothing to wait for.
DRAIN = (
    "timeout 30 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'Kubernetes removes the pod'"
    " --deadline-remaining-seconds {drain_s} && timeout {drain_s} bash -c 'while pgrep -x raylet; do sleep 1; done'"
)
END_GRACE_S = 30  # beyond `drain_s`, for the end of Ray


def make_head(spec: KubeSpec, ports: dict[str, int]) -> Document:
    """The head group: Ray's own servers, and no CPU for work. ports: by name, in addition to Ray's"""
    container = _make_container(spec, spec.head, "head", 0)
    container["ports"] = _list_ports({"gcs": GCS_PORT, "dashboard": DASHBOARD_PORT, "metrics": METRICS_PORT, **ports})
    return {
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
        "template": _make_template(spec, spec.head, container),
    }


def make_worker_group(spec: KubeSpec, group: WorkerGroup, readiness: Document | None = None) -> Document:
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


def make_driver_group(spec: KubeSpec) -> Document:
    """One pod for the driver of a job and its gateway, of the head's size, at which a Service points."""
    size = {name: getattr(spec.head, name) for name in PodSpec.model_fields}
    made = make_worker_group(
        spec, WorkerGroup.model_construct(**size, name=DRIVER_GROUP, gpus=0, min=1, max=1, spot="")
    )
    made["rayStartParams"]["resources"] = f"'{{\"{DRIVER_RESOURCE}\": 1}}'"
    return made


def make_submitter(spec: KubeSpec) -> Document:
    """The pod that submits a job, as KubeRay makes it, which leaves out the secrets of the image's registry."""
    resources = {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m", "memory": "200Mi"}}
    container = {"name": "ray-job-submitter", "image": spec.image, "resources": resources}
    secrets = [{"name": name} for name in spec.pull_secrets]
    return {"spec": {"containers": [container], "restartPolicy": "Never", "imagePullSecrets": secrets}}


def make_cluster_spec(spec: KubeSpec, groups: list[Document], ports: dict[str, int]) -> Document:
    """The spec of a RayCluster: with the token of the Secret, and with the autoscaler where it is on."""
    from importlib.metadata import version

    made = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token", "secretName": get_secret_name(spec)},
        "enableInTreeAutoscaling": spec.autoscale,
        "headGroupSpec": make_head(spec, ports),
        "workerGroupSpecs": groups,
    }
    if spec.autoscale:
        made["autoscalerOptions"] = {"version": "v2", "idleTimeoutSeconds": spec.idle_s}
    return made


def get_secret_name(spec: KubeSpec) -> str:
    """The Secret with the tokens."""
    return spec.secret or f"{spec.name}-tokens"


def _make_container(spec: KubeSpec, pod: PodSpec, role: str, gpus: int) -> Document:
    token = {"secretKeyRef": {"name": get_secret_name(spec), "key": "shoal_token"}}
    variables = {"SHOAL_HOME": HOME, **({"SHOAL_STORE": spec.store} if spec.store else {}), **spec.variables}
    if not gpus:
        variables["NVIDIA_VISIBLE_DEVICES"] = "void"  # an image of CUDA sees all GPUs of its machine otherwise
    limits: Document = {"cpu": str(pod.cpus), "memory": pod.memory, **({spec.gpu_resource: str(gpus)} if gpus else {})}
    made: Document = {
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
        made["envFrom"] = [{"secretRef": {"name": spec.credentials}}]
    if spec.tls_secret:
        made["volumeMounts"].append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
    return made


def _make_template(spec: KubeSpec, pod: PodSpec, container: Document) -> Document:
    claim = {"persistentVolumeClaim": {"claimName": spec.home_claim}} if spec.home_claim else {"emptyDir": {}}
    volumes: list[Document] = [{"name": "home", **claim}]
    if spec.tls_secret:
        volumes.append({"name": "tls", "secret": {"secretName": spec.tls_secret}})
    made: Document = {
        "containers": [container],
        "volumes": volumes,
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
    }
    if spec.service_account:
        made["serviceAccountName"] = spec.service_account
    if spec.pull_secrets:
        made["imagePullSecrets"] = [{"name": name} for name in spec.pull_secrets]
    if pod.node_selector:
        made["nodeSelector"] = dict(pod.node_selector)
    if pod.tolerations:
        made["tolerations"] = _list_tolerations(pod)
    return {"metadata": {"labels": {NAME_LABEL: spec.name}}, "spec": made}


def _list_tolerations(pod: PodSpec) -> list[Document]:
    return [each.model_dump(exclude_unset=True) for each in pod.tolerations]


def _list_ports(ports: dict[str, int]) -> list[Document]:
    return [{"name": name, "containerPort": port} for name, port in ports.items()]
