"""Text <-> token ids and chat templates, from tokenizer.json and its neighbours."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken

from sv_jax.checkpoints.hf_config import read_json
from sv_jax.config import UserError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one checkpoint.

    vocab_size: one more than the largest id that has a text; the model's embedding may be larger.
    eos_token_ids: ids that end a generation, () if there are none.
    has_chat_template: whether `apply_chat_template` can be called.
    """

    def __init__(self, directory: Path, *, eos_token_ids: Sequence[int] = ()):
        self._config = _optional_json(directory / "tokenizer_config.json")
        self._tokenizer = _read_tokenizer(directory)
        _add_declared_tokens(self._tokenizer, self._config)
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self._template = chat_template(directory, self._config)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; add_special_tokens adds BOS or EOS where tokenizer.json says so.

        (tokenizer_config.json's add_bos_token is not asked: transformers ignores it beside a tokenizer.json.)

        Raises UserError for text that is not valid Unicode (lone surrogates).
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise UserError(f"text {text[:20]!r}... cannot be encoded: it is not valid Unicode") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Ids beyond the vocabulary (embeddings are padded) give no text."""
        known = [int(token) for token in token_ids if 0 <= token < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: list[dict], *, add_generation_prompt: bool = True) -> str:
        """`messages` ({"role", "content"} each) as the prompt text that the model was trained on.

        The text names its special tokens itself: encode it with add_special_tokens=False.
        Raises UserError if the checkpoint has no template, or if the template refuses the messages.
        """
        if self._template is None:
            raise UserError("the checkpoint has no chat template; give plain text prompts")
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **special_tokens(self._config),
            )
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template refuses these messages: {error}") from error


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token... of a tokenizer_config.json, where they may be strings or objects."""
    values = {name: config.get(name) for name in SPECIAL_NAMES}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def token_id(directory: Path, token: str) -> int | None:
    """The id of one token text, None if the vocabulary has no such token."""
    return _read_tokenizer(directory).token_to_id(token)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise UserError(
            f"{directory} lacks tokenizer.json; allowed: a fast tokenizer (transformers writes one with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the bindings raise plain Exception
        raise UserError(
            f"{path} is not a tokenizer that this version of tokenizers reads: {error}"
        ) from error


def _add_declared_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json declares, in the order of their ids."""
    declared = config.get("added_tokens_decoder") or {}
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if isinstance(token, dict) and tokenizer.token_to_id(token["content"]) is None:
            keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
            options = {key: bool(token[key]) for key in keys if key in token}
            added = [AddedToken(token["content"], **options)]
            (tokenizer.add_special_tokens if token.get("special") else tokenizer.add_tokens)(added)


def chat_template(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    """The compiled chat template of a directory: chat_template.jinja, else tokenizer_config.json's."""
    path, source = directory / "chat_template.jinja", config.get("chat_template")
    if path.exists():
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):  # several named templates
        source = next((item["template"] for item in source if item.get("name") == "default"), None)
    if not source:
        return None
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template of {directory} is not valid Jinja: {error}") from error


def _environment() -> jinja2.Environment:
    """Templates come from strangers: sandboxed, and unable to change what is passed in.

    Whitespace, filters and helpers are those of transformers, which templates are written against.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    return environment


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a model is trained on; for prompts it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own convention)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes HTML, which models never saw.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
