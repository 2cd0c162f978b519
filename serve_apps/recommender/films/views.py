"""The page: recommended films, each with buttons for stars, and what the viewer has rated."""

from __future__ import annotations

import time

from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, HttpResponseNotFound, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_GET, require_POST

from films.models import Rating, Viewer
from films.recommend import STARS, current_version, read_films, recommend, reranker

MAX_ID = 2**63 - 1  # of the database


@require_GET
@ensure_csrf_cookie
def show_films(request: HttpRequest) -> HttpResponse:
    """The page of whom the session names, or of a new viewer, who has no row until the first rating."""
    page = recommend(request.session.get("viewer", 0))
    context = {"page": page, "counts": reranker().counts()}
    response = render(request, "films.html", context)
    response["Cache-Control"] = "no-store"  # going back shows the newest ratings too
    return response


@require_POST
def rate(request: HttpRequest) -> HttpResponse:
    """Add a rating, which is on the disk when this returns, and show the next page."""
    try:
        film, stars = map(int, request.POST["rating"].split(":"))
    except (KeyError, ValueError):
        return HttpResponseBadRequest("rating is FILM:STARS, two whole numbers", content_type="text/plain")
    if stars not in STARS:
        return HttpResponseBadRequest("stars are between 1 and 5", content_type="text/plain")
    if not 0 < film <= MAX_ID or not read_films([film]):
        return HttpResponseNotFound("there is no such film", content_type="text/plain")
    with transaction.atomic():
        viewer = request.session.get("viewer") or Viewer.objects.create().pk
        Rating.objects.create(viewer_id=viewer, film_id=film, stars=stars, timestamp=int(time.time()))
    request.session["viewer"] = viewer
    return redirect("films")


@require_GET
def show_status(request: HttpRequest) -> JsonResponse:
    """The version, and the outcomes of re-ranking, for programs."""
    version = current_version().get()
    facts = {"version": version.number, "ratings": version.num_ratings, "last_row": version.last_row}
    return JsonResponse({**facts, "endpoint": reranker().url, "reranking": reranker().counts()})
