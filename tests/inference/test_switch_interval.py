"""How often threads take turns, while somebody needs that, and afterwards."""

import contextlib
import sys

from jaxscale.inference.server import ServerConfig
from jaxscale.inference.server.run import make_server
from jaxscale.inference.switch_interval import short_switch_interval


def test_overlapping_blocks_restore_what_was_found():
    before = sys.getswitchinterval()
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(short_switch_interval())
    second.enter_context(short_switch_interval())
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before


def test_a_server_changes_nothing_but_while_it_runs(monkeypatch):
    before, seen = sys.getswitchinterval(), []

    def run(self, sockets=None):
        seen.append(sys.getswitchinterval())

    monkeypatch.setattr("uvicorn.Server.run", run)
    server = make_server(lambda: None, ServerConfig())
    assert sys.getswitchinterval() == before
    server.run()
    assert seen[0] < before == sys.getswitchinterval()
