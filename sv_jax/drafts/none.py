"""No drafts: plain autoregressive decoding through the same loop."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from sv_jax.speculation.types import Draft, SpeculationState


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Every draft is the root alone."""

    @property
    def num_speculative_tokens(self) -> int:
        return 0

    def propose(self, state: SpeculationState) -> Draft:
        root = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)
        return Draft(tokens=root, parents=jnp.full_like(root, -1))
