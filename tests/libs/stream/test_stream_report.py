"""The report of a stream names its metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal import runs
from shoal.libs.stream.spec import StreamSpec
from shoal.runs import RunKind
from shoal.runs.run_kind import infer_kind


def test_the_report_of_a_stream_names_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    values = {"stream/per_s": 250.0, "stream/lag_p99_ms": 8.0, "prequential/mae": 0.125, "train/loss": 1.0}
    for name, kind in (("one", RunKind.STREAM), ("two", RunKind.TRAINING)):
        with runs.create("stream", "", name, kind=kind) as run:
            run.log(1, values)
    page, other = (runs.write_report(runs.load(name)).read_text() for name in ("one", "two"))
    assert "<b>250</b><span>messages a second</span>" in page
    assert "each message tested before it is learnt" in page
    assert "messages a second" not in other
    assert infer_kind(StreamSpec().to_yaml()) is RunKind.STREAM
