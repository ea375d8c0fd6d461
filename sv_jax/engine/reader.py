"""What the host knows of a batch's rows: it reads states between slices, finds stop strings, streams text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from sv_jax.engine.results import FinishReason, TokenLogprob
from sv_jax.engine.row_text import RowText
from sv_jax.engine.trace import RowTrace
from sv_jax.model.transformer import Transformer
from sv_jax.speculation.types import Logprobs, SpeculationState, Trace

OnText = Callable[[int, str, FinishReason | None], None]
"""(row, new text, finish reason in the row's last call)."""


class Row:
    """One prompt's output so far: ids, text and how it ended."""

    def __init__(self, prompt_tokens: int, *, eos_ids: Sequence[int], text: RowText) -> None:
        self.prompt_tokens = prompt_tokens
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.seconds = 0.0  # when its last token was seen
        self._eos_ids = eos_ids
        self._row_text = text

    def push(self, token_ids: list[int], ended: bool) -> str:
        """Takes new tokens, and whether the row has ended with them; returns the text to show."""
        eos = ended and bool(token_ids) and token_ids[-1] in self._eos_ids
        pushed = self._row_text.push(token_ids[:-1] if eos else token_ids)
        shown = pushed.text
        if pushed.stopped:
            self.token_ids += token_ids[: pushed.kept]
            self.finish_reason = "stop"
        else:
            self.token_ids += token_ids
            if ended:
                shown += self._row_text.finish()
                self.finish_reason = "stop" if eos else "length"
        self.text += shown
        return shown

    def interrupt(self) -> None:
        """Ends the row as it is: what was held back comes out."""
        if self.finish_reason is None:
            self.text += self._row_text.finish()
            self.finish_reason = "interrupted"


class Reader:
    """Reads what slices emitted; each token once."""

    def __init__(self, rows: Sequence[Row], first_row: int, on_text: OnText | None) -> None:
        self.rows = rows
        self.longest = 0  # committed tokens of the longest row
        self.done = False
        self._first_row = first_row
        self._on_text = on_text

    def read(self, target: Transformer, state: SpeculationState, seconds: float) -> SpeculationState:
        """Takes over what is new; rows whose stop string was found are finished in the state returned."""
        tokens, lengths, device_finished = jax.device_get((state.tokens, state.lengths, state.finished))
        finished = device_finished.copy()
        for index, row in enumerate(self.rows):
            if row.finish_reason is not None:
                continue
            known = row.prompt_tokens + len(row.token_ids)
            new = tokens[index, known : lengths[index] + 1].tolist()
            if not new:
                continue
            shown = row.push(new, bool(finished[index]))
            row.seconds = seconds
            finished[index] |= row.finish_reason is not None
            if self._on_text is not None and (shown or row.finish_reason is not None):
                self._on_text(self._first_row + index, shown, row.finish_reason)
        self.longest, self.done = int(lengths.max()), bool(finished.all())
        if not self.done and (finished != device_finished).any():
            placed = jax.device_put(finished, target.sharding.named("batch"))
            state = dataclasses.replace(state, finished=placed)
        return state


def row_traces(trace: Trace, rows: Sequence[Row]) -> list[RowTrace]:
    """Host copies of the rows' traces, as long as what was kept of their tokens."""
    whole = RowTrace.read(trace)
    return [
        whole[i, row.prompt_tokens : row.prompt_tokens + len(row.token_ids)] for i, row in enumerate(rows)
    ]


def row_logprobs(logprobs: Logprobs, rows: Sequence[Row], count: int) -> list[list[TokenLogprob]]:
    """Host copies of log-probabilities, with the `count` most likely alternatives."""
    emitted, top, top_ids = jax.device_get((logprobs.emitted, logprobs.top, logprobs.top_ids))

    def entry(row: int, position: int, token: int) -> TokenLogprob:
        ids, values = (np.asarray(x[row, position, :count]).tolist() for x in (top_ids, top))
        return TokenLogprob(token, float(emitted[row, position]), list(zip(ids, values)))

    return [
        [entry(i, row.prompt_tokens + j, token) for j, token in enumerate(row.token_ids)]
        for i, row in enumerate(rows)
    ]
