"""The addresses of the site."""

from django.urls import path

from films import views

urlpatterns = [
    path("", views.show_films, name="films"),
    path("rate", views.rate, name="rate"),
    path("status", views.show_status, name="status"),
]
