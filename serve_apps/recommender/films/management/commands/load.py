"""Fill an empty database: `manage.py load FOLDER` in MovieLens' format, `manage.py load` with generated films."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.db import transaction

from films.models import Film, Rating, Viewer
from films.movielens import RatingTable, generate, read_folder
from shoal.errors import ConfigError

BATCH_ROWS = 5000


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("folder", nargs="?", default="", help="with ratings.csv and movies.csv; none: generated")
        parser.add_argument("--if-empty", action="store_true", help="do nothing if there are films already")

    def handle(self, *, folder: str, if_empty: bool, **_: Any) -> None:
        if Film.objects.exists():
            if if_empty:
                return
            raise ConfigError("folder", folder, "there are films already", "set RECOMMENDER_HOME to an empty folder")
        table = read_folder(folder) if folder else generate()
        store(table)
        self.stdout.write(
            f"{len(table.films):,} films and {len(table.rating):,} ratings from {folder or 'the generator'}"
        )


def store(table: RatingTable) -> None:
    """Store all in one transaction: a process that is killed leaves an empty database."""
    with transaction.atomic():
        Film.objects.bulk_create(
            [Film(at + 1, film.movie_id, film.title, film.genres) for at, film in enumerate(table.films)],
            batch_size=BATCH_ROWS,
        )
        viewers = sorted(set(table.user.tolist()))
        Viewer.objects.bulk_create([Viewer(viewer) for viewer in viewers], batch_size=BATCH_ROWS)
        columns = (each.tolist() for each in (table.user, table.film, table.rating, table.timestamp))
        rows = (
            Rating(viewer_id=user, film_id=film + 1, stars=stars, timestamp=time)
            for user, film, stars, time in zip(*columns, strict=True)
        )
        Rating.objects.bulk_create(rows, batch_size=BATCH_ROWS)
