"""KubeSpec: the cluster below a job or an endpoint on Kubernetes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator, model_validator

from shoal.config import Spec
from shoal.store.location import require_location

DRIVER_GROUP = "driver"  # where the gateway of a job is; added to a job with `gateway_port`
MAX_NAME_CHARS = 47  # KubeRay adds to it, and refuses names of clusters beyond 53
OWN_VOLUMES = ("home", "tls", "tmp")
OWN_VARIABLES = ("SHOAL_HOME", "SHOAL_STORE", "RAY_ADDRESS", "RAY_AUTH_MODE")

# The rules of Kubernetes' API server for names, keys and values, and of a container's runtime for an image.
_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS = rf"{_PART}(\.{_PART})*"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_HOST = rf"({_DNS.replace('a-z', 'A-Za-z')}|\[[0-9A-Fa-f:]+\])(:[0-9]+)?"
_PATH = r"[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*"
_IMAGE = rf"({_HOST}/)?{_PATH}(/{_PATH})*(:[A-Za-z0-9_][-A-Za-z0-9_.]{{0,127}})?(@[A-Za-z0-9_+.-]+:[0-9a-fA-F]{{32,}})?"


def _require_key(key: str) -> str:
    """Raises ValueError for what is no key of a label, an annotation or a taint."""
    if len(key.rpartition("/")[0]) > 253 or not re.fullmatch(rf"({_DNS}/)?{_WORD}", key):
        rule = "NAME or PREFIX/NAME, as in example.org/role: letters, digits, - _ and ., at most 63 of them in NAME"
        raise ValueError(f"{key!r} is no key: give {rule}")
    return key


def _require_value(value: str) -> str:
    """Raises ValueError for what is no value of a label or a taint."""
    if not re.fullmatch(rf"({_WORD})?", value):
        raise ValueError(f"{value!r} is no value of a label: give at most 63 letters, digits, - _ and .")
    return value


def _require_labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        _require_key(key)
        _require_value(value)
    return labels


Label = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
ObjectName = Annotated[str, StringConstraints(pattern=rf"^{_DNS}$", max_length=253)]
OptionalName = Annotated[str, StringConstraints(pattern=rf"^({_DNS})?$", max_length=253)]
Labels = Annotated[dict[str, str], AfterValidator(_require_labels)]
_SIZE = r"[1-9][0-9]*(\.[0-9]+)?([kMGTP]|[KMGTP]i)?"
Quantity = Annotated[str, StringConstraints(pattern=rf"^{_SIZE}$")]
OptionalQuantity = Annotated[str, StringConstraints(pattern=rf"^({_SIZE})?$")]
# Fields of a pod that `pod` may have; the others are this room's own, or would undo them.
POD_FIELDS: dict[str, type] = {
    **dict.fromkeys(("priorityClassName", "schedulerName", "runtimeClassName", "preemptionPolicy", "dnsPolicy"), str),
    **dict.fromkeys(("initContainers", "volumes", "topologySpreadConstraints", "hostAliases"), list),
    **dict.fromkeys(("affinity", "dnsConfig"), dict),
}

# What selects a cloud's nodes that may be taken away at any time: labels, and the taint to tolerate, if there is one.
SPOT_NODES: dict[str, tuple[dict[str, str], str]] = {
    "gke": ({"cloud.google.com/gke-spot": "true"}, "cloud.google.com/gke-spot"),
    "eks": ({"eks.amazonaws.com/capacityType": "SPOT"}, ""),
    "aks": ({"kubernetes.azure.com/scalesetpriority": "spot"}, "kubernetes.azure.com/scalesetpriority"),
    "karpenter": ({"karpenter.sh/capacity-type": "spot"}, ""),
}


class Toleration(Spec):
    """A taint of machines that pods accept, in Kubernetes' own words."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: Annotated[str, AfterValidator(_require_value)] = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    tolerationSeconds: int | None = None

    @model_validator(mode="after")
    def _go_together(self) -> Toleration:
        if self.key:
            _require_key(self.key)
        elif self.operator == "Equal":
            raise ValueError("has no key: give one, or operator: Exists, which accepts every taint")
        if self.operator == "Exists" and self.value:
            raise ValueError("has a value that operator: Exists does not compare: leave it out, or give Equal")
        if self.tolerationSeconds is not None and self.effect != "NoExecute":
            raise ValueError("has tolerationSeconds, which are for effect: NoExecute")
        return self


class PodSpec(Spec):
    """One kind of pod; a pod is a node of Ray.

    cpus:          processors of a pod
    memory:        of a pod, as Kubernetes writes it: 16Gi; a fourth of it may be objects of Ray
    disk:          its ephemeral storage, likewise: requested, and the most that it gets; "": as its machine has it
    node_selector: labels that its machine must have
    tolerations:   taints of machines that it accepts, as Kubernetes writes them
    """

    cpus: int = Field(default=2, ge=1, le=1024)
    memory: Quantity = "8Gi"
    disk: OptionalQuantity = ""
    node_selector: Labels = Field(default_factory=dict)
    tolerations: list[Toleration] = Field(default_factory=list)


class WorkerGroup(PodSpec):
    """Pods that are alike, as many as are needed.

    name:     of the group
    gpus:     of a pod
    min, max: pods; the autoscaler chooses between them
    spot:     machines that may be taken away, and of which cloud; "": others
    """

    name: Label = "workers"
    cpus: int = Field(default=4, ge=1, le=1024)
    memory: Quantity = "16Gi"
    gpus: int = Field(default=0, ge=0, le=64)
    min: int = Field(default=0, ge=0, le=10_000)
    max: int = Field(default=4, ge=1, le=10_000)
    spot: Literal["", "gke", "eks", "aks", "karpenter"] = ""

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if name in ("headgroup", DRIVER_GROUP):
            raise ValueError("is the name of a group that is added")
        return name

    @field_validator("max")
    @classmethod
    def _is_no_less(cls, most: int, info: ValidationInfo) -> int:
        if most < info.data.get("min", 0):
            raise ValueError(f"is below min, {info.data['min']}")
        return most


class KubeSpec(Spec):
    """Where a job, an endpoint or a cluster runs. All objects are in one namespace.

    name:            of the objects; by default that of the job, or of the endpoint's first model
    image:           with Shoal and the user's own files: see the Dockerfile
    pull_secrets:    of the image's registry
    store:           SHOAL_STORE of all pods, a bucket
    home_claim:      a PersistentVolumeClaim that all pods can mount and write, instead of a store
    credentials:     a Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID
    service_account: of the pods, whose cloud role may replace credentials
    secret:          a Secret with `auth_token`, Ray's token, and `shoal_token`; "": one is written, with this user's
    variables:       further environment variables
    labels, annotations: of all objects and pods, as of a queue (Kueue, Volcano), a budget or a mesh
    pod:             further fields of all pods, as Kubernetes writes them: priorityClassName, initContainers, volumes,
                     topologySpreadConstraints and others
    mounts:          of the volumes of `pod`, in all pods
    read_only:       whether the image's files cannot be written; /tmp and SHOAL_HOME can
    is_closed:       whether pods of others reach the port of the endpoint or the gateway, and metrics, alone: KubeRay
                     makes a NetworkPolicy
    gcs_claim:       a PersistentVolumeClaim of the head, by which it may die and come back
    redis:           HOST:PORT, for the same
    head:            the pod of Ray's own servers; it computes nothing
    workers, groups: the pods that compute: one group, and further ones
    autoscale:       whether their number follows the need; otherwise it is `min`
    idle_s:          until the autoscaler removes a pod without work
    gpu_resource:    what Kubernetes calls a GPU
    service_type:    of the endpoint's, or the gateway's, Service
    service_annotations: of it, for the cloud's balancer
    tls_secret:      a Secret of the type kubernetes.io/tls for the endpoint
    gateway_port:    of a job's gateway; 0: none. Adds a pod for the job's driver and the gateway, and a Service
    gateway_host:    where actors reach that Service; by default its name within the cluster
    working_dir:     a zip file in a bucket that Ray unpacks for the job; "": the image has all files
    retries:         of a failed job, each on a new cluster, where it goes on with its run
    keep_s:          until the pods of a finished job are removed
    deadline_s:      until a job is ended; 0: no limit
    drain_s:         until a pod that Kubernetes removes is ended, for requests and checkpoints
    """

    name: Annotated[str, StringConstraints(pattern=r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$", max_length=MAX_NAME_CHARS)] = ""
    namespace: Label = "default"
    image: str = ""
    pull_secrets: list[ObjectName] = Field(default_factory=list)
    store: str = ""
    home_claim: OptionalName = ""
    credentials: OptionalName = ""
    service_account: OptionalName = ""
    secret: OptionalName = ""
    variables: dict[str, str] = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    pod: dict[str, Any] = Field(default_factory=dict)
    mounts: list[dict[str, Any]] = Field(default_factory=list)
    read_only: bool = False
    is_closed: bool = False
    gcs_claim: OptionalName = ""
    redis: str = Field(default="", pattern=rf"^({_HOST})?$")
    head: PodSpec = PodSpec()
    workers: WorkerGroup = WorkerGroup()
    groups: list[WorkerGroup] = Field(default_factory=list)
    autoscale: bool = True
    idle_s: int = Field(default=60, ge=0)
    gpu_resource: str = Field(default="nvidia.com/gpu", pattern=rf"^{_DNS}/{_WORD}$")
    service_type: Literal["ClusterIP", "LoadBalancer", "NodePort"] = "ClusterIP"
    service_annotations: dict[str, str] = Field(default_factory=dict)
    tls_secret: OptionalName = ""
    gateway_port: int = Field(default=0, ge=0, le=65535)
    gateway_host: str = ""
    working_dir: str = ""
    retries: int = Field(default=0, ge=0, le=100)
    keep_s: int = Field(default=3600, ge=0)
    deadline_s: int = Field(default=0, ge=0)
    drain_s: int = Field(default=120, ge=0, le=3600)

    @property
    def all_groups(self) -> list[WorkerGroup]:
        """All groups that compute."""
        return [self.workers, *self.groups]

    @property
    def has_lasting_gcs(self) -> bool:
        """Whether a head that comes back finds its cluster."""
        return bool(self.gcs_claim or self.redis)

    @field_validator("pod")
    @classmethod
    def _are_fields_of_pods(cls, pod: dict[str, Any]) -> dict[str, Any]:
        for name, value in pod.items():
            if name not in POD_FIELDS:
                raise ValueError(f"has {name!r}, which is none of {', '.join(POD_FIELDS)}")
            if not isinstance(value, POD_FIELDS[name]):
                raise ValueError(f"has {name} = {value!r}, which is no {POD_FIELDS[name].__name__}")
        return pod

    @field_validator("image")
    @classmethod
    def _is_reference(cls, image: str) -> str:
        if image and not re.fullmatch(_IMAGE, image):
            raise ValueError(
                "is no image: give HOST/PATH:TAG, as in example.org/lab/shoal:1, with a path in lower case"
            )
        return image

    @field_validator("annotations", "service_annotations")
    @classmethod
    def _have_keys(cls, annotations: dict[str, str]) -> dict[str, str]:
        for key in annotations:
            _require_key(key.lower())  # Kubernetes ignores the case of an annotation's prefix
        return annotations

    @field_validator("store")
    @classmethod
    def _is_bucket(cls, store: str) -> str:
        if store and "://" not in require_location("kube.store", store):
            raise ValueError("is a folder, which pods do not share: give a bucket, or home_claim")
        return store

    @field_validator("variables")
    @classmethod
    def _are_no_secrets(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"has {name!r}, which is no name of a variable")
            if name in OWN_VARIABLES:
                raise ValueError(f"has {name}, which Shoal or KubeRay sets: leave it out; kube.store gives SHOAL_STORE")
            if re.search(r"TOKEN|SECRET|PASSWORD|_KEY$", name):
                raise ValueError(f"has {name}, which anybody who reads the manifest would see: give it in credentials")
        return variables

    @field_validator("working_dir")
    @classmethod
    def _is_zip(cls, folder: str) -> str:
        if folder and not re.fullmatch(r"(s3|gs|https|azure)://\S+\.zip", folder):
            raise ValueError("is no zip file at s3://, gs://, azure:// or https://")
        return folder

    @model_validator(mode="after")
    def _go_together(self) -> KubeSpec:
        if not self.name:
            raise ValueError("name is missing: give kube.name, such as lab")
        if not self.image:
            raise ValueError("image is missing: give kube.image, one that is made of the Dockerfile")
        if not (self.store or self.home_claim):
            raise ValueError("store is missing: pods share no disk, so give kube.store, or kube.home_claim")
        if self.gcs_claim and self.redis:
            raise ValueError("gcs_claim and redis are for the same: give one")
        if self.gcs_claim and self.retries:
            raise ValueError("retries begin a new cluster each, which would find the old one's in gcs_claim: give one")
        volumes = [each.get("name") for each in self.pod.get("volumes", [])]
        if taken := {*OWN_VOLUMES} & {*volumes}:
            raise ValueError(f"pod.volumes has {min(taken)}, which is a volume of ours: give another name")
        for each in self.mounts:
            if each.get("name") not in volumes or "mountPath" not in each:
                raise ValueError(f"mounts has {each!r}: give name, of a volume of pod.volumes, and mountPath")
        names = [group.name for group in self.all_groups]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"groups has {name} twice")
        for group in self.all_groups:  # fixed numbers
            if not self.autoscale and not group.min:
                raise ValueError(f"autoscale=false needs min of the group {group.name}: it would have no pod")
        return self
