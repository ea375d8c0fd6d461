"""The jitted slice of the decoding loop, compiled for a mesh that need not exist."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.platform import MOST_STEP_TOKENS
from sv_jax.ahead_of_time import buffers, hlo
from sv_jax.ahead_of_time.targets import find_target
from sv_jax.config import DEFAULT_CUTS, Cuts, ModelConfig
from sv_jax.drafts.none import NoDraft
from sv_jax.drafts.prompt_lookup import PromptLookup
from sv_jax.model.transformer import Transformer, abstract_params
from sv_jax.sharding import Sharding, shard_model
from sv_jax.sparsity.config import SparsityConfig
from sv_jax.sparsity.plan import SparsityPlan, make_plan
from sv_jax.speculation.loop import decode_slice
from sv_jax.speculation.request import make_request
from sv_jax.speculation.state import start_state, state_axes
from sv_jax.speculation.types import SpeculationState


@dataclasses.dataclass(frozen=True)
class SliceProgram:
    """What is compiled: propose, verify, accept and commit in one while loop."""

    config: ModelConfig
    platform: str  # tpu:v5e, gpu:h200, ..; see targets
    mesh: tuple[int, int]
    batch: int
    capacity: int  # cache slots per row
    num_speculative_tokens: int  # K; a step verifies T = K + 1 tokens a row
    sparsity: SparsityConfig | None = None
    implementation: str | None = None  # of attention over the cache
    cuts: Cuts = DEFAULT_CUTS
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class CompiledSlice:
    """What the compiler says, per chip."""

    topology: str
    implementation: str  # of attention over the cache in a verify step
    seconds: float  # of compilation, tracing left out
    processor_seconds: float  # of it, on all cores: what a machine with other work does not change
    argument_bytes: int  # weights, cache, the rest of the state
    temporary_bytes: int
    temporary_array_bytes: int | None  # of them, those of arrays (`buffers.array_bytes`); None: not asked
    unaliased_output_bytes: int  # results that are not written over an argument
    collectives: dict[str, int]  # in the loop, by kind
    cache_copies: tuple[str, ...]  # instructions that copy an array with the sizes of a layer's K or V

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes + self.unaliased_output_bytes


def abstract_state(
    target: Transformer, batch: int, capacity: int, sparsity: SparsityPlan | None
) -> SpeculationState:
    """A state as shapes on their shards."""
    request = make_request([1] * batch, [capacity] * batch)
    state = jax.eval_shape(
        lambda request: start_state(target, request, capacity=capacity, sparsity=sparsity), request
    )

    def placed(x: Any, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target.sharding.named(*axes))

    return jax.tree.map(placed, state, state_axes(state))


def lower_slice(program: SliceProgram) -> tuple[Any, SpeculationState, str]:
    """The lowered slice, the shapes of its state, and the compiler's name of the topology.

    Raises:
      UserError: what does not divide, or an unknown platform. CompilerMissing. NotImplementedError: a shape
        that the implementation does not take.
    """
    tokens = program.num_speculative_tokens + 1
    if program.implementation not in (None, "xla") and tokens > MOST_STEP_TOKENS:
        raise NotImplementedError(
            f"{tokens} tokens in a step; allowed with {program.implementation}: up to {MOST_STEP_TOKENS}"
        )
    found = find_target(program.platform, program.mesh[0] * program.mesh[1])
    sharding = shard_model(program.config, found.mesh(program.mesh), program.cuts)
    target = Transformer(program.config, program.dtype, sharding, program.implementation)
    plan = None if program.sparsity is None else make_plan(program.sparsity, program.config)
    state = abstract_state(target, program.batch, program.capacity, plan)
    drafter = PromptLookup(program.num_speculative_tokens) if program.num_speculative_tokens else NoDraft()
    number = _whole(jnp.int32(0), sharding)
    traced = decode_slice.trace(
        target,
        abstract_params(target),
        drafter,
        state,
        number,
        number,
        sparsity=jax.tree.map(lambda x: _whole(x, sharding), plan),
    )
    kind = "tpu" if sharding.platform == "tpu" else "cuda"
    return traced.lower(lowering_platforms=(kind,)), state, found.topology


def _whole(x: jax.Array, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding.named())


def compile_slice(program: SliceProgram, *, arrays: bool = False) -> CompiledSlice:
    """Compiles for the mesh. Raises as `lower_slice`, and RuntimeError where the compiler refuses.

    arrays: whether arrays among the temporaries are told from the rest, by a dump in a temporary folder.
    """
    lowered, state, topology = lower_slice(program)
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, **buffers.DUMP} if arrays else {}
        started, busy = time.perf_counter(), time.process_time()
        compiled = lowered.compile(compiler_options=options)
        seconds, processor_seconds = time.perf_counter() - started, time.process_time() - busy
        assignments = [path.read_text() for path in Path(folder).glob(buffers.DUMPED)]
    memory = compiled.memory_analysis()
    keys = state.cache.keys[0]
    shard = keys.sharding.shard_shape(keys.shape)
    text = compiled.as_text()
    inside = hlo.loop_instructions(text)
    return CompiledSlice(
        topology=topology,
        implementation="pallas_tpu" if hlo.has_kernel(text, "block_sparse_attention") else "xla",
        seconds=seconds,
        processor_seconds=processor_seconds,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        temporary_array_bytes=max(map(buffers.array_bytes, assignments)) if arrays else None,
        unaliased_output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=dict(Counter(hlo.collectives(inside))),
        cache_copies=tuple(hlo.materialised_copies(text, shard)),
    )
