"""The TPU kernel's arithmetic, interpreted, in the real loop: the tokens of plain XLA, on every mesh."""

from collections import Counter

import jax.numpy as jnp
import pytest

from sv_jax.ahead_of_time import hlo
from sv_jax.config import DEFAULT_CUTS, Cuts
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.speculation.loop import decode_slice
from tests.tiny import (
    TINY,
    attention_plan,
    make_model,
    prefilled,
    random_prompts,
    replace,
    run_to_end,
    sequences,
)

# One layer: an interpreted kernel takes seconds to compile. Four KV heads for a model axis of four.
ONE = replace(TINY, num_layers=1, num_kv_heads=4)
CAPACITY, LIMIT = 256, 110
INTERPRETED = "pallas_tpu_interpret"


def start(mesh, implementation, keep, cuts=DEFAULT_CUTS):
    target, params = make_model(ONE, mesh, implementation=implementation, cuts=cuts)
    sparsity = None if keep is None else attention_plan(ONE, keep=keep, score="mass")
    rows = target.sharding.data_size
    repeated = (random_prompts([9])[0] * 9)[:70]
    prompts = [repeated, random_prompts([90], seed=1)[0], *random_prompts([40, 3, 50, 66, 80, 20])]
    prompts = prompts[: max(rows, 2)]
    limits = [LIMIT] * len(prompts)
    # Chunks of 128 tokens are plain XLA's on both sides; what is compared are the steps.
    state = prefilled(target, params, prompts, limits=limits, capacity=CAPACITY, chunk=128, sparsity=sparsity)
    return target, params, state, sparsity


def texts(mesh, implementation, keep, cuts=DEFAULT_CUTS):
    target, params, state, sparsity = start(mesh, implementation, keep, cuts)
    return sequences(run_to_end(target, params, PromptLookup(4), state, sparsity=sparsity))


def kernels(mesh, implementation, keep, cuts=DEFAULT_CUTS):
    """Pallas calls in the slice, as traced."""
    target, params, state, sparsity = start(mesh, implementation, keep, cuts)
    traced = decode_slice.trace(target, params, PromptLookup(4), state, jnp.int32(9), sparsity=sparsity)
    return str(traced.jaxpr).count("pallas_call[")


@pytest.mark.parametrize("mesh", [(1, 1), (2, 4)])
def test_sparse_steps_have_the_same_tokens(mesh):
    assert texts(mesh, INTERPRETED, 0.3) == texts(mesh, "xla", 0.3)


@pytest.mark.parametrize("mesh", [(4, 2)])
def test_dense_steps_have_the_same_tokens(mesh):
    assert texts(mesh, INTERPRETED, None) == texts(mesh, "xla", None)


def test_the_same_tokens_over_a_cache_that_is_cut():
    cuts = Cuts(kv_shard="data")
    assert texts((2, 2), INTERPRETED, 0.3, cuts) == texts((1, 1), "xla", 0.3)


def test_which_one_ran():
    """A kernel in the step with drafts and one in the plain step; sparse ones have a dense way each."""
    assert kernels((1, 1), INTERPRETED, None) == 2
    assert kernels((1, 1), INTERPRETED, 0.3) == 2  # a plan by share has no budget that is read whole
    assert kernels((1, 1), "xla", 0.3) == kernels((1, 1), None, 0.3) == 0


def test_a_kernel_adds_no_collective():
    """But for the number of blocks that a row read, which is then summed over the heads' devices."""
    found = {}
    for implementation in ("xla", INTERPRETED):
        target, params, state, sparsity = start((2, 2), implementation, 0.3)
        arguments = (target, params, PromptLookup(4), state, jnp.int32(9))
        text = decode_slice.lower(*arguments, sparsity=sparsity).compile().as_text()
        inside = hlo.loop_instructions(text)
        assert hlo.copies(inside, state.cache.keys[0].shape) == []
        talking = [i for i in inside if hlo.collectives([i])]
        found[implementation] = Counter((i.opcode, i.shapes) for i in talking)
    rows = (("s32", (1,)),)
    assert found["xla"] and not found["xla"] - found[INTERPRETED]
    assert set(found[INTERPRETED] - found["xla"]) <= {("all-reduce", rows)}
