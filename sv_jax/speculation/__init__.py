"""One step is propose, verify, accept, commit; a slice of steps is one jitted while_loop.

`start_state`, `prefill_chunk`, `decode_slice` and `grow_state` are jitted; `step`, `verify`,
`accept_greedy` and `commit` are the pure functions that they are made of.
"""

from sv_jax.speculation.accept import accept_greedy
from sv_jax.speculation.commit import commit
from sv_jax.speculation.loop import decode_slice, step
from sv_jax.speculation.prefill import prefill_chunk
from sv_jax.speculation.state import grow_state, start_state
from sv_jax.speculation.types import (
    Acceptance,
    Draft,
    Drafter,
    SpeculationState,
    Statistics,
    Verification,
)
from sv_jax.speculation.verify import verify

__all__ = [
    "Acceptance",
    "Draft",
    "Drafter",
    "SpeculationState",
    "Statistics",
    "Verification",
    "accept_greedy",
    "commit",
    "decode_slice",
    "grow_state",
    "prefill_chunk",
    "start_state",
    "step",
    "verify",
]
