"""The titles of a stream's metrics in the report."""

from shoal.extend.runs import RunPanels

PANELS = RunPanels(
    titles={
        "prequential/mae": "Mean absolute error, each message tested before it is learnt",
        "prequential/as_now": 'The same of the forecast "as now"',
        "stream/per_s": "Messages learnt a second",
        "stream/lag_p50_ms": "Lag from sensor to answer, median (ms)",
        "stream/lag_p99_ms": "Lag from sensor to answer, p99 (ms)",
        "stream/learn_p50_ms": "A batch with an update, median (ms)",
        "stream/learn_p99_ms": "A batch with an update, p99 (ms)",
        "stream/commit_ms": "From snapshot to acknowledgement (ms)",
        "stream/batch": "Messages a batch",
        "stream/redelivered": "Messages delivered again",
        "stream/duplicates": "Duplicates, not learnt",
        "stream/drifts": "Drifts noticed",
    },
    criteria=("prequential/",),
    folded=("stream/",),
    cards={"stream/per_s": "messages a second", "stream/lag_p99_ms": "lag, p99 (ms)", "stream/malformed": "malformed"},
)
