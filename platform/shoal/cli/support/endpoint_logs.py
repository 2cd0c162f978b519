"""What the processes of an endpoint print: its job, its controller and its replicas, also those that have ended.

Called by `shoal serve logs`. Asks the cluster's dashboard, which reads the files on every host that is up.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx2

from shoal.cli.support.jobs import RAY_LOG_LINE, JobLogReader
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.dashboard_api import connect, list_state, request_json
from shoal.cluster.jobs import JobHandle

_MARKS = (":job_id:", ":actor_name:", ":task_name:")
_API = "/api/v0"


class EndpointLogs:
    """The lines of one endpoint, from the beginning, and then what has come since.

    job: the submission id of the job that keeps the endpoint up; "" without one
    """

    def __init__(self, cluster: ClusterHandle, endpoint: str, job: str = "") -> None:
        self._cluster, self._endpoint = cluster, endpoint
        self._job_log = JobLogReader(JobHandle(cluster, job)) if job else None
        self._offsets: dict[str, int] = {}

    def read_new_lines(self, *, is_over: bool) -> list[tuple[str, str]]:
        """The process and the line: of the job, then of the controller and of each replica. is_over: an incomplete last
        line is one. Raises ConnectionLost and ClusterError."""
        found = [("job", line) for line in self._job_log.read_new_lines(is_over=is_over)] if self._job_log else []
        with connect(self._cluster) as client:
            for process, path in sorted(self._list_files(client)):
                new = client.get(path).content[self._offsets.get(path, 0) :]
                whole = new if is_over else new[: new.rfind(b"\n") + 1]
                self._offsets[path] = self._offsets.get(path, 0) + len(whole)
                lines = whole.decode(errors="replace").splitlines()
                ours = (each for each in lines if not (each.startswith(_MARKS) or RAY_LOG_LINE.search(each)))
                found += [(process, each) for each in ours]
        return found

    def _list_files(self, client: httpx2.Client) -> Iterator[tuple[str, str]]:
        """The process of each file, with its host where there are several, and the path by which it is read."""
        hosts = {each["node_id"]: each["node_name"] for each in list_state(client, "nodes") if each["state"] == "ALIVE"}
        processes: dict[str, dict[str, str]] = {}  # by host, and by the end of the file's name
        for actor in list_state(client, "actors"):
            is_replica = actor["class_name"].startswith(f"ServeReplica:{self._endpoint}:")
            if is_replica or actor["repr_name"] == f"EndpointController:{self._endpoint}":
                process = f"replica-{actor['pid']}" if is_replica else "controller"
                processes.setdefault(actor["node_id"], {})[f"{actor['job_id']}-{actor['pid']}"] = process
        for host in hosts.keys() & processes.keys():
            at = f"@{hosts[host]}" if len(hosts) > 1 else ""
            listed = request_json(client, "GET", f"{_API}/logs?node_id={host}&glob=worker-*")["data"]["result"]
            for file in (each for files in listed.values() for each in files):
                if found := processes[host].get(file.rpartition(".")[0].split("-", 2)[2]):
                    yield f"{found}{at}", f"{_API}/logs/file?node_id={host}&filename={file}&lines=-1"
