"""What one step leaves out by a plan: the choices that the model asks for."""

from __future__ import annotations

import jax

from sv_jax.model.choices import Choices
from sv_jax.sharding import Sharding
from sv_jax.sparsity.experts import choose_experts
from sv_jax.sparsity.plan import SparsityPlan
from sv_jax.sparsity.selection import make_chooser, summary_scorer
from sv_jax.sparsity.summaries import BlockSummaries


def make_choices(
    plan: SparsityPlan,
    summaries: BlockSummaries | None,
    lengths: jax.Array,
    nodes: jax.Array,
    live: jax.Array,
    *,
    sharding: Sharding,
) -> Choices:
    """The choices of a step.

    Args:
      summaries: of the cache's blocks; wanted by sparse attention alone.
      lengths: int32[B], committed tokens. nodes: bool[B, T], tokens of the step that are no empty slots.
      live: bool[B], rows whose output counts.
    """
    blocks = None
    if plan.attention is not None:
        if summaries is None:
            raise ValueError("there are no block summaries; start_state needs the same sparsity plan")
        score = summary_scorer(plan.attention, summaries, lengths, nodes)
        blocks = make_chooser(plan.attention, score, lengths, live, sharding=sharding)
    return Choices(
        blocks=blocks,
        experts=None if plan.experts is None else choose_experts(plan.experts),
        channels=None if plan.channels is None else plan.channels.of_layer,
    )
