"""A command line made of a dataclass whose fields are options (`option_table.declare`)."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from sv_jax.config import UserError
from sv_jax.option_table import Option, flag, from_command_line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage text: the caller prints it."""
        raise UserError(f"{message}; --help lists what is allowed")


def options_of(table: type) -> dict[str, Option]:
    """The options of a dataclass, by field name."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(table)}


def _help(option: Option, default: Any) -> str:
    if default is None or default == ():  # the help says what happens then
        return option.help.replace("%", "%%")
    if option.kind == "flag":
        default = "yes" if default else "no"
    stated = f"{default:g}" if option.kind == "real" else default
    return f"{option.help} (default: {stated})".replace("%", "%%")


def build_parser(table: type, *, prog: str, description: str, epilog: str | None = None) -> _Parser:
    """Options that are not given leave no trace. Those of fields without a default must be given."""
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(table):
        option: Option = field.metadata["option"]
        required = field.default is dataclasses.MISSING
        explanation = _help(option, None if required else field.default)
        if option.kind == "flag":
            action: Any = argparse.BooleanOptionalAction
            parser.add_argument(flag(field.name), action=action, help=explanation)
            continue
        metavar = option.metavar or "{" + ",".join(option.choices) + "}"
        parser.add_argument(
            flag(field.name),
            action="append" if option.kind == "texts" else "store",
            metavar=metavar,
            required=required,
            help=explanation,
        )
    return parser


def parse_given(
    parser: argparse.ArgumentParser, table: type, arguments: Sequence[str] | None
) -> dict[str, Any]:
    """The options that a command line gives, checked, by name; what else the parser has, as it is.

    Raises UserError for what is not allowed.
    """
    options = options_of(table)
    given = vars(parser.parse_args(arguments))
    return {
        name: from_command_line(options[name], value, flag(name)) if name in options else value
        for name, value in given.items()
    }
