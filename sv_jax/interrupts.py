"""Ctrl-C while the device works: the first asks for a clean end, the second ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

INTERRUPTED = 130  # the exit code of shells for a program that SIGINT ended


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether SIGINT has come; a second SIGINT exits with 130.

    Python's handlers wait until a running call into XLA returns, which a compilation makes long. A thread
    that reads the signal wakeup socket does not wait. Outside of the main thread, where handlers cannot be
    set, SIGINT is left as it is.
    """
    seen = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield seen.is_set
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    old_handler = signal.signal(signal.SIGINT, lambda *_: None)
    old_writer = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reader, seen), daemon=True)
    watcher.start()
    try:
        yield seen.is_set
    finally:
        signal.set_wakeup_fd(old_writer)
        signal.signal(signal.SIGINT, old_handler or signal.default_int_handler)
        writer.close()  # the watcher reads the end and returns
        watcher.join()
        reader.close()


def _watch(reader: socket.socket, seen: threading.Event) -> None:
    """Each signal sends its number as one byte."""
    presses = 0
    while data := reader.recv(1):
        presses += data[0] == signal.SIGINT
        if presses > 1:
            os._exit(INTERRUPTED)
        if presses == 1 and not seen.is_set():
            print("\ninterrupted: ending after the running steps; once more ends at once", file=sys.stderr)
            seen.set()
