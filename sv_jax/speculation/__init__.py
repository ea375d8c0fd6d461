"""One step is propose, verify, accept, commit; a slice of steps is one jitted while_loop.

`start_state`, `prefill_chunk`, `decode_slice` and `grow_state` are jitted; `step`, `verify`, `accept` and
`commit` are the pure functions that they are made of.
"""

from sv_jax.speculation.accept import accept
from sv_jax.speculation.commit import commit
from sv_jax.speculation.loop import decode_slice, step
from sv_jax.speculation.prefill import prefill_chunk
from sv_jax.speculation.request import Request, make_request
from sv_jax.speculation.sampling import draw_tokens, row_keys, target_law, warp
from sv_jax.speculation.state import grow_state, start_state
from sv_jax.speculation.types import (
    Acceptance,
    Draft,
    Drafter,
    Logprobs,
    Sampling,
    SpeculationState,
    Trace,
    Verification,
)
from sv_jax.speculation.verify import verify

__all__ = [
    "Acceptance",
    "Draft",
    "Drafter",
    "Logprobs",
    "Request",
    "Sampling",
    "SpeculationState",
    "Trace",
    "Verification",
    "accept",
    "commit",
    "decode_slice",
    "draw_tokens",
    "grow_state",
    "make_request",
    "prefill_chunk",
    "row_keys",
    "start_state",
    "step",
    "target_law",
    "verify",
    "warp",
]
