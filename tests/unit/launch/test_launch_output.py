"""What ranks print: names of files, prefixes, colours."""

import io
import os

import pytest

from smpc.launch.output import OutputOptions, RankOutput

PLACES = [
    {"rank": rank, "local_rank": rank - 2, "world_size": 4, "local_world_size": 2, "node_rank": 1} for rank in (2, 3)
]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stdout": "out.log"}, "--stdout: 'out.log' is one file for several ranks; put {rank} into it"),
        ({"stderr": "{world_size}.log"}, "--stderr: '{world_size}.log' is one file for several ranks"),
        ({"stdout": "{host}.log"}, "--stdout: unknown field {host} in '{host}.log'; known are {rank}, {local_rank},"),
        ({"stdout": "{}.log"}, "--stdout: unknown field {} in"),
        ({"stdout": "{rank"}, "--stdout: '{rank' is no file name with fields"),
        ({"stdout": "{rank:x.y}"}, "--stdout: unknown field {rank:x.y} in '{rank:x.y}'"),
        ({"console": "some"}, "--console: expected all, first, none, found 'some'"),
    ],
)
def test_options_that_cannot_be(options, says):
    (found,) = OutputOptions(**options).violations(PLACES)
    assert found.startswith(says)


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "2").mkdir()
    (found,) = OutputOptions(stdout=f"{tmp_path}/{{rank}}").violations(PLACES)
    assert "which is a folder" in found
    (tmp_path / "file").write_text("")
    (found,) = OutputOptions(stdout=f"{tmp_path}/file/{{rank}}").violations(PLACES)
    assert "cannot write" in found
    assert OutputOptions(stdout=f"{tmp_path}/new/{{rank}}").violations(PLACES) == []
    assert OutputOptions(stdout=f"{tmp_path}/all.log").violations(PLACES[:1]) == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _print(options, written, stream=None, place=PLACES[1]):
    """What a console shows of the bytes, written in pieces."""
    console = stream or io.StringIO()
    output = RankOutput(options, console, io.StringIO())
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as source:
        output.attach((source, None), place)
        for piece in written:
            os.write(writer, piece)
        os.close(writer)
        output.close()
    return console.getvalue()


def test_lines_are_whole_and_say_whose_they_are():
    assert (
        _print(OutputOptions(), [b"a", b"b\nc", b"\n\nlast"]) == "[rank 3] ab\n[rank 3] c\n[rank 3] \n[rank 3] last\n"
    )
    assert _print(OutputOptions(prefix=False), [b"a\n"]) == "a\n"
    assert _print(OutputOptions(), [b"10%\r20%\rdone\r\n"]) == "[rank 3] 10%\r[rank 3] 20%\r[rank 3] done\n"
    assert (
        _print(OutputOptions(), ["gr\u00fcn \u2713\n".encode(), b"\xff\n"])
        == "[rank 3] gr\u00fcn \u2713\n[rank 3] \\xff\n"
    )
    assert _print(OutputOptions(), [b"x" * 200_000 + b"\n"]).count("x") == 200_000


def test_whose_output_is_shown():
    assert _print(OutputOptions(console="none"), [b"a\n"]) == ""
    assert _print(OutputOptions(console="first"), [b"a\n"]) == ""
    assert _print(OutputOptions(console="first"), [b"a\n"], place=PLACES[0]) == "[rank 2] a\n"


def test_the_end_of_what_is_not_shown_is_kept():
    output = RankOutput(OutputOptions(console="first"), io.StringIO(), io.StringIO())
    pipes = [os.pipe() for _ in range(2)]
    with open(pipes[0][0], "rb", buffering=0) as out, open(pipes[1][0], "rb", buffering=0) as err:
        output.attach((out, err), PLACES[1])
        for (_, writer), text in zip(pipes, (b"early\n" + b"x" * 100_000 + b"\nlast\n", b"warning\n"), strict=True):
            os.write(writer, text[:60_000])
            os.write(writer, text[60_000:])
            os.close(writer)
        output.close()
    kept = output.hidden(3)
    assert kept.startswith("smpc: stdout of rank 3, its last 64 KiB:\nxxx")
    assert kept.endswith("x\nlast\nsmpc: stderr of rank 3:\nwarning")
    assert "early" not in kept
    assert len(kept) < 70_000
    assert output.hidden(2) == ""


def test_colour_is_for_terminals(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert _print(OutputOptions(), [b"a\n"], Terminal()) == "\x1b[32m[rank 3]\x1b[0m a\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert _print(OutputOptions(), [b"a\n"], Terminal()) == "[rank 3] a\n"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert _print(OutputOptions(), [b"a\n"], Terminal()) == "[rank 3] a\n"


def test_files_have_what_was_written(tmp_path):
    options = OutputOptions(stdout=f"{tmp_path}/deep/{{rank}}.log")
    assert _print(options, [b"a\r\n\xff", b"b"]) == "[rank 3] a\n[rank 3] \\xffb\n"
    assert (tmp_path / "deep" / "3.log").read_bytes() == b"a\r\n\xffb"


def test_a_single_rank_has_the_console_to_itself():
    assert OutputOptions().is_inherited(1)
    assert not OutputOptions().is_inherited(2)
    assert not OutputOptions(stdout="x").is_inherited(1)
    assert not OutputOptions(console="none").is_inherited(1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_full_disk_is_told_once(tmp_path):
    """The rest of a log used to be missing without a word."""
    (tmp_path / "3.log").symlink_to("/dev/full")
    shown, complaints = io.StringIO(), io.StringIO()
    output = RankOutput(OutputOptions(stdout=f"{tmp_path}/{{rank}}.log"), shown, complaints)
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as source:
        output.attach((source, None), PLACES[1])
        os.write(writer, b"a\n" * 50_000)  # several times what is read at once
        os.close(writer)
        output.close()
    assert shown.getvalue() == "[rank 3] a\n" * 50_000
    assert complaints.getvalue() == f"smpc: warning: output is missing in '{tmp_path}/3.log': No space left on device\n"
