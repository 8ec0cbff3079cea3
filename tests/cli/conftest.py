"""The command line, run in this process."""

import re

import pytest

from jaxscale import __version__, cli


@pytest.fixture
def command(capfd):
    """Run a command: its exit code, and what it printed, each in one line."""

    def call(*arguments):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, _in_a_line(out), _in_a_line(err)

    return call


def loading(name):
    """The first line that a command prints, on standard error."""
    return f"jaxscale: {name}, by jaxscale {__version__}: loading its libraries "


def _in_a_line(text):
    """What was printed without the boxes and line breaks of the terminal."""
    return re.sub(r"[│╭╰─╮╯\s]+", " ", text)
