"""A learner besides the first: it computes the gradients of its shares, and takes every step that the first one takes.

Called by the Ray workers, and by tests in a process or thread of its own. Publishes and saves nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress

import torch

from shoal.errors import ConnectionLost
from shoal.rl.algorithms.algorithm import NonFiniteLoss, make_algorithm
from shoal.rl.learner_group import HubLink, SampleShard
from shoal.rl.spec import RLSpec
from shoal.wire import ExperienceSpec


class LearnerReplica:
    """Learns what the hub sends, until the hub is gone; then it joins the next one."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec) -> None:
        torch.set_num_threads(spec.learner.torch_threads)
        self._algorithm = make_algorithm(spec, experience, has_replay=False)

    def run(self, connect: Callable[[], HubLink | None]) -> None:
        """Join the hub that `connect` finds, again and again, until it finds none. It may raise ConnectionLost:
        try again."""
        torch.set_flush_denormal(True)
        link: HubLink | None = None
        while True:
            try:
                if link is None and (link := connect()) is None:
                    return
                self._algorithm.group = link
                share = link.wait_for_share(self._load)
                with suppress(NonFiniteLoss):  # the hub decides what it drops
                    if isinstance(share, SampleShard):
                        self._algorithm.learn_share(share)
                        continue
                    for _ in self._algorithm.update(share):
                        pass
            except ConnectionLost:
                if link is not None:
                    link.close()
                link = None

    def _load(self, state: bytes) -> None:
        self._algorithm.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
