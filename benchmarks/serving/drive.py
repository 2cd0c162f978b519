"""The driver as a child process, and what it found. Called by every benchmark of serving."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.children import OUR_PYTHON, Child
from benchmarks.serving.driver import Plan
from shoal.extend.client import EndpointRequest
from shoal.libs.bench.endpoint import encode_request
from shoal.libs.bench.sender import OK

BINARY_HEADER = "Inference-Header-Content-Length"
MOST_CONNECTIONS = 1500
GRACE_S = 60.0
JSON_TYPE, BINARY_TYPE = "application/json", "application/octet-stream"
_numbers = itertools.count()


@dataclass(frozen=True)
class Target:
    """Where requests go: a URL and the requests' bytes, taken in turn. `grpc_path`: they are messages of that call."""

    url: str
    requests: Sequence[bytes]
    grpc_path: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of each request. Times in seconds of time.monotonic()."""

    due_s: np.ndarray
    sent_s: np.ndarray
    done_s: np.ndarray
    kinds: np.ndarray
    versions: np.ndarray
    seconds: float
    cpu_s: float
    examples: dict[str, str]  # by kind, the first body that was no answer

    @property
    def latency_s(self) -> np.ndarray:
        """Of the requests that were answered, from the moment they were due."""
        ok = self.kinds == OK
        found: np.ndarray = (self.done_s - self.due_s)[ok]
        return found

    @property
    def failures(self) -> dict[str, int]:
        return dict(Counter(kind for kind in self.kinds.tolist() if kind != OK))

    @property
    def per_s(self) -> float:
        """Answers a second."""
        return len(self.latency_s) / self.seconds

    def ms(self, percent: float) -> float:
        """A percentile of the latency; infinite when nothing was answered."""
        return float(1e3 * np.percentile(self.latency_s, percent)) if len(self.latency_s) else float("inf")

    def goodput(self, within_s: float) -> float:
        """Answers a second that came within the objective."""
        return float(np.sum(self.latency_s <= within_s)) / self.seconds

    @property
    def driver_us(self) -> float:
        """Processor time of the driver for each request, in microseconds."""
        return 1e6 * self.cpu_s / max(1, len(self.due_s))

    @property
    def late_ms(self) -> float:
        """p99 of how much later than due requests left."""
        return float(1e3 * np.percentile(self.sent_s - self.due_s, 99))

    def line(self) -> str:
        """For a terminal."""
        failed = f", failures {self.failures}" if self.failures else ""
        return (
            f"{self.per_s:,.0f}/s, p50 {self.ms(50):.2f}, p99 {self.ms(99):.2f} ms{failed}"
            f" (driver: {self.cpu_s / self.seconds:.0%} of a core, p99 {self.late_ms:.1f} ms late)"
        )


class Drive:
    """A driver that was started; `outcome()` waits for its end. Use as a context manager."""

    def __init__(self, folder: Path, target: Target, **plan: object) -> None:
        number = next(_numbers)
        parts = urlsplit(target.url)
        url = f"http://{parts.netloc}"
        files = []
        for index, request in enumerate(target.requests):
            file = folder / f"request-{number}-{index}"
            file.write_bytes(request)
            files.append(str(file))
        self._out = folder / f"outcome-{number}.npz"
        content = {"connections": MOST_CONNECTIONS, "grpc_path": target.grpc_path} | plan
        self._plan = Plan(url, files, str(self._out), **content)  # type: ignore[arg-type]
        path = folder / f"plan-{number}.json"
        path.write_text(json.dumps(asdict(self._plan)))
        self._child = Child([OUR_PYTHON, "-m", "benchmarks.serving.driver", str(path)], folder, goodbye_s=0.0)

    def begun(self, timeout_s: float = 30.0) -> float:
        """When the driver began, in seconds of time.monotonic()."""
        return float(self._child.answer(timeout_s)["begun_s"])

    def outcome(self) -> Outcome:
        plan = self._plan
        said: dict[str, object] = {}
        while "out" not in said:
            said = self._child.answer(plan.warm_up_s + plan.seconds + plan.timeout_s + GRACE_S)
        with np.load(self._out) as found:
            rows, cpu_s = found["rows"], float(found["cpu_share"]) * plan.seconds
            examples = dict(zip(found["example_kinds"].tolist(), found["examples"].tolist(), strict=True))
        times = (rows["due_s"], rows["sent_s"], rows["done_s"])
        versions = np.where(rows["kind"] == OK, rows["version"], "0").astype(int)
        return Outcome(*times, rows["kind"], versions, plan.seconds, cpu_s, examples)

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()


def closed(folder: Path, target: Target, connections: int, seconds: float, warm_up_s: float = 0.5) -> Outcome:
    """A closed loop."""
    with Drive(folder, target, connections=connections, seconds=seconds, warm_up_s=warm_up_s) as drive:
        return drive.outcome()


def poisson(
    folder: Path, target: Target, rate: float, seconds: float, warm_up_s: float = 0.5, seed: int = 0, **plan: object
) -> Outcome:
    """An open loop; the same seed gives the same arrivals."""
    with Drive(folder, target, rate=rate, seconds=seconds, warm_up_s=warm_up_s, seed=seed, **plan) as drive:
        return drive.outcome()


def http_request(url: str, body: bytes, content_type: str = JSON_TYPE, **headers: object) -> bytes:
    """The bytes of one POST. Underscores in the headers' names stand for hyphens."""
    parts = urlsplit(url)
    named = {"content-type": content_type, **{name.replace("_", "-"): str(value) for name, value in headers.items()}}
    request = EndpointRequest("POST", parts.path or "/", named, body)
    return encode_request(request, f"{parts.scheme}://{parts.netloc}")
