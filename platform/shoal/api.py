"""The functions of `import shoal` for notebooks and scripts: `fit`, `serve`, `connect`, `load_run`.

Each is a few lines over the packages below. The Ray cluster, if one is needed, is that of `shoal up`, or one of this
process's own, which ends with its last user and at the latest with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from shoal.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from shoal.actor import GameActor, RemoteActor
    from shoal.client import Client
    from shoal.runs import Run
    from shoal.serve.on_ray.deployment import DeployedEndpoint
    from shoal.train import Task, TrainSpec
    from shoal.train.reporting.result import TrainResult


def fit(
    task: type[Task] | Task | str | TrainSpec,
    *,
    register: bool = True,
    say: Callable[[str], None] | None = print,
    **fields: Any,
) -> TrainResult:
    """Train a Task to the end, and register its network.

    task:     a Task class (also one defined in a notebook); a word, as `shoal run train task=...` takes it:
              `my_task.py:MyTask`, `package.module:MyTask`, or a recipe's name; a Task of `shoal.hf`; or a TrainSpec
    register: register the network as a new version of `name` (by default the class's name in lower case). The best one
              on the same validation data is `champion`, by the metric of `stop.target`, else of `stop.convergence`,
              else by the loss; `aliases=["candidate"]` names it otherwise
    say:      receives progress lines; None for silence
    fields:   of TrainSpec, nested ones as dicts:
              `stop={"epochs": 3}`, `stop={"target": "accuracy>=0.9"}`, `optimizer={"learning_rate": 1e-3}`,
              `batch_size=256`, `parallel="fsdp"`, `workers=2`, `sync="parameter_server"`, `args={"hidden": 64}`,
              `device="cuda"`, `resume=RUN_ID`

    With `workers=1` it trains in this process, without Ray; with more, in Ray workers, parallelised by `parallel`
    ("ddp", "fsdp", "tensor", "pipeline", or degrees).

    Ctrl-C and SIGTERM save a checkpoint, and then end the program as they end any: by KeyboardInterrupt, and by status
    143. The last line says what continues: the same call, and `resume=RUN_ID`. Where the program has a handler of its
    own, that is called once all is saved; if it returns, so does this, and `result.is_interrupted`.

    Returns the outcome: `result.metrics` of the retained network, `result.model` for `shoal.load`, `result.run_id` for
    `shoal.load_run`.
    Raises ConfigError for a field or a Task that does not fit, PlanError for a model that does not fit the plan,
    DataError, NotFinite, OutOfMemory (all of them ShoalError); the run's record has the reason.

        class Line(shoal.Task):
            def model(self): return torch.nn.Linear(1, 1)
            def data(self): return shoal.Data(train=TensorDataset(x, 2 * x + 1))
            def loss(self, outputs, batch): return ((outputs - batch[1]) ** 2).mean()

        result = shoal.fit(Line, stop={"epochs": 20})
    """
    from shoal.train.launch.local import fit_locally
    from shoal.train.launch.training_run import end_program
    from shoal.train.task_source import require_standalone

    spec = make_train_spec(task, fields)
    if spec.workers == 1 and not spec.has_replicas:
        result = fit_locally(spec, registers=register, predicts=False, say=say)
    else:
        require_standalone(spec)
        attachment.acquire()
        try:
            from shoal.flows.training import JOB, train_on_cluster  # imports ray: see `serve`

            result = train_on_cluster(spec, JOB, registers=register)
        finally:
            attachment.release()
    remedy = f'Go on with: the same call, and resume="{result.run_id}"' if result.is_interrupted else ""
    if say and remedy:
        say(remedy)
    end_program(result.signal, remedy)
    return result


def make_train_spec(task: type[Task] | Task | str | TrainSpec, fields: Mapping[str, Any]) -> TrainSpec:
    """The spec of what `fit` takes. Raises ConfigError for what is no Task."""
    from shoal.train.launch.overrides import load_recipe
    from shoal.train.spec import TrainSpec
    from shoal.train.task import Task
    from shoal.train.task_source import get_task_path

    if isinstance(task, TrainSpec):
        base = task
    elif isinstance(task, str):
        base = load_recipe(task)
    elif isinstance(task, type) and issubclass(task, Task):
        base = TrainSpec(task=get_task_path(task), name=task.__name__.lower())
    elif isinstance(task, Task) and task.args is not None:
        base = TrainSpec(task=get_task_path(type(task)), args=dict(task.args), name=type(task).__name__.lower())
        base = base.update(task.defaults)
    else:
        raise ConfigError("task", repr(task), "is no Task class, word or TrainSpec", "give the class, not an instance")
    return base.update(fields)


class ServedEndpoint:
    """An endpoint that lives as long as this process, a detached one longer; a context manager, with `close`.

    url:   the root of the protocol: `{url}/v2/models/{name}/infer`
    token: required from callers
    """

    def __init__(self, endpoint: DeployedEndpoint, token: str, closing: ExitStack) -> None:
        self.name = endpoint.name
        self.url = endpoint.url
        self.token = token
        self._closing = closing

    def client(self, **options: Any) -> Client:
        """A client of this endpoint; `options` as `shoal.Client` takes them."""
        from shoal.client import Client

        return Client(self.url, token=self.token, **options)

    def close(self) -> None:
        """Remove the endpoint, unless it is detached, and the cluster that was started for it, if any. Idempotent."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(*models: str, **fields: Any) -> ServedEndpoint:
    """Serve registered models over HTTP from Ray Serve replicas, and return when all of them answer.

    models: `name@version`, `name@alias` (the endpoint follows it), or `name` for the newest version now
    fields: of EndpointSpec: `num_replicas=2`, `port=8000`, `model={"max_batch_size": 64}`, ...

    Raises ConfigError, RegistryError for unknown models, ClusterError when Ray or a replica does not start.

        with shoal.serve("line") as endpoint, endpoint.client() as client:
            client.infer("line", [[1.0]])
    """
    from shoal.flows.serving_spec import ServingSpec
    from shoal.home import load_access_token

    spec = ServingSpec.parse({"models": list(models), "endpoint": fields} if fields else {"models": list(models)})
    with ExitStack() as closing:
        attachment.acquire(is_lasting=spec.endpoint.lifetime == "detached")
        closing.callback(attachment.release)
        from shoal.flows.serving import record_endpoint  # imports ray, which reads its settings from the environment

        endpoint = closing.enter_context(record_endpoint(spec))
        return ServedEndpoint(endpoint, load_access_token(), closing.pop_all())


@overload
def connect(
    address: str,
    *,
    token: str | None = None,
    budget_s: float = 0.002,
    inference: Literal["local"] = "local",
    **options: Any,
) -> GameActor: ...


@overload
def connect(
    address: str, *, token: str | None = None, budget_s: float = 0.002, inference: Literal["remote"], **options: Any
) -> RemoteActor: ...


def connect(
    address: str, *, token: str | None = None, budget_s: float = 0.002, inference: str = "local", **options: Any
) -> GameActor | RemoteActor:
    """Connect a game to the gateway of a run; returns when the first weights have arrived.

        actor = shoal.connect("tcp://127.0.0.1:5555")
        action = actor.act(observation)
        actor.reward(1.0)
        actor.end_episode(observation, truncated=False)

    address: tcp://HOST:PORT, as the run prints it, or several with `|` between: see `shoal.ActorClient`
    token:   by default the access token of this machine ($SHOAL_TOKEN, or the file in $SHOAL_HOME)
    budget_s: how long a call of the game may wait while the learner is busy; then experience is discarded and counted
    inference: "local": the actor computes the policy; "remote": the gateway does, and `act` waits for its answer
    options: as `shoal.ActorClient` takes them; `server_key` for a gateway on another machine

    Raises Refused, ConnectionLost. `shoal.actor.play(environment, actor.client)` is the bundled loop.
    """
    from shoal.actor import ActorClient, GameActor, RemoteActor, RemoteClient
    from shoal.home import load_access_token

    if inference not in ("local", "remote"):
        raise ConfigError("inference", inference, "is unknown", 'take "local" or "remote"')
    client_type = RemoteClient if inference == "remote" else ActorClient
    client = client_type(address, load_access_token() if token is None else token, **options)
    try:
        client.connect()
        return RemoteActor(client) if isinstance(client, RemoteClient) else GameActor(client, budget_s=budget_s)
    except BaseException:
        client.close()
        raise


def load_run(run: str = "latest") -> Run:
    """The record of a run, by its id or as `latest`: metrics as tables, events, models, endpoints. Raises RunError."""
    import shoal.runs

    return shoal.runs.load(run)


class Attachment:
    """This process as a driver of a cluster, while an endpoint or a run uses it."""

    def __init__(self) -> None:
        self._num_users = 0
        self._closing = ExitStack()

    def acquire(self, is_lasting: bool = False) -> None:
        """Raises ClusterError, ConfigError. is_lasting: only on a cluster that outlives this process"""
        from shoal.cluster.attach import find_cluster
        from shoal.cluster.embedded_cluster import start_cluster
        from shoal.cluster.job_main import is_connected, join_cluster
        from shoal.runs.waits import WaitReporter

        if self._num_users == 0:
            if is_connected():
                raise ClusterError("this process is connected to a Ray of its own: call ray.shutdown() first")
            with ExitStack() as closing:
                cluster = find_cluster()
                if cluster is None and is_lasting:
                    raise ClusterError("no cluster is up, as a detached endpoint needs: `shoal up` starts one")
                if cluster is not None and not cluster.is_local:
                    problem = "is a cluster of other hosts, which a process joins as a job"
                    raise ConfigError("RAY_ADDRESS", cluster.address, problem, "use `shoal run`, or unset it")
                with WaitReporter("starting Ray"):
                    cluster = cluster or closing.enter_context(start_cluster())
                    closing.enter_context(join_cluster(cluster))
                self._closing = closing.pop_all()
        self._num_users += 1

    def release(self) -> None:
        """Disconnect if this was the last user, and end a cluster that was started for it."""
        from shoal.runs.waits import WaitReporter

        self._num_users -= 1
        if self._num_users == 0:
            with WaitReporter("ending Ray"):
                self._closing.close()


attachment = Attachment()
