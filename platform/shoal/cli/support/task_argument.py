"""The argument that names a task. Called by the verbs that take one; imports nothing, as they load in a blink."""

from __future__ import annotations


def without_key(_context: object, _argument: object, task: str) -> str:
    """A click callback: the task also where it is typed as for `shoal run`, `task=NAME`."""
    return task.removeprefix("task=")
