"""The pictures of README.md, from real runs: the live display while CartPole is learnt, the report of that run, and the
page in which a game learns.

python -m benchmarks.pictures        # writes docs/pictures/live_display.svg, report.png and game.png; needs chromium
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.children import ROOT

sys.path.append(str(ROOT / "tests"))
from chromium import Chromium

PICTURES = ROOT / "docs/pictures"
COLUMNS = 100
SHOWN_FROM = 150.0  # mean return: the display has a curve by then
GAME_SHOWN_FROM = 3.0  # mean return of the copies
BROWSER = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,900")


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as home:
        os.environ["SHOAL_HOME"] = home  # read when a run is looked for
        command = [sys.executable, "-c", "from shoal.cli import main; main()", "run", "actor_learner", "--actors", "4"]
        run = subprocess.Popen([*command, "--plain"], cwd=ROOT)
        draw_display(run)
        if run.wait(timeout=600):
            return 1
        report = next(Path(home, "runs").glob("*/report.html"))
        picture = PICTURES / "report.png"
        subprocess.run([chromium, *BROWSER, f"--screenshot={picture}", report.as_uri()], check=True, timeout=120)
        draw_game(Path(home))
    return 0


def draw_game(home: Path) -> None:
    """Save the page of the recipe `game` once its copies catch most of what falls, as its player sees it."""
    words = [sys.executable, "-c", "from shoal.cli import main; main()", "run", "game", "--plain"]
    run = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "DISPLAY": ""})
    (home / "chromium").mkdir()
    browser = Chromium(home / "chromium")
    browser.call("Emulation.setDeviceMetricsOverride", width=1040, height=720, deviceScaleFactor=1, mobile=False)
    link, deadline = home / "game.html", time.monotonic() + 300
    while not link.exists() and time.monotonic() < deadline:
        time.sleep(0.25)
    browser.call("Page.navigate", url=link.as_uri())
    mean = "Number(document.getElementById('return')?.textContent)"
    while not (browser.run(mean) or 0.0) > GAME_SHOWN_FROM and time.monotonic() < deadline:
        time.sleep(0.25)
    shot = browser.call("Page.captureScreenshot", format="png")["data"]
    (PICTURES / "game.png").write_bytes(base64.b64decode(shot))
    run.wait(timeout=600)
    browser.close()


def draw_display(run: subprocess.Popen[bytes]) -> None:
    """Save the display as it is once the mean return is above SHOWN_FROM, as people see it on a terminal."""
    from rich.console import Console

    import shoal
    from shoal.cli.display import run_view
    from shoal.errors import RunError

    view = None
    while run.poll() is None:
        time.sleep(0.25)
        try:
            view = run_view.make_view(shoal.load_run(), view)
        except RunError:
            continue  # it has not begun to record yet
        if view is not None and view.metrics.get("return/mean_100", 0.0) > SHOWN_FROM:
            break
    if view is None:
        raise RuntimeError("the run ended before it had anything to show")
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(run_view.render(view, COLUMNS))
    drawn = console.export_svg(title="shoal run actor_learner --actors 4")
    without_fonts = re.sub(
        r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL
    )  # which a page would load from elsewhere
    (PICTURES / "live_display.svg").write_text(without_fonts)


if __name__ == "__main__":
    sys.exit(main())
