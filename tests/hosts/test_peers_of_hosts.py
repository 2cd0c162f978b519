"""A replica's calls of a peer whose host is lost, which closes no connection."""

import json
import sys
from pathlib import Path

import pytest
from network import network, why_none

from shoal_program import ROOT

pytestmark = [pytest.mark.skipif(bool(why_none()), reason=why_none()), pytest.mark.timeout(900)]
SCRIPT = str(ROOT / "tests/hosts/call_peer.py")


def test_a_call_ends_when_the_peer_s_host_is_lost(tmp_path: Path) -> None:
    """Without a deadline, and although the peer had received it."""
    with network(tmp_path) as made:
        here, there = made.add("here"), made.add("there")
        with there.start([sys.executable, SCRIPT, "serve", there.address]) as serving:
            serving.wait_for_line("^listening$")
            with here.start([sys.executable, SCRIPT, "call", there.address], limit_s=120.0) as calling:
                calling.wait_for_line("^sent$")
                serving.wait_for_line("^asked$")
                made.cut(there)
                assert calling.wait() == 0
        assert json.loads(calling.said.splitlines()[-1]) == ["RequestLost", "ConnectionLost"]
