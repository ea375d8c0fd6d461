"""Ctrl-C: what there is comes out, and the exit code says so."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from sv_jax.interrupts import deferred_interrupts
from tests.fake_engine import FakeModel, python, run


@pytest.fixture(autouse=True)
def _interrupts_are_heard():
    """A shell's background jobs, of which a test run may be one, start with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupted_comparison_still_gives_the_output(fake, capsys):
    fake.configure(stop_comparison=True)
    code, out, err = run(capsys, "--prompt", "one", "--check-lossless", "--json")
    assert code == 130 and "interrupted" in err
    document = json.loads(out)
    assert document["outputs"][0]["text"] == "ONE" and document["lossless"]["interrupted"]


def test_interrupt_gives_what_there_is(fake, capsys):
    fake.configure(stop_after=2)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = run(capsys, "--prompt", "abc👍", "--check-lossless")
    assert (code, out) == (130, "ABC\N{REPLACEMENT CHARACTER}\n")
    assert "interrupted: ending after the running steps" in err and "verification was dense" in err
    assert "compare" not in fake.loaded[0].calls
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_while_loading(fake, capsys, monkeypatch):
    monkeypatch.setattr(FakeModel, "load_weights", lambda self: os.kill(os.getpid(), signal.SIGINT))
    code, out, err = run(capsys, "--prompt", "one")
    assert (code, out) == (130, "") and err.endswith("interrupted\n")


def test_interrupts_outside_of_the_main_thread():
    seen = []

    def work():
        with deferred_interrupts() as interrupted:
            seen.append(interrupted())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_second_interrupt_ends_a_long_call_at_once():
    # time.sleep stands for a long call into XLA; the handler returns, so the sleep goes on.
    code = """if True:
        import os, signal, threading, time
        from sv_jax.interrupts import deferred_interrupts
        kill = lambda: os.kill(os.getpid(), signal.SIGINT)
        with deferred_interrupts():
            threading.Timer(0.2, kill).start()
            threading.Timer(0.6, kill).start()
            time.sleep(60)
    """
    started = time.monotonic()
    done = python(code)
    assert done.returncode == 130 and time.monotonic() - started < 30
    assert done.stderr.count(b"once more ends at once") == 1
