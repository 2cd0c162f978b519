"""A population of learners, each fed by actors of its own: they copy and change each other while they learn."""
