"""What the processes of an endpoint print: its job, its controller and its replicas, also those that have ended.

Called by `shoal serve logs`. Reads the files that Ray writes on this host, by the names of the actors in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoal.cli.support.jobs import RAY_LOG_LINE

HEAD_BYTES = 512  # of a file: its first lines name the job and the actor
_MARKS = (":job_id:", ":actor_name:", ":task_name:")
_SERVES = "ServeReplica:"


class EndpointLogs:
    """The lines of one endpoint, from the beginning, and then what has come since.

    temp_dir: of the cluster
    run_id:   of the job that keeps the endpoint up; "" without one
    """

    def __init__(self, temp_dir: Path, endpoint: str, run_id: str = "") -> None:
        self._temp_dir, self._endpoint, self._run_id = temp_dir, endpoint, run_id
        self._offsets: dict[Path, int] = {}

    def read_new_lines(self) -> list[tuple[str, str]]:
        """The process and the line: of the job, then of each replica and of the controller."""
        found = []
        for process, path in self._list_files():
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            lines = whole.decode(errors="replace").splitlines()
            found += [(process, each) for each in lines if not (each.startswith(_MARKS) or RAY_LOG_LINE.search(each))]
        return found

    def _list_files(self) -> Iterator[tuple[str, Path]]:
        """The files by now, each with the name of its process."""
        logs = "ray/session_[0-9]*/logs"  # the session's own folder, never its link
        if self._run_id:
            yield from (("job", path) for path in self._temp_dir.glob(f"{logs}/job-driver-{self._run_id}.log"))
        of_replica, of_controller = f"{_SERVES}{self._endpoint}:", f"EndpointController:{self._endpoint}"
        for path in sorted(self._temp_dir.glob(f"{logs}/worker-*"), key=lambda each: each.stat().st_mtime):
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES).decode(errors="replace").splitlines()
            actors = [line.removeprefix(":actor_name:") for line in head if line.startswith(":actor_name:")]
            if any(actor.startswith(of_replica) for actor in actors):
                yield f"replica-{path.stem.rpartition('-')[2]}", path
            elif of_controller in actors:
                yield "controller", path
