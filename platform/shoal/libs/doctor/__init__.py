"""`shoal doctor`: whether this machine can run Shoal."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "doctor",
    verbs={
        "doctor": ("shoal.libs.doctor.command:doctor", "Check this machine and show the remedy for each problem."),
    },
    heading="begin",
)
