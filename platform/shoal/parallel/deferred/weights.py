"""The values of parameters on the meta device: drawn, or read from a file, and given one after the other.

Made by `build`; filled into a sharded model by its plan. No more than one full tensor is in memory at a time, besides
those that the draw of another needs. `decide_plan` finds such a plan, while the model runs with arbitrary values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from shoal.errors import summarize_error
from shoal.parallel.comm.world import World
from shoal.parallel.deferred.tape import CannotDefer, Region, Tape
from shoal.parallel.state.module_snapshot import has_hooks, preserve_module, preserve_parameter_attributes
from shoal.parallel.state.skeleton import lend_values
from shoal.parallel.state.state_dict import copy_into, sum_in_double
from shoal.random_state import preserve_rng


class DeferredWeights:
    """What fills the parameters, and buffers, of one model that are on the meta device.

    given:        values that are read instead of drawn, by name in the model's state dict
    sampled:      once the model is filled, the sum of some numbers of each value that was read, to compare ranks by
    eager_reason: why each rank has filled the full model before it was split; "" where none has
    """

    def __init__(self, model: nn.Module, tape: Tape, find_region: Callable[[Tensor], Region | None]) -> None:
        self._tape = tape
        self.given: Mapping[str, Tensor] = {}
        self.sampled: Mapping[str, str] = tape.sampled
        self.eager_reason = ""
        self.is_filled = False
        self._regions: dict[str, Region] = {}
        first_names = {id(each): name for name, each in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        self._first_names = {name: first_names[id(each)] for name, each in every}  # tied ones have several
        storages = set[int]()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_meta:
                continue
            region = find_region(tensor)
            if region is None:
                raise CannotDefer(f"{name} is on the meta device, and nothing gives it a value")
            if isinstance(tensor, nn.Parameter) and has_hooks(tensor):
                raise CannotDefer(f"{name} has a hook")  # which would stay with the tensor without memory
            if region.storage in storages:
                raise CannotDefer(f"{name} is in the memory of another parameter")
            storages.add(region.storage)
            self._regions[name] = region

    def fingerprint(self) -> dict[str, str]:
        """By name, a hash of how the value comes about: equal where the values are."""
        hashes = dict[int, str]()
        for call, digest in zip(self._tape.calls, self._tape.digest(), strict=True):
            hashes |= dict.fromkeys([*call.writes, *(region.storage for _, region in call.new)], digest)
        constants = {storage: sum_in_double(value) for storage, value in self._tape.constants.items()}
        return {
            name: f"{region.size} {constants.get(region.storage)} {hashes.get(region.storage)}"
            for name, region in self._regions.items()
        }

    def fill(self, model: nn.Module, device: torch.device, own: Collection[str] | None = None) -> None:
        """Give memory on `device` to what is on the meta device, this rank's part alone, and fill it; once.

        own: the first names of the parameters that this rank has a part of; None for all. Others stay as they are

        Each rank draws the same numbers, and keeps its part.
        """
        if self.is_filled:
            return
        self.is_filled = True
        absent = set() if own is None else dict(model.named_parameters()).keys() - own
        made: dict[int, tuple[Tensor, Tensor]] = {}

        def allocate(each: Tensor) -> Tensor:
            """A parameter stays one object; a buffer of several modules gets one tensor."""
            if not each.is_meta:
                return each
            if isinstance(each, nn.Parameter):
                return torch.empty_like(each, device=device)
            return made.setdefault(id(each), (each, torch.empty_like(each, device=device)))[1]

        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # a tied parameter stays one
        try:
            with preserve_parameter_attributes(model):
                model._apply(allocate)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        tensors = dict[str, Tensor]([*model.named_parameters(), *model.named_buffers(remove_duplicate=False)])
        given = {self._first_names.get(name, name) for name in self.given}

        def fill(name: str, region: Region, value: Tensor) -> None:
            copy_into(tensors[name].data, region.view(value.untyped_storage()))

        drawn = {name: each for name, each in self._regions.items() if name not in given and name not in absent}
        sinks = {region.storage: partial(fill, name, region) for name, region in drawn.items()}
        self._tape.replay(sinks, keeps_rng=not self.given)
        for name in self.given:
            if (first := self._first_names.get(name, name)) in absent:
                continue
            copy_into(tensors[first].data, self._tape.read(self.given, name))


def move_to_device(model: nn.Module, device: torch.device) -> None:
    """Move all that has memory."""
    model._apply(lambda each: each if each.is_meta else each.to(device))


T = TypeVar("T")


def decide_plan(
    find: Callable[[], T], model: nn.Module, deferred: DeferredWeights | None, world: World, device: torch.device
) -> T:
    """What `find` returns on rank 0, on every rank. Collective. Raises its PlanError, on every rank.

    A plan follows from what a model does with values, not from the values: arbitrary ones stand in for those of
    `deferred`. If `find` fails with them, each rank fills the whole model, and `deferred` has the reason.
    """
    if deferred is not None and not deferred.is_filled:
        result: tuple[T | None, str] = None, ""
        if world.is_first:
            try:
                with lend_values(model, device), preserve_module(model), preserve_rng():
                    result = find(), ""
            except Exception as error:  # noqa: BLE001 - any error of the user's module, which may need its own values
                result = None, summarize_error(error)
        plan, reason = world.broadcast(result)
        if plan is not None:
            return plan
        deferred.fill(model, device)
        deferred.eager_reason = f"its plan is not found without its weights: {reason}"
    return world.decide(find)
