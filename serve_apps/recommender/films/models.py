"""The database: films, viewers, and a log of ratings to which rows are only ever added."""

from __future__ import annotations

from django.db import models


class Film(models.Model):
    """`id` is its position among all films, from 1: the row of its factors plus one, in every version."""

    id = models.BigAutoField(primary_key=True)
    movie_id = models.BigIntegerField(unique=True)  # the number in the user's file
    title = models.TextField()
    genres = models.TextField(blank=True)


class Viewer(models.Model):
    """Someone who rates. The id is that of the user's file, or one that the first page drew."""

    id = models.BigAutoField(primary_key=True)


class Rating(models.Model):
    """One rating. The newest row of a viewer and a film counts; SQLite commits rows in the order of their ids."""

    id = models.BigAutoField(primary_key=True)
    viewer = models.ForeignKey(Viewer, models.CASCADE)
    film = models.ForeignKey(Film, models.CASCADE)
    stars = models.FloatField()
    timestamp = models.BigIntegerField()
