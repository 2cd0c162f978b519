"""Members one after another, through one module whose tensors are a member's rows in turn: fits every model.

The engine that others must equal, and the one for models that no other can compute. Called through MemberEngine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.extend.parallel import get_value
from shoal.libs.population.engines.engine import MemberChunk, MemberEngine
from shoal.libs.population.engines.member_dropout import replace_dropout
from shoal.libs.population.member_rows import MemberRows
from shoal.libs.population.objective import MemberBatch, Objective, stack_trees

_process_generator = threading.Lock()


class LoopedEngine(MemberEngine):
    """`model` computes each member: its parameters' data are set to the member's rows.

    draws_randomly: the model takes random numbers from the process' generator, other than in dropout layers. Then that
                    generator is exchanged for the member's while the member computes, one thread at a time
    """

    name = "looped"
    max_chunk = 1  # a member takes its steps while its rows are in the cache

    def __init__(self, model: nn.Module, objective: Objective, *, draws_randomly: bool = False) -> None:
        self.model, self._dropout = replace_dropout(model)
        self.objective, self._draws_randomly = objective, draws_randomly
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        self._bound: tuple[MemberRows, int] | None = None  # what the tensors are now
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        for name, _ in model.named_buffers():
            path, _, key = name.rpartition(".")
            self._owners[name] = model.get_submodule(path), key

    def compute_gradients(self, chunk: MemberChunk, batch: MemberBatch) -> Tensor:
        chunk.rows.gradients.zero_()
        self.model.train()
        self._dropout.generators = chunk.generators
        losses = []
        for index, generator in enumerate(chunk.generators):
            self._bind(chunk, index)
            content = batch.of_member(index)
            with self._exchange(generator):
                loss = get_value(self.objective.loss(self.model(*self.objective.inputs(content)), content))
                if not isinstance(loss, Tensor) or loss.ndim:
                    kind = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
                    raise ConfigError("loss", kind, "is no scalar tensor", "return the mean over the batch")
                loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():  # most models change their buffers in place; others assign new ones
                for name, (module, key) in self._owners.items():
                    row, buffer = chunk.rows.buffers[name][index], module._buffers[key]
                    if buffer is not None and buffer.data_ptr() != row.data_ptr():
                        row.copy_(buffer)
                        module._buffers[key] = row.data
        return torch.stack(losses)

    @torch.no_grad()
    def predict(self, chunk: MemberChunk, batch: MemberBatch) -> Any:
        self.model.eval()
        outputs = []
        for index in range(len(chunk)):
            self._bind(chunk, index)
            outputs.append(self.model(*self.objective.inputs(batch.of_member(index))))
        return stack_trees(outputs)

    def _bind(self, chunk: MemberChunk, index: int) -> None:
        self._dropout.member = index
        if self._bound is not None and self._bound[0] is chunk.rows and self._bound[1] == index:
            return
        self._bound = (chunk.rows, index)
        for name, parameter in self._parameters.items():
            parameter.grad = None  # which lets the data have another address
            parameter.data = chunk.rows.parameters[name][index]
            parameter.grad = chunk.rows.gradient_views[name][index]
        for name, parameter in self._frozen.items():
            parameter.data = chunk.rows.buffers[name][index]
        for name, (module, key) in self._owners.items():
            module._buffers[key] = chunk.rows.buffers[name][index].data  # autograd counts changes of each alone

    @contextmanager
    def _exchange(self, generator: torch.Generator) -> Iterator[None]:
        if not self._draws_randomly:
            yield
            return
        process = find_process_generator(generator.device)
        with _process_generator:
            before = process.get_state()
            process.set_state(generator.get_state())
            try:
                yield
                generator.set_state(process.get_state())
            finally:
                process.set_state(before)


def find_process_generator(device: torch.device) -> torch.Generator:
    """The generator from which operations without one take their random numbers."""
    if device.type == "cuda":
        generator: torch.Generator = torch.cuda.default_generators[device.index or 0]
        return generator
    return torch.default_generator
