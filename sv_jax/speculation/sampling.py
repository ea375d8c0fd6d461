"""From logits to tokens: filters, laws, and draws whose randomness belongs to a row and a position."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from sv_jax.speculation.types import Sampling

NEVER = -jnp.inf  # the logit of a token that a filter has removed


class Purpose(enum.IntEnum):
    """What a random number decides. Draws of one position with different purposes are independent."""

    TOKEN = 0  # the emitted token: plain, bonus or recovered
    ACCEPT = 1  # whether the sibling number `index` is accepted
    DRAFT = 2  # a drafter's own draws; `index` tells siblings apart


@jax.jit
def row_keys(seeds: jax.Array, occurrences: jax.Array) -> jax.Array:
    """Key data uint32[B, 2] of rows, from each prompt's seed and its number among identical prompts.

    Neither the row's place in the batch nor the step enters: what stands beside a prompt does not change
    its text.
    """

    def row(seed: jax.Array, occurrence: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), occurrence)
        return jax.random.key_data(key)

    return jax.vmap(row)(seeds.astype(jnp.uint32), occurrences.astype(jnp.uint32))


def position_keys(
    sampling: Sampling, positions: jax.Array, purpose: Purpose, index: int | jax.Array = 0
) -> jax.Array:
    """Typed keys [B, T] for absolute positions int32[B, T] of the tokens that they decide."""

    def one(data: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        for number in (position, int(purpose), index):
            key = jax.random.fold_in(key, number)
        return key

    return jax.vmap(lambda data, row: jax.vmap(lambda p: one(data, p))(row))(sampling.keys, positions)


def _as_float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _cut(values: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """bool like `values`: entries v for which the weights of all larger entries sum to less than `limit`.

    values: float32[..., V], not negative. limit: float32[..., 1]. Equal values stay or go together.

    Bisection over the bit patterns of the values, which are ordered as the values are: at most 31 sums, each
    of which is local to the shards of a vocabulary but for one number. A sort would move the vocabulary.
    """

    def above(bits: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(values > _as_float(bits), weights, 0.0), axis=-1, keepdims=True)

    # Invariant: above(low) >= limit > above(high), as far as low is not the start.
    def proceed(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        low, high = bounds
        return jnp.any(high - low > 1)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = above(middle) < limit
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    peak = jnp.max(values, axis=-1, keepdims=True)
    high = jax.lax.bitcast_convert_type(peak, jnp.int32)
    _, high = jax.lax.while_loop(proceed, halve, (jnp.full_like(high, -1), high))
    return values >= _as_float(high)


def warp(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Temperature, top-k, top-p, min-p, in this order (transformers'), for draft and target laws alike.

    Args:
      logits: float32[B, T, V]. Rows with temperature 0 are filtered as if it were 1; who draws picks the
        argmax for them, which no filter removes.

    Returns:
      float32[B, T, V], -inf where a filter removed the token; softmax of it is the law. Ties at the edge of
      top-k and top-p are kept together.
    """
    temperature = sampling.temperature[:, None, None]
    # The best token's logit becomes 0 first: a quotient by a tiny temperature would overflow.
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = scaled / jnp.where(temperature > 0, temperature, 1.0)

    def filtered(keep: jax.Array, active: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.where(keep | ~active, logits, NEVER)

    def top_k(scaled: jax.Array) -> jax.Array:
        limit = sampling.top_k.astype(jnp.float32)[:, None, None]
        values = jnp.exp(scaled)
        return filtered(_cut(values, jnp.ones_like(values), limit), limit > 0, scaled)

    def top_p(scaled: jax.Array) -> jax.Array:
        limit = sampling.top_p[:, None, None]
        probs = jax.nn.softmax(scaled, axis=-1)
        return filtered(_cut(probs, probs, limit), limit < 1, scaled)

    scaled = jax.lax.cond(jnp.any(sampling.top_k > 0), top_k, lambda x: x, scaled)
    scaled = jax.lax.cond(jnp.any(sampling.top_p < 1), top_p, lambda x: x, scaled)
    min_p = sampling.min_p[:, None, None]
    return filtered(scaled >= jnp.log(min_p), min_p > 0, scaled)


def likeliest(scores: jax.Array) -> jax.Array:
    """int32[..]: the first index of the largest of scores [.., V]; `argmax` as two plain reductions.

    XLA for TPU compiles them in a quarter of the time of its reduction of pairs, and over a vocabulary that
    is cut, shards exchange a maximum and an index in place of all pairs.
    """
    ids = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    is_less = scores < jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_less, scores.shape[-1], ids), axis=-1)


def target_law(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Probabilities float32[B, T, V] of the next token; a greedy row's are 1 on its argmax."""
    greedy = jax.nn.one_hot(likeliest(logits), logits.shape[-1], dtype=jnp.float32)
    sampled = jax.nn.softmax(warp(logits, sampling), axis=-1)
    return jnp.where(sampling.temperature[:, None, None] > 0, sampled, greedy)


def gumbel_noise(sampling: Sampling, positions: jax.Array, vocab_size: int, purpose: Purpose) -> jax.Array:
    """float32[B, T, V]: argmax(log p + noise) is a draw from p for the token at each position."""
    keys = position_keys(sampling, positions, purpose)
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32)))(keys)


def draw_tokens(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """The token that plain decoding emits at `positions`: argmax, or a draw from the warped law.

    The noise depends on the row's seed and the position alone. So a row draws the same token whether the
    position was reached by plain steps or by accepted drafts (up to near-ties of logits plus noise).

    Args:
      logits: float32[B, T, V], after `process_logits`.
      positions: int32[B, T], where the drawn tokens will stand.

    Returns:
      int32[B, T].
    """
    greedy = likeliest(logits)

    def sampled() -> jax.Array:
        noise = gumbel_noise(sampling, positions, logits.shape[-1], Purpose.TOKEN)
        drawn = likeliest(warp(logits, sampling) + noise)
        return jnp.where(sampling.temperature[:, None] > 0, drawn, greedy)

    return jax.lax.cond(jnp.any(sampling.temperature > 0), sampled, lambda: greedy)
