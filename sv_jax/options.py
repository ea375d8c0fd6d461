"""The options of `python -m sv_jax.generate`: one table makes the command line and reads the TOML file."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from sv_jax.config import Range, UserError
from sv_jax.sampling_params import GREEDY, RANGES, SamplingParams
from sv_jax.text_output import MARKS

T = TypeVar("T")
Kind = Literal["text", "texts", "number", "real", "flag"]


@dataclasses.dataclass(frozen=True)
class Option:
    """What one field of GenerateOptions accepts, and how it is explained."""

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


def _option(default: T, kind: Kind, help: str, **limits: Any) -> T:
    return dataclasses.field(default=default, metadata={"option": Option(kind, help, **limits)})


def _sampling_option(name: str, metavar: str, help: str) -> Any:
    limits = RANGES[name]
    kind: Kind = "number" if limits.type is int else "real"
    return _option(getattr(GREEDY, name), kind, help, metavar=metavar, range=limits)


def _at_least(minimum: int) -> Range:
    return Range(int, lambda value: value >= minimum, f"a whole number of at least {minimum}")


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Everything that a run of the command line needs, with its defaults."""

    model: str = _option(
        "smollm2-135m",
        "text",
        "a registry name, a Hugging Face directory, a .gguf file, or a hub id org/name",
        metavar="M",
    )
    prompt: tuple[str, ...] = _option(
        (), "texts", "a prompt; repeat it for several (default: four built-in prompts)", metavar="P"
    )
    prompt_file: str | None = _option(
        None,
        "text",
        "prompts from a UTF-8 file, one a line, blank lines are skipped; - is standard input",
        metavar="F",
    )
    chat: bool | None = _option(
        None, "flag", "put prompts into the chat template (default: where the model has one)"
    )
    mesh: str = _option("1x1", "text", "devices as DATAxMODEL, such as 4x2; emulated on CPU", metavar="DxM")
    max_new_tokens: int = _option(
        128, "number", "tokens generated per prompt", metavar="N", range=_at_least(1)
    )
    min_new_tokens: int = _option(
        0, "number", "no end-of-sequence token before that many tokens", metavar="N", range=_at_least(0)
    )
    stop: tuple[str, ...] = _option(
        (), "texts", "a text that ends the output; repeat it for several", metavar="S", blank=True
    )
    include_stop: bool = _option(False, "flag", "leave the stop text in the output")
    temperature: float = _sampling_option(
        "temperature", "T", "0 takes the most likely token, above 0 samples"
    )
    top_k: int = _sampling_option("top_k", "N", "sample from the N most likely tokens; 0: from all")
    top_p: float = _sampling_option(
        "top_p", "P", "sample from the fewest most likely tokens that make up P; 1: from all"
    )
    min_p: float = _sampling_option(
        "min_p", "P", "sample from tokens at least P times as likely as the most likely; 0: from all"
    )
    seed: int = _sampling_option("seed", "N", "of sampling: the same seed, the same text")
    repetition_penalty: float = _sampling_option(
        "repetition_penalty", "X", "above 1 makes tokens of prompt and output less likely"
    )
    presence_penalty: float = _sampling_option(
        "presence_penalty", "X", "above 0 makes tokens of the output less likely, once"
    )
    frequency_penalty: float = _sampling_option(
        "frequency_penalty", "X", "above 0 makes tokens of the output less likely, each time"
    )
    num_speculative_tokens: int | str = _option(
        7,
        "number",
        "drafted tokens per step, a step verifies one more; auto: as many as pay",
        metavar="K",
        range=_at_least(0),
        choices=("auto",),
    )
    draft_method: str = _option(
        "prompt-lookup", "text", "where drafts come from", choices=("prompt-lookup", "none")
    )
    dtype: str | None = _option(
        None,
        "text",
        "of weights and cache (default: float32 on CPU, bfloat16 elsewhere)",
        choices=("float32", "bfloat16"),
    )
    max_model_len: int | None = _option(
        None,
        "number",
        "tokens of prompt and output together (default: the model's)",
        metavar="N",
        range=_at_least(2),
    )
    max_batch_size: int = _option(16, "number", "prompts decoded at a time", metavar="B", range=_at_least(1))
    ignore_eos: bool = _option(False, "flag", "go on after an end-of-sequence token")
    check_lossless: bool = _option(
        False, "flag", "also decode plainly and compare; a difference beyond near-ties exits with 1"
    )
    logprobs: int = _option(
        0,
        "number",
        "with --json: log-probabilities of each token and of the N most likely ones",
        metavar="N",
        range=Range(int, lambda value: 0 <= value <= 20, "a whole number from 0 to 20"),
    )
    json: bool = _option(
        False, "flag", "end standard output with one JSON object; all else goes to standard error"
    )
    stream: bool = _option(True, "flag", "print text while it is generated")
    cache_dir: str | None = _option(
        None, "text", "where fetched and converted weights go (default: the user's cache)", metavar="DIR"
    )

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**{name: getattr(self, name) for name in RANGES})


OPTIONS: dict[str, Option] = {
    field.name: field.metadata["option"] for field in dataclasses.fields(GenerateOptions)
}
DEFAULTS = GenerateOptions()
# Two ways to say the same thing: one of them per source, and the command line's one counts.
EXCLUSIVE = ("prompt", "prompt_file")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_value(option: Option, value: Any, label: str) -> Any:
    """`value` in the type of its field. Raises UserError, starting with `label`, for what is not allowed."""
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


def _is_unicode(text: str) -> bool:
    """Whether `text` has no surrogates: Python puts them where an argument's bytes are not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_exclusive(values: Mapping[str, Any], spell: str) -> None:
    if all(name in values for name in EXCLUSIVE):
        raise UserError(f"{spell} gives both prompt and prompt-file; allowed: one of the two")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage text: the caller prints it."""
        raise UserError(f"{message}; --help lists what is allowed")


def _help(name: str, option: Option) -> str:
    default = getattr(DEFAULTS, name)
    if default is None or default == ():  # the help says what happens then
        return option.help.replace("%", "%%")
    if option.kind == "flag":
        default = "yes" if default else "no"
    stated = f"{default:g}" if option.kind == "real" else default
    return f"{option.help} (default: {stated})".replace("%", "%%")


def build_parser() -> argparse.ArgumentParser:
    """The command line; options that are not given leave no trace, so that a TOML file can set them."""
    parser = _Parser(
        prog="python -m sv_jax.generate",
        description="Generates text with speculative decoding: what the model alone would write.",
        epilog=MARKS,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, option in OPTIONS.items():
        explanation = _help(name, option)
        if option.kind == "flag":
            parser.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=explanation)
            continue
        metavar = option.metavar or "{" + ",".join(option.choices) + "}"
        action = "append" if option.kind == "texts" else "store"
        parser.add_argument(flag(name), action=action, metavar=metavar, help=explanation)
    parser.add_argument(
        "--config", metavar="F.toml", help="a TOML file with any of these options; the command line wins"
    )
    return parser


def _from_command_line(name: str, value: Any) -> Any:
    option = OPTIONS[name]
    if option.range:
        with contextlib.suppress(ValueError):  # check_value names it
            value = option.range.type(value)
    return check_value(option, value, flag(name))


def read_toml(path: str) -> dict[str, Any]:
    """Options of a TOML file, by field name; keys may be written with dashes or underscores.

    Raises UserError for a file that cannot be read, an unknown key, or a value that is not allowed.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path!r}: {error.strerror}; allowed: a TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"--config {path!r} is not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise UserError(f"--config {path!r}: unknown key {key!r}; allowed: {', '.join(OPTIONS)}")
        if name in values:
            raise UserError(f"--config {path!r}: {key!r} is there twice, with dashes and with underscores")
        values[name] = check_value(OPTIONS[name], value, f"--config {path!r}: {key} =")
    check_exclusive(values, f"--config {path!r}")
    return values


def parse_options(arguments: Sequence[str] | None = None) -> GenerateOptions:
    """Defaults, then the TOML file's values, then the command line's. Raises UserError for bad input."""
    given = vars(build_parser().parse_args(arguments))
    config = given.pop("config", None)
    command = {name: _from_command_line(name, value) for name, value in given.items()}
    check_exclusive(command, "the command line")
    values = read_toml(config) if config is not None else {}
    if any(name in command for name in EXCLUSIVE):
        values = {name: value for name, value in values.items() if name not in EXCLUSIVE}
    options = GenerateOptions(**(values | command))
    if options.min_new_tokens > options.max_new_tokens:
        raise UserError(
            f"{flag('min_new_tokens')} {options.min_new_tokens} is not allowed; "
            f"allowed: at most {flag('max_new_tokens')}, {options.max_new_tokens}"
        )
    return options
