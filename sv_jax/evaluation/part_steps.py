"""What it changes to leave experts or channels out: true texts, verified densely and by each setting.

    prefix (dense, as in a run) | step of T true tokens | step | step ..

Measured are all tokens of the steps. A setting's steps write their own K/V, as in a run, and the tokens are
the text's. One text at a time: what the tokens of a step share must not depend on other rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.engine.ffn_reads import weight_channels
from sv_jax.engine.language_model import LanguageModel
from sv_jax.evaluation.cutting import Case
from sv_jax.evaluation.true_steps import TrueStep, chain, true_steps
from sv_jax.model.cache import KVCache
from sv_jax.model.choices import Choices
from sv_jax.model.experts import Routing
from sv_jax.model.ffn import ChannelReads, LayerChannels
from sv_jax.model.moe import ExpertReads
from sv_jax.model.transformer import Params, Transformer
from sv_jax.sparsity.config import SparsityConfig
from sv_jax.sparsity.experts import choose_experts, count_votes
from sv_jax.sparsity.plan import SparsityPlan, make_plan
from sv_jax.sparsity.step import make_choices
from sv_jax.sparsity.summaries import STATISTICS, BlockSummaries, update_summaries
from sv_jax.speculation.types import StepReads
from sv_jax.speculation.verify import verify

Control = Literal["", "random", "static", "oracle"]


@dataclasses.dataclass(frozen=True)
class PartSetting:
    """What is compared with dense verification.

    control: who makes the list of experts, or of channels, that a step's tokens share: "" the tokens;
      "random" a draw among the wanted ones; of channels also "static", what mattered most on other texts, and
      "oracle", what they come to be.
    """

    name: str  # in tables
    sparsity: SparsityConfig
    control: Control = ""


@dataclasses.dataclass(frozen=True)
class PartMeasurement:
    """One text under one setting. Sums over its measured positions, or over its steps."""

    case: str
    document: str
    setting: str
    positions: int
    agreeing: int  # with the dense pass's most likely token
    kl: float  # KL(dense || sparse), nats
    nll: float  # -log probability of the text's own tokens, nats
    dense_nll: float
    steps: int
    experts: tuple[float, ...] | None  # ExpertReads
    channels: tuple[float, ...] | None  # ChannelReads
    weight_channels: float  # vectors of gate, up and down that were read
    dense_weight_channels: float


class Carry(NamedTuple):
    """What a setting's steps have written."""

    cache: KVCache
    summaries: BlockSummaries | None
    lengths: jax.Array  # int32[1]


class Compared(NamedTuple):
    """[T] each, but for what the step read."""

    agreeing: jax.Array  # bool
    kl: jax.Array  # float32, nats
    nll: jax.Array
    dense_nll: jax.Array
    reads: StepReads


def control_choices(
    choices: Choices,
    plan: SparsityPlan,
    model: Transformer,
    control: Control,
    key: jax.Array,
    static_votes: Sequence[jax.Array | None],
) -> Choices:
    """The same choices with lists that the control makes."""
    experts, channels = choices.experts, choices.channels
    if control == "random" and plan.experts is not None:
        size = plan.experts.num_experts

        def draw(layer: int, routing: Routing) -> jax.Array:
            wanted = count_votes(routing, size) > 0
            return jnp.where(wanted, jax.random.uniform(jax.random.fold_in(key, layer), (size,)), -1.0)

        experts = choose_experts(plan.experts, draw)
    if control and channels is not None:
        given = channels

        def of_layer(layer: int) -> LayerChannels | None:
            chosen = given(layer)
            if chosen is None or control == "oracle":
                return chosen and dataclasses.replace(chosen, rule="oracle")
            if control == "static":
                return dataclasses.replace(chosen, votes=static_votes[layer])
            size = model.config.intermediate_size
            return dataclasses.replace(
                chosen, votes=jax.random.uniform(jax.random.fold_in(key, layer), (size,))
            )

        channels = of_layer
    return dataclasses.replace(choices, experts=experts, channels=channels)


@partial(jax.jit, static_argnames=("target", "control"), donate_argnames=("carry",))
def part_step(
    target: Transformer,
    params: Params,
    carry: Carry,
    tokens: jax.Array,
    following: jax.Array,
    nodes: jax.Array,
    dense_logits: jax.Array,
    plan: SparsityPlan,
    key: jax.Array,
    static_votes: Sequence[jax.Array | None],
    *,
    control: Control,
) -> tuple[Carry, Compared]:
    """One step of a setting over T true tokens, and the commit of its own K/V.

    Args:
      tokens, following: int32[1, T]. nodes: bool[1, T]. dense_logits: float32[T, V], of the dense pass.
      static_votes: per layer float32[F], of the static control.
    """
    cache, summaries, lengths = carry
    live = jnp.ones(1, bool)
    choices = make_choices(plan, summaries, lengths, nodes, live, sharding=target.sharding)
    choices = control_choices(choices, plan, target, control, key, static_votes)
    verified = verify(target, params, cache, lengths, chain(tokens), choices)
    cache = cache.write(verified.new_kv, lengths, target.sharding)
    after = lengths + tokens.shape[1]
    if summaries is not None:
        summaries = update_summaries(summaries, cache, lengths, after, tokens.shape[1], target.sharding)
    dense_law, law = (jax.nn.log_softmax(x) for x in (dense_logits, verified.logits[0]))
    pick = jnp.arange(tokens.shape[1]), following[0]
    compared = Compared(
        agreeing=jnp.argmax(law, axis=-1) == jnp.argmax(dense_law, axis=-1),
        kl=jnp.sum(jnp.exp(dense_law) * (dense_law - law), axis=-1),
        nll=-law[pick],
        dense_nll=-dense_law[pick],
        reads=verified.reads,
    )
    return Carry(cache, summaries, after), compared


class _DenseStep(NamedTuple):
    compared: int
    tokens: jax.Array
    following: jax.Array
    nodes: jax.Array
    logits: jax.Array  # float32[T, V]


def measure_parts(
    model: LanguageModel,
    case: Case,
    settings: Sequence[PartSetting],
    *,
    num_speculative_tokens: int,
    seed: int = 0,
    static_votes: Sequence[np.ndarray | None] = (),
) -> Iterator[PartMeasurement]:
    """One text under every setting, in order.

    Args:
      num_speculative_tokens: K; a step verifies T = K + 1 tokens.
      seed: of the random control. static_votes: of the static one, per layer float32[F].
    """
    plans = [make_plan(setting.sparsity, model.target.config) for setting in settings]
    attentions = [plan.attention for plan in plans if plan.attention is not None]
    dense: list[_DenseStep] = []
    start: TrueStep | None = None
    for step in true_steps(
        model,
        [case],
        num_speculative_tokens=num_speculative_tokens,
        block_sizes=tuple(sorted({plan.block_size for plan in attentions})),
        statistics=tuple(sorted({name for plan in attentions for name in STATISTICS[plan.score]})),
    ):
        if start is None:  # asking for the next step takes the cache away
            start = step._replace(
                cache=jax.tree.map(jnp.copy, step.cache), summaries=jax.tree.map(jnp.copy, step.summaries)
            )
        dense.append(_DenseStep(step.compared, step.tokens, step.following, step.nodes, step.dense.logits[0]))
    assert start is not None
    for setting, plan in zip(settings, plans):
        votes = tuple(static_votes) if setting.control == "static" else ()
        yield _measure_setting(model, case, setting, plan, start, dense, seed, votes)


def _measure_setting(
    model: LanguageModel,
    case: Case,
    setting: PartSetting,
    plan: SparsityPlan,
    start: TrueStep,
    dense: Sequence[_DenseStep],
    seed: int,
    static_votes: tuple[np.ndarray | None, ...],
) -> PartMeasurement:
    summaries = None if plan.attention is None else start.summaries[plan.attention.block_size]
    carry = jax.tree.map(jnp.copy, Carry(start.cache, summaries, start.lengths))
    sums = np.zeros(4)
    experts, channels = np.zeros(len(ExpertReads._fields)), np.zeros(len(ChannelReads._fields))
    seen = StepReads()
    for number, step in enumerate(dense):
        key = jax.random.fold_in(jax.random.key(seed), number)
        texts = step.tokens, step.following, step.nodes, step.logits
        carry, found = part_step(
            model.target, model.params, carry, *texts, plan, key, static_votes, control=setting.control
        )
        figures = (found.agreeing, found.kl, found.nll, found.dense_nll)
        sums += [np.asarray(x)[: step.compared].sum(dtype=np.float64) for x in figures]
        seen = found.reads
        experts += 0 if seen.experts is None else np.array([int(x) for x in seen.experts])
        channels += 0 if seen.channels is None else np.array([float(x) for x in seen.channels])
    config, steps = model.target.config, len(dense)
    wanted = int(experts[1])
    return PartMeasurement(
        case=case.name,
        document=case.document,
        setting=setting.name,
        positions=sum(step.compared for step in dense),
        agreeing=int(sums[0]),
        kl=sums[1],
        nll=sums[2],
        dense_nll=sums[3],
        steps=steps,
        experts=None if seen.experts is None else tuple(experts.tolist()),
        channels=None if seen.channels is None else tuple(channels.tolist()),
        weight_channels=weight_channels(plan.channels, config, steps, int(experts[0]), 1),
        dense_weight_channels=weight_channels(None, config, steps, wanted, 1),
    )
