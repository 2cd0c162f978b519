"""The Django app `films`."""

from django.apps import AppConfig


class FilmsConfig(AppConfig):
    name = "films"
    default_auto_field = "django.db.models.BigAutoField"
