"""What it costs that a layer reads what it would not select itself, measured on true texts.

Every step runs T true tokens densely, then sparsely with every layer's own set, then once more for each
change of one layer: layer l reads everything (DENSE), or the set that an earlier layer a selected (SA*).

    damage   D[a, l] = mean KL(dense || sparse with l reading a's set) - mean KL(dense || sparse, own sets)
    jaccard  J[a, l] = mean |S_a & S_l| / |S_a | S_l| over steps, rows and KV heads, S: own sets (the paper's)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.config import ModelConfig
from sv_jax.engine.decoding import padded_batch
from sv_jax.engine.language_model import LanguageModel
from sv_jax.evaluation.texts import Case
from sv_jax.evaluation.true_steps import TrueStep, chain, split_case, true_steps
from sv_jax.model.cache import KVCache, LayerKV
from sv_jax.model.cached_attention import Selection
from sv_jax.model.choices import Choices
from sv_jax.model.transformer import Params, Transformer
from sv_jax.sparsity.config import AttentionSparsity
from sv_jax.sparsity.plan import AttentionPlan, plan_attention, resolve_anchors
from sv_jax.sparsity.selection import make_chooser, summary_scorer
from sv_jax.sparsity.summaries import STATISTICS, BlockSummaries
from sv_jax.speculation.verify import verify

Pair = tuple[int, int]
"""(a, l): layer l reads the set that layer a < l selected."""
DENSE = -1  # in place of the layer whose set is read: everything is


class SharedPass(NamedTuple):
    """A sparse step against the dense one."""

    kl: jax.Array  # float32[B, T]: KL(dense || sparse) in nats
    agreeing: jax.Array  # bool[B, T]: the same most likely token
    block_indices: jax.Array  # int32[L, B, K, N]: each layer's own set, whether it was read or not
    num_blocks: jax.Array  # int32[L, B, K]


@partial(jax.jit, static_argnames=("target",))
def shared_pass(
    target: Transformer,
    params: Params,
    cache: KVCache,
    summaries: BlockSummaries,
    lengths: jax.Array,
    tokens: jax.Array,
    nodes: jax.Array,
    dense_logits: jax.Array,
    plan: AttentionPlan,
    source: jax.Array,
) -> SharedPass:
    """A sparse step over T true tokens in which layer l reads the set of layer source[l].

    `source` is traced: one program for every pair, every choice of anchors and of dense layers.

    Args:
      tokens: int32[B, T], the first at position lengths[b]. nodes: bool[B, T], tokens that exist.
      dense_logits: float32[B, T, V], of the dense step.
      plan: in which every layer selects.
      source: int32[L], source[l] <= l, or DENSE.
    """
    score = summary_scorer(plan, summaries, lengths, nodes)
    select = make_chooser(plan, score, lengths, lengths > 0, sharding=target.sharding)
    own: list[Selection] = []

    def choose(layer: int, q: jax.Array, cached: LayerKV, chosen: object) -> Selection:
        selection = select(layer, q, cached, ())
        assert selection is not None
        own.append(selection)
        indices, counts = (
            jnp.stack([getattr(s, name) for s in own])[jnp.maximum(source[layer], 0)]
            for name in ("block_indices", "num_blocks")
        )
        whole = source[layer] == DENSE
        if selection.whole is not None:
            whole = whole | selection.whole
        return dataclasses.replace(selection, block_indices=indices, num_blocks=counts, whole=whole)

    verified = verify(target, params, cache, lengths, chain(tokens), Choices(choose))
    dense_law, law = (jax.nn.log_softmax(x) for x in (dense_logits, verified.logits))
    return SharedPass(
        kl=jnp.sum(jnp.exp(dense_law) * (dense_law - law), axis=-1),
        agreeing=jnp.argmax(law, axis=-1) == jnp.argmax(dense_law, axis=-1),
        block_indices=jnp.stack([s.block_indices for s in own]),
        num_blocks=jnp.stack([s.num_blocks for s in own]),
    )


def jaccard(block_indices: np.ndarray, num_blocks: np.ndarray, pairs: Sequence[Pair]) -> np.ndarray:
    """float64[pairs]: |S_a & S_l| / |S_a | S_l|, mean over rows and KV heads; two empty sets are alike.

    Args:
      block_indices: int[L, B, K, N]; entries past num_blocks int[L, B, K] are not in the set.
    """
    held = np.arange(block_indices.shape[-1]) < num_blocks[..., None]
    blocks = int(np.max(block_indices, where=held, initial=0)) + 1
    # One place more for what is not in the set.
    member = np.zeros((*num_blocks.shape, blocks + 1), bool)
    np.put_along_axis(member, np.where(held, block_indices, blocks), True, axis=-1)
    member = member[..., :blocks]

    def similarity(a: np.ndarray, b: np.ndarray) -> float:
        either = (a | b).sum(-1)
        return float(np.mean(np.where(either, (a & b).sum(-1) / np.maximum(either, 1), 1.0)))

    return np.array([similarity(member[a], member[b]) for a, b in pairs])


def selecting_plan(attention: AttentionSparsity, model: ModelConfig) -> AttentionPlan:
    """The plan in which every layer selects, whatever `attention.anchors` says."""
    return plan_attention(dataclasses.replace(attention, anchors=None), model)


def sources_of(anchors: Sequence[int], attention: AttentionSparsity, model: ModelConfig) -> np.ndarray:
    """int32[L]: whose set each layer reads with these anchors and the dense layers of `attention`."""
    resolved = resolve_anchors(dataclasses.replace(attention, anchors=tuple(anchors)), model)
    return np.array([DENSE if anchor is None else anchor for anchor in resolved], np.int32)


def own_source(layers: int, dense: Sequence[int] = ()) -> np.ndarray:
    """int32[L]: every layer reads its own set, those of `dense` everything."""
    source = np.arange(layers, dtype=np.int32)
    source[list(dense)] = DENSE
    return source


def pair_source(pair: Pair, layers: int, dense: Sequence[int] = ()) -> np.ndarray:
    """int32[L]: as `own_source`, but for the pair's second layer."""
    source = own_source(layers, dense)
    source[pair[1]] = pair[0]
    return source


def run_step(
    model: LanguageModel, step: TrueStep, plan: AttentionPlan, source: np.ndarray, rows: int
) -> tuple[float, int, SharedPass]:
    """Sums over a step's compared positions in the first `rows` rows: KL in nats, equal top-1 tokens."""
    passed = shared_pass(
        model.target,
        model.params,
        step.cache,
        step.summaries[plan.block_size],
        step.lengths,
        step.tokens,
        step.nodes,
        step.dense.logits,
        plan,
        source,
    )
    kl, agreeing = (np.asarray(x)[:rows, : step.compared] for x in (passed.kl, passed.agreeing))
    return float(kl.sum(dtype=np.float64)), int(agreeing.sum()), passed


class StepFigures(NamedTuple):
    """One step of one batch, summed over the compared positions of its rows."""

    batch: int
    step: int
    rows: int
    positions: int
    kl: list[float]  # per source, nats
    agreeing: list[int]  # per source, positions with the dense pass's most likely token
    jaccard: list[float]  # per pair, mean over rows and KV heads; [] where it was not asked for


def sweep(
    model: LanguageModel,
    cases: Sequence[Case],
    plan: AttentionPlan,
    sources: Sequence[np.ndarray],
    *,
    pairs: Sequence[Pair] = (),
    num_speculative_tokens: int,
    batch_size: int,
    known: Iterable[tuple[int, int]] = (),
    should_stop: Callable[[], bool] = lambda: False,
    on_pass: Callable[[], Any] = lambda: None,
) -> Iterator[StepFigures]:
    """Runs every step of all cases once with each source.

    Args:
      cases: all of one length and with as many measured tokens.
      sources: int32[L] each, see `shared_pass`; with `pairs` the first has the own sets of their layers.
      pairs: those whose Jaccard similarity is wanted.
      batch_size: cases that run side by side, rounded up to a multiple of the data axis.
      known: (batch, step) that are not needed any more.
      should_stop: asked between passes; True ends the sweep after the last whole step.
      on_pass: called after each sparse pass.
    """
    size = padded_batch(min(len(cases), batch_size), model.sharding.data_size)
    missing = set(step_numbers(cases, num_speculative_tokens, size)) - set(known)
    for batch, first in enumerate(range(0, len(cases), size)):
        wanted = {step for number, step in missing if number == batch}
        part = list(cases[first : first + size])
        padding = part[-1:] * (size - len(part))  # one more of its kind: another batch size, another program
        if not wanted:
            continue
        steps = true_steps(
            model,
            [*part, *padding],
            num_speculative_tokens=num_speculative_tokens,
            block_sizes=(plan.block_size,),
            statistics=STATISTICS[plan.score],
            should_stop=should_stop,
        )
        for step in steps:
            if step.number in wanted:
                passes = []
                for source in sources:
                    if should_stop():
                        return
                    passes.append(run_step(model, step, plan, source, len(part)))
                    on_pass()
                yield _step_figures(batch, step, passes, pairs, len(part))
        if should_stop():
            return


def _step_figures(
    batch: int,
    step: TrueStep,
    passes: Sequence[tuple[float, int, SharedPass]],
    pairs: Sequence[Pair],
    rows: int,
) -> StepFigures:
    own = passes[0][2]
    indices, counts = (np.asarray(x)[:, :rows] for x in (own.block_indices, own.num_blocks))
    return StepFigures(
        batch=batch,
        step=step.number,
        rows=rows,
        positions=rows * step.compared,
        kl=[kl for kl, _, _ in passes],
        agreeing=[agreeing for _, agreeing, _ in passes],
        jaccard=jaccard(indices, counts, pairs).tolist() if pairs else [],
    )


def step_numbers(
    cases: Sequence[Case], num_speculative_tokens: int, batch_size: int
) -> list[tuple[int, int]]:
    """(batch, step) of a whole sweep."""
    _, steps = split_case(len(cases[0].token_ids), cases[0].measured, num_speculative_tokens + 1)
    batches = -(-len(cases) // batch_size)
    return [(batch, step) for batch in range(batches) for step in range(steps)]


class Totals(NamedTuple):
    """Means over a whole sweep."""

    positions: int
    kl: np.ndarray  # float64[sources], nats a position
    agreement: np.ndarray  # float64[sources], share of positions
    jaccard: np.ndarray  # float64[pairs]


def total(figures: Iterable[StepFigures]) -> Totals:
    """Steps weigh as many positions as they have; in the Jaccard similarity, as many rows."""
    # In one order, whatever the order in which they were measured: sums of floats depend on it.
    steps = sorted(figures, key=lambda step: (step.batch, step.step))
    positions = sum(step.positions for step in steps)
    rows = np.array([step.rows for step in steps])
    return Totals(
        positions=positions,
        kl=np.sum([step.kl for step in steps], axis=0) / positions,
        agreement=np.sum([step.agreeing for step in steps], axis=0) / positions,
        jaccard=rows @ np.array([step.jaccard for step in steps]) / rows.sum(),
    )
