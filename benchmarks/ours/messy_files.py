"""Twelve files as people have them: three countries' numbers and dates, gaps of ten kinds, ids, codes, rare categories.

Called by `benchmarks.messy_tables` and by tests. Each file tells of parcels; the target follows from weight and plan.
"""

from __future__ import annotations

import csv
import datetime
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

GAPS = ["", "-", "n/a", "NA", "N/A", "NULL", "?", "nan", "None", "#N/A"]
NBSP = "\u202f"


class MessyFile(NamedTuple):
    """A file, what is said of it, and the kinds that its columns are to have. No name: it has no line of names."""

    path: Path
    target: str | int
    kinds: dict[str, str]
    has_names: bool = True
    encoding: str = "utf-8"


def number(value: float, group: str, point: str, digits: int = 2) -> str:
    return f"{value:,.{digits}f}".replace(",", "\0").replace(".", point).replace("\0", group)


class Parcels:
    """Draws the rows of one file."""

    def __init__(self, seed: str, num_rows: int) -> None:
        self.draw, self.num_rows = random.Random(seed), num_rows
        self.weights = [self.draw.lognormvariate(6, 1.2) for _ in range(num_rows)]
        self.counts = [self.draw.randint(0, 9000) for _ in range(num_rows)]
        self.days = [datetime.date(2024, 1, 1) + datetime.timedelta(self.draw.randint(0, 700)) for _ in range(num_rows)]
        self.plans = [self.draw.choice(["basic", "plus", "family"]) for _ in range(num_rows)]
        self.late = [weight > 400 and plan != "plus" for weight, plan in zip(self.weights, self.plans, strict=True)]

    def column(self, form: Callable[[Any], str], values: list[Any], gaps: list[str] | None = None) -> list[str]:
        """A tenth are gaps."""
        rate = 0.1 if gaps else 0.0
        return [self.draw.choice(gaps or [""]) if self.draw.random() < rate else form(each) for each in values]

    def words(self, *words: str) -> list[str]:
        return [self.draw.choice(words) for _ in range(self.num_rows)]

    def yes(self, yes: str = "yes", no: str = "no") -> list[str]:
        return [yes if each else no for each in self.late]


def write_all(folder: Path, num_rows: int = 240) -> dict[str, MessyFile]:
    """The files by name."""
    return {make.__name__: make(folder, Parcels(make.__name__, num_rows)) for make in FILES}


def write(
    folder: Path,
    name: str,
    columns: dict[str, list[str]],
    target: str | int,
    kinds: dict[str, str],
    separator: str = ",",
    encoding: str = "utf-8",
    *,
    has_names: bool = True,
    quoting: Any = csv.QUOTE_MINIMAL,
) -> MessyFile:
    path = folder / f"{name}.csv"
    with path.open("w", newline="", encoding=encoding) as file:
        rows = csv.writer(file, delimiter=separator, quoting=quoting)
        if has_names:
            rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))
    return MessyFile(path, target, kinds, has_names, encoding)


def german(folder: Path, of: Parcels) -> MessyFile:
    columns = {
        "plz": [f"{of.draw.choice([1234, 4127, 99084, 10115, 80331]):05d}" for _ in range(of.num_rows)],
        "gewicht": of.column(lambda each: number(each, ".", ","), of.weights, ["", "-", "k.A."]),
        "anzahl": of.column(lambda each: number(each, ".", ",", 0), of.counts),
        "seit": of.column(lambda each: each.strftime("%d.%m.%Y"), of.days, ["", "-"]),
        "tarif": of.plans,
        "verspätet": of.yes("ja", "nein"),
    }
    kinds = {"plz": "word", "gewicht": "number:,", "anzahl": "number:,", "seit": "date:%d.%m.%Y", "tarif": "word"}
    return write(folder, "german", columns, "verspätet", kinds, ";")


def american(folder: Path, of: Parcels) -> MessyFile:
    columns = {
        "weight": of.column(lambda each: number(each, ",", "."), of.weights, ["NULL", ""]),
        "count": of.column(lambda each: number(each, ",", ".", 0), of.counts),
        "since": of.column(lambda each: f"{each.month}/{each.day}/{each.year}", of.days, ["", "N/A"]),
        "insured": of.column(str, [of.draw.random() < 0.5 for _ in range(of.num_rows)], ["", "NULL"]),
        "plan": of.plans,
        "late": of.yes(),
    }
    kinds = {"weight": "number:.", "count": "number:.", "since": "date:%m/%d/%Y", "insured": "truth", "plan": "word"}
    return write(folder, "american", columns, "late", kinds, quoting=csv.QUOTE_ALL)


def french(folder: Path, of: Parcels) -> MessyFile:
    columns = {
        "poids": of.column(lambda each: number(each, NBSP, ","), of.weights, ["?", "NA"]),
        "depuis": of.column(lambda each: each.strftime("%d/%m/%Y"), of.days, [""]),
        "forfait": of.plans,
        "prévu": of.column(lambda each: each.strftime("%d/%m/%Y"), of.days),
        "en retard": of.yes("oui", "non"),
    }
    kinds = {"poids": "number:,", "depuis": "date:%d/%m/%Y", "forfait": "word", "prévu": "date:%d/%m/%Y"}
    return write(folder, "french", columns, "en retard", kinds, ";")


def swiss_with_times(folder: Path, of: Parcels) -> MessyFile:
    columns = {
        "weight": of.column(lambda each: number(each, "'", "."), of.weights, ["--"]),
        "seen": of.column(lambda each: f"{each:%d.%m.%y} {of.draw.randint(0, 23):02d}:30", of.days, ["-"]),
        "rate": of.column(lambda each: f"{each / 1e6:.3e}", of.weights, ["n/a"]),
        "plan": of.plans,
        "late": of.yes(),
    }
    kinds = {"weight": "number:.", "seen": "date:%d.%m.%y %H:%M", "rate": "number", "plan": "word"}
    return write(folder, "swiss_with_times", columns, "late", kinds, "\t")


def with_mark(folder: Path, of: Parcels) -> MessyFile:
    """Its first bytes are a byte order mark, before an input."""
    columns = {"weight": of.column(lambda each: number(each, "", ","), of.weights, [""]), "plan": of.plans}
    kinds = {"weight": "number:,", "plan": "word"}
    return write(folder, "with_mark", columns | {"late": of.yes()}, "late", kinds, ";", "utf-8-sig")


def ten_gaps(folder: Path, of: Parcels) -> MessyFile:
    columns = {
        "weight": of.column(lambda each: f"{each:.1f}", of.weights, GAPS),
        "since": of.column(str, of.days, GAPS),
        "insured": of.column(lambda each: str(each).lower(), [of.draw.random() < 0.5 for _ in of.days], GAPS),
        "plan": of.column(str, of.plans, GAPS),
        "late": of.yes(),
    }
    return write(
        folder, "ten_gaps", columns, "late", {"weight": "number", "since": "date", "insured": "truth", "plan": "word"}
    )


def ids(folder: Path, of: Parcels) -> MessyFile:
    shuffled = of.draw.sample(range(10_000, 99_999), of.num_rows)
    columns = {
        "": [str(each) for each in range(of.num_rows)],
        "customer_id": [str(each) for each in shuffled],
        "parcel": [str(uuid.UUID(int=of.draw.getrandbits(128))) for _ in range(of.num_rows)],
        "country": ["xx"] * of.num_rows,
        "weight": of.column(lambda each: f"{each:.3f}", of.weights, [""]),
        "plan": of.plans,
        "late": of.yes("1", "0"),
    }
    return write(folder, "ids", columns, "late", {"weight": "number", "plan": "word"})


def codes(folder: Path, of: Parcels) -> MessyFile:
    """Thousands of two meanings, beside a column of one."""
    columns = {
        "postcode": [f"{of.draw.randint(1000, 99999):05d}" for _ in range(of.num_rows)],
        "branch": of.words("007", "012", "101", "205"),
        "volume": [number(1000 * of.draw.randint(1, 9) + 500, ",", ".", 0) for _ in range(of.num_rows)],
        "weight": of.column(lambda each: number(each, ",", "."), of.weights, ["-"]),
        "plan": of.plans,
        "late": of.yes(),
    }
    kinds = {"postcode": "word", "branch": "word", "volume": "number:.", "weight": "number:.", "plan": "word"}
    return write(folder, "codes", columns, "late", kinds, "|")


def unseen(folder: Path, of: Parcels) -> MessyFile:
    """Each of some words is in one row, so some are in validation rows alone."""
    plans = [f"special {at}" if at % 8 == 0 else plan for at, plan in enumerate(of.plans)]
    columns = {"weight": of.column(lambda each: f"{each:.1f}", of.weights, ["-"]), "plan": plans, "late": of.yes()}
    return write(folder, "unseen", columns, "late", {"weight": "number", "plan": "word"})


def without_names(folder: Path, of: Parcels) -> MessyFile:
    columns = [of.yes(), of.column(lambda each: f"{each:.1f}", of.weights, ["?"]), of.plans, [*map(str, of.days)]]
    named = {str(at): values for at, values in enumerate(columns)}
    kinds = {"1": "number", "2": "word", "3": "date"}
    return write(folder, "without_names", named, 0, kinds, has_names=False)


def numbered(folder: Path, of: Parcels) -> MessyFile:
    """As pandas writes a frame whose columns have no names."""
    columns = {"0": of.yes("1", "0"), "1": of.column(lambda each: f"{each:.1f}", of.weights, [""]), "2": of.plans}
    return write(folder, "numbered", columns, 0, {"1": "number", "2": "word"})


def many_lines(folder: Path, of: Parcels) -> MessyFile:
    """Names and texts with line breaks, separators, quotes and blanks around."""
    columns = {
        "weight\n(kg)": of.column(lambda each: f" {each:.1f} ", of.weights, ["-", " "]),
        "plan, or so": of.column(lambda each: f'{each}, the\n"{each}"', of.plans, [""]),
        "since": of.column(lambda each: f"{each:%b %d, %Y}", of.days),
        "late": of.yes(),
    }
    kinds = {"weight\n(kg)": "number", "plan, or so": "word", "since": "date:%b %d, %Y"}
    return write(folder, "many_lines", columns, "late", kinds)


FILES = (
    *(german, american, french, swiss_with_times, with_mark, ten_gaps, ids, codes, unseen, without_names, numbered),
    many_lines,
)


def read_rows(file: MessyFile, encoding: str = "") -> list[dict[str, str]]:
    """The raw rows as `csv.DictReader` has them."""
    text = file.path.read_text(encoding or file.encoding)
    separator = max(",\t;|", key=text.partition("\n")[0].count)
    names = None if file.has_names else [str(at) for at in range(text.partition("\n")[0].count(separator) + 1)]
    with file.path.open(newline="", encoding=encoding or file.encoding) as opened:
        return list(csv.DictReader(opened, names, delimiter=separator))
