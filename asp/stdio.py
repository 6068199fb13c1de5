"""What every console script of ours needs before it does anything: three streams that exist, and complaints in one line."""

import argparse
import io
import os
import sys
from typing import NoReturn

from asp.terminal import printable

EXIT_CONFIGURATION = 2


def ready() -> None:
    """Make stdin, stdout and stderr usable, whatever we were started with.

    A closed one would be None in Python, and worse, the next file that is opened would get its number: then what is written
    to descriptor 1 lands in that file. A closed stream becomes /dev/null. A character that the terminal's encoding cannot
    show is written as a backslash escape, since it must not end a run.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            taken = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if taken != number:
                os.dup2(taken, number)
                os.close(taken)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line, in the form of all our errors."""

    def error(self, message: str) -> NoReturn:
        """Print ``PROGRAM: MESSAGE`` and exit 2. Arguments can be foreign text, so they are made safe to show (L8)."""
        shown = printable(message, newlines=False)
        self.exit(EXIT_CONFIGURATION, f"{self.prog.partition(' ')[0]}: {shown}; see: {self.prog} --help\n")
