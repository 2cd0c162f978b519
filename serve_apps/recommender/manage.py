"""The commands of the recommender: `migrate`, `load`, `retrain`, `web`, `start`, and Django's own."""

import os
import sys

if __name__ == "__main__":
    from shoal.errors import ShoalError, needs_extra

    os.environ["DJANGO_SETTINGS_MODULE"] = "films.settings"
    try:
        with needs_extra("recommender"):
            from django.core.management import execute_from_command_line
        execute_from_command_line(sys.argv)
    except ShoalError as error:
        sys.exit(f"error: {error}")
