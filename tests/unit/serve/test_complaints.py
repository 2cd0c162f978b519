"""What is kept of a text in which Ray has buried an error of ours."""

import json

import pytest

from shoal.errors import InferenceError, error_summary, summarize_error
from shoal.serve.http.response import build_error_response

BURIED = """The deployment failed to start 2 times in a row. See controller logs for details. Error:
ray::ServeReplica:s:replica.initialize_and_get_metadata() (pid=23567, ip=127.0.0.1)
  File "/site-packages/ray/serve/_private/replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
shoal.errors.ConfigError: what was tried first
  File "/platform/shoal/serve/replica/replica.py", line 79, in start
    raise ShoalError(trouble)
shoal.errors.ShoalError: model 'm': ConfigError: preprocess = 'mine:nosuch': 'mine' has no 'nosuch'
"""


def test_the_last_error_of_ours_is_kept_and_nothing_else() -> None:
    assert error_summary(BURIED) == "model 'm': ConfigError: preprocess = 'mine:nosuch': 'mine' has no 'nosuch'"
    assert error_summary("RuntimeError: shoal.errors.ConfigError is not ours here") == ""
    killed = (
        "5 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: 0a) was"
        " 22.41GB used / 23.54GB limit (0.952155)\nOOM kill reason: ...\nRefer to the documentation"
    )
    assert error_summary(killed) == "Ray ended the process, since 22.41 of its host's 23.54 GB of memory were in use"


@pytest.mark.parametrize(
    ("words", "first", "last"),
    [
        ("", "RuntimeError", "RuntimeError"),
        (" \n", "RuntimeError", "RuntimeError"),
        ("one line", "one line", "one line"),
        ("\nnot enough memory\n  advice\nShoalError: why \n", "not enough memory", "ShoalError: why"),
        ("x" * 300, "x" * 200, "x" * 200),
    ],
)
def test_an_error_in_one_line(words: str, first: str, last: str) -> None:
    assert summarize_error(RuntimeError(words)) == first
    assert summarize_error(RuntimeError(words), line=-1) == last
    assert len(summarize_error(RuntimeError("x" * 300), max_chars=None)) == 300


def test_half_a_pair_of_utf_16_in_what_went_wrong_is_told_and_not_in_the_way() -> None:
    """As in the name of a file whose bytes are no UTF-8, in an error of the user's code."""
    error = InferenceError(500, "no such file: \udcff.txt")
    assert json.loads(build_error_response(error).body) == {"error": "no such file: \\udcff.txt"}
