"""Prompts for a run without any: four kinds of work, so that a data axis of four has a row each."""

from __future__ import annotations

CODE = """Add a docstring to each function, change nothing else, and give the complete code:

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

def variance(values):
    center = mean(values)
    total = 0.0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)
"""

QUOTE = """Repeat the following passage word for word: "Four score and seven years ago our fathers brought \
forth on this continent, a new nation, conceived in Liberty, and dedicated to the proposition that all men \
are created equal. Now we are engaged in a great civil war, testing whether that nation, or any nation so \
conceived and so dedicated, can long endure.\""""

SUMMARY = """Summarize this report in two sentences, using its own words where you can.

The lighthouse on the northern cape was built in 1871 after two ships were lost on the reef in one winter. \
Its lamp first burned whale oil, and since 1934 it has been electric. The last keeper left in 1988. Today \
the lighthouse is open on summer weekends."""

CHAT = "Why does the sky turn red at sunset, but look blue at noon?"

BUILTIN_PROMPTS: tuple[str, ...] = (CODE, QUOTE, SUMMARY, CHAT)
