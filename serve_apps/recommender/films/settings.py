"""Settings of the web process, the retraining and the commands. All files lie in $RECOMMENDER_HOME.

RECOMMENDER_HOME           the database, the versions of the factors, the secret key; default $SHOAL_HOME/recommender
RECOMMENDER_ENDPOINT       the URL of an endpoint with the two towers; without it the first order is shown
RECOMMENDER_MODEL          the towers' name there; default: movies
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from shoal.home import home


def load_secret_key(folder: Path) -> str:
    """The key of this installation: made once, readable by its owner alone."""
    path, draft = folder / "secret_key", folder / f".secret_key.{os.getpid()}"
    if not path.exists():
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(50))
        with suppress(FileExistsError):  # another process was first
            os.link(draft, path)  # a reader sees the full key or none
        draft.unlink()
    return path.read_text()


RECOMMENDER_HOME = Path(os.environ.get("RECOMMENDER_HOME") or home() / "recommender")
RECOMMENDER_HOME.mkdir(parents=True, exist_ok=True)
RECOMMENDER_MODELS = RECOMMENDER_HOME / "models"
RECOMMENDER_ENDPOINT = os.environ.get("RECOMMENDER_ENDPOINT", "")
RECOMMENDER_MODEL = os.environ.get("RECOMMENDER_MODEL", "movies")
RECOMMENDER_DEADLINE_S = 0.015

SECRET_KEY = load_secret_key(RECOMMENDER_HOME)
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]"]
ROOT_URLCONF = "films.urls"
INSTALLED_APPS = ["films"]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "films.write_lock.AnswerBusy",
]
SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"  # who rates: no row to write
SESSION_COOKIE_SAMESITE = "Strict"
SESSION_COOKIE_AGE = 365 * 24 * 3600
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": RECOMMENDER_HOME / "ratings.sqlite",
        "CONN_MAX_AGE": None,  # a connection a thread
        # Readers never wait in WAL mode; a write takes the lock at once instead of failing half-way, for one short row.
        # How long a rating waits for the lock is in films/write_lock.py.
        "OPTIONS": {
            "timeout": 10,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
        },
    }
}
USE_TZ = True
USE_I18N = False
LOGGING = {  # Django's own says nothing of errors unless DEBUG is on
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"terminal": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"django": {"handlers": ["terminal"], "level": "ERROR"}},
}
