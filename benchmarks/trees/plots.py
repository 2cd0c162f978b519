"""The plot of docs/libs/trees.md, from docs/pictures/trees.json.

python -m benchmarks.trees.plots
"""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.trees.__main__ import DATA, FORMS

COLOURS = {"own": "#1b6ca8", "user": "#d98a00"}
AXES = {"trees grow": "nodes of a tree (64 trees)", "batches grow": "trees of a batch (39 nodes each)"}


def main() -> None:
    found = json.loads(DATA.read_text())
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    for panel, (what, label) in zip(panels, AXES.items(), strict=True):
        for form, points in found[what].items():
            sizes = [int(size) for size in points]
            microseconds = [each / 1e3 for each in points.values()]
            panel.plot(sizes, microseconds, "o-", color=COLOURS[form], label=FORMS[form], markersize=4)
        panel.set(xscale="log", yscale="log", xlabel=label, ylabel="µs a node, planned, forward and backward")
        panel.set_ylim(5, 150)
        panel.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
        sizes = [int(size) for size in found[what]["own"]]
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(DATA.parent / "trees_cost.png", dpi=130)


if __name__ == "__main__":
    main()
