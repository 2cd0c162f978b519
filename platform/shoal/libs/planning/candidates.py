"""The plans that hardware admits: degrees of parallelism with micro-batches, and kinds of synchronisation.

Pure functions of specs. Whether a model and a batch fit a plan is found later, by running it. Called by `planner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.config import last_override
from shoal.errors import ConfigError
from shoal.extend.sync import find_sync_config_type

CHOSEN = ("workers", "parallel", "sync", "sync.kind", "sync.staleness")  # by the plan
CHOSEN_DEGREES = tuple(f"parallel.{name}" for name in ("data", "replicate", "shard", "tensor", "pipeline"))
MAX_STAGES = 8
SSP_STALENESS = 4


@dataclass(frozen=True)
class Candidate:
    """A plan by its overrides, `a.b=c`.

    is_synchronous: whether the weights after each step are those of one process over the global batch
    """

    name: str
    overrides: tuple[str, ...]
    workers: int
    is_synchronous: bool = True


def require_open_choices(overrides: Sequence[str]) -> None:
    """Raises ConfigError for an override of something that the plan chooses."""
    for name in (*CHOSEN, *CHOSEN_DEGREES):
        if any(override.partition("=")[0] == name for override in overrides):
            remedy = "leave it out, and say hosts and devices"
            raise ConfigError(name, last_override(overrides, name), "is what `shoal plan` chooses", remedy)


def enumerate_candidates(
    hosts: int, devices: int, every: int, micro_batches: int | None = None, sync: Sequence[str] = ()
) -> list[Candidate]:
    """One device, every division of all devices, and every kind of replicas.

    Tensor parallel ranks stay within a host, since they exchange activations in each layer.

    every:         of local steps
    micro_batches: of a pipeline; None: two and four for each stage
    sync:          overrides `sync.FIELD=...`, for the kinds that have the field
    """
    workers = hosts * devices
    candidates = [Candidate("one device", ("parallel=single", "workers=1"), 1)]
    if workers == 1:
        return candidates
    for tensor in _divisors(devices):
        for pipeline in _divisors(workers // tensor):
            if pipeline <= MAX_STAGES:
                candidates += _divide_model(workers, hosts, tensor, pipeline, micro_batches)
    return candidates + list(_replicate_model(workers, hosts, every, sync))


def _divide_model(
    workers: int, hosts: int, tensor: int, pipeline: int, micro_batches: int | None
) -> Iterator[Candidate]:
    data = workers // tensor // pipeline
    splits = [f"parallel.{name}={size}" for name, size in (("tensor", tensor), ("pipeline", pipeline)) if size > 1]
    names = [f"{name}={size}" for name, size in (("tensor", tensor), ("pipeline", pipeline)) if size > 1]
    presets: list[tuple[str, list[str]]] = [("", ["parallel=ddp"])]
    if data > 1:
        presets = [(f"ddp={data}", ["parallel=ddp"]), (f"fsdp={data}", ["parallel=fsdp"])]
    if 1 < hosts < data and data % hosts == 0:
        presets.append((f"hybrid={data}", ["parallel=hybrid", f"parallel.replicate={hosts}"]))
    variants: list[tuple[str, list[str]]] = [("", [])]
    if pipeline > 1:
        numbers = [micro_batches] if micro_batches is not None else [2 * pipeline, 4 * pipeline]
        variants = [(f"{each} micro-batches", [f"parallel.micro_batches={each}"]) for each in numbers]
    for preset, overrides in presets:
        for variant, more in variants:
            name = " x ".join(filter(None, [preset, *names])) + (f", {variant}" if variant else "")
            yield Candidate(name, (*overrides, *splits, *more, f"workers={workers}"), workers)


def _replicate_model(workers: int, hosts: int, every: int, sync: Sequence[str]) -> Iterator[Candidate]:
    """With a server on each host."""
    kinds = (
        ("parameter server, BSP", "parameter_server", "sync.staleness=0", True),
        (f"parameter server, SSP({SSP_STALENESS})", "parameter_server", f"sync.staleness={SSP_STALENESS}", False),
        ("parameter server, free-running", "parameter_server", "sync.staleness=null", False),
        (f"local SGD, every {every} steps", "local_sgd", f"sync.every={every}", False),
        (f"DiLoCo, every {every} steps", "diloco", f"sync.every={every}", False),
    )
    servers = (f"sync.servers={hosts}",) if hosts > 1 else ()
    for name, kind, override, is_synchronous in kinds:
        fields = find_sync_config_type(kind).model_fields.keys() - {"every"}
        given = [each for each in sync if each.partition("=")[0].removeprefix("sync.") in fields]
        overrides = "parallel=ddp", f"sync.kind={kind}", override, *given, *servers, f"workers={workers}"
        yield Candidate(name, overrides, workers, is_synchronous)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
