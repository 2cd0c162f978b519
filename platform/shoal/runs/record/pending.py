"""A run's rows that are not yet written. Used by the recorder, under its lock."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.runs.record.tensorboard_writer import LogEntry


@dataclass
class PendingWrites:
    """The rows in order; `num_rows` is their number in the database."""

    logged: list[LogEntry] = field(default_factory=list)
    shown: list[LogEntry] = field(default_factory=list)  # newest values that do not enter the history
    groups: dict[str, LogEntry] = field(default_factory=dict)  # the newest of each
    versions: list[tuple[int, int, int, float, str]] = field(default_factory=list)
    others: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)
    forgotten_after: int | None = None  # drop later steps that were written before
    num_rows: int = 0

    def forget_after(self, step: int) -> None:
        for entries in (self.logged, self.shown):
            entries[:] = [entry for entry in entries if entry[0] <= step]
        self.groups = {group: entry for group, entry in self.groups.items() if entry[0] <= step}
        self.forgotten_after = step if self.forgotten_after is None else min(step, self.forgotten_after)
        logged = sum(len(values) for _, _, values in [*self.logged, *self.shown, *self.groups.values()])
        self.num_rows = logged + len(self.versions) + len(self.others) + 1

    def extend(self, later: PendingWrites) -> None:
        self.logged += later.logged
        self.shown += later.shown
        self.groups |= later.groups
        self.versions += later.versions
        self.others += later.others
        self.num_rows += later.num_rows
