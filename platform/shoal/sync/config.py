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
from shoal.plugins.library import find_sound_libraries

if TYPE_CHECKING:
    from torch.optim import Optimizer

# The configuration of the platform's own kind. Libraries add theirs.
CONFIGS = {"all_reduce": "shoal.sync.config:AllReduceConfig"}
GROUP = "shoal.synchronizers"  # of entry points, and of the words that libraries add
# What a library makes of `all_reduce` by other fields: `elastic` of workers=[min,max], `hogwild` of sync.hogwild.
VARIANTS = "shoal.synchronizer_variants"


class SyncConfig(Spec):
    """What every kind has. Subclasses of ours give `kind` a default, their word.

    kind:            how the replicas of a run stay one model: a word, or a file with a configuration
    synchronizer:    the `module:name` of its `Synchronizer`, or of a function that makes one of a `Replica`
    launch:          what starts and follows the processes of a run of replicas: a word of the group `shoal.launchers`,
                     or a `module:name` (see `train.launch.training_run.LaunchReplicas`)
    controller:      the `module:name` of what makes the controller of such a run; "": the one of peers
    probe:           the `module:name` of a `CostProbe`, by which `shoal plan` measures a kind with servers; "": none
    has_replicas:    each worker is a replica of its own, which may be replaced while the others go on
    admits_parallel: `parallel` may divide the model, or the workers among copies of it
    has_every_step:  each worker has the weights after every step of the run; `average` needs them
    admits_cuda:     workers may train on a GPU
    chief_may_leave: worker 0, too, leaves when it is asked to, and is replaced
    one_optimizer:   where a Task with several optimizers is rejected: why, and what else to use
    """

    kind: str

    synchronizer: ClassVar[str]
    launch: ClassVar[str] = "replicas"
    controller: ClassVar[str] = ""
    probe: ClassVar[str] = ""
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
    def local_steps(self) -> int:
        """Steps of its own optimiser that a worker takes between two exchanges; 0: none."""
        return 0

    @property
    def waits_for_all(self) -> bool:
        """Whether each step of the run, or each exchange, waits for all workers."""
        return True

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
    def list_kinds(cls) -> Collection[str]:
        return list_kinds()

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
        own = map(load_reference, list_kinds().values())
        return dict.fromkeys([*cls.model_fields, *(name for each in own for name in each.model_fields)])


class AllReduceConfig(SyncConfig):
    """Every step waits for all ranks, and has the gradients of the global batch.

    hogwild: with one worker: lanes that train its weights at once, without locks (1106.5730)
    """

    kind: Literal["all_reduce"] = "all_reduce"
    hogwild: int = Field(default=1, ge=1)

    synchronizer = "shoal.sync.synchronizer:AllReduce"
    has_replicas = False
    admits_parallel = True
    has_every_step = True

    def resolve(self, workers: int, min_workers: int | None) -> SyncConfig:
        if min_workers is None:
            return self if self.hogwild == 1 else _make_variant("hogwild", lanes=self.hogwild)
        if self.hogwild > 1:
            raise ValueError("sync.hogwild does not go with workers=[min,max]: a lane takes steps of its own")
        return _make_variant("elastic", workers=workers, min_workers=min_workers)


_DEFAULT = "all_reduce"


def list_kinds() -> dict[str, str]:
    """The `module:name` of the configuration of each kind that Shoal and its libraries have, by its word."""
    libraries = find_sound_libraries()
    return CONFIGS | {kind: name for each in libraries for kind, name in each.extensions.get(GROUP, {}).items()}


def _make_variant(kind: str, **fields: object) -> SyncConfig:
    variant: SyncConfig = find_extension(kind, VARIANTS)(**fields)
    return variant


def find_sync_config_type(kind: object) -> type[SyncConfig]:
    """The configuration of the synchronizer `kind`. Raises ValueError."""
    config_type = find_extension(str(kind), GROUP, CONFIGS)
    if not (isinstance(config_type, type) and issubclass(config_type, SyncConfig)):
        raise ValueError(f"{kind} is no subclass of shoal.extend.SyncConfig")
    if not isinstance(getattr(config_type, "synchronizer", None), str):
        raise ValueError(f"{kind} does not say what its synchronizer is: synchronizer: ClassVar[str] = 'module:Class'")
    return config_type


def _advise(kind: object, config_type: type[SyncConfig], name: str) -> str:
    """What to do about a field that a kind does not have."""
    owners = _find_owners(name)
    remedy = f"leave it out, or choose sync.kind={' or '.join(owners)}" if owners else "leave it out"
    return f"{kind} has none, but {', '.join([*config_type.model_fields][1:])}: {remedy}"


def _find_owners(name: str) -> list[str]:
    """The kinds of ours that have a field."""
    return [kind for kind, reference in list_kinds().items() if name in load_reference(reference).model_fields]


def _parse_config(value: object) -> object:
    """Parse a kind, or the fields of one kind."""
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind", _DEFAULT)
    config_type = find_sync_config_type(kind)
    for name in value:
        if name not in config_type.model_fields:
            given = "null" if value[name] is None else value[name]
            raise ValueError(f"sync.{name}={given}: {_advise(kind, config_type, name)}")
    return config_type.model_validate({"kind": kind, **value})


AnySyncConfig = Annotated[SerializeAsAny[SyncConfig], BeforeValidator(_parse_config)]
