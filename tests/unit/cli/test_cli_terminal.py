"""Progress is for terminals: shown on a pseudo-terminal, gone at the end, a line every ten seconds elsewhere."""

from __future__ import annotations

import io
import os
import re
import select
import sys
import threading
import time

from smpc.cli.terminal import progress


def test_nothing_is_written_where_nobody_looks(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress() as show:
        show("Tracing")
    assert stream.getvalue() == ""


def test_what_takes_long_is_told_in_lines_where_there_is_no_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(every=0.01) as show:
        show("Planning", 3, 40)
        end = time.monotonic() + 60
        while "\n" not in stream.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert re.match(r"smpc: Planning \(3 of 40\), \d+ s so far\n", stream.getvalue())
    assert "smpc progress" not in [thread.name for thread in threading.enumerate()]


def test_phases_are_shown_on_a_terminal_and_wiped(monkeypatch):
    leader, follower = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(follower, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with progress() as show:
            show("Tracing [bold]the[/bold] model")
            print("a word of the model's", file=sys.stderr)
            show("Solving")
        terminal.flush()
        written = ""
        while select.select([leader], [], [], 0)[0]:  # a terminal gives what it has in pieces
            written += os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "Tracing [bold]the[/bold] model" in written
    assert "Solving" in written
    assert "a word of the model's" in written
    assert written.rindex("\x1b[2K") > written.rindex("Solving")  # the line is erased
