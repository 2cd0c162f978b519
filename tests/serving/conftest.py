"""The film site: one of this process, which its settings allow once, and copies of it for processes."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A site of this process: 150 generated films, one version."""
    folder = tmp_path_factory.mktemp("site")
    import serving.film_site  # noqa: F401  (it makes the package `films` known)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECOMMENDER_HOME", str(folder))
        patch.setenv("DJANGO_SETTINGS_MODULE", "films.settings")
        import django

        django.setup()
    from django.core.management import call_command
    from django.db import connections
    from films.management.commands import load, retrain
    from films.movielens import generate

    call_command("migrate", verbosity=0)
    load.store(generate(num_users=80, num_films=150, num_ratings=3000))
    retrain.retrain(folder / "models")
    yield folder
    connections.close_all()


@pytest.fixture
def own_home(home: Path, tmp_path: Path) -> Path:
    """A copy of the site, for processes."""
    folder = tmp_path / "site"
    (folder / "models").mkdir(parents=True)
    databases = (closing(sqlite3.connect(each / "ratings.sqlite")) for each in (home, folder))
    with next(databases) as source, next(databases) as target:
        source.backup(target)
    shutil.copytree(home / "models", folder / "models", dirs_exist_ok=True)
    return folder
