"""What the compiled loop does not do: recompile, wait for the host, copy caches, gather shards."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sv_jax.ahead_of_time import hlo
from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.sampling_params import SamplingParams
from sv_jax.speculation.loop import decode_slice
from sv_jax.speculation.prefill import prefill_chunk
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import start_state
from sv_jax.speculation.types import Draft
from tests.tiny import TINY, histograms, make_model, prefilled, random_prompts, replace, run_to_end

# Sizes that no other array has: the cache, each weight and each activation can be told apart.
DISTINCT = replace(
    TINY,
    vocab_size=112,
    hidden_size=40,
    intermediate_size=88,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    tie_word_embeddings=False,
)
CAPACITY = 96


COMPILING = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration")


def count_compilations(events, name, *_, **__):
    if name in COMPILING:
        events.append(name)


def random_sampling(rng):
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.9]),
        top_k=int(rng.integers(0, 20)),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.1]),
        seed=int(rng.integers(0, 2**32)),
        repetition_penalty=rng.choice([1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, -0.5]),
    )


def test_nothing_recompiles_after_warm_up():
    """200 steps with other prompts, lengths, limits, ends, acceptance and slice lengths, greedy and sampled
    with any filters and penalties."""
    target, params = make_model()
    drafter = PromptLookup(4)
    rng = np.random.default_rng(0)

    def run(seed, max_steps):
        lengths = rng.integers(1, 30, 4)
        prompts = random_prompts(lengths, seed=seed)
        if seed % 2:  # repetitive text: more is accepted
            prompts = [(p[:4] * len(p))[: len(p)] for p in prompts]
        limits = lengths + rng.integers(1, 60, 4)
        eos_ids = rng.integers(0, 64, (4, 2)).tolist() if seed % 3 == 0 else None
        request = {"limits": limits, "eos_ids": eos_ids, "min_lengths": (lengths + seed % 5).tolist()}
        if seed % 4:
            request["sampling"] = [random_sampling(rng) for _ in prompts]
        state = prefilled(target, params, prompts, **request)
        state = run_to_end(target, params, drafter, state, max_steps=max_steps)
        return histograms(state, 5).sum(0), int(state.steps)

    run(0, max_steps=3)
    events: list[str] = []
    listener = partial(count_compilations, events)
    jax.monitoring.register_event_duration_secs_listener(listener)
    histogram, steps, seed = 0, 0, 0
    while steps < 200:
        seed += 1
        more, taken = run(seed, int(rng.integers(1, 20)))
        histogram, steps = histogram + more, steps + taken
    assert events == []
    assert (histogram[1:6] > 0).all()  # acceptance did vary

    jax.jit(lambda x: x * 3 + seed)(jnp.ones(3))
    assert set(events) == set(COMPILING)  # the listener does hear
    jax.monitoring.unregister_event_duration_listener(listener)


def test_no_transfer_inside_a_slice():
    target, params = make_model()
    prompts = random_prompts((5, 9, 2, 7))
    state = prefilled(target, params, prompts, limits=[60] * 4)
    max_steps = jax.device_put(jnp.int32(50))
    with jax.transfer_guard("disallow"):
        state = decode_slice(target, params, PromptLookup(4), state, max_steps)
        with pytest.raises(Exception, match=r"[Dd]isallowed host-to-device transfer"):
            decode_slice(target, params, PromptLookup(4), state, np.int32(50))
    assert int(state.steps) > 5


def start(mesh, num_logprobs=0):
    target, params = make_model(DISTINCT, mesh)
    request = make_request([3] * 4, [12] * 4, eos_ids=[[3]] * 4)
    state = start_state(target, request, capacity=CAPACITY, num_logprobs=num_logprobs)
    cache = state.cache.keys[0]
    return target, params, state, cache.sharding.shard_shape(cache.shape)


def gathered(text, params):
    """Lines that bring shards of a cache, a weight or the vocabulary together, and whether there is any
    other gather."""
    gathers = [i for i in hlo.instructions(text) if i.opcode.startswith(("all-gather", "all-to-all"))]
    weights = [leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    dims_of_many = {CAPACITY, DISTINCT.vocab_size, DISTINCT.vocab_size // 2}
    bad = [
        i.line
        for i in gathers
        if any(dims_of_many & set(dims) for _, dims in i.shapes)
        or any(i.has_shape(shape) for shape in weights)
    ]
    return bad, len(gathers) > len(bad)


@dataclasses.dataclass(frozen=True)
class Lawful:
    """Drafts the root again and again, and says that it drew them from a law: they go through rejection."""

    num_speculative_tokens: int

    def propose(self, state):
        chain = jnp.arange(self.num_speculative_tokens + 1, dtype=jnp.int32)
        root = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)
        tokens = jnp.broadcast_to(root, (root.shape[0], len(chain)))
        law = jax.nn.softmax(jnp.cos(tokens[:, :, None] + jnp.arange(DISTINCT.vocab_size)), axis=-1)
        return Draft(tokens, jnp.broadcast_to(chain - 1, tokens.shape), law)


LOOPS = {
    "lookup": (PromptLookup(4), 0),
    "plain": (NoDraft(), 0),
    "rejection": (Lawful(4), 0),
    "logprobs": (PromptLookup(4), 5),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)], ids=["1x1", "2x2"])
def test_loop_body(mesh, loop):
    """No copy of a cache, nothing that waits for the host, no shard of a cache, weight or vocabulary
    gathered. Sampling is in every program, behind a condition."""
    drafter, num_logprobs = LOOPS[loop]
    target, params, state, cache_shape = start(mesh, num_logprobs)
    text = decode_slice.lower(target, params, drafter, state, jnp.int32(10)).compile().as_text()
    inside = hlo.loop_instructions(text)
    # The reader sees the loop: per layer and for K and V, an update of the cache.
    assert sum(i.has_shape(cache_shape) and i.opcode in ("fusion", "scatter") for i in inside) >= 4
    assert hlo.copies(inside, cache_shape) == []
    host = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")
    assert [i.line for i in inside if i.opcode in host or "callback" in i.line] == []
    bad, others = gathered(text, params)
    assert bad == []
    # The few likeliest tokens of each shard come together; the best one of all is two reductions.
    assert others == (mesh == (2, 2) and num_logprobs > 0)
    assert any(i.opcode.startswith("all-reduce") for i in inside) == (mesh == (2, 2))


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)], ids=["1x1", "2x2"])
def test_prefill_chunk(mesh):
    """The same of a prefill chunk, which runs outside of any loop."""
    target, params, state, cache_shape = start(mesh)
    text = prefill_chunk.lower(target, params, state, jnp.zeros((4, 32), jnp.int32)).compile().as_text()
    assert hlo.copies(hlo.instructions(text), cache_shape) == []
    assert gathered(text, params) == ([], False)


def test_a_copied_cache_would_be_found():
    """Reading the old cache after the new one was written forces a copy, also inside of a branch."""
    shape = (4, 2, CAPACITY, 12)

    def body(carry):
        i, cache = carry

        def overlap():
            written = jax.lax.dynamic_update_slice(cache, jnp.ones((4, 2, 1, 12)), (0, 0, i, 0))
            return jax.lax.dynamic_update_slice(written, cache[:, :, :1] + written[:, :, -1:], (0, 0, 0, 0))

        return i + 1, jax.lax.cond(cache[0, 0, 0, 0] > 2, overlap, lambda: cache)

    @partial(jax.jit, donate_argnums=0)
    def loop(cache):
        return jax.lax.while_loop(lambda carry: carry[0] < 9, body, (0, cache))

    text = loop.lower(jnp.zeros(shape)).compile().as_text()
    inside = hlo.loop_instructions(text)
    assert hlo.copies(inside, shape)
    assert not hlo.copies(inside, (4, 2, CAPACITY, 13))


def test_gathered_caches_and_logits_would_be_found():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "model"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    gather = jax.jit(lambda x: jnp.sin(x), in_shardings=spec, out_shardings=whole)
    text = gather.lower(jnp.zeros((4, 2, CAPACITY, 12))).compile().as_text()
    assert gathered(text, {})[0]
    logits = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None, "model"))
    gather = jax.jit(lambda x: jnp.sort(jnp.sin(x)), in_shardings=logits, out_shardings=logits)
    assert gathered(gather.lower(jnp.zeros((4, 5, 112))).compile().as_text(), {})[0]


def test_a_slice_donates_its_state():
    """The caches are updated in place: the old ones are gone."""
    target, params = make_model()
    state = prefilled(target, params, random_prompts((5,)), limits=[20])
    after = decode_slice(target, params, PromptLookup(4), state, jnp.int32(3))
    assert all(array.is_deleted() for array in state.cache.keys + state.cache.values)
    assert not after.cache.keys[0].is_deleted()
