"""What `--expand-args` makes of arguments, beside what a shell makes of them."""

import subprocess

import pytest

from smpc.launch.job import expanded

ENVIRONMENT = {"RANK": "3", "HOME": "/home/me", "A_B": "x y", "PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(
    "argument",
    ["$RANK", "${RANK}.txt", "out/$RANK-${A_B}", "~/data", "~", "a~/b", "$RANK$RANK", "plain", "100%", "a=$A_B"],
)
def test_as_a_shell_does(argument):
    quoted = argument if argument.startswith("~") else f'"{argument}"'
    said = subprocess.run(
        ["/bin/sh", "-c", f"printf %s {quoted}"], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert expanded([argument], ENVIRONMENT) == (said.stdout,)


@pytest.mark.parametrize("argument", ["$NOWHERE", "${NOWHERE}", "$", "${", "$$", "`id`", "$(id)", "~other/x", "*"])
def test_what_is_left_as_it_is(argument):
    assert expanded([argument], ENVIRONMENT) == (argument,)


def test_values_are_not_expanded_again():
    assert expanded(["$A"], {"A": "$B ~", "B": "no"}) == ("$B ~",)
    assert expanded(["~"], {}) == ("~",)
