"""What a compiled program's temporaries are: XLA's buffer assignment, read from its dump."""

from __future__ import annotations

import re

ALLOCATION = re.compile(r"allocation \d+: size \d+,(?: color (\d+),)? preallocated-temp")
VALUE = re.compile(r"\s+value: <\d+ .+? @\d+> \(size=(\d+),offset=(\d+)\): (\S)")
DUMP = {"xla_dump_hlo_as_text": True}  # compiler options that write it, beside "xla_dump_to"
DUMPED = "*after_optimizations-buffer-assignment.txt"


def array_bytes(assignment: str) -> int:
    """Bytes of temporaries in main memory that some array takes at some time.

    The rest are tables of pointers, one for each tuple: on TPU 512 bytes, on 16 KiB of its own, for each
    asynchronous copy and each loop. They grow with the number of instructions, not with any size.

    Raises:
      ValueError: no temporaries are assigned in this text.
    """
    spans, inside, found = [], False, False
    for line in assignment.splitlines():
        if line.startswith("allocation"):
            allocation = ALLOCATION.match(line)
            inside = allocation is not None and allocation[1] in (None, "0")
            found = found or inside
        elif inside and (value := VALUE.match(line)) and value[3] != "(":
            size, offset = int(value[1]), int(value[2])
            spans.append((offset, offset + size))
    if not found:
        raise ValueError("no preallocated temporaries in this buffer assignment")
    total, end = 0, 0
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0)
        end = max(end, last)
    return total
