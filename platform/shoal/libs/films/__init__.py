"""Films of policies: episodes as animations, with what the policy thought of each step drawn beneath."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "films",
    verbs={"play": ("shoal.libs.films.command:play", "Play a registered policy, print its returns, and film it.")},
    heading="play",
    extensions={
        "shoal.films": {
            "draw": "shoal.libs.films.film_file:draw_film",
            "actor": "shoal.libs.films.filmed_game:FilmedGame",
            "samples": "shoal.libs.films.samples:SampleSheet",
        }
    },
)
