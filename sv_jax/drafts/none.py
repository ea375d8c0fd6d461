"""No drafts: plain autoregressive decoding through the same loop."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from sv_jax.speculation.types import Draft, SpeculationState


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Every draft is the root, and empty slots up to T = num_slots where the platform wants padding."""

    num_slots: int = 1

    @property
    def num_speculative_tokens(self) -> int:
        return self.num_slots - 1

    def propose(self, state: SpeculationState) -> Draft:
        root = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)
        tokens = jnp.pad(root, [(0, 0), (0, self.num_slots - 1)])
        return Draft(tokens=tokens, parents=jnp.full_like(tokens, -1))
