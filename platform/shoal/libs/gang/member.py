"""A worker of a replica: loads its part of each version, and computes what the replica sends.

Made by the shell of its process; `serve` returns when the replica is gone. One thread computes, in the order of the
replica's messages; one reads these, and one the activations of the stage before, so that sending waits for no forward.

| capacity                | what blocks           | who unblocks              | close()                            |
|-------------------------|-----------------------|---------------------------|------------------------------------|
| ACTIVATIONS received    | the stage before, by  | the forward that takes    | the connections close, and `serve` |
| ahead; any number of    | the connection's own  | the next one              | returns after the present forward  |
| messages, which clients | buffer                |                           |                                    |
| wait for                |                       |                           |                                    |
"""

from __future__ import annotations

import logging
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.errors import ConnectionLost, InferenceError, ModelError, WeightsError
from shoal.extend.parallel import TIMEOUT_S, set_network_interface, set_parameters, split_layers
from shoal.extend.serve import (
    TemplateConfig,
    check_finite,
    check_names,
    check_shape,
    choose_kernels,
    name_all_outputs,
    select_outputs,
    to_array,
)
from shoal.extend.sync import Channel, ChannelListener, connect
from shoal.libs.gang.messages import BuildModel, DropVersion, JoinGang, LoadVersion, RunBatch, WorkerAnswer
from shoal.libs.gang.plan import GangPlan, Stage, build_model, make_absent, to_inputs
from shoal.weights import WeightFile
from shoal.weights.tensor_files import VersionTensors

logger = logging.getLogger(__name__)
ACTIVATIONS = 2
Shard = Callable[[tuple[Any, ...], Tensor | None], Any]  # of a stage; or of layers that are split, which receive None


class GangMember:
    """Listens at `address` for its replica.

    on_lost: called, in a thread, when the replica is gone: a process that computes ends there
    """

    def __init__(self, host: str, on_lost: Callable[[], None] = lambda: None) -> None:
        self._listener = ChannelListener(host)
        self.address = self._listener.address
        self._on_lost = on_lost
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._received: queue.Queue[Tensor | Exception | None] = queue.Queue(ACTIVATIONS)
        self._channels: list[Channel] = []
        self._versions: dict[int, tuple[TemplateConfig, Shard]] = {}
        self._store: Any = None

    def serve(self, torch_threads: int = 1) -> None:
        """Join the other workers, and compute until the replica is gone."""
        torch.set_num_threads(torch_threads)
        try:
            replica = self._accept()
            replica.send(WorkerAnswer())  # only then may other workers connect: who is admitted first is the replica
            while isinstance(message := replica.receive(), BuildModel):
                try:
                    build_model(message.factory)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's module: its load reports it
                    logger.warning("a spare worker cannot build the model: %s", error)
                replica.send(WorkerAnswer())
            self._join(replica, message)

            def read_messages() -> None:
                with suppress(ConnectionLost):
                    while True:
                        self._messages.put(replica.receive())
                self._messages.put(None)
                self._on_lost()

            threading.Thread(target=read_messages, name="shoal-gang", daemon=True).start()
            while (message := self._messages.get()) is not None:
                if isinstance(message, DropVersion):
                    self._versions.pop(message.key, None)
                    continue
                answer = self._load(message) if isinstance(message, LoadVersion) else self._run(message)
                if answer is not None:
                    replica.send(answer)
        except OSError:
            logger.info("a worker ends: its replica or another worker is gone")
        finally:
            self.close()
            self._on_lost()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._listener.close()

    def _accept(self) -> Channel:
        if (channel := self._listener.accept()) is None:
            raise ConnectionLost("the worker is closed")
        self._channels.append(channel)
        return channel

    def _join(self, replica: Channel, join: JoinGang) -> None:
        self._rank = join.rank
        self._next = None
        self._mesh = None
        if join.splits_layers:
            self._open_store(replica, join)
            self._mesh = init_device_mesh("cpu", (join.size,))
            return
        if join.next is not None:
            self._next = connect(join.next)
            self._channels.append(self._next)
        if join.rank:
            previous = self._accept()
            threading.Thread(target=self._read_activations, args=(previous,), daemon=True).start()
        replica.send(WorkerAnswer())

    def _open_store(self, replica: Channel, join: JoinGang) -> None:
        """Form the process group. The first worker has its store, of which the replica informs the others."""
        set_network_interface(self.address.host)
        limit = timedelta(seconds=TIMEOUT_S)
        if join.store is None:  # of one address alone: a store asks nobody for a secret
            opened = socket.create_server((self.address.host, 0))
            host, port = opened.getsockname()
            descriptor = opened.detach()
            self._store = TCPStore(
                host, port, join.size, True, limit, wait_for_workers=False, master_listen_fd=descriptor
            )
        else:
            self._store = TCPStore(*join.store, join.size, False, limit, wait_for_workers=False)
        replica.send(WorkerAnswer(self._store.port))
        dist.init_process_group("gloo", store=self._store, rank=join.rank, world_size=join.size, timeout=limit)

    def _read_activations(self, previous: Channel) -> None:
        with suppress(ConnectionLost):
            while True:
                self._received.put(previous.receive())
        self._received.put(None)

    def _load(self, load: LoadVersion) -> WorkerAnswer:
        try:
            shard = load_shard(load.config, load.plan, load.file, self._rank, self._mesh)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's module: the version's rejection has it
            what = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
            return WorkerAnswer(error=WeightsError(what))
        self._versions[load.key] = load.config, shard
        return WorkerAnswer()

    def _run(self, run: RunBatch) -> WorkerAnswer | None:
        """Compute a micro-batch; only the worker that has the result answers."""
        received: Tensor | Exception | None = None
        if self._mesh is None and self._rank:
            received = self._received.get()
            if received is None:
                raise ConnectionLost("the stage before is gone")
        result: Any = received
        if not isinstance(received, Exception):
            try:
                config, shard = self._versions[run.key]
                with torch.inference_mode():
                    result = shard(to_inputs(run.inputs, config.bf16_inputs), received)
                    if self._next is None:
                        names = config.outputs
                        arrays = name_all_outputs(result) if names is None else select_outputs(result, names)
                        result = {name: to_array(each) for name, each in arrays.items()}
            except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's module: its caller has it
                result = _to_portable(error)
        if self._next is not None:
            self._next.send(result)
            return None
        if self._mesh is not None and self._rank:
            return None
        return WorkerAnswer(error=result) if isinstance(result, Exception) else WorkerAnswer(result)


def _to_portable(error: BaseException) -> InferenceError:
    """The error, if it is an answer to a request and can be sent; else a ModelError of its text."""
    if isinstance(error, InferenceError):
        with suppress(Exception):  # a user's class may not survive it
            copy: InferenceError = pickle.loads(pickle.dumps(error))
            return copy
    return ModelError(500, f"{type(error).__name__}: {error}")


def load_shard(config: TemplateConfig, plan: GangPlan, file: WeightFile, rank: int, mesh: DeviceMesh | None) -> Shard:
    """This worker's part of a version. Raises WeightsError when the file is missing, damaged or of another model.

    mesh: of the workers that split layers
    """
    model = build_model(config.factory)
    state = model.state_dict(keep_vars=True)
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    reader = _TensorReader(file, config.options.finite)
    check_names(file.version, expected, reader.names)
    if plan.layers is not None:
        assert mesh is not None
        split_layers(model, plan.layers, mesh)
    aliases = _group_names(model)
    values: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if plan.stages is not None and rank not in plan.stages.parameters[name]:
            values[name] = make_absent(name, parameter)
            continue
        stored = next((each for each in aliases[name] if each in reader.names), name)
        values[name] = reader.read_parameter(stored, parameter, expected[name])
    set_parameters(model, {name: each.requires_grad_(False) for name, each in values.items()})
    for name, buffer in model.named_buffers():
        if name in expected:
            buffer.copy_(reader.read(name, expected[name], may_be_infinite=not bool(torch.isfinite(buffer).all())))
    if plan.layers is None:
        choose_kernels(model)
    model.requires_grad_(False)
    return (lambda inputs, _: model(*inputs)) if plan.stages is None else Stage(model, plan.stages, rank)


def _group_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by its first."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    names: dict[str, list[str]] = {name: [] for name in first.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[first[parameter]].append(name)
    return names


class _TensorReader:
    """Reads tensors one by one. A file is verified, or downloaded, before the first of its tensors is read."""

    def __init__(self, file: WeightFile, is_finite: bool) -> None:
        self._version, self._is_finite = file.version, is_finite
        for part in file.parts:
            if file.origin is None and not part.path.exists():
                problem = f"weights version {file.version} cannot be read: there is no {part.path}"
                raise WeightsError(f"{problem}; a worker's host needs the registry at the same path")
        self._tensors = VersionTensors(file)
        self.names = frozenset(self._tensors)

    def read(self, name: str, expected: tuple[Any, Any], *, part: Any = None, may_be_infinite: bool = False) -> Tensor:
        """The tensor, or the slices of it that `part` has. Raises WeightsError."""
        if part is None:
            tensor = self._tensors[name]
            shape = tensor.shape
        else:
            shape = self._tensors.get_shape(name)
            tensor = self._tensors.read_part(name, part) if shape == expected[0] else torch.empty(0, dtype=expected[1])
        check_shape(self._version, name, (shape, tensor.dtype), expected)
        if self._is_finite and not may_be_infinite:
            check_finite(self._version, name, tensor)
        return tensor

    def read_parameter(self, name: str, parameter: Tensor, expected: tuple[Any, Any]) -> Tensor:
        """The parameter, or of a split one this worker's part."""
        if not isinstance(parameter, DTensor):
            return self.read(name, expected)
        mesh, layout = parameter.device_mesh, parameter.placements
        sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, layout)
        part = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        own = self.read(name, expected, part=part)
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(own, mesh, layout, run_check=False, shape=shape, stride=stride)
