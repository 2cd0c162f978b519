"""The plots of docs/batching.md and docs/batching/why-no-timeout.md, from docs/pictures/batching.json.

python -m benchmarks.batching_plots
"""

from __future__ import annotations

import json
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks.batching import DATA, DEADLINE_S, MEASURED_TIMEOUTS_MS

COLOURS = {"60": "#1b6ca8", "200": "#2a9d5c", "400": "#d98a00", "800": "#b3322f"}
# Colour, line, and where its name stands.
STYLES = {
    "with admission": ("#1b6ca8", "-", (1.75, 1.02)),
    "without admission, 64 may wait": ("#d98a00", "--", (2.02, 0.58)),
    "without admission": ("#b3322f", ":", (1.35, 0.04)),
}
LEFT_MS = 0.42
PERCENTS = {"p50_ms": "median latency, ms", "p99_ms": "99th percentile, ms"}


def timeouts(found: dict[str, Any]) -> None:
    """Latency against the timeout: the classic batcher's curves, and ours as level lines."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharex=True)
    for panel, (key, label) in zip(panels, PERCENTS.items(), strict=True):
        for rate, colour in COLOURS.items():
            _one_rate(panel, found, rate, key, colour)
        panel.set(xscale="log", xlabel="timeout of the classic batcher, ms", ylabel=label, ylim=(0, 145))
        panel.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
        panel.minorticks_off()
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], color=colour, label=f"{rate} requests/s") for rate, colour in COLOURS.items()]
    handles += [
        Line2D([], [], color="black", label="classic, simulated"),
        Line2D([], [], color="black", marker="o", linestyle="", markersize=5, label="classic, measured"),
        Line2D([], [], color="black", linestyle="--", label="no timeout (ours), simulated"),
        Line2D([], [], color="black", marker="D", linestyle="", markersize=6, label="no timeout (ours), measured"),
    ]
    figure.legend(handles=handles, ncols=4, loc="upper center", frameon=False, fontsize=9)
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.12, top=0.84, wspace=0.18)
    figure.savefig(DATA.parent / "batching_timeout.png", dpi=130)


def _one_rate(panel: Axes, found: dict[str, Any], rate: str, key: str, colour: str) -> None:
    classic = found["simulated"]["timeouts"][rate]["classic"]
    panel.plot([float(ms) for ms in classic], [point[key] for point in classic.values()], color=colour)
    panel.axhline(found["simulated"]["timeouts"][rate]["ours"][key], color=colour, linestyle="--", linewidth=1)
    measured = found["measured"]["timeouts"][rate]
    points = [measured["classic"][str(ms)][key] for ms in MEASURED_TIMEOUTS_MS]
    panel.plot(MEASURED_TIMEOUTS_MS, points, "o", color=colour, markersize=5, alpha=0.8)
    panel.plot([LEFT_MS], [measured["ours"][key]], "D", color=colour, markersize=6, clip_on=False)


def overload(found: dict[str, Any]) -> None:
    """Answers within the deadline, as a share of the capacity, against the load."""
    figure, panel = plt.subplots(figsize=(7.2, 4.4))
    for name, (colour, style, place) in STYLES.items():
        points = found["simulated"]["overload"][name]
        panel.plot(
            [float(load) for load in points], [point["goodput"] for point in points.values()], style, color=colour
        )
        panel.text(*place, name, color=colour, fontsize=9.5)
        for load, point in found["measured"]["overload"].get(name, {}).items():
            panel.plot([float(load)], [point["goodput"]], "D", color=colour)
    handles = [
        Line2D([], [], color="black", label="simulated"),
        Line2D([], [], color="black", marker="D", linestyle="", label="measured"),
    ]
    panel.legend(handles=handles, frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(0.0, 0.3))
    panel.set(
        xlabel="load, as a share of the capacity",
        ylabel=f"answered within {1e3 * DEADLINE_S:.0f} ms,\nas a share of the capacity",
        ylim=(0, 1.1),
    )
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(DATA.parent / "batching_overload.png", dpi=130)


def main() -> None:
    found = json.loads(DATA.read_text())
    timeouts(found)
    overload(found)


if __name__ == "__main__":
    main()
