"""What a run's steps read of the feed-forward weights, from its trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from sv_jax.config import ModelConfig
from sv_jax.engine.trace import RowTrace
from sv_jax.model.ffn import ChannelReads
from sv_jax.model.moe import ExpertReads
from sv_jax.sparsity.channels import ChannelPlan
from sv_jax.sparsity.plan import SparsityPlan


@dataclasses.dataclass(frozen=True)
class FFNCounts:
    """Sums over the steps of a batch, which its rows share; experts and channels over layers, too."""

    tokens: int  # that these steps emitted
    steps: int
    sparse_steps: int  # those that left something out
    experts: ExpertReads | None  # None: the model has none
    channels: ChannelReads | None  # of layers that leave some out; None: no layer does
    weight_bytes: int  # feed-forward weights, of one copy of the model; routers are not counted
    dense_weight_bytes: int

    def __add__(self, other: FFNCounts) -> FFNCounts:
        def add(a: object, b: object) -> object:
            if isinstance(a, tuple) and isinstance(b, tuple):
                return type(a)(*(x + y for x, y in zip(a, b)))  # type: ignore[call-arg]
            return None if a is None or b is None else a + b  # type: ignore[operator]

        names = [field.name for field in dataclasses.fields(self)]
        return FFNCounts(*(add(getattr(self, name), getattr(other, name)) for name in names))  # type: ignore[arg-type]


def count_ffn_reads(
    rows: Sequence[RowTrace], plan: SparsityPlan, model: ModelConfig, dtype: str, shards: int
) -> FFNCounts:
    """Reads of a batch's rows that verified by `plan`. A step counts once if any row kept a token of it.

    Args:
      dtype: of the weights. shards: of the model axis, each of which keeps as many channels.
    """
    step = np.concatenate([row.step for row in rows])
    numbers, firsts = np.unique(step, return_index=True)
    firsts = firsts[numbers > 0]  # the prefill's token has no step

    def per_step(name: str) -> list[np.ndarray] | None:
        parts = [getattr(row, name) for row in rows]
        if any(part is None for part in parts):
            return None
        return [np.concatenate(column)[firsts].astype(np.float64) for column in zip(*parts)]

    experts, channels = per_step("experts"), per_step("channels")
    left_out = np.zeros(len(firsts), bool)
    if experts is not None:
        left_out |= experts[2] < experts[3]  # pairs
    if channels is not None:
        left_out |= channels[0] < channels[1]  # used
    read, wanted = (0, 0) if experts is None else (int(experts[i].sum()) for i in (0, 1))
    sizes = weight_channels(plan.channels, model, len(firsts), read, shards)
    dense = weight_channels(None, model, len(firsts), wanted, shards)
    channel_bytes = model.hidden_size * jnp.dtype(dtype).itemsize
    return FFNCounts(
        tokens=int((step > 0).sum()),
        steps=len(firsts),
        sparse_steps=int(left_out.sum()),
        experts=None if experts is None else ExpertReads(*(int(x.sum()) for x in experts)),  # type: ignore[arg-type]
        channels=None if channels is None else ChannelReads(*(float(x.sum()) for x in channels)),  # type: ignore[arg-type]
        weight_bytes=sizes * channel_bytes,
        dense_weight_bytes=dense * channel_bytes,
    )


def weight_channels(
    channels: ChannelPlan | None, model: ModelConfig, steps: int, experts: int, shards: int
) -> int:
    """Vectors of hidden_size numbers that steps read: one a channel of gate, of up and of down.

    Args:
      experts: that the steps read, over layers. Which layers' is not known: where a shared budget leaves some
        layers dense, all experts count as read in full.
    """

    def network(size: int, layer: int, shards: int = shards) -> int:
        chosen = None if channels is None else channels.of_layer(layer)
        if chosen is None or chosen.rule != "shared":
            return 3 * size
        return size + 2 * chosen.count(size, shards)

    total = 0
    moe_layers = [layer for layer in range(model.num_layers) if model.has_experts(layer)]
    for layer in range(model.num_layers):
        if model.moe is None or layer not in moe_layers:
            total += steps * network(model.intermediate_size, layer)
        elif model.moe.shared_expert_size:
            total += steps * network(model.moe.shared_expert_size, layer)
    if model.moe is not None:
        size = model.moe.expert_size
        dearest = max((network(size, layer, 1) for layer in moe_layers), default=0)
        total += experts * dearest
    return total
