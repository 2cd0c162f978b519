"""The first tables."""

from typing import ClassVar

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar = []
    operations: ClassVar = [
        migrations.CreateModel(
            name="Film",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("movie_id", models.BigIntegerField(unique=True)),
                ("title", models.TextField()),
                ("genres", models.TextField(blank=True)),
            ],
        ),
        migrations.CreateModel(
            name="Viewer",
            fields=[("id", models.BigAutoField(primary_key=True, serialize=False))],
        ),
        migrations.CreateModel(
            name="Rating",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("stars", models.FloatField()),
                ("timestamp", models.BigIntegerField()),
                ("film", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="films.film")),
                ("viewer", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="films.viewer")),
            ],
        ),
    ]
