"""The report of a run: the page of the console with its data inside, in one file that opens offline, and one picture.

Called by the verb `shoal report` and at the end of runs. Reads the run and writes two files into its folder; never
changes the record. It needs no server, nor the packages of one.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shoal.atomic_file import create_private, make_folder
from shoal.errors import RunError
from shoal.extend.cli import Texts, verb
from shoal.extend.runs import (
    MEAN_RETURN,
    RETURNS,
    VALIDATION,
    Line,
    MetricHistory,
    Panel,
    Run,
    draw_panels,
    encode_picture,
    format_number,
    load,
    read_curves,
    thin,
    to_png,
)
from shoal.libs.console.run_data import MAX_PICTURE_BYTES, describe_events, describe_panels, describe_run, find_panels

STATIC = Path(__file__).parent / "static"
FILMS = "films"  # a folder of a run's folder: the first, the middle and the last one are on the page
NUM_POINTS = 500  # of each curve
LOSSES = {"train/loss": "training", f"{VALIDATION}loss": "validation"}
_IMPORT = re.compile(r'(from ")(\.[^"]+)"')
# It can load nothing from elsewhere; what a run says is data, and no script.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="content-security-policy" content="{policy}">
<title>Shoal</title>
<style>{style}</style>
</head>
<body>
<main id="main" tabindex="-1"></main>
<div id="said" role="status" aria-live="polite"></div>
<noscript><p>The report draws itself by JavaScript. `shoal runs` prints the same.</p></noscript>
<script type="application/json" id="stored">{data}</script>
<script>{charts}</script>
<script type="importmap">{modules}</script>
<script type="module">import "report.js";</script>
</body>
</html>
"""


def write_page(run: Run) -> Path:
    """Write `report.html` and, if there is anything to draw, `learning_curve.png`; returns the path of the page.

    Raises RunError when the run's folder is not writable.
    """
    try:
        make_folder(run.folder)
        curves = read_curves(run)
        if panels := list_learning_curves(run, curves):
            picture = to_png(draw_panels(panels, f"{run.name} · {run.id}"))
            create_private(run.folder / "learning_curve.png").write_bytes(picture)
        path = create_private(run.folder / "report.html")
        path.write_text(build_page(run, curves), encoding="utf-8")
        return path
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"the report of run {run.id!r} cannot be written to {run.folder}: {reason}") from error


def build_page(run: Run, curves: dict[str, MetricHistory]) -> str:
    """The page of one run."""
    path = f"/api/runs/{run.id}"
    found = [each for each in sorted((run.folder / FILMS).glob("*.webp")) if each.stat().st_size <= MAX_PICTURE_BYTES]
    films = [found[index] for index in sorted({0, len(found) // 2, len(found) - 1})] if found else []
    pictures = [(each.stem, encode_picture(each.read_bytes(), "webp")) for each in films]
    panels = {"panels": [*([Panel(title="films", pictures=pictures)] if pictures else []), *describe_panels(run)]}
    data = {**_answer(run, curves), f"{path}/panels": panels, f"{path}/events": describe_events(run)}
    return _render([run], data)


def compare_runs(runs: list[Run]) -> str:
    """The page of several runs over each other."""
    return _render(runs, {path: each for run in runs for path, each in _answer(run, read_curves(run)).items()})


def _answer(run: Run, curves: dict[str, MetricHistory]) -> dict[str, Any]:
    """What the console's server would answer about a run and its curves, by the path that is asked."""
    described = describe_run(run)
    drawn = {name: thin(each, NUM_POINTS) for name, each in curves.items() if not name.startswith(described["hidden"])}
    answer = {"incarnation": run.incarnation, "sampled": False, "curves": drawn}
    return {f"/api/runs/{run.id}": described, f"/api/runs/{run.id}/curves": answer}


def _render(runs: list[Run], data: dict[str, Any]) -> str:
    modules: dict[str, str] = {}
    _collect(STATIC / "report.js", modules)
    style = "".join((STATIC / name).read_text() for name in ("vendor/uplot/uPlot.min.css", "style.css"))
    charts = (STATIC / "vendor/uplot/uPlot.iife.min.js").read_text()
    stored = msgspec.json.encode({"runs": [run.id for run in runs], **data}).decode().replace("<", "\\u003c")
    return _PAGE.format(
        policy=_POLICY, style=style, charts=charts, data=stored, modules=json.dumps({"imports": modules})
    )


def _collect(path: Path, modules: dict[str, str]) -> None:
    """A module and those that it imports, by their paths in STATIC, as data URLs: there is no folder to load from."""

    def name(found: re.Match[str]) -> str:
        imported = (path.parent / found[2]).resolve()
        if (key := imported.relative_to(STATIC).as_posix()) not in modules:
            modules[key] = ""
            _collect(imported, modules)
        return f'{found[1]}{key}"'

    text = _IMPORT.sub(name, path.read_text()).encode()
    modules[path.relative_to(STATIC).as_posix()] = f"data:text/javascript;base64,{base64.b64encode(text).decode()}"


def list_learning_curves(run: Run, curves: dict[str, MetricHistory]) -> list[Panel]:
    """The losses and the metric of training; each mean return of several policies; else what the run is judged by over
    steps and over seconds."""
    best, titles = run.best(), find_panels(run.kind).titles
    if best is None:
        return []
    metric, value = best
    note = f"best {format_number(value)}"
    losses = [_make_line(curves[name], label) for name, label in LOSSES.items() if name in curves]
    policies = [name for name in curves if name.startswith(RETURNS)]
    if "train/loss" in curves:
        own = [] if metric in LOSSES else [Panel(title=metric, note=note, lines=[_make_line(curves[metric], metric)])]
        return [Panel(title="loss", lines=losses), *own]
    if policies and MEAN_RETURN not in policies:
        heading = titles[MEAN_RETURN]
        return [
            Panel(title=f"{heading}: {name.removeprefix(RETURNS)}", lines=[_make_line(curves[name], name)])
            for name in policies
        ]
    curve, heading = curves[metric], titles.get(metric, metric)
    order, seconds = curve.times.argsort(kind="stable"), curve.times - run.created_at
    over_time = MetricHistory(seconds[order], curve.times[order], curve.values[order])
    resumed = [(each.time - run.created_at, "resumed") for each in run.read_events() if each.kind == "resumed"]
    return [
        Panel(title=heading, note=note, lines=[_make_line(curve, metric)]),
        Panel(title=heading, x="wall time (s)", lines=[_make_line(over_time, metric)], marks=resumed),
    ]


def _make_line(curve: MetricHistory, label: str) -> Line:
    columns: dict[str, Any] = dict(thin(curve, NUM_POINTS))
    return Line(label, columns["steps"], columns["values"])


@verb(work="writing the report")
def report(
    runs: Annotated[Texts, "[RUN]..."] = (),
    *,
    open_path: Annotated[bool, "Print the path of the page and nothing else, to hand to a browser."] = False,
) -> Iterator[str]:
    """Write the one-page HTML report of a RUN (the newest when left out), with its learning curve as a picture.

    Of several RUNs, a page with their curves over each other, and where their specs differ: comparison.html.

    \b
    Examples:
      shoal report
      shoal report 20261120-064501-3f2a 20261120-0712
      xdg-open "$(shoal report latest --open-path)"
    """
    records = list({run.id: run for run in map(load, runs or ("latest",))}.values())
    record = records[0]
    if len(records) > 1:
        path = create_private(record.folder / "comparison.html")
        path.write_text(compare_runs(records), encoding="utf-8")
    else:
        path = write_page(record)
    if open_path:
        yield str(path)
        return
    yield f"The report of {', '.join(f'{each.id} ({each.status.value})' for each in records)}: {path}"
    picture = path.with_name("learning_curve.png")
    if picture.exists():
        yield f"Its learning curve: {picture}"
