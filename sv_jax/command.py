"""What all command lines here have in common: where lines go, how mistakes are told, and exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from sv_jax.config import UserError
from sv_jax.interrupts import INTERRUPTED

USER_ERROR, BROKEN_PIPE = 2, 141


def say(text: str) -> None:
    """To standard error, after what standard output has so far: in a terminal the two are one text."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def run_command(run: Callable[[], int]) -> int:
    """The exit code of `run`. Bad input is told in one line, an interrupt in another."""
    _tolerate_narrow_encodings()
    try:
        return run()
    except UserError as error:
        # One line, also where a message quotes a library that writes several.
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Of a module that is run as a program."""
    # Shells start background jobs with SIGINT ignored; one that is sent on purpose still counts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())


def _tolerate_narrow_encodings() -> None:
    """A terminal that cannot show a character shows a question mark; it does not end the run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_stdout() -> None:
    """What is still buffered for a reader that has gone must not be flushed when Python exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
