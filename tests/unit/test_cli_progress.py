"""Progress is for terminals: shown on a pseudo-terminal, gone at the end, absent elsewhere."""

import io
import os
import select
import sys

from smpc.cli.progress import progress


def test_nothing_is_written_where_nobody_looks(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress() as show:
        show("Tracing")
    assert stream.getvalue() == ""


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
