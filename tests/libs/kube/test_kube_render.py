"""Manifests by their schemas, and specs that are refused before anything is written."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_schemas import CRDS, find_problems, find_unrestricted

from shoal.cli.support.jobs import validate_overrides
from shoal.errors import ConfigError, RunError
from shoal.libs.kube import command
from typed import said, typed

pytestmark = pytest.mark.skipif(not CRDS.exists(), reason="KubeRay's schemas are not here")
IMAGE, STORE = "kube.image=example.org/shoal:1", "kube.store=s3://bucket/shoal"
PLAIN = (IMAGE, STORE)
BESIDE = ("Secret", "Service", "PodDisruptionBudget")
INSECURE = ("endpoint", "digits", "endpoint.insecure=true", *PLAIN)
TASK = "task=lenet"
GPU_GROUP = "kube.groups=[{name: gpu, cpus: 8, gpus: 2, max: 3, spot: gke}]"

OPERATORS = (
    "kube.labels={kueue.x-k8s.io/queue-name: research}",
    "kube.annotations={example.org/cost-center: '42'}",
    "kube.workers.disk=50Gi",
    "kube.mounts=[{name: data, mountPath: /data, readOnly: true}]",
    "kube.pod={priorityClassName: batch, volumes: [{name: data, persistentVolumeClaim: {claimName: films}}],"
    " initContainers: [{name: warm, image: example.org/warm:1}], topologySpreadConstraints:"
    " [{maxSkew: 1, topologyKey: topology.kubernetes.io/zone, whenUnsatisfiable: ScheduleAnyway}]}",
)
# A manifest each, the path of one field in it, and a value that does not fit there.
SPECS: dict[str, tuple[tuple[str, ...], str, object]] = {
    "job": (("job", "train", TASK, *PLAIN), "spec.entrypoint", 3),
    "job on GPUs": (
        ("job", "train", TASK, "device=cuda", "workers=4", GPU_GROUP, "kube.workers.gpus=1", *PLAIN),
        "spec.rayClusterSpec.workerGroupSpecs.1.template.spec.tolerations.0.operator",
        ["Exists"],
    ),
    "job with actors": (
        ("job", "actor_learner", "kube.gateway_port=5700", "kube.service_type=LoadBalancer", *PLAIN),
        "spec.rayClusterSpec.workerGroupSpecs.0.minReplicas",
        "one",
    ),
    "job with a zip file": (
        ("job", "train", TASK, "kube.working_dir=s3://bucket/files.zip", "kube.deadline_s=600", *PLAIN),
        "spec.activeDeadlineSeconds",
        "10m",
    ),
    "endpoint": (
        ("endpoint", "digits@champion", "endpoint.insecure=true", *PLAIN),
        "spec.rayClusterConfig.headGroupSpec.template.spec.containers.0.ports.0.containerPort",
        "gcs",
    ),
    "endpoint with TLS": (
        ("endpoint", "digits", "tabular@2", "kube.tls_secret=web", "kube.service_type=LoadBalancer", *PLAIN),
        "spec.rayClusterConfig.workerGroupSpecs.0.template.spec.containers.0.readinessProbe.httpGet.scheme",
        ["HTTPS"],
    ),
    "endpoint with clients' certificates": (
        (
            *("endpoint", "digits", "kube.tls_secret=web", "endpoint.tls.client_ca=/etc/shoal/tls/ca.crt"),
            *("endpoint.num_gpus=1", "kube.workers.gpus=1", *PLAIN),
        ),
        "spec.serveService.spec.type",
        ["LoadBalancer"],
    ),
    "endpoint that scales": (
        (
            *("endpoint", "digits", "endpoint.insecure=true", "endpoint.scale={objective_s: 0.1, min: 1, max: 8}"),
            *("kube.service_annotations={example.org/internal: 'true'}", *PLAIN),
        ),
        "spec.rayClusterConfig.autoscalerOptions.idleTimeoutSeconds",
        "60",
    ),
    "cluster": (("cluster", "kube.name=lab", *PLAIN), "spec.enableInTreeAutoscaling", "yes"),
    "cluster of an operator": (
        ("cluster", *PLAIN, "kube.gcs_claim=gcs", "kube.is_closed=true", "kube.read_only=true", *OPERATORS),
        "spec.networkPolicy.mode",
        "Closed",
    ),
    "job that is retried": (
        ("job", "train", TASK, "kube.retries=3", "kube.redis=redis.lab:6379", *PLAIN, *OPERATORS),
        "spec.backoffLimit",
        "three",
    ),
    "console": (
        ("console", "--cluster", "lab", *PLAIN),
        "spec.template.spec.containers.0.readinessProbe.exec.command",
        "bash",
    ),
    "console with TLS": (
        ("console", "kube.tls_secret=web", "kube.service_type=LoadBalancer", "--name", "runs.example.org", *PLAIN),
        "spec.strategy.type",
        3,
    ),
    "cluster of fixed size": (
        (
            *("cluster", IMAGE, "kube.home_claim=shared", "kube.credentials=aws", "kube.secret=own"),
            *("kube.autoscale=false", "kube.workers.min=3", "kube.pull_secrets=[registry]"),
            "kube.service_account=shoal",
        ),
        "spec.workerGroupSpecs.0.template.spec.volumes.0.persistentVolumeClaim",
        "shared",
    ),
}


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "validate_overrides", lambda path, words: None)  # a process that imports torch


def render(out: Path, words: tuple[str, ...]) -> list[dict[str, Any]]:
    """All documents of all files."""
    lines = said("kube render", *words, "--out", str(out)).splitlines()
    paths = [Path(line.split()[-1]) for line in lines if "apply" in line]
    assert sorted(paths) == sorted(out.iterdir())
    return [each for path in paths for each in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("name", SPECS)
def test_manifests_fit_the_schemas_and_a_wrong_field_is_named(name: str, tmp_path: Path) -> None:
    words, path, wrong = SPECS[name]
    documents = render(tmp_path / "out", words)
    assert [problem for each in documents for problem in find_problems(each)] == []
    assert find_unrestricted(documents) == []
    [changed] = [copy.deepcopy(each) for each in documents if each["kind"] not in BESIDE]
    place: Any = changed
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    for part in parents:
        place = place[part]
    place[last] = wrong
    assert any(str(last) in problem for problem in find_problems(changed))
    del place[last]
    place["unheard" if isinstance(last, str) else 0] = wrong
    assert any("unheard" in problem for problem in find_problems(changed))


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("cluster", STORE), "image"),
    (("cluster", IMAGE), "store"),
    (("cluster", IMAGE, "kube.store=/mnt/shared"), "store"),
    (("cluster", *PLAIN, "kube.name=Lab"), "name"),
    (("cluster", *PLAIN, "kube.name="), "kube.name"),
    (("endpoint", "123", "endpoint.insecure=true", *PLAIN), "kube.name"),
    (("cluster", *PLAIN, f"kube.name=a{'b' * 47}"), "name"),
    (("cluster", *PLAIN, "kube.workers.memory=16 GB"), "kube.workers.memory ="),
    (("cluster", *PLAIN, "kube.workers.min=5"), "workers.max"),
    (("cluster", *PLAIN, "kube.workers.name=driver"), "workers.name"),
    (("cluster", *PLAIN, "kube.groups=[{name: workers}]"), "workers twice"),
    (("cluster", *PLAIN, "kube.workers.spot=ebay"), "workers.spot"),
    (("cluster", *PLAIN, "kube.autoscale=false"), "min"),
    (("cluster", *PLAIN, "kube.gpu_resource=gpu"), "gpu_resource"),
    (("cluster", *PLAIN, "kube.variables={AWS_SECRET_ACCESS_KEY: x}"), "credentials"),
    (("cluster", *PLAIN, "kube.variables={SHOAL_HOME: /data}"), "SHOAL_HOME"),
    (("cluster", *PLAIN, "kube.variables={SHOAL_STORE: /data}"), "SHOAL_STORE"),
    (("cluster", *PLAIN, "kube.variables={MY NAME: x}"), "MY NAME"),
    (("cluster", *PLAIN, "kube.wrokers.max=2"), "kube.wrokers"),
    (("cluster", *PLAIN, "kube.tls_secret=A_b"), "kube.tls_secret ="),
    (("cluster", *PLAIN, "workers=2"), "kube"),
    (("cluster", *PLAIN, "--file", "nowhere.yaml"), "file"),
    (("console", *PLAIN, "port=80"), "kube"),
    (("job", "train", TASK, "workers=17", *PLAIN), "workers"),
    (("job", "train", TASK, "device=cuda", "workers=1", *PLAIN), "GPUs"),
    (("job", "nothing", *PLAIN), "job"),
    (("job", "train", TASK, "args.password=hidden-word", *PLAIN), "credentials"),
    (("job", "train", TASK, "kube.working_dir=files.zip", *PLAIN), "working_dir"),
    (("endpoint", "digits", *PLAIN), "insecure"),
    (("endpoint", "endpoint.insecure=true", *PLAIN), "models"),
    (("endpoint", "digits", "endpoint.insecure=true", "endpoint.port=80", *PLAIN), "endpoint.port"),
    (("endpoint", "digits", "endpoint.insecure=true", "endpoint.token=hidden-word", *PLAIN), "endpoint.token"),
    (("endpoint", "digits", "endpoint.tls.certificate=a", "endpoint.tls.key=b", *PLAIN), "kube.tls_secret"),
    ((*INSECURE, "endpoint.keys=[{name: ada, key: hidden-word}]"), "endpoint.keys.0.key"),
]


GPU_WORKERS, HALF_GPUS = ("endpoint.num_gpus=1", "kube.workers.gpus=1"), "{name: b, cpus: 1, gpus: 1, max: 1}"
TAINT = "kube.workers.tolerations=[{{{}}}]"
# The rules of Kubernetes' API server and of KubeRay's containers, which the schemas do not have.
REFUSED += [
    (("cluster", *PLAIN, TAINT.format("key: a, operator: Exist")), "kube.workers.tolerations.0.operator = 'Exist'"),
    (("cluster", *PLAIN, TAINT.format("key: a, operater: Exists")), "kube.workers.tolerations.0.operater"),
    (("cluster", *PLAIN, TAINT.format("key: a b, operator: Exists")), "'a b' is no key"),
    (("cluster", *PLAIN, TAINT.format("key: a, value: x y")), "kube.workers.tolerations.0.value"),
    (("cluster", *PLAIN, TAINT.format("key: a, operator: Exists, value: x")), "leave it out, or give Equal"),
    (("cluster", *PLAIN, TAINT.format("effect: NoSchedule")), "has no key"),
    (("cluster", *PLAIN, TAINT.format("key: a, value: b, tolerationSeconds: 3")), "effect: NoExecute"),
    (("cluster", *PLAIN, "kube.head.tolerations=[{key: a, operator: exists}]"), "kube.head.tolerations.0.operator"),
    (("cluster", *PLAIN, "kube.groups=[{name: b, tolerations: [{key: a, effect: no}]}]"), "groups.0.tolerations.0"),
    (("cluster", *PLAIN, "kube.workers.node_selector={role: x/y}"), "'x/y' is no value"),
    (("cluster", *PLAIN, "kube.workers.node_selector={Example.org/role: x}"), "'Example.org/role' is no key"),
    (("cluster", *PLAIN, "kube.service_annotations={example.org/a b: x}"), "'example.org/a b' is no key"),
    (("cluster", *PLAIN, f"kube.service_annotations={{{'a' * 64}: x}}"), "kube.service_annotations"),
    (("cluster", *PLAIN, "kube.credentials=a..b"), "kube.credentials"),
    (("cluster", *PLAIN, "kube.labels={a b: x}"), "'a b' is no key"),
    (("cluster", *PLAIN, "kube.annotations={a b: x}"), "kube.annotations"),
    (("cluster", *PLAIN, "kube.workers.disk=50 GB"), "kube.workers.disk ="),
    (("cluster", *PLAIN, "kube.pod={hostNetwork: true}"), "has 'hostNetwork'"),
    (("cluster", *PLAIN, "kube.pod={volumes: data}"), "is no list"),
    (("cluster", *PLAIN, "kube.mounts=[{name: data, mountPath: /data}]"), "mountPath"),
    (("cluster", *PLAIN, "kube.pod={volumes: [{name: home, emptyDir: {}}]}"), "give another name"),
    (("cluster", *PLAIN, "kube.redis=redis 6379"), "kube.redis"),
    (("cluster", *PLAIN, "kube.redis=redis:6379", "kube.gcs_claim=gcs"), "give one"),
    (("job", "train", TASK, *PLAIN, "kube.retries=1", "kube.gcs_claim=gcs"), "retries begin a new cluster"),
    (("cluster", *PLAIN, "kube.gpu_resource=-/gpu"), "kube.gpu_resource"),
    *(
        (("cluster", STORE, f"kube.image={image}"), "kube.image")
        for image in ("My/Shoal:1", "shoal 1", "shoal:", "host:port/shoal", "a//b", "shoal@sha256:12")
    ),
    ((*INSECURE, "endpoint.num_cpus=8"), "endpoint.num_cpus = 8.0: is more than the 4 CPUs of a pod"),
    ((*INSECURE, "endpoint.num_gpus=1"), "kube.workers.gpus=1"),
    ((*INSECURE, "endpoint.model.device=cuda"), "endpoint.num_gpus"),
    ((*INSECURE, "endpoint.num_gpus=2", "kube.workers.gpus=1"), "at most 1"),
    ((*INSECURE, "endpoint.num_cpus=3", "endpoint.num_replicas=5"), "endpoint.num_replicas = 5"),
    ((*INSECURE, "endpoint.num_cpus=4", "endpoint.scale={min: 5, max: 8}"), "endpoint.scale.min = 5"),
    (
        (*INSECURE, "endpoint.num_cpus=8", *GPU_WORKERS, "kube.groups=[{name: b, cpus: 8}]"),
        "0 processes of 8 CPUs and 1 GPUs",
    ),
]


@pytest.mark.parametrize(
    "words",
    [
        ("cluster", STORE, "kube.image=shoal"),
        ("cluster", STORE, "kube.image=REGISTRY/shoal:1"),
        ("cluster", STORE, "kube.image=localhost:5000/lab/my_shoal--x.y:v1.2-RC_3"),
        ("cluster", STORE, f"kube.image=ghcr.io/lab/shoal:1@sha256:{'0a' * 32}"),
        ("cluster", *PLAIN, TAINT.format("operator: Exists")),
        ("cluster", *PLAIN, TAINT.format("key: a.b/c, value: '', effect: PreferNoSchedule")),
        ("cluster", *PLAIN, TAINT.format("key: a, operator: Exists, effect: NoExecute, tolerationSeconds: 0")),
        ("cluster", *PLAIN, "kube.service_annotations={Example.org/A_b.c: 'any text: 1'}", "kube.name=lab"),
        ("cluster", *PLAIN, "kube.workers.node_selector={cloud.google.com/gke-spot: 'true', role: ''}"),
        (*INSECURE, "endpoint.num_cpus=0.1", "endpoint.num_replicas=160"),
        (*INSECURE, "endpoint.num_gpus=0.5", f"kube.groups=[{HALF_GPUS}]", "endpoint.num_replicas=2"),
        (*INSECURE, "endpoint.model.device=cuda", "kube.workers.gpus=1", "endpoint.num_replicas=4"),
    ],
)
def test_what_kubernetes_accepts_is_rendered(words: tuple[str, ...], tmp_path: Path) -> None:
    documents = render(tmp_path / "out", words)
    assert not [problem for each in documents if each["apiVersion"] == "ray.io/v1" for problem in find_problems(each)]


@pytest.mark.parametrize(("words", "named"), REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_spec_is_refused_before_anything_is_written(words: tuple[str, ...], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        render(tmp_path / "out", words)
    assert named in str(caught.value)
    assert "hidden-word" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_job_itself_checks_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "validate_overrides", validate_overrides)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import sys\nsys.exit(f'error: refused: {sys.argv[1:]}')  # as job_main does\n")
    with pytest.raises(RunError, match=r"refused: \['env=Nowhere-v1', '--check'\]"):
        render(tmp_path / "out", ("job", "own.py", "env=Nowhere-v1", *PLAIN))
    assert not (tmp_path / "out").exists()


def test_what_pods_get_is_what_the_words_say(tmp_path: Path) -> None:
    words, _, _ = SPECS["job on GPUs"]
    secret, job = render(tmp_path / "out", (*words, "kube.credentials=aws", "kube.drain_s=7"))
    assert job["spec"]["entrypoint"] == f"python /opt/shoal/jobs/train.py {TASK} device=cuda workers=4"
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": secret["metadata"]["name"]}
    head, (one, two) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    pods = [each["template"]["spec"] for each in (head, one, two)]
    gpus = [each["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for each in pods]
    assert gpus == [None, "1", "2"]
    hidden = [any(each["name"] == "NVIDIA_VISIBLE_DEVICES" for each in pod["containers"][0]["env"]) for pod in pods]
    assert hidden == [True, False, False]
    assert all(pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "aws"}}] for pod in pods)
    assert [pod.get("nodeSelector") for pod in pods] == [None, None, {"cloud.google.com/gke-spot": "true"}]
    assert two["maxReplicas"] == 3
    assert one["template"]["spec"]["terminationGracePeriodSeconds"] > 7


def test_what_operators_ask_for_is_on_every_pod_and_object(tmp_path: Path) -> None:
    words, _, _ = SPECS["cluster of an operator"]
    documents = render(tmp_path / "out", words)
    assert all(each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research" for each in documents)
    cluster = next(each["spec"] for each in documents if each["kind"] == "RayCluster")
    templates = [each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for template in templates:
        assert template["metadata"]["annotations"] == {"example.org/cost-center": "42"}
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert pod["priorityClassName"] == "batch"
        assert {"/data", "/tmp", "/var/lib/shoal"} <= {each["mountPath"] for each in container["volumeMounts"]}
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"} in container["env"]
    disks = [each["spec"]["containers"][0]["resources"]["requests"].get("ephemeral-storage") for each in templates]
    assert disks == [None, "50Gi"]
    assert not [each for each in documents if each["kind"] == "PodDisruptionBudget"]  # its head may go and come back


def test_evictions_leave_what_is_always_there_but_one(tmp_path: Path) -> None:
    def list_budgets(*words: str) -> dict[str, Any]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        documents = render(out, words)
        budgets = [each for each in documents if each["kind"] == "PodDisruptionBudget"]
        assert not [each for each in budgets if "maxUnavailable" in each["spec"]]  # of no use with a custom resource
        return {each["metadata"]["name"]: each["spec"]["minAvailable"] for each in budgets}

    assert list_budgets(*INSECURE) == {"digits-head": 1}
    assert list_budgets(*INSECURE, "kube.workers.min=3") == {"digits-head": 1, "digits-worker": 2}
    assert list_budgets("cluster", "kube.name=lab", "kube.workers.min=3", *PLAIN) == {"lab-head": 1}


def test_a_pod_that_escalates_is_found() -> None:
    """The rules of the profile find something."""
    pod = {"containers": [{"name": "a"}], "volumes": [{"name": "b", "hostPath": {"path": "/"}}]}
    assert len(find_unrestricted({"template": {"spec": pod}})) == 5


def test_a_retried_job_goes_on_with_its_run(tmp_path: Path) -> None:
    _, job, *_ = render(tmp_path / "out", SPECS["job that is retried"][0])
    assert job["spec"]["backoffLimit"] == 3
    assert "SHOAL_RUN_ID" in yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]


def test_tokens_are_in_a_file_of_their_own_for_its_owner_alone(tmp_path: Path) -> None:
    secret, *others = render(tmp_path / "out", SPECS["cluster"][0])
    tokens = secret["stringData"].values()
    assert all(len(each) > 30 for each in tokens)
    [path] = (tmp_path / "out").glob("*-tokens.yaml")
    assert path.stat().st_mode & 0o77 == 0
    assert not any(token in str(others) for token in tokens)


def test_actors_reach_the_gateway_by_its_service(tmp_path: Path) -> None:
    words = (*SPECS["job with actors"][0], "kube.gateway_host=play.example.org", "kube.name=cartpole")
    _, job, service = render(tmp_path / "out", words)
    assert "gateway.advertise=play.example.org:5700" in job["spec"]["entrypoint"]
    [driver, other] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    # KubeRay labels a pod with its group's name and with the labels of its template, and not with the RayJob's name.
    pods = [
        {"ray.io/group": each["groupName"], **each["template"].get("metadata", {}).get("labels", {})}
        for each in (driver, other)
    ]
    selector = service["spec"]["selector"]
    assert [selector.items() <= each.items() for each in pods] == [True, False]
    assert "cartpole" in selector.values()  # not the pod of another job
    assert driver["groupName"] == "driver"
    assert (driver["minReplicas"], driver["maxReplicas"]) == (1, 1)
    assert "shoal_driver" in driver["rayStartParams"]["resources"]
    assert "shoal_driver" in job["spec"]["entrypointResources"]


def test_a_console_listens_beyond_its_pod_with_tls_alone(tmp_path: Path) -> None:
    secret, plain = render(tmp_path / "plain", SPECS["console"][0])
    words = (*SPECS["console with TLS"][0], "kube.namespace=lab")
    _, deployment, service = render(tmp_path / "tls", words)
    programs = [each["spec"]["template"]["spec"]["containers"][0]["command"][4:] for each in (plain, deployment)]
    assert programs[0] == ["--port=8267"]
    given = typed("console", *programs[1])  # as the verb reads its words: here are no such files
    assert "/etc/shoal/tls/tls.crt" in str(given.exception)
    assert {"--name=runs.example.org", "--name=console.lab.svc"} < set(programs[1])
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    assert deployment["spec"]["template"]["spec"]["restartPolicy"] == "Always"
    variables = {each["name"]: each for each in plain["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert variables["SHOAL_STORE"]["value"] == "s3://bucket/shoal"
    assert variables["RAY_API_SERVER_ADDRESS"]["value"] == "http://lab-head-svc.default.svc:8265"
    tokens = {variables[name]["valueFrom"]["secretKeyRef"]["key"] for name in ("SHOAL_TOKEN", "RAY_AUTH_TOKEN")}
    assert tokens == set(secret["stringData"])


@pytest.mark.parametrize(("model", "name"), [("resnet50", "resnet50"), ("My.Model_2@1", "my-model-2"), ("3d", "d")])
def test_a_model_gives_its_endpoint_a_name_of_its_own(model: str, name: str, tmp_path: Path) -> None:
    _, service, *_ = render(tmp_path / "out", ("endpoint", model, "endpoint.insecure=true", *PLAIN))
    assert service["metadata"]["name"] == name


def test_the_submitter_of_a_job_pulls_its_image_from_a_private_registry(tmp_path: Path) -> None:
    words = ("job", "train", TASK, "kube.pull_secrets=[registry]", *PLAIN)
    _, job = render(tmp_path / "out", words)
    assert find_problems(job) == []
    submitter = job["spec"]["submitterPodTemplate"]["spec"]
    assert submitter["imagePullSecrets"] == [{"name": "registry"}]
    assert submitter["containers"][0]["image"] == "example.org/shoal:1"
    assert "command" not in submitter["containers"][0]  # KubeRay's own
