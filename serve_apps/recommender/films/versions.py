"""Versions of the factors on disk: written at once or not at all, and mapped into a web process between two requests.

    MODELS/v00000007/         one version: arrays of .npy, version.json
    MODELS/CURRENT            the number that requests use

Written by the command `retrain` alone; read by every web process. A folder gets its name only when all its files are on
the disk, and CURRENT moves after it. Open maps outlive their folder's removal. Knows neither Django nor torch.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from films.factorisation import Floats, Ints, ItemPosterior
from shoal.atomic_file import replace_synced, sync_folder, write_synced
from shoal.errors import DataError

RETAINED_VERSIONS = 3
ARRAYS = ("vectors", "covariances", "user_precisions", "item_precisions")


@dataclass(frozen=True)
class RatingLog:
    """The ratings that a version has learnt, each pair of user and film once: its newest row of the database.

    user, film, row: [N]; `film` is a position from 0; `row` the database's row id
    last_row:        the last row that was read; the next training reads those after it
    """

    user: Ints
    film: Ints
    rating: Floats
    row: Ints
    last_row: int

    @classmethod
    def empty(cls) -> RatingLog:
        none = np.zeros(0, np.int64)
        return cls(none, none, np.zeros(0), none, 0)

    def merge(self, user: Ints, film: Ints, rating: Floats, row: Ints) -> RatingLog:
        """With newer rows, in the order of their ids. A row that is there already changes nothing."""
        joined = [
            np.concatenate(each)
            for each in zip((self.user, self.film, self.rating, self.row), (user, film, rating, row), strict=True)
        ]
        order = np.lexsort((joined[3], joined[1], joined[0]))
        users, films, ratings, rows = (each[order] for each in joined)
        is_last = np.append((np.diff(users) != 0) | (np.diff(films) != 0), True)[: len(users)]
        last_row = max(self.last_row, int(row.max(initial=0)))
        return RatingLog(users[is_last], films[is_last], ratings[is_last], rows[is_last], last_row)


@dataclass(frozen=True)
class Version:
    """One version, mapped. A request takes it once and uses it to its end."""

    number: int
    items: ItemPosterior
    last_row: int
    num_ratings: int


def write_version(folder: Path, items: ItemPosterior, log: RatingLog) -> int:
    """Write the next version and point CURRENT at it; older ones than the last three are removed. Returns its number.

    A process that is killed at any moment leaves the version before, or this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = max([0, *list_versions(folder)]) + 1
    draft = folder / ".draft"
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    draft.mkdir()
    for name in ARRAYS:
        _write_array(draft / f"{name}.npy", getattr(items, name))
    for name in ("user", "film", "rating", "row"):
        _write_array(draft / f"log_{name}.npy", getattr(log, name))
    facts = {"mean": items.mean, "noise": items.noise, "last_row": log.last_row, "num_ratings": len(log.row)}
    write_synced(draft / "version.json", json.dumps(facts).encode())
    sync_folder(draft)
    draft.rename(_path(folder, number))
    sync_folder(folder)
    replace_synced(folder / "CURRENT", str(number).encode())
    for old in sorted(list_versions(folder))[:-RETAINED_VERSIONS]:
        shutil.rmtree(_path(folder, old))
    return number


def list_versions(folder: Path) -> list[int]:
    """The numbers of the versions that are there in full."""
    return [int(path.name[1:]) for path in folder.glob("v*") if path.name[1:].isdigit()]


def read_current(folder: Path) -> int | None:
    """The number of the current version; None before the first."""
    try:
        return int((folder / "CURRENT").read_text())
    except FileNotFoundError:
        return None


def open_version(folder: Path, number: int) -> Version:
    """Map a version. Raises FileNotFoundError when it was removed, DataError when it is damaged."""
    path = _path(folder, number)
    try:
        arrays: dict[str, Any] = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        facts = json.loads((path / "version.json").read_text())
        items = ItemPosterior(mean=facts["mean"], noise=facts["noise"], **arrays)
        return Version(number, items, facts["last_row"], facts["num_ratings"])
    except (ValueError, KeyError, EOFError) as error:
        raise DataError("version", str(path), f"is damaged: {error}", "remove it, and train anew") from error


def read_log(folder: Path, number: int) -> RatingLog:
    """The ratings that a version has learnt."""
    path = _path(folder, number)
    user, film, rating, row = (np.load(path / f"log_{name}.npy") for name in ("user", "film", "rating", "row"))
    return RatingLog(user, film, rating, row, json.loads((path / "version.json").read_text())["last_row"])


class CurrentVersion:
    """The version for the next request of this process, for any number of threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version: Version | None = None
        self._lock = threading.Lock()

    def get(self) -> Version:
        """The current version, mapped anew if CURRENT has moved. Raises DataError before the first version."""
        number = read_current(self._folder)
        version = self._version
        if version is not None and version.number == number:
            return version
        with self._lock:
            while self._version is None or self._version.number != number:
                if number is None:
                    problem = "there is no version of the factors yet"
                    raise DataError("models", str(self._folder), problem, "run `manage.py retrain --once`")
                try:
                    self._version = open_version(self._folder, number)
                except FileNotFoundError:  # removed since CURRENT was read, by three newer versions
                    number = read_current(self._folder)
            return self._version


def _write_array(path: Path, array: Any) -> None:
    with path.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())


def _path(folder: Path, number: int) -> Path:
    return folder / f"v{number:08d}"
