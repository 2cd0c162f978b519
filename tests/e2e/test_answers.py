"""docs/answers.md: each question's command runs, and prints the lines that the page shows; its figures are measured.

Times, rates and memory are the machine's: a number with such a unit is compared by pattern, and so is every number in
the answers of VARYING, which train or measure. `...` stands for what is left out.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import cli

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/answers.md"
SLOW = (2, 3, 4, 5, 6, 7, 10, 11, 13, 14, 16, 19, 20, 21, 22)  # which start processes, or take more than three seconds
VARYING = (2, 3, 4, 5, 6, 10, 11, 13, 14, 15, 16, 17, 20, 21, 22, 24)
NUMBER = r"[-+]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-?\d+)?"
MEASURE = rf"{NUMBER} ?(?:us|ms|s|[KM]iB)\b"

SECTIONS = {int(each.partition(".")[0]): each for each in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]}


def read_blocks(section: str) -> list[tuple[str, str]]:
    """The language, with its options, and the text of each fenced block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def make_pattern(line: str, is_varying: bool) -> str:
    def widen(piece: str) -> str:
        if piece == "...":
            return ".*"
        if re.fullmatch(MEASURE, piece):
            return MEASURE
        return NUMBER if is_varying and re.fullmatch(NUMBER, piece) else re.escape(piece)

    return "".join(map(widen, re.split(rf"(\.\.\.|{MEASURE}|{NUMBER})", " ".join(line.split()))))


def check_printed(shown: str, printed: str, is_varying: bool) -> None:
    """Each line that is shown is printed, in this order."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in shown.splitlines():
        pattern = re.compile(make_pattern(line, is_varying))
        assert any(pattern.fullmatch(each) for each in lines), f"not printed: {line}\n{printed}"


def run_here(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line, in this process where it is one of ours alone."""
    match shlex.split(line):
        case ["shoal", *words]:
            cli.main(words, prog_name="shoal", standalone_mode=False)
        case ["python", "-m", module, *words] if "|" not in words:
            monkeypatch.setattr(sys, "argv", [module, *words])
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case _:
            subprocess.run(["bash", "-c", line], check=True, timeout=60, cwd=ROOT if "benchmarks." in line else None)


@pytest.mark.parametrize("number", [pytest.param(each, marks=[pytest.mark.soak] * (each in SLOW)) for each in SECTIONS])
def test_the_command_prints_what_the_page_shows(
    number: int, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    *commands, (language, shown) = read_blocks(SECTIONS[number])
    assert commands
    assert language == "text"
    for info, text in commands:
        if info.startswith("python file="):
            Path(info.partition("=")[2]).write_text(text)
        elif info == "python":
            exec(compile(text, PAGE.name, "exec"), {"__name__": "__main__"})
        elif number in SLOW:
            subprocess.run(["bash", "-ec", text], check=True, timeout=570)
        else:
            for line in text.replace("\\\n", " ").splitlines():
                run_here(line, monkeypatch)
    check_printed(shown, capfd.readouterr().out, number in VARYING)


def test_each_figure_is_measured() -> None:
    """The numbers of a question's last paragraph are in docs/measured.md, or on the page to read on."""
    unknown = []
    for number, section in SECTIONS.items():
        (figure,) = re.findall(r"^```text\n.*?^```\n\n(.*?\]\(([^)]*\.md)\))$", section, re.DOTALL | re.MULTILINE)
        known = "".join((PAGE.parent / page).read_text() for page in ("measured.md", figure[1]))
        for each in re.findall(NUMBER, re.sub(r"[A-Za-z]\w*", "", figure[0])):
            if not re.search(rf"(?<![\w.,]){re.escape(each)}(?!\d|[.,]\d)", known):
                unknown.append(f"{number}: {each}")
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize(
    ("shown", "printed", "is_varying", "is_right"),
    [
        ("step 3 took 5 ms ...", "one\nstep  3 took 7.25 s of 8", False, True),
        ("step 3", "step 4", False, False),
        ("step 3", "step 4", True, True),
        ("a\nb", "b\na", False, False),
        ("peak 2 MiB", "peak 31.5 KiB", False, True),
    ],
)
def test_what_is_compared(shown: str, printed: str, is_varying: bool, is_right: bool) -> None:
    try:
        check_printed(shown, printed, is_varying)
    except AssertionError:
        assert not is_right
    else:
        assert is_right
