"""The drift meter's core: the same prefixes verified densely and sparsely, step by step.

Every step runs T true tokens over a cache that the dense passes filled, once densely and once by each
setting, and compares the laws of the next token. What a run would add, K/V that sparse passes wrote, is left
to the free-running comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sv_jax.config import UserError
from sv_jax.engine.language_model import LanguageModel
from sv_jax.evaluation.selectors import SELECTORS, make_scorer
from sv_jax.evaluation.texts import Case
from sv_jax.evaluation.true_steps import DensePass, chain, true_steps
from sv_jax.model.cache import KVCache
from sv_jax.model.choices import Choices
from sv_jax.model.transformer import Params, Transformer
from sv_jax.sparsity.config import SCORES, AttentionSparsity
from sv_jax.sparsity.plan import AttentionPlan, plan_attention
from sv_jax.sparsity.reads import kv_bytes, summary_bytes
from sv_jax.sparsity.selection import make_chooser
from sv_jax.sparsity.summaries import STATISTICS, BlockSummaries
from sv_jax.speculation.verify import verify


@dataclasses.dataclass(frozen=True)
class DriftSetting:
    """What is compared with dense verification."""

    selector: str  # a name of SELECTORS
    attention: AttentionSparsity  # its score is not used: the selector stands in its place

    def __post_init__(self) -> None:
        if self.selector not in SELECTORS:
            raise UserError(f"selector {self.selector!r} is not allowed; allowed: {', '.join(SELECTORS)}")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One case under one setting."""

    case: str
    kind: str
    document: str
    context: int  # tokens of the case
    setting: DriftSetting
    positions: int  # compared
    agreeing: int  # with the same most likely token
    kl: float  # sum over positions of KL(dense || sparse), nats
    agreeing_prefix: int  # positions before the first disagreement
    steps: int
    kv_bytes: float  # K, V and summaries that a step read, mean over steps
    dense_kv_bytes: float
    found: bool | None  # a needle: every token of the answer is the sparse pass's most likely one
    dense_found: bool | None


class Compared(NamedTuple):
    """A step of one setting against the dense one; [B, T] but for the last."""

    agreeing: jax.Array  # bool: the same most likely token
    kl: jax.Array  # float32: KL(dense || sparse) in nats
    right: jax.Array  # bool: the most likely token is the one that the text goes on with
    kv_blocks: jax.Array  # int32[B]


@partial(jax.jit, static_argnames=("target", "selector"))
def sparse_pass(
    target: Transformer,
    params: Params,
    cache: KVCache,
    summaries: BlockSummaries,
    lengths: jax.Array,
    tokens: jax.Array,
    following: jax.Array,
    nodes: jax.Array,
    dense: DensePass,
    plan: AttentionPlan,
    key: jax.Array,
    *,
    selector: str,
) -> Compared:
    """The same step with what `selector` chooses within the plan's budget."""
    masses = dense.masses[plan.block_size]
    score = make_scorer(selector, plan, summaries, masses, key, lengths, nodes)
    choose = make_chooser(plan, score, lengths, lengths > 0, sharding=target.sharding)
    verified = verify(target, params, cache, lengths, chain(tokens), Choices(choose))
    dense_law, law = (jax.nn.log_softmax(x) for x in (dense.logits, verified.logits))
    best = jnp.argmax(law, axis=-1)
    assert verified.reads.kv_blocks is not None
    return Compared(
        agreeing=best == jnp.argmax(dense_law, axis=-1),
        kl=jnp.sum(jnp.exp(dense_law) * (dense_law - law), axis=-1),
        right=best == following,
        kv_blocks=verified.reads.kv_blocks,
    )


def plan_of(setting: DriftSetting, model: LanguageModel) -> AttentionPlan:
    """The plan of a setting. Raises UserError for layers that the model does not have."""
    score = setting.selector if setting.selector in SCORES else setting.attention.score
    attention = dataclasses.replace(setting.attention, score=score)
    return plan_attention(attention, model.target.config)


class _Tally:
    """Sums over the steps of a batch, [B] each."""

    def __init__(self, rows: int) -> None:
        # Per step, [B, compared positions].
        self.agreeing: list[np.ndarray] = []
        self.kl: list[np.ndarray] = []
        self.right: list[np.ndarray] = []
        self.kv_bytes, self.dense_bytes = np.zeros(rows), np.zeros(rows)


def measure(
    model: LanguageModel,
    cases: Sequence[Case],
    settings: Sequence[DriftSetting],
    *,
    num_speculative_tokens: int,
    seed: int = 0,
) -> Iterator[list[Measurement]]:
    """Compares one batch of cases, all of one length and with as many measured tokens, under every setting.

    Args:
      cases: their number is a multiple of the mesh's data axis.
      num_speculative_tokens: K; a step verifies T = K + 1 tokens with the blocks that its first one chose.
      seed: of the random control.

    Yields, per setting in order, a Measurement for each case.
    """
    plans = [plan_of(setting, model) for setting in settings]
    block_sizes = tuple(sorted({plan.block_size for plan in plans}))
    statistics = tuple(sorted({name for plan in plans for name in STATISTICS[plan.score]}))
    target, params = model.target, model.params
    tallies = [_Tally(len(cases)) for _ in settings]
    dense_right: list[np.ndarray] = []
    for step in true_steps(
        model,
        cases,
        num_speculative_tokens=num_speculative_tokens,
        block_sizes=block_sizes,
        statistics=statistics,
    ):
        dense_right.append(np.asarray(step.dense.right)[:, : step.compared])
        key = jax.random.fold_in(jax.random.key(seed), step.number)
        for setting, plan, tally in zip(settings, plans, tallies):
            compared = sparse_pass(
                target,
                params,
                step.cache,
                step.summaries[plan.block_size],
                step.lengths,
                step.tokens,
                step.following,
                step.nodes,
                step.dense,
                plan,
                key,
                selector=setting.selector,
            )
            _add(tally, compared, step.compared, step.length, plan, setting, model)
    right = np.concatenate(dense_right, axis=1)
    for setting, tally in zip(settings, tallies):
        yield [
            _measurement(case, row, setting, tally, len(dense_right), right) for row, case in enumerate(cases)
        ]


def _add(
    tally: _Tally,
    compared: Compared,
    count: int,
    length: int,
    plan: AttentionPlan,
    setting: DriftSetting,
    model: LanguageModel,
) -> None:
    """Adds a step at `length` committed tokens, of whose nodes the first `count` are compared."""
    agreeing, kl, right, blocks = (np.asarray(x) for x in compared)
    tally.agreeing.append(agreeing[:, :count])
    tally.kl.append(kl[:, :count])
    tally.right.append(right[:, :count])
    config, itemsize = model.target.config, jnp.dtype(model.dtype).itemsize
    tally.kv_bytes += blocks * plan.block_size * kv_bytes(config, itemsize)
    if setting.selector in SCORES:  # controls read no summaries
        tally.kv_bytes += summary_bytes(plan, config, length)
    tally.dense_bytes += config.num_layers * config.num_kv_heads * length * kv_bytes(config, itemsize)


def _measurement(
    case: Case, row: int, setting: DriftSetting, tally: _Tally, steps: int, dense_right: np.ndarray
) -> Measurement:
    agreeing, kl, right = (np.concatenate(x, axis=1)[row] for x in (tally.agreeing, tally.kl, tally.right))
    needle = case.kind == "needle"
    return Measurement(
        case=case.name,
        kind=case.kind,
        document=case.document,
        context=len(case.token_ids),
        setting=setting,
        positions=len(agreeing),
        agreeing=int(agreeing.sum()),
        kl=float(kl.sum()),
        agreeing_prefix=int(np.argmin(np.append(agreeing, False))),
        steps=steps,
        kv_bytes=float(tally.kv_bytes[row] / steps),
        dense_kv_bytes=float(tally.dense_bytes[row] / steps),
        found=bool(right.all()) if needle else None,
        dense_found=bool(dense_right[row].all()) if needle else None,
    )
