"""How long versions take, asked while batches of newer ones come."""

from __future__ import annotations

from shoal.serve.messages.replica_report import ForwardMedians
from shoal.serve.replica.model_statistics import ForwardTimes


class Busy(ForwardTimes):
    """A batch of a version that nobody has asked for yet ends while the times are read, as in a forward's thread."""

    def get_medians(self, version: int) -> ForwardMedians:
        found = super().get_medians(version)
        self.add(version + 100, 1, 0.1)
        return found


def test_a_batch_of_a_new_version_may_end_while_times_are_read() -> None:
    times = Busy()
    for version in (1, 2):
        for seconds in (0.3, 0.1, 0.2):
            times.add(version, 5, seconds)
    assert times.retain_medians([1, 2, 3]) == {1: {2: (3, 0.2)}, 2: {2: (3, 0.2)}}
