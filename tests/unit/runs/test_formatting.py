"""Numbers and times for people; web addresses without secrets."""

import math

import pytest

from shoal.runs.event_messages import format_warning
from shoal.runs.formatting import format_age, format_duration, format_metric, format_number, format_size, parse_duration
from shoal.runs.record.provenance import format_masked_command, mask_command_line


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_number(0.0), "0"),
        (format_number(1234567.0), "1,234,567"),
        (format_number(-5.0), "-5"),
        (format_number(2403.71), "2,404"),
        (format_number(1234567.5), "1,234,568"),
        (format_number(999.96), "1,000"),
        (format_number(3e-5), "3e-5"),
        (format_number(0.999999), "1.000"),
        (format_metric("wait/data", 0.004567), "0.457%"),
        (format_metric("optimizer/learning_rate", 0.0003), "0.0003"),
        (format_metric("episode/success_rate", 0.5), "50%"),
        (format_number(0.000123456), "0.0001235"),
        (format_number(1e300), "1e300"),
        (format_number(math.nan), "not a number"),
        (format_number(-math.inf), "-∞"),
        (format_duration(8.24), "8.2 s"),
        (format_duration(59.96), "1 min 0 s"),
        (format_duration(200), "3 min 20 s"),
        (format_duration(7500), "2 h 5 min"),
        (format_duration(273_600), "3 d 4 h"),
        (format_duration(-0.1), "0.0 s"),
        (format_age(59.9), "59 s"),
        (format_age(7500), "2 h"),
        (format_size(12), "12 B"),
        (format_size(3584), "3.5 KiB"),
    ],
)
def test_numbers_and_times_are_written_for_people(shown: str, expected: str) -> None:
    assert shown == expected


def test_durations_are_read_as_people_write_them() -> None:
    read = [parse_duration(text) for text in ("30m", "1.5 h", "45min", "90s", "2d", "soon", "30")]
    assert read == [1800.0, 5400.0, 2700.0, 90.0, 172_800.0, None, None]


def test_the_user_of_a_url_is_masked() -> None:
    words = ["shoal", "run", "train", "--pip", "git+https://oauth2:s3cret@example.org/team/lib.git", "args.at=a@b"]
    shown = format_masked_command(words)
    assert "s3cret" not in shown
    assert "git+https://***@example.org/team/lib.git" in shown
    assert "args.at=a@b" in shown
    assert mask_command_line("pip install https://t0ken@example.org/x") == "pip install 'https://***@example.org/x'"
    assert mask_command_line("curl https://example.org/a@b") == "curl https://example.org/a@b"


def test_a_replica_of_an_endpoint_that_is_lost_is_no_learner() -> None:
    """Both are events of one record; a display that could not word one would end the run."""
    assert format_warning("replica_lost", {"model": "", "version": None, "reason": "did not report"}) == ""
    assert "the others go on" in format_warning("learner_lost", {"pid": 1})
