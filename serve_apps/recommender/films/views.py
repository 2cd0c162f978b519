"""The page: recommended films, each with buttons for stars, and what the viewer has rated."""

from __future__ import annotations

import secrets
import time

from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, HttpResponseNotFound, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_GET, require_POST

from films.models import Rating, Viewer
from films.recommend import STARS, current_version, read_films, recommend, reranker
from films.write_lock import begin_write

MAX_ID = 2**63 - 1  # of the database
NEW_VIEWERS = range(2**40, 2**53)  # above the numbers of files; a float has each of them


@require_GET
@ensure_csrf_cookie
def show_films(request: HttpRequest) -> HttpResponse:
    """The page of whom the session names. A new viewer has a number at once, and no row until the first rating.

    Were the number drawn with the first rating, a second one on its way meanwhile would be another viewer's.
    """
    if "viewer" not in request.session:
        request.session["viewer"] = secrets.choice(NEW_VIEWERS)
    page = recommend(request.session["viewer"])
    context = {"page": page, "counts": reranker().counts()}
    response = render(request, "films.html", context)
    response["Cache-Control"] = "no-store"  # going back shows the newest ratings too
    return response


@require_POST
def rate(request: HttpRequest) -> HttpResponse:
    """Add a rating, on the disk when this returns, and show the next page. 503 while the database is locked."""
    try:
        film, stars = map(int, request.POST["rating"].split(":"))
    except (KeyError, ValueError):
        return HttpResponseBadRequest("rating is FILM:STARS, two whole numbers", content_type="text/plain")
    if stars not in STARS:
        return HttpResponseBadRequest("stars are between 1 and 5", content_type="text/plain")
    if not 0 < film <= MAX_ID or not read_films([film]):
        return HttpResponseNotFound("there is no such film", content_type="text/plain")
    viewer = request.session.setdefault("viewer", secrets.choice(NEW_VIEWERS))
    with begin_write():
        Viewer.objects.get_or_create(pk=viewer)
        Rating.objects.create(viewer_id=viewer, film_id=film, stars=stars, timestamp=int(time.time()))
    return redirect("films")


@require_GET
def show_status(request: HttpRequest) -> JsonResponse:
    """The version, and the outcomes of re-ranking, for programs."""
    version = current_version().get()
    facts = {"version": version.number, "ratings": version.num_ratings, "last_row": version.last_row}
    return JsonResponse({**facts, "endpoint": reranker().url, "reranking": reranker().counts()})
