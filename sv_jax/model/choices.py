"""What a step leaves out, layer by layer: asked while the step is traced, answered with small arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax

from sv_jax.model.attention import BlockChooser
from sv_jax.model.experts import Routing
from sv_jax.model.ffn import LayerChannels


class ExpertChooser(Protocol):
    """Decides which experts of a layer are left out; plain Python at trace time."""

    def __call__(self, layer: int, probabilities: jax.Array, routing: Routing) -> Routing:
        """The routing of `layer` with other experts, or none, in place of some.

        Args:
          probabilities: float32[B, T, E], the router's.
          routing: what they come to; tokens that do not count go to no expert.
        """


@dataclasses.dataclass(frozen=True)
class Choices:
    """Each part's choice; None: nothing is left out of it."""

    blocks: BlockChooser | None = None  # of the cache, which attention reads
    experts: ExpertChooser | None = None
    channels: Callable[[int], LayerChannels | None] | None = None  # of the layer's networks, experts' too

    @property
    def counts_experts(self) -> bool:
        """Whether what is read of the experts is to be known, for the sake of the bytes."""
        return self.experts is not None or self.channels is not None


DENSE = Choices()
