"""A limit to the tokens of an expert: an explicit option, never the default, whose losses are counted."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp

from sv_jax.model.experts import Routing, sort_pairs

SMALLEST_PART = 100  # capacity factors are taken to the nearest fraction with a denominator up to this one


def expert_capacity(capacity_factor: float, routing: Routing, num_experts: int) -> jax.Array:
    """The tokens that each expert may have: ceil(capacity_factor * live tokens * k / E), int32[].

    Live tokens are those that go to some expert: padding, empty slots and finished rows do not raise it.

    Args:
      routing: [.., k]; num_experts and more: nowhere.
    """
    factor = Fraction(capacity_factor).limit_denominator(SMALLEST_PART)  # in float32, 1.1 * 80 may be > 88
    live = jnp.sum(jnp.any(routing.experts < num_experts, axis=-1), dtype=jnp.int32)
    pairs = live * (routing.experts.shape[-1] * factor.numerator)
    return -(-pairs // (num_experts * factor.denominator))


def drop_beyond_capacity(
    routing: Routing, num_experts: int, capacity: jax.Array | int
) -> tuple[Routing, jax.Array]:
    """Sends nowhere what an expert has beyond its first `capacity` pairs, in the order of tokens.

    A token's k choices are in the order of their ranks. Weights stay as they are: what a dropped pair would
    have added is missing from the sum. Pairs that went nowhere before take no capacity.

    Args:
      routing: [.., k], tokens in row-major order; num_experts and more: nowhere.
      capacity: pairs of an expert, at least 0; may be traced.

    Returns:
      The routing, and how many pairs were dropped, int32[].
    """
    chosen = routing.experts.reshape(-1)
    pairs = sort_pairs(routing.experts.reshape(-1, routing.experts.shape[-1]), num_experts)
    expert = chosen[pairs.order]
    there = expert < num_experts
    before = jnp.arange(len(chosen), dtype=jnp.int32) - pairs.firsts[jnp.minimum(expert, num_experts - 1)]
    dropped = there & (before >= capacity)
    experts = chosen.at[pairs.order].set(jnp.where(dropped, num_experts, expert), unique_indices=True)
    return routing._replace(experts=experts.reshape(routing.experts.shape)), jnp.sum(dropped, dtype=jnp.int32)
