"""An endpoint's status: the controller's state and the replicas' reports, as one document.

Called by the controller's shell for `GET /shoal/v1/status`. Pure except for the retained earlier counts, from which
rates are computed.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from shoal.client.endpoint_status import (
    CertificateStatus,
    EndpointStatus,
    EvidenceStatus,
    MetricStatus,
    ModelStatus,
    ReplicaStatus,
    ResidencyStatus,
    RolloutEvent,
    VersionStatus,
)
from shoal.serve.controller.canary_guard import Evidence, latency_ratio
from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.rollout import Phase, Rollout
from shoal.serve.controller.state import ModelState
from shoal.serve.messages.counts import Histogram, ModelCounts, VersionCounts, merge
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport, Residency
from shoal.serve.spec.model_options import GuardOptions, ModelOptions

WINDOW_S = 10.0
SAMPLE_S = 1.0
MINUTE_S = 60.0
MAX_HISTORY = 240  # minutes with requests, of all versions of a model
NUM_EVENTS = 50
LONG_FORWARD_S = 2.0  # a longer forward shows in the status while it runs
STATES = {Phase.VACANT: "UNAVAILABLE", Phase.STAGING: "LOADING"}

Counts = Mapping[str, Mapping[str, ModelCounts]]  # by replica and model
Part = TypeVar("Part", bound=msgspec.Struct)


class StatusReporter:
    """Describes one endpoint. `sample()` is called about once a second.

    certificate: describes that of its ingress
    facts:       fields of the document that stay as they are
    """

    def __init__(
        self,
        controller: EndpointController,
        certificate: Callable[[], CertificateStatus | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        may_sleep: bool = False,
        **facts: Any,
    ) -> None:
        self._controller = controller
        self._clock = clock
        self._certificate, self._may_sleep = certificate, may_sleep
        self._facts = facts
        self._samples: deque[tuple[float, Counts]] = deque(maxlen=int(WINDOW_S / SAMPLE_S))
        self._sampled_s = -SAMPLE_S
        self._minute: tuple[float, Counts] = (clock(), {})  # when the present one began, and the counts then
        self._history: defaultdict[str, deque[tuple[float, int, float, float | None]]] = defaultdict(
            lambda: deque(maxlen=MAX_HISTORY)
        )
        self.wanted = ""

    def sample(self) -> None:
        now_s = self._clock()
        if now_s - self._sampled_s >= SAMPLE_S:
            self._sampled_s = now_s
            heard = [report for report in self._controller.reports.values() if report.pid]
            counted = {report.replica: report.counts for report in heard}
            self._samples.append((now_s, counted))
            begun_s, minute = self._minute
            self._minute = (begun_s, {**counted, **minute})
            if now_s - begun_s >= MINUTE_S:
                self._remember()
                self._minute = (now_s, counted)

    def _remember(self) -> None:
        """Add the minute that has ended to the history of each model."""
        ended_at = time.time()
        for name in self._controller.state.models:
            counts = _merge_present(report.counts for report in self._controller.store.list_reports(name))
            before_s, before = self._find_before([self._minute], name)
            for version in counts.versions if counts else ():
                each = build_version_status(version, "", 0.0, counts, before, before_s)
                if each.requests_per_s:
                    self._history[name].append((ended_at, version, each.requests_per_s, each.p99_s))

    def describe_endpoint(self) -> dict[str, Any]:
        """The full document, an `EndpointStatus`."""
        controller = self._controller
        state, reports = controller.state, controller.reports.values()
        models = [self._build_model_status(name, model) for name, model in state.models.items()]
        replicas = [
            _fill(ReplicaStatus, report, id=report.replica, error="; ".join(_list_problems(state.models, report)))
            for report in reports
        ]
        status = EndpointStatus(
            endpoint=controller.name,
            time=time.time(),
            started_at=state.started_at,
            window_s=WINDOW_S,
            generation=state.generation,
            wanted=self.wanted,
            ready=all(replica.ready for replica in replicas) if replicas else self._may_sleep,
            asleep=self._may_sleep and not replicas,
            replicas=replicas,
            models=models,
            events=[_fill(RolloutEvent, each) for each in state.events[-NUM_EVENTS:]],
            certificate=self._certificate(),
            **self._facts,
        )
        return _builtins(status)

    def describe_model(self, name: str) -> dict[str, Any]:
        """One model's part of the document; only the name for a deleted one."""
        model = self._controller.state.models.get(name)
        if model is None:
            return _builtins(ModelStatus(name, state="UNAVAILABLE", reason="deleted"))
        return _builtins(self._build_model_status(name, model))

    def _build_model_status(self, name: str, model: ModelState) -> ModelStatus:
        controller = self._controller
        reports = controller.store.list_reports(name)
        rollout, deployment = model.rollout, model.deployment
        is_open = rollout.phase is Phase.CANARY
        options = ModelOptions.parse(deployment.options)
        counts = _merge_present(report.counts for report in reports)
        before_s, before = self._find_before(self._samples, name)
        slowest: dict[int, float] = {}  # the slowest replica's forward of so many rows: a safe estimate
        for rows, seconds in (each for report in reports for each in report.latency):
            slowest[rows] = max(slowest.get(rows, 0.0), seconds)
        status = _fill(
            ModelStatus,
            rollout,
            options,
            merge(
                [
                    VersionCounts() if counts is None else counts.sum_requests(),
                    *(models[name] for models in controller.final_counts.values() if name in models),
                ]
            ),
            name=name,
            state="READY" if rollout.stable else STATES.get(rollout.phase, "READY"),
            reason=(
                controller.registry_errors.get(name, "")
                or _describe_rejection(model)
                or controller.assignments.find_error(name)
            ),
            source=f"{name}@{deployment.version}" if deployment.version else name,
            versions=[
                build_version_status(
                    version, *_find_track_and_share(version, rollout, reports), counts, before, before_s
                )
                for version in sorted({version for report in reports for version in report.staged})
                if deployment.is_live or version in (rollout.stable, rollout.candidate)  # others are being stopped
            ],
            queued_rows=sum(report.queued_rows for report in reports),
            max_queued_rows=options.max_queue_size * len(reports),
            batch_rows=_average_batch_rows(counts, before),
            max_batch_rows=options.max_rows,
            refused=sum(counts.refused.get(status, 0) for status in (429, 504)) if counts else 0,
            latency=sorted(slowest.items()),
            last_failure=next((report.failure.describe() for report in reports if report.failure is not None), ""),
            residency=_build_residency(reports) if controller.assignments.is_on_demand(model) else None,
            evidence=_build_evidence(*controller.collect_evidence(name)) if is_open else None,
            metrics=_summarize_metrics(counts, before, before_s),
            history=list(self._history[name]),
        )
        if not deployment.is_live:
            return status
        return msgspec.structs.replace(
            status,
            state="READY" if any(report.version for report in reports) else "UNAVAILABLE",
            phase="live",
            source="a run",
            pinned=max(rollout.stable, 0),
            newest_percent=rollout.shares.percent if is_open else None,
            stable=0,
            candidate=controller.live.find_candidate(name) if is_open else 0,
        )

    def _find_before(self, samples: Sequence[tuple[float, Counts]], name: str) -> tuple[float, ModelCounts | None]:
        """The present replicas' counts when the samples began, and how many seconds ago that was. A later replica's
        counts are those of its first report: it may have served long before this controller started."""
        if not samples:
            return 0.0, None
        before = []
        for report in self._controller.reports.values():
            first = next((counts[report.replica] for _, counts in samples if report.replica in counts), None)
            before.append((report.counts if first is None else first).get(name))
        return self._clock() - samples[0][0], _merge_present(before)


def _merge_present(snapshots: Iterable[ModelCounts | None]) -> ModelCounts | None:
    present = [each for each in snapshots if each is not None]
    return merge(present) if present else None


def _list_problems(models: Mapping[str, ModelState], report: ReplicaReport) -> Iterator[str]:
    """The planned versions that a replica could not stage (one no longer planned is in the model's `reason`), and a
    forward that blocks its requests, after whose `hang_s` it is replaced."""
    for name, model in models.items():
        for rejected in report.models[name].rejected if name in report.models else ():
            if rejected.version in (0, model.rollout.stable, model.rollout.candidate):
                yield f"{name}{f'@{rejected.version}' if rejected.version else ''}: {rejected.reason}"
    if report.computing_s >= LONG_FORWARD_S:
        yield f"a forward has taken {report.computing_s:.0f} s"


def _describe_rejection(model: ModelState) -> str:
    """Why a model's last candidate, or the last version of its run, does not answer; "" for none."""
    rollout, last = model.rollout, model.last_rejected
    if rollout.refused:
        return f"version {rollout.refused} is not served: {rollout.reason}"
    if rollout.reason or last is None or last.version not in model.rejected:
        return rollout.reason
    instead = f" version {last.instead} answered instead:" if last.instead else ""
    return f"version {last.version} was rejected,{instead} {last.reason}"


def _find_track_and_share(version: int, rollout: Rollout, reports: Sequence[ModelReport]) -> tuple[str, float]:
    """The track and share of a version, which may answer on some replicas and not yet on others."""
    answering = [report for report in reports if report.version]
    given, track = 0.0, ""
    for report in answering:
        candidate = report.candidate if rollout.phase is Phase.CANARY else 0
        part = rollout.shares.percent / 100.0 if candidate else 0.0
        if version == report.version:
            given, track = given + 1.0 - part, "stable"
        elif version == candidate:
            given, track = given + part, track or ("shadow" if rollout.shares.is_shadow else "candidate")
    return track, given / len(answering) if answering else 0.0


def build_version_status(
    version: int, track: str, share: float, counts: ModelCounts | None, before: ModelCounts | None, before_s: float
) -> VersionStatus:
    """Build a version's status from its `counts` now and those of `before_s` seconds ago."""
    now = counts.versions.get(version) if counts else None
    if now is None:
        return VersionStatus(version, track, share)
    earlier = before.versions.get(version) if before else None
    recent = now.request_s.since(earlier.request_s if earlier else None)
    # Lower than before when a replica has gone with its counts.
    num_recent = max(0, sum(now.statuses.values()) - (sum(earlier.statuses.values()) if earlier else 0))
    return _fill(
        VersionStatus,
        now,
        version=version,
        track=track,
        share=share,
        requests_per_s=num_recent / before_s if before_s > 0.0 else 0.0,
        p50_s=recent.estimate_quantile(0.5),
        p99_s=recent.estimate_quantile(0.99),
    )


def _summarize_metrics(now: ModelCounts | None, before: ModelCounts | None, before_s: float) -> dict[str, MetricStatus]:
    """Rates of the counters and quantiles of the histograms that libraries have."""
    summarized = {}
    earlier = before.others if before else {}
    for name, metric in (now.others if now else {}).items():
        value, old = metric.value, earlier[name].value if name in earlier else None
        if isinstance(value, Histogram):
            recent = value.since(old if isinstance(old, Histogram) else None)
            p50_s, p99_s = (recent.estimate_quantile(q) for q in (0.5, 0.99))
            summarized[name] = MetricStatus(metric.help, p50_s=p50_s, p99_s=p99_s)
        elif metric.kind == "counter" and before_s > 0.0:
            num_before = old if isinstance(old, int | float) else 0.0
            summarized[name] = MetricStatus(metric.help, max(0.0, value - num_before) / before_s)
    return summarized


def _average_batch_rows(now: ModelCounts | None, before: ModelCounts | None) -> float | None:
    if now is None:
        return None
    recent = now.batch_rows.since(before.batch_rows if before else None)
    batches = sum(recent.counts)
    return recent.sum / batches if batches else None


def _build_evidence(guard: GuardOptions, evidence: Evidence) -> EvidenceStatus:
    ratio = latency_ratio(evidence.stable, evidence.candidate)
    value = evidence.metrics.get(guard.metric)
    return _fill(EvidenceStatus, evidence, guard, latency_ratio=ratio, value=value)


def _build_residency(reports: Sequence[ModelReport]) -> ResidencyStatus:
    total = merge([Residency(), *(report.residency for report in reports if report.residency is not None)])
    load_s = total.total_load_s / total.loads if total.loads else None
    return _fill(ResidencyStatus, total, replicas=sum(report.version > 0 for report in reports), load_s=load_s)


def _fill(part: type[Part], *sources: object, **more: Any) -> Part:
    """A part of the document: its fields are those of the same names in `sources`, and `more`."""
    names = part.__struct_fields__
    fields = {name: getattr(each, name) for each in sources for name in names if hasattr(each, name)}
    return part(**fields | more)


def _builtins(status: msgspec.Struct) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(status)
    return document
