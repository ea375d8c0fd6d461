"""Texts of the user's own: a file with one JSON object a line. No JAX: mistakes are told at once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from sv_jax.config import UserError

KINDS = ("ordinary", "copy", "needle")  # of the built-in texts; the user's have others
FIELDS = ("text", "kind", "name")


@dataclasses.dataclass(frozen=True)
class UserText:
    """One line of the file. name: the bootstrap's unit; kind: what is judged together."""

    name: str
    kind: str
    text: str
    line: int


def read_texts(path: str | Path) -> tuple[UserText, ...]:
    """The texts of a file, one JSON object a line: {"text": ..., "kind"?: .., "name"?: ..}.

    Raises:
      UserError: the file cannot be read, has no texts, or a line (its number is said) is not such an object.
    """
    label = f"--texts {str(path)!r}"
    try:
        content = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{label}: {error.strerror}; allowed: a file with one JSON object a line") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{label} is not UTF-8 text (byte {error.start})") from error
    texts: list[UserText] = []
    names: dict[str, int] = {}
    # Only newlines separate: splitlines() would also cut at U+2028 inside of a text.
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            text = _read_line(line, number, f"{label}, line {number}")
            if text.name in names:
                raise UserError(
                    f"{label}, line {number}: name {text.name!r} is line {names[text.name]}'s, too; "
                    "allowed: names that differ"
                )
            names[text.name] = number
            texts.append(text)
    if not texts:
        raise UserError(f'{label} has no texts; allowed: one JSON object {{"text": ...}} a line')
    return tuple(texts)


def _read_line(line: str, number: int, label: str) -> UserText:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{label} is not JSON: {error.msg} at character {error.pos + 1}") from error
    if not isinstance(entry, dict):
        raise UserError(f'{label} is not a JSON object; allowed: {{"text": ..., "kind"?: .., "name"?: ..}}')
    if unknown := [key for key in entry if key not in FIELDS]:
        raise UserError(f"{label}: unknown key {unknown[0]!r}; allowed: {', '.join(FIELDS)}")
    for key in FIELDS:
        if key in entry and not (isinstance(entry[key], str) and entry[key].strip()):
            raise UserError(f"{label}: {key} is {entry[key]!r:.40}; allowed: text that is not blank")
    if "text" not in entry:
        raise UserError(f"{label} has no text; allowed: an object with a key 'text'")
    if entry.get("kind") in KINDS:
        raise UserError(f"{label}: kind {entry['kind']!r} is a built-in kind; allowed: any other name")
    return UserText(entry.get("name", f"line-{number}"), entry.get("kind", "own"), entry["text"], number)
