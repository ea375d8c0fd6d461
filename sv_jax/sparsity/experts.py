"""Sparse experts: tokens skip experts of little weight (SMoE), or share a list of them.

A token's experts stand in order of their weights, the largest first, as the router gives them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sv_jax.config import ModelConfig, UserError
from sv_jax.model.capacity import drop_beyond_capacity, expert_capacity
from sv_jax.model.choices import ExpertChooser
from sv_jax.model.experts import Routing
from sv_jax.sparsity.ffn_config import ExpertSparsity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertPlan:
    """For one model. Numbers and betas are arrays: other ones run in the same program."""

    experts_per_token: jax.Array  # int32[]: k', at most k
    max_skipped: jax.Array | None  # int32[]; None: none are skipped
    betas: jax.Array | None  # float32[L, k - 1]; layers without experts have zeros
    shortlist: jax.Array | None  # int32[]; None: there is none
    reading: str = dataclasses.field(metadata={"static": True})
    outside: str = dataclasses.field(metadata={"static": True})
    capacity_factor: float | None = dataclasses.field(metadata={"static": True})
    renormalise: bool = dataclasses.field(metadata={"static": True})
    num_experts: int = dataclasses.field(metadata={"static": True})


def plan_experts(sparsity: ExpertSparsity, model: ModelConfig) -> ExpertPlan:
    """Raises UserError for numbers that do not fit the model, or a model without experts."""
    moe = model.moe
    if moe is None:
        raise UserError(f"experts are to be left out; this {model.family} model has none")
    k = moe.num_experts_per_tok
    limits = {"experts_per_token": k, "max_skipped": k - 1, "shortlist": moe.num_experts}
    for name, most in limits.items():
        if (value := getattr(sparsity, name)) is not None and value > most:
            label = name.replace("_", "-")
            raise UserError(f"experts {label} {value}; allowed for this model: up to {most}")
    betas = None
    if sparsity.betas is not None and sparsity.max_skipped is not None:
        layers = [layer for layer in range(model.num_layers) if model.has_experts(layer)]
        sizes = {len(row) for row in sparsity.betas}
        if len(sparsity.betas) != len(layers) or sizes != {k - 1}:
            raise UserError(
                f"experts betas has {len(sparsity.betas)} lists of {sorted(sizes)} numbers; allowed for this "
                f"model: {len(layers)} lists of {k - 1}"
            )
        betas = jnp.zeros((model.num_layers, k - 1)).at[jnp.array(layers)].set(jnp.array(sparsity.betas))

    def number(value: int | None) -> jax.Array | None:
        return None if value is None else jnp.int32(value)

    return ExpertPlan(
        experts_per_token=jnp.int32(sparsity.experts_per_token or k),
        max_skipped=number(sparsity.max_skipped),
        betas=betas,
        shortlist=number(sparsity.shortlist),
        reading=sparsity.reading,
        outside=sparsity.outside,
        capacity_factor=sparsity.capacity_factor,
        renormalise=moe.norm_topk_prob if sparsity.renormalise is None else sparsity.renormalise,
        num_experts=moe.num_experts,
    )


def low_shares(weights: jax.Array) -> jax.Array:
    """float32[.., k - 1]: what share of a token's weights its i least ones have, i = 1 .. k - 1.

    weights: float32[.., k], descending.
    """
    ascending = jnp.cumsum(weights[..., ::-1], axis=-1)
    return ascending[..., :-1] / ascending[..., -1:]


def count_skipped(weights: jax.Array, betas: jax.Array, max_skipped: jax.Array, reading: str) -> jax.Array:
    """int32[..]: experts that each token leaves out, those of least weight (SMoE of arXiv 2512.21911).

    Args:
      weights: float32[.., k], descending. betas: float32[k - 1].
      reading: of the rule "i experts are skipped if the share of the i least weights is below betas[i - 1]".
        "first" tests i = 1, 2, .. and stops at the first that fails, "largest" takes the largest i that
        passes.
    """
    number = jnp.arange(1, weights.shape[-1], dtype=jnp.int32)
    passes = (low_shares(weights) < betas) & (number <= max_skipped)
    if reading == "first":
        return jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=-1), axis=-1)
    return jnp.max(jnp.where(passes, number, 0), axis=-1, initial=0)


def keep_experts(routing: Routing, kept: jax.Array, num_experts: int, *, renormalise: bool) -> Routing:
    """The routing without the experts that `kept` bool[B, T, k] does not keep.

    renormalise: a token's weights have the same sum as before; where none is left they are 0.
    """
    weights = jnp.where(kept, routing.weights, 0.0)
    if renormalise:
        weights = _scaled_to(weights, routing.weights)
    return Routing(_without(routing, kept, num_experts), weights)


def _without(routing: Routing, kept: jax.Array, num_experts: int) -> jax.Array:
    return jnp.where(kept, routing.experts, num_experts)


def _scaled_to(weights: jax.Array, before: jax.Array) -> jax.Array:
    """`weights` [.., k] with the sum of `before`; where all are 0 they stay so."""
    wanted, total = (jnp.sum(w, axis=-1, keepdims=True) for w in (before, weights))
    return weights * jnp.where(total > 0, wanted / jnp.where(total > 0, total, 1.0), 0.0)


def count_votes(routing: Routing, num_experts: int) -> jax.Array:
    """float32[E]: the weights that a step's tokens give to each expert, over rows and tokens."""
    goes = routing.experts[..., None] == jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.sum(jnp.where(goes, routing.weights[..., None], 0.0), axis=(0, 1, 2))


def shortlist_experts(votes: jax.Array, size: jax.Array) -> jax.Array:
    """bool[E]: the `size` experts with most votes, those of lower number first where votes are equal."""
    order = jnp.argsort(-votes, stable=True)
    return jnp.argsort(order) < size


def repick_experts(
    probabilities: jax.Array, listed: jax.Array, count: jax.Array, routing: Routing, *, renormalise: bool
) -> Routing:
    """Each token's best experts among those that are listed; fewer where the list has fewer.

    Args:
      probabilities: float32[B, T, E]. listed: bool[E]. count: int32[B, T], how many a token takes, up to k.
      routing: of all experts, the best first. Tokens that go nowhere in it go nowhere.
      renormalise: as `keep_experts`.
    """
    num_experts, k = listed.size, routing.experts.shape[-1]
    best, experts = jax.lax.top_k(jnp.where(listed, probabilities, -1.0), k)
    goes = (best >= 0) & (jnp.arange(k, dtype=jnp.int32) < count[..., None])
    goes = goes & (routing.experts[..., :1] < num_experts)
    # Weights are probabilities, or these over the sum of k of them.
    unit = routing.weights[..., :1] / jnp.max(probabilities, axis=-1, keepdims=True)
    weights = jnp.where(goes, best * unit, 0.0)
    if renormalise:
        weights = _scaled_to(weights, routing.weights)
    return Routing(jnp.where(goes, experts, num_experts).astype(jnp.int32), weights)


Voter = Callable[[int, Routing], jax.Array]
"""(layer, routing) -> float32[E]: what the shortlist is made by."""


def choose_experts(plan: ExpertPlan, voter: Voter | None = None) -> ExpertChooser:
    """The choice of a step by the plan.

    voter: stands in place of the tokens' votes, for controls. None: `count_votes`.
    """
    size = plan.num_experts

    def choose(layer: int, probabilities: jax.Array, routing: Routing) -> Routing:
        chosen = choose_freely(layer, probabilities, routing)
        if plan.capacity_factor is None:
            return chosen
        room = expert_capacity(plan.capacity_factor, routing, size)
        within, _ = drop_beyond_capacity(chosen, size, room)
        return keep_experts(chosen, within.experts < size, size, renormalise=plan.renormalise)

    def choose_freely(layer: int, probabilities: jax.Array, routing: Routing) -> Routing:
        rank = jnp.arange(routing.experts.shape[-1], dtype=jnp.int32)
        count = jnp.broadcast_to(plan.experts_per_token, routing.experts.shape[:-1])
        if plan.betas is not None:
            assert plan.max_skipped is not None
            count -= count_skipped(routing.weights, plan.betas[layer], plan.max_skipped, plan.reading)
        kept = rank < count[..., None]
        if plan.shortlist is not None:
            votes = (voter or count_layer_votes)(
                layer, Routing(_without(routing, kept, size), routing.weights)
            )
            listed = shortlist_experts(votes, plan.shortlist)
            if plan.outside == "repick":
                return repick_experts(probabilities, listed, count, routing, renormalise=plan.renormalise)
            kept = kept & jnp.take(jnp.append(listed, False), routing.experts)
        return keep_experts(routing, kept, size, renormalise=plan.renormalise)

    def count_layer_votes(layer: int, routing: Routing) -> jax.Array:
        return count_votes(routing, size)

    return choose


def describe_experts(plan: ExpertPlan, model: ModelConfig) -> list[str]:
    """The plan in words, a line each."""
    assert model.moe is not None
    k = model.moe.num_experts_per_tok
    rules = []
    if int(plan.experts_per_token) < k:
        rules.append(f"each token its {int(plan.experts_per_token)} best of {k} experts")
    if plan.max_skipped is not None:
        rules.append(
            f"each token skips up to {int(plan.max_skipped)} of its {k} experts, by the betas of its layer "
            f"(reading {plan.reading!r})"
        )
    if plan.shortlist is not None:
        then = "dropped" if plan.outside == "truncate" else "replaced by its best inside"
        rules.append(
            f"all tokens of a step share a list of {int(plan.shortlist)} of {plan.num_experts} experts a "
            f"layer, by their votes; a token's experts outside are {then}"
        )
    if plan.capacity_factor is not None:
        rules.append(
            f"an expert takes at most {plan.capacity_factor:g} times its even share of a step's tokens"
        )
    weights = "scaled to their old sum" if plan.renormalise else "as they were"
    return [f"sparse experts in verification: {'; '.join(rules)}; weights that are left are {weights}"]
