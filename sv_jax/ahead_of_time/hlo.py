"""Just enough of a reader of compiled HLO text to ask what runs inside of a loop, and what is copied."""

from __future__ import annotations

import dataclasses
import re

HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}|called_computations=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of the result, (dtype, dims) each
    line: str

    def has_shape(self, dims: tuple[int, ...]) -> bool:
        """Whether a result has these sizes, in any order and with ones anywhere."""
        wanted = sorted(d for d in dims if d != 1)
        return any(sorted(d for d in found if d != 1) == wanted for _, found in self.shapes)

    @property
    def called(self) -> list[str]:
        names = []
        for one, branches, several in CALLED.findall(self.line):
            names += [n.strip().lstrip("%") for n in (one or branches or several).split(",")]
        return names


def _instruction(name: str, text: str) -> Instruction:
    # The result type is one token, or a parenthesised tuple; the opcode follows it.
    if text.startswith("("):
        end, depth = 0, 1
        while depth:
            end += 1
            depth += (text[end] == "(") - (text[end] == ")")
        result, rest = text[: end + 1], text[end + 2 :]
    else:
        result, rest = text.split(" ", 1)
    shapes = tuple(
        (dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in SHAPE.findall(result)
    )
    return Instruction(name, rest.split("(", 1)[0], shapes, text)


def computations(text: str) -> dict[str, list[Instruction]]:
    """Computations of a compiled module by name, with their instructions."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if header := HEADER.match(line):
            current = found.setdefault(header[1], [])
        elif instruction := INSTRUCTION.match(line):
            current.append(_instruction(*instruction.groups()))
    return found


def loop_instructions(text: str) -> list[Instruction]:
    """Everything that runs in the outermost while loops: bodies, and what they call, branches included."""
    modules = computations(text)
    called_by_loops = {
        name
        for instructions in modules.values()
        for instruction in instructions
        if instruction.opcode == "while"
        for name in instruction.called
    }
    assert called_by_loops, "no while loop in this module"
    pending, seen = list(called_by_loops), set()
    while pending:
        if (name := pending.pop()) in seen:
            continue
        seen.add(name)
        for instruction in modules[name]:
            pending += instruction.called
    return [instruction for name in sorted(seen) for instruction in modules[name]]


def instructions(text: str) -> list[Instruction]:
    """Everything in a module."""
    return [instruction for module in computations(text).values() for instruction in module]


COPIES = ("copy", "copy-start", "transpose", "convert")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def copies(among: list[Instruction], dims: tuple[int, ...]) -> list[str]:
    """Lines that copy an array of these sizes, by any name."""
    return [i.line for i in among if i.opcode in COPIES and i.has_shape(dims)]


def collectives(among: list[Instruction]) -> list[str]:
    """The kind of each instruction that talks to other devices; what is awaited later counts once."""
    kinds = (i.opcode.removesuffix("-start") for i in among)
    return [kind for kind in kinds if kind in COLLECTIVES]


def has_kernel(text: str, name: str) -> bool:
    """Whether a Pallas kernel of this name is called."""
    calls = (i for i in instructions(text) if i.opcode == "custom-call")
    return any(i.name.split(".")[0] == name and "tpu_custom_call" in i.line for i in calls)


def materialised_copies(text: str, dims: tuple[int, ...]) -> list[str]:
    """Lines that write a copy of an array of these sizes to memory, relayouts among them.

    Instructions within a fusion write nothing, but for its root. A copy to fast memory, S(1), is a read that
    is early, not a copy.
    """
    modules = computations(text)
    fused = {name for module in modules.values() for i in module if i.opcode == "fusion" for name in i.called}
    roots = {name: module[-1].opcode for name, module in modules.items() if module}

    def writes_copy(i: Instruction) -> bool:
        copying = i.opcode in COPIES or (i.opcode == "fusion" and any(roots[c] in COPIES for c in i.called))
        return copying and i.has_shape(dims) and "S(1)" not in i.line.split(i.opcode + "(", 1)[0]

    return [i.line for name, module in modules.items() if name not in fused for i in module if writes_copy(i)]
