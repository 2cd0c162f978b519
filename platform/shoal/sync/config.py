"""How the replicas of a run stay one model, chosen by its kind: `sync=all_reduce`, `sync.kind=diloco sync.every=20`.

Owns the table of kinds. Imports no torch: launchers read a spec without computing. A synchronizer of the user's own is
named by its configuration: `sync.kind=my_sync.py:MyConfig` (see `shoal.extend`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from shoal.config import Spec
from shoal.plugins.find import find_extension, load_reference

if TYPE_CHECKING:
    from torch.optim import Optimizer

# The configuration of each: modules are imported at their first use.
CONFIGS = {
    "all_reduce": "shoal.sync.config:AllReduceConfig",
    "parameter_server": "shoal.sync.parameter_server.config:ParameterServerConfig",
    "local_sgd": "shoal.sync.parameter_server.config:LocalSGDConfig",
    "diloco": "shoal.sync.parameter_server.config:DiLoCoConfig",
}
GROUP = "shoal.synchronizers"  # of entry points


class SyncConfig(Spec):
    """What every kind has. Subclasses of ours give `kind` a default, their word.

    synchronizer:    the `module:name` of its `Synchronizer`, or of a function that makes one of a `Replica`
    controller:      the `module:name` of what makes the controller of a run of replicas
    has_replicas:    each worker is a replica of its own, which may be replaced while the others go on
    admits_parallel: `parallel` may divide the model, or the workers among copies of it
    has_every_step:  each worker has the weights after every step of the run; `average` needs them
    admits_cuda:     workers may train on a GPU
    chief_may_leave: worker 0, too, leaves when it is asked to, and is replaced
    one_optimizer:   where a Task with several optimizers is rejected: why, and what else to use
    """

    kind: str

    synchronizer: ClassVar[str]
    controller: ClassVar[str] = "shoal.sync.peers:PeerController"
    has_replicas: ClassVar[bool] = True
    admits_parallel: ClassVar[bool] = False
    has_every_step: ClassVar[bool] = False
    admits_cuda: ClassVar[bool] = True
    chief_may_leave: ClassVar[bool] = False
    one_optimizer: ClassVar[tuple[str, str] | None] = None

    @property
    def chosen_by(self) -> tuple[str, object]:
        """The field of a TrainSpec that chooses this, and its value."""
        return "sync.kind", self.kind

    @property
    def num_servers(self) -> int:
        """Processes of a run besides its workers."""
        return 0

    @property
    def num_lanes(self) -> int:
        """Lanes that train the weights of one process at once."""
        return 1

    @property
    def micro_batches(self) -> int:
        """The parts of a worker's share of a step, on the average, whose gradients it adds up."""
        return 1

    @property
    def shares_memory(self) -> bool:
        """Whether all processes of a run must be on one host."""
        return False

    def resolve(self, workers: int, min_workers: int | None) -> SyncConfig:
        """The configuration that a run with so many workers has: this one, unless that makes it another kind.

        Raises ValueError.
        """
        return self

    def check_run(self, workers: int, batch_size: int) -> None:
        """Raises ValueError for what does not fit; `batch_size` is that of all workers, and divides by their number."""

    def check_model(self, optimizer: Optimizer) -> None:
        """Raises ConfigError for a model that this does not take, before a worker starts.

        optimizer: of the Task, over all parameters of the model
        """

    @classmethod
    def choose_type(cls, values: Mapping[str, Any]) -> type[Spec]:
        return find_sync_config_type(values.get("kind", _DEFAULT))

    @classmethod
    def expand_choice(cls, choice: str) -> dict[str, Any]:
        return {"kind": choice}

    @classmethod
    def explain_absence(cls, name: str) -> str:
        kind = cls.model_fields["kind"]
        return _advise(cls.__name__ if kind.is_required() else kind.default, cls, name) if _find_owners(name) else ""

    @classmethod
    def list_fields(cls) -> Collection[str]:
        """Also those of other kinds of ours."""
        own = map(load_reference, CONFIGS.values())
        return dict.fromkeys([*cls.model_fields, *(name for each in own for name in each.model_fields)])


class AllReduceConfig(SyncConfig):
    """Every step waits for all ranks, and has the gradients of the global batch.

    hogwild:      with one worker: lanes that train its weights at once, without locks (1106.5730)
    hogwild_mode: threads or processes; `auto` tries both for a second each and goes on with the faster
    """

    kind: Literal["all_reduce"] = "all_reduce"
    hogwild: int = Field(default=1, ge=1)
    hogwild_mode: Literal["auto", "threads", "processes"] = "auto"

    synchronizer: ClassVar[str] = "shoal.sync.synchronizer:AllReduce"
    has_replicas: ClassVar[bool] = False
    admits_parallel: ClassVar[bool] = True
    has_every_step: ClassVar[bool] = True

    def resolve(self, workers: int, min_workers: int | None) -> SyncConfig:
        if min_workers is None:
            return HogwildConfig(lanes=self.hogwild, mode=self.hogwild_mode) if self.hogwild > 1 else self
        if self.hogwild > 1:
            raise ValueError("sync.hogwild does not go with workers=[min,max]: a lane takes steps of its own")
        return ElasticConfig(workers=workers, min_workers=min_workers)


class ElasticConfig(SyncConfig):
    """`all_reduce` with `workers=[min_workers,workers]`: a step has the gradients of all that take part, which may
    change."""

    kind: Literal["elastic"] = "elastic"
    workers: int
    min_workers: int

    synchronizer: ClassVar[str] = "shoal.sync.elastic.worker:make_elastic_sync"
    controller: ClassVar[str] = "shoal.sync.elastic.controller:make_elastic_controller"
    has_every_step: ClassVar[bool] = True
    chief_may_leave: ClassVar[bool] = True
    one_optimizer: ClassVar[tuple[str, str] | None] = ("workers that join share the gradients of one", "use workers=N")

    @property
    def chosen_by(self) -> tuple[str, object]:
        return "workers", f"[{self.min_workers},{self.workers}]"


class HogwildConfig(SyncConfig):
    """`all_reduce` with `sync.hogwild` > 1: lanes of one process."""

    kind: Literal["hogwild"] = "hogwild"
    lanes: int
    mode: Literal["auto", "threads", "processes"]

    synchronizer: ClassVar[str] = "shoal.train.launch.hogwild:HogwildSync"
    has_replicas: ClassVar[bool] = False
    admits_cuda: ClassVar[bool] = False
    one_optimizer: ClassVar[tuple[str, str] | None] = ("a lane has one", "leave it out")

    @property
    def chosen_by(self) -> tuple[str, object]:
        return "sync.hogwild", self.lanes

    @property
    def num_lanes(self) -> int:
        return self.lanes

    def check_run(self, workers: int, batch_size: int) -> None:
        if workers > 1 or batch_size % self.lanes:
            raise ValueError(f"sync.hogwild={self.lanes}: give workers=1, and a batch_size that it divides")


_DEFAULT = "all_reduce"


def find_sync_config_type(kind: object) -> type[SyncConfig]:
    """The configuration of the synchronizer `kind`. Raises ValueError."""
    found = find_extension(str(kind), GROUP, CONFIGS)
    if not (isinstance(found, type) and issubclass(found, SyncConfig)):
        raise ValueError(f"{kind} is no subclass of shoal.extend.SyncConfig")
    if not isinstance(getattr(found, "synchronizer", None), str):
        raise ValueError(f"{kind} does not say what its synchronizer is: synchronizer: ClassVar[str] = 'module:Class'")
    return found


def _find_owners(name: str) -> dict[str, Any]:
    """The kinds of ours that have a field, and what it is there."""
    found = {kind: load_reference(reference).model_fields.get(name) for kind, reference in CONFIGS.items()}
    return {kind: field for kind, field in found.items() if field is not None}


def _advise(kind: object, chosen: type[SyncConfig], name: str) -> str:
    owners, names = _find_owners(name), ", ".join([*chosen.model_fields][1:])
    remedy = f"leave it out, or choose sync.kind={' or '.join(owners)}" if owners else "leave it out"
    return f"{kind} has none, but {names}: {remedy}"


def _parse_config(value: object) -> object:
    """A kind, or fields of one kind. Records of release 0.1 have those of all kinds: what is unused has its default."""
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind", _DEFAULT)
    chosen = find_sync_config_type(kind)
    fields = {name: each for name, each in value.items() if name in chosen.model_fields}
    for name in [each for each in value if each not in fields]:
        if any(field.default == value[name] for field in _find_owners(name).values()):
            continue
        given = "null" if value[name] is None else value[name]
        raise ValueError(f"sync.{name}={given}: {_advise(kind, chosen, name)}")
    return chosen.model_validate({"kind": kind, **fields})


AnySyncConfig = Annotated[SerializeAsAny[SyncConfig], BeforeValidator(_parse_config)]
