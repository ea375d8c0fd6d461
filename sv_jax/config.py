"""What a model is: frozen, hashable descriptions that jitted programs are specialised on; and user errors."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, Literal, get_args

Family = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]
FAMILIES: tuple[Family, ...] = get_args(Family)
LARGEST = 2.0**127  # what float32 holds for sure; NaN and infinities are not below it


class UserError(ValueError):
    """Bad input: the message is one line that names the value and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a field or an option takes."""

    type: Callable[[Any], float]  # int or float
    holds: Callable[[float], bool]
    allowed: str

    def check(self, label: str, value: Any) -> Any:
        """`value` as an int or float. Raises UserError, which starts with `label`."""
        # NumPy's numbers are these, too.
        expected = numbers.Integral if self.type is int else numbers.Real
        with contextlib.suppress(OverflowError):  # whole numbers beyond every float
            if isinstance(value, expected) and not isinstance(value, bool):
                number = self.type(value)
                if abs(number) < LARGEST and self.holds(number):
                    return number
        raise UserError(f"{label} {value!r} is not allowed; allowed: {self.allowed}")


def check_layers(label: str, layers: Any) -> tuple[int, ...]:
    """Layer numbers, ascending and without repetition. Raises UserError."""
    allowed = "a list of different layer numbers, 0 or more"
    if not isinstance(layers, list | tuple):
        raise UserError(f"{label} {layers!r} is not allowed; allowed: {allowed}")
    for layer in layers:
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
            raise UserError(f"{label} has {layer!r}; allowed: {allowed}")
    if len(set(layers)) != len(layers):
        raise UserError(f"{label} {list(layers)} names a layer twice; allowed: {allowed}")
    return tuple(sorted(layers))


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the pretraining context.

    kind: "linear", "llama3" or "yarn". Fields that a kind does not use keep their defaults.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None derives it from `factor`
    mscale: float | None = None  # yarn (DeepSeek style)
    mscale_all_dim: float | None = None  # yarn (DeepSeek style)
    truncate: bool = True  # yarn: round the correction range to whole channels


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in place of the feed-forward network of some layers.

    A token goes through the num_experts_per_tok experts with the largest router probabilities, a softmax over
    all experts; its weights are these, divided by their sum if norm_topk_prob is set.
    """

    num_experts: int
    num_experts_per_tok: int
    expert_size: int  # channels of one expert
    norm_topk_prob: bool
    shared_expert_size: int = 0  # channels of an expert that all tokens use, behind a sigmoid gate; 0: none

    def __post_init__(self) -> None:
        if not 0 < self.num_experts_per_tok <= self.num_experts:
            raise UserError(
                f"num_experts_per_tok={self.num_experts_per_tok} is not allowed; allowed: 1 to the "
                f"number of experts, {self.num_experts}"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of one decoder-only transformer (the numbers of its config.json)."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False  # bias on query, key, value
    attention_output_bias: bool = False
    mlp_bias: bool = False
    # RMSNorm on queries and keys before RoPE: over each head's head_dim (qwen3), or over all heads (olmoe).
    qk_norm: Literal["head", "projection"] | None = None
    sliding_windows: tuple[int | None, ...] = ()  # per layer; () means full attention everywhere
    tie_word_embeddings: bool = False
    moe: MoEConfig | None = None
    dense_ffn_layers: tuple[int, ...] = ()  # layers of a MoE model with a plain feed-forward network

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even number")
        if beyond := [layer for layer in self.dense_ffn_layers if not 0 <= layer < self.num_layers]:
            raise UserError(f"layer {beyond[0]} has a plain FFN; the model has {self.num_layers} layers")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise UserError(
                f"sliding_windows has {len(self.sliding_windows)} entries for {self.num_layers} layers"
            )

    def sliding_window(self, layer: int) -> int | None:
        """Positions that layer `layer` can look back over (the query's own included); None: all."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` has experts in place of a plain feed-forward network."""
        return self.moe is not None and layer not in self.dense_ffn_layers


KV_SHARDS = ("none", "data")
EXPERT_SHARDS = ("model", "all")


@dataclasses.dataclass(frozen=True)
class Cuts:
    """What a run may cut otherwise than the table of sharding.py says.

    kv_shard: "data" cuts the cache's positions over the data axis in place of the batch's rows: for one long
      row, or few. Every data shard then computes all rows, over its own positions.
    expert_shard: "all" cuts experts over all devices; the tokens of all rows then travel to them.
    """

    kv_shard: str = "none"  # of KV_SHARDS
    expert_shard: str = "model"  # of EXPERT_SHARDS

    def __post_init__(self) -> None:
        for name, allowed in (("kv_shard", KV_SHARDS), ("expert_shard", EXPERT_SHARDS)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r}; allowed: {', '.join(allowed)}")


DEFAULT_CUTS = Cuts()
