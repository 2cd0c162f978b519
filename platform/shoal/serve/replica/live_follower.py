"""Keeps a replica's live model up to date with its run and the controller's plan.

Owned by the model manager, on its event loop. A thread fetches new weights. Weights that the run has replaced, but the
endpoint still needs, come from the controller, which has them from a replica. Decides nothing: `live.versions` selects
the version that answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import ConnectionLost, WeightsError
from shoal.serve.messages.desired_state import ModelPlan
from shoal.serve.replica.live_versions import LiveVersionSelector
from shoal.serve.replica.watchers import RETRY_S, ControllerClient, WeightFollower
from shoal.weights import WeightSource

logger = logging.getLogger(__name__)


class LiveFollower:
    """Follows one model until close(); `thread` takes the weights of the run.

    changed: called on the event loop when there is something to report
    """

    def __init__(
        self,
        name: str,
        versions: LiveVersionSelector,
        weights: WeightSource,
        controller: ControllerClient,
        plan: ModelPlan,
        changed: Callable[[], None],
    ) -> None:
        self._name = name
        self._versions = versions
        self._controller = controller
        self._changed = changed
        self._plan, self._is_resting = plan, False
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        versions.changed = self._tell
        versions.apply(plan)
        self.thread = WeightFollower(weights, versions.take)
        self.apply(plan)

    @property
    def has_polled(self) -> bool:
        """Whether what the run had published, if anything, was taken or rejected, and no version is to be fetched."""
        return self.thread.has_polled and not self._versions.missing()

    def has(self, plan: ModelPlan) -> bool:
        """Whether it answers with the pinned version, if that is available."""
        return not plan.pinned or not plan.is_retained or self._versions.version == plan.pinned

    def apply(self, plan: ModelPlan) -> None:
        """Apply the controller's plan: at once if the version is loaded, else once it arrives."""
        is_again = plan.attempt != self._plan.attempt
        self._plan = plan
        self._versions.apply(plan)
        self._rest(is_again)
        self._poll()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop following; waits up to `timeout_s` for the thread. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        self.thread.close(timeout_s)

    def _rest(self, is_again: bool = False) -> None:
        """Pause the run's thread while no version would be taken, and resume with the newest weights afterwards."""
        is_resting = self._versions.is_resting
        if is_resting != self._is_resting or is_again:
            self._is_resting = is_resting
            self.thread.set_paused(is_resting)

    def _tell(self) -> None:
        """Notify the event loop. Callable from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._poll)
            self._loop.call_soon_threadsafe(self._changed)

    def _poll(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._exchange())

    async def _exchange(self) -> None:
        """Send the controller the weights it should retain, and fetch the missing ones."""
        while True:
            plan = self._plan
            try:
                if missing := self._versions.missing():
                    snapshot = self._versions.snapshot(missing)
                    snapshot = snapshot or await self._controller.fetch_weights(self._name, missing)
                    if snapshot is not None:  # else another version is retained by now, as the next plan shows
                        try:
                            await asyncio.to_thread(self._versions.put, snapshot)
                        except WeightsError as error:
                            logger.error("older weights are rejected, serving continues: %s", error)
                        self._rest()
                is_wanted = plan.retained and not plan.is_retained
                if is_wanted and (snapshot := self._versions.snapshot(plan.retained)) is not None:
                    await self._controller.store_weights(self._name, snapshot)
            except ConnectionLost as error:
                logger.debug("the controller is away, serving continues: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:
                logger.exception("%s: weights could not be exchanged with the controller", self._name)
                return  # the next plan or local change tries again
            if plan is self._plan:
                return
