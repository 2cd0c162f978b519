"""Plays episodes through the endpoint of a run while that goes on: trials, and probes of the best actions.

Called by `actor_learner`, whose thread records what is returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

from shoal.errors import ShoalError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.loop_policy import LoopPolicy
from shoal.flows.policy_connection import PolicyAddress, PolicyConnection, connect_policy, wait_for_version
from shoal.flows.policy_evaluation import Connections, Evaluation, play_probe
from shoal.weights import WeightSnapshot

NUM_CONNECTIONS = 2  # the endpoint computes for one while this process steps the environments of the other
PAUSE_FACTOR = 19  # pauses between probes are so many times as long as a probe: they take 5% of the time at most


class EpisodePlayer:
    """One evaluation at a time, in a thread of its own.

    connect: gives connections to the endpoint for such actions
    """

    def __init__(
        self, spec: ActorLearnerSpec, connect: Callable[[str], AbstractContextManager[Sequence[Connections]]]
    ) -> None:
        self._spec, self._connect = spec, connect
        self._thread = ThreadPoolExecutor(1, "episode-player")
        self._connections: Sequence[Connections] = ()
        self._probe: Future[Evaluation] | None = None
        self._began_s = self._due_s = 0.0  # of the newest probe, and of the next one

    def start(self, action: str, play: Callable[[Sequence[Connections]], Evaluation]) -> Future[Evaluation]:
        """Begin a trial. A probe that has not ended is given up."""
        self.cancel()
        self._take_probe()
        return self._thread.submit(self._play, action, play)

    def probe(self) -> float | None:
        """The mean return of a probe that has just ended; begin one when it is time."""
        if self._probe is None:
            if time.monotonic() >= self._due_s:
                self._began_s = time.monotonic()
                self._probe = self._thread.submit(self._play, "best", lambda each: play_probe(each, self._spec))
        elif self._probe.done():
            return self._take_probe()
        return None

    def cancel(self) -> None:
        """Let what is being played raise ConnectionLost. Does not wait."""
        for each in self._connections:
            for connection in each.values():
                connection.is_cancelled = True

    def close(self) -> None:
        """End without waiting. Idempotent."""
        self.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _play(self, action: str, play: Callable[[Sequence[Connections]], Evaluation]) -> Evaluation:
        with self._connect(action) as self._connections:
            return play(self._connections)

    def _take_probe(self) -> float | None:
        probe, self._probe = self._probe, None
        if probe is None:
            return None
        now_s = time.monotonic()
        self._due_s = now_s + PAUSE_FACTOR * (now_s - self._began_s)
        if not probe.done():
            probe.cancel()
            return None
        try:
            return probe.result().mean_return
        except ShoalError:
            return None  # as while a replica restarts: the next one may succeed


@contextmanager
def connect_policies(
    policies: Sequence[LoopPolicy], url: str, token: str, action: str
) -> Iterator[Sequence[Connections]]:
    """Connections to all policies at the endpoint, for such actions."""
    from shoal.serve.on_ray.ingress_front import call_on_head, is_on_head  # loads Serve, as `deploy` has

    with ExitStack() as opened:

        def connect(policy: LoopPolicy) -> PolicyConnection:
            address = PolicyAddress(url, policy.spec.model_name, token, policy.spec.state_size, action)
            connection = connect_policy(address, None if is_on_head() else call_on_head)
            opened.callback(connection.close)
            return connection

        yield [{each.name: connect(each) for each in policies} for _ in range(NUM_CONNECTIONS)]


def wait_for_versions(
    connections: Connections, policies: Sequence[LoopPolicy], candidates: Sequence[WeightSnapshot]
) -> None:
    """Wait until the endpoint serves these versions of the policies, or newer ones. Raises ConnectionLost."""
    for each, snapshot in zip(policies, candidates, strict=True):
        observation, mask = each.first_inputs
        wait_for_version(connections[each.name], observation, snapshot.version, mask=mask)
