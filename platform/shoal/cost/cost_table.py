"""The cost of a run as one flat table of numbers: their names, meaning and formatting.

The events `cost_predicted` and `cost_measured` of a run's record have the same names, so that they can be compared.
Used for predicting, measuring, recording and printing costs. Pure values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.runs.panels import Panel

PREDICTED, MEASURED = "cost_predicted", "cost_measured"  # kinds of events in the run record


@dataclass(frozen=True)
class Quantity:
    """One number of the table. `unit` is one of count, operations, bytes, seconds, share."""

    name: str
    unit: str
    meaning: str


# "a rank": the rank with the most. A step is one step of the optimiser, over the full global batch.
QUANTITIES = (
    Quantity("parameters", "count", "parameters of the model"),
    Quantity("parameters_trainable", "count", "of these, trained"),
    Quantity("parameters_rank", "count", "parameters on a rank"),
    Quantity("flops_forward_sample", "operations", "forward, each sample"),
    Quantity("flops_backward_sample", "operations", "backward, each sample"),
    Quantity("flops_step", "operations", "a step, all ranks together"),
    Quantity("flops_rank", "operations", "a step, on a rank"),
    Quantity("memory_parameters", "bytes", "parameters and buffers on a rank"),
    Quantity("memory_gradients", "bytes", "gradients on a rank"),
    Quantity("memory_optimizer", "bytes", "optimiser states on a rank"),
    Quantity("memory_average", "bytes", "averaged weights on a rank"),
    Quantity("memory_activations", "bytes", "activations on a rank, before the backward pass"),
    Quantity("memory_peak", "bytes", "peak memory of a rank"),
    Quantity("sent_bytes", "bytes", "a rank sends, each step"),
    Quantity("bubble", "share", "bubble: the share of a step without work"),
    Quantity("step_s", "seconds", "a step (predicted: without waiting for other ranks)"),
    Quantity("latency_s", "seconds", "inference on one sample"),
)
QUANTITY_BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}
COMPARED = ("memory_peak", "flops_step", "sent_bytes", "bubble")  # predicted within 10%


PLACEMENT_HEADINGS = ("module", "parameters", "held as", "ranks")
_TEXT_FIELDS = ("unknown", "notes", "cuts")


@dataclass(frozen=True)
class PlacementRow:
    """Which ranks store a run of layers.

    share: of the module's parameters on each of `ranks`; the rest is on the other ranks of its group
    """

    module: str
    num_parameters: int
    held_as: str
    ranks: tuple[int, ...]
    share: float

    def to_cells(self) -> tuple[str, ...]:
        """The row as plain strings, under PLACEMENT_HEADINGS."""
        return (self.module, f"{self.num_parameters:,}", self.held_as, format_ranks(self.ranks))


def format_ranks(ranks: Sequence[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3 and 6."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True)
class CostTable:
    """The known numbers by name, and notes on the unknown ones.

    unknown: operators and modules with unknown arithmetic, which the FLOPs exclude
    notes:   unusual ways in which numbers were obtained
    cuts:    names of the modules that begin the pipeline's stages after the first
    ranks:   the numbers of each profiled rank
    placed:  which rank stores what
    """

    values: dict[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    ranks: dict[int, dict[str, float]] = field(default_factory=dict)
    placement_rows: tuple[PlacementRow, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, math.nan)

    def to_details(self) -> dict[str, Any]:
        """For an event of the run record; `of` reads it back."""
        words = {name: list(getattr(self, name)) for name in _TEXT_FIELDS if getattr(self, name)}
        return {**{name: value for name, value in self.values.items() if math.isfinite(value)}, **words}

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> CostTable:
        """From the details of an event; unknown names are skipped."""
        values = {name: float(details[name]) for name in QUANTITY_BY_NAME if name in details}
        unknown, notes, cuts = (tuple(details.get(name, ())) for name in _TEXT_FIELDS)
        return cls(values, unknown, notes, cuts)


def combine_ranks(ranks: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """One table of many ranks: the maximum of each number, the sum of those over all ranks."""
    rows = list(ranks.values())
    names = {name for row in rows for name in row}
    values = {name: max(row[name] for row in rows if name in row) for name in names}
    if "flops_rank" in names:
        values["flops_step"] = sum(row.get("flops_rank", 0.0) for row in rows)
    return {name: values[name] for name in QUANTITY_BY_NAME if name in values}


def relative_error(predicted: float, measured: float) -> float:
    """The relative error of the prediction; NaN if either number is unknown."""
    if not (math.isfinite(predicted) and math.isfinite(measured)):
        return math.nan
    return (predicted - measured) / measured if measured else (0.0 if not predicted else math.inf)


def build_cost_panel(tables: Mapping[str, Mapping[str, Any]]) -> Panel:
    """The known quantities of one table, or of two: the second is what the first is compared with."""
    rows = []
    for quantity in QUANTITIES:
        values = [float(each.get(quantity.name, math.nan)) for each in tables.values()]
        cells = [format_quantity(value, quantity.unit) for value in values]
        if len(values) == 2:
            error = relative_error(*values)
            cells.append(f"{error:+.1%}" if math.isfinite(error) else "-")
        if any(map(math.isfinite, values)):
            rows.append((quantity.meaning, *cells))
    return Panel(title="cost and memory", header=("", *tables, *(["off by"] if len(tables) == 2 else [])), rows=rows)


def format_quantity(value: float, unit: str) -> str:
    """`1.2 M`, `3.4 GFLOP`, `5.6 MiB`, `7.8 ms`, `9%`; a dash for an unknown number."""
    if not math.isfinite(value):
        return "-"
    if unit == "bytes":
        return _format_scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    if unit == "seconds":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
    if unit == "share":
        return f"{100 * value:.3g}%"
    if unit == "operations":
        return _format_scaled(value, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))
    return f"{value:,.0f}"


def _format_scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:.4g} {units[power]}"
