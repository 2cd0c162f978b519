"""The plots of a finder's or an ablation's results, as PNG files. Called by the CLI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shoal.extend.runs import INK, LINE, MARK, MUTED, RULE, format_number, make_figure, to_png
from shoal.extend.runs import format_size as in_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shoal.libs.planning.ablation import VariantSummary
    from shoal.libs.planning.finders import BatchSizeResult, LearningRateResult


def plot_learning_rate(result: LearningRateResult, title: str) -> bytes:
    """The loss over the rate, with the suggested rate and the range that is too high."""
    with _make_figure(title, 1) as (figure, (axes,)):
        axes.plot(result.rates, result.losses, color=RULE, linewidth=1, label="loss")
        axes.plot(result.rates, result.smoothed, color=LINE, linewidth=2, label="smoothed")
        if result.suggestion is not None:
            axes.axvline(result.suggestion, color=MARK, linewidth=1.5, label=f"steepest: {result.suggestion:.2g}")
        axes.axvline(result.lowest, color=MUTED, linewidth=1, linestyle=":", label=f"lowest: {result.lowest:.2g}")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        low, high = min(result.smoothed), max(result.smoothed[0], min(result.smoothed))
        axes.set_ylim(low - 0.1 * (high - low or 1.0), high + 0.6 * (high - low or 1.0))  # exclude divergence
        axes.set_xlabel("learning rate")
        axes.legend()
    return to_png(figure)


def plot_batch_size(result: BatchSizeResult, title: str) -> bytes:
    """Speed and memory over the batch size."""
    fitting, refused = ([each for each in result.tried if each.fits is fits] for fits in (True, False))
    with _make_figure(title, 2) as (figure, (speed, memory)):
        speed.plot([each.batch_size for each in fitting], [each.samples_per_s for each in fitting], "o-", color=LINE)
        speed.axvline(result.fastest, color=MARK, linewidth=1.5, label=f"fastest: {result.fastest:,}")
        speed.set_ylabel("samples per second")
        speed.set_ylim(bottom=0)
        speed.legend()
        for tried, style, colour in ((fitting, "o-", LINE), (refused, "x", MARK)):
            memory.plot([each.batch_size for each in tried], [each.memory_bytes for each in tried], style, color=colour)
        if result.is_limited:
            memory.axhline(
                result.limit_bytes, color=MARK, linewidth=1.5, label=f"limit: {in_bytes(result.limit_bytes)}"
            )
            memory.legend()
        memory.set_ylabel("memory")
        memory.set_yscale("log", base=2)
        memory.yaxis.set_major_formatter(_make_formatter("memory_bytes"))
        for axes in (speed, memory):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(_make_formatter("batch size"))
            axes.set_xlabel("batch size")
    return to_png(figure)


def plot_ablation(worths: Sequence[VariantSummary], quantities: Sequence[tuple[str, str]], title: str) -> bytes:
    """One panel per quantity, one row per variant: its mean and spread, the full Task on top.

    quantities: (name in `VariantSummary.values`, label)
    """
    rows = list(range(len(worths)))[::-1]
    with _make_figure(title, len(quantities), height=1.4 + 0.34 * len(worths)) as (figure, panels):
        for axes, (name, label) in zip(panels, quantities, strict=True):
            for row, worth in zip(rows, worths, strict=True):
                spread = worth.values.get(name)
                if spread is None:
                    continue
                colour = INK if worth.is_baseline else LINE
                axes.errorbar(spread.mean, row, xerr=spread.deviation, fmt="o", color=colour, capsize=3, markersize=5)
                if worth.is_baseline:
                    axes.axvline(spread.mean, color=RULE, linewidth=1, zorder=0)
            axes.set_xlabel(label)
            axes.set_ylim(-0.6, len(worths) - 0.4)
            axes.set_yticks(rows, [worth.name for worth in worths] if axes is panels[0] else [""] * len(rows))
            axes.locator_params(axis="x", nbins=4)
            axes.xaxis.set_major_formatter(_make_formatter(name))
    return to_png(figure)


def _make_formatter(name: str) -> Callable[[float, object], str]:
    if name == "memory_bytes":
        return lambda value, _: in_bytes(max(int(value), 0))
    return lambda value, _: format_number(value)


@contextmanager
def _make_figure(title: str, num_panels: int, height: float = 3.5) -> Iterator[tuple[Figure, list[Axes]]]:
    with make_figure((max(5.4, 3.6 * num_panels), height), layout="constrained") as figure:
        figure.suptitle(title, color=INK, fontsize=10, fontweight="bold", x=0.01, ha="left")
        panels = list(figure.subplots(1, num_panels, squeeze=False)[0])
        for axes in panels:
            axes.grid(axis="x")
            axes.margins(x=0.05)
        yield figure, panels
