"""Log-probabilities of emitted tokens under the model's own law."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from sv_jax.sharding import MODEL, Sharding
from sv_jax.speculation.types import Logprobs


def top_logits(logits: jax.Array, count: int, sharding: Sharding) -> tuple[jax.Array, jax.Array]:
    """The `count` largest logits [B, T, count] and their ids, descending.

    Each device looks through its own rows and its own part of the vocabulary, and only the winners travel: a
    bare top_k would gather all logits on every device, those of other rows too.
    """
    if sharding.mesh.size == 1:
        return jax.lax.top_k(logits, count)
    whole, spec = sharding.spec("batch", None, None), sharding.spec("batch", None, "vocab")
    shard_size = logits.shape[-1] // (sharding.model_size if spec[2] == MODEL else 1)
    local = min(count, shard_size)

    @partial(jax.shard_map, mesh=sharding.mesh, in_specs=spec, out_specs=(spec, spec))
    def winners(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(part, local)
        return values, ids + (shard_size * jax.lax.axis_index(MODEL) if spec[2] == MODEL else 0)

    values, ids = (sharding.constrain(x, "batch", None, None) for x in winners(logits))
    if spec == whole:
        return values, ids

    @partial(jax.shard_map, mesh=sharding.mesh, in_specs=(whole, whole), out_specs=(whole, whole))
    def best(values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, order = jax.lax.top_k(values, count)
        return values, jnp.take_along_axis(ids, order, axis=-1)

    return best(values, ids)


def emitted_logprobs(
    logits: jax.Array, tokens: jax.Array, path: jax.Array, count: int, sharding: Sharding
) -> Logprobs:
    """log_softmax of the model's logits at the emitted tokens, and at the `count` most likely ones.

    Args:
      logits: float32[B, T, V] as `verify` returns them, nothing applied.
      tokens: int32[B, T], emitted; tokens[b, i] follows node path[b, i].

    Returns:
      Logprobs with leaves [B, T] and [B, T, count].
    """
    with jax.named_scope("logprobs"):
        totals = jax.nn.logsumexp(logits, axis=-1)
        values, ids = top_logits(logits, count, sharding)
        by_path = path[:, :, None]
        values, ids = (jnp.take_along_axis(x, by_path, axis=1) for x in (values, ids))
        totals = jnp.take_along_axis(totals, path, axis=1)

        def row(logits: jax.Array, nodes: jax.Array, tokens: jax.Array) -> jax.Array:
            return logits[nodes, tokens]

        emitted = jax.vmap(row)(logits, path, tokens)
        return Logprobs(emitted - totals, values - totals[..., None], ids)
