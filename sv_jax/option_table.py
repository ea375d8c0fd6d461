"""What an option of the command line accepts: the table's entries, and how a value is checked against one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from sv_jax.config import Range, UserError, check_layers

T = TypeVar("T")
Kind = Literal["text", "texts", "number", "real", "flag", "layers"]


@dataclasses.dataclass(frozen=True)
class Option:
    """What one field of the options accepts, and how it is explained."""

    kind: Kind
    help: str
    metavar: str | None = None
    range: Range | None = None  # of numbers and reals, always there
    choices: tuple[str, ...] = ()  # texts that are names, () allows any; words that stand for a number
    blank: bool = False  # texts: may be white space

    @property
    def allowed(self) -> str:
        if self.range:
            return ", or ".join([self.range.allowed, *self.choices])
        if self.choices:
            return ", ".join(self.choices)
        unwanted = "empty" if self.blank else "blank"
        return {
            "text": "text that is not empty",
            "texts": f"Unicode text that is not {unwanted}, or a list of such texts",
            "flag": "true or false",
        }[self.kind]


def declare(default: T, kind: Kind, help: str, **limits: Any) -> T:
    """A dataclass field that is an option."""
    return dataclasses.field(default=default, metadata={"option": Option(kind, help, **limits)})


def at_least(minimum: int) -> Range:
    return Range(int, lambda value: value >= minimum, f"a whole number of at least {minimum}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# Two ways to say the same thing: one of them per source.
EXCLUSIVE = (("prompt", "prompt_file"), ("keep", "rho"))
# What an option takes away from the sources that it wins over, beside its own value there.
REPLACES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt_file",),
    "prompt_file": ("prompt",),
    "keep": ("rho", "l0"),
    "rho": ("keep",),
    "experts_per_token": ("max_skipped",),
    "max_skipped": ("experts_per_token",),
}


def check_exclusive(values: Mapping[str, Any], spell: str) -> None:
    """Raises UserError where one source says the same thing in two ways."""
    for names in EXCLUSIVE:
        if all(name in values for name in names):
            both = " and ".join(name.replace("_", "-") for name in names)
            raise UserError(f"{spell} gives both {both}; allowed: one of the two")


def override(values: Mapping[str, Any], winning: Mapping[str, Any]) -> dict[str, Any]:
    """The options of two sources together."""
    replaced = {other for name in winning for other in REPLACES.get(name, ())}
    return {name: value for name, value in values.items() if name not in replaced} | dict(winning)


def check_value(option: Option, value: Any, label: str) -> Any:
    """`value` in the type of its field. Raises UserError, starting with `label`, for what is not allowed."""
    if option.kind == "layers":
        return check_layers(label.removesuffix(" ="), value)
    refusal = UserError(f"{label} {value!r} is not allowed; allowed: {option.allowed}")
    if option.kind == "texts":
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise refusal
        if bad := [
            text for text in texts if not (text if option.blank else text.strip()) or not _is_unicode(text)
        ]:
            raise UserError(f"{label} {bad[0]!r} is not allowed; allowed: {option.allowed}")
        return tuple(texts)
    if option.range:
        with contextlib.suppress(UserError):
            return value if value in option.choices else option.range.check(label, value)
        raise refusal
    if type(value) is not {"text": str, "flag": bool}[option.kind]:
        raise refusal
    if option.kind == "text" and (not value or (option.choices and value not in option.choices)):
        raise refusal
    return value


def from_command_line(option: Option, value: Any, label: str) -> Any:
    """The value of an argument, which is text unless the option is a flag or a list of texts."""
    if option.range:
        with contextlib.suppress(ValueError):  # check_value names it
            value = option.range.type(value)
    if option.kind == "layers":
        parts = [part.strip() for part in value.split(",")]
        # Numbers of any length are not for int().
        value = [int(part) if part.isdecimal() and len(part) < 10 else part for part in parts]
    return check_value(option, value, label)


def _is_unicode(text: str) -> bool:
    """Whether `text` has no surrogates: Python puts them where an argument's bytes are not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
