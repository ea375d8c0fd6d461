"""Why `Linear` multiplies as it does: weights times few vectors, in the orientations and dtypes there are.

    python scripts/bench_linear.py

Each variant streams the weights of several layers once per call; variants are interleaved, figures are
medians in GB/s of weights read. "ours" is `sv_jax.model.layers.multiply`: weights [in, out] on the right and
a float32 result. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sv_jax.model.layers import multiply

WEIGHT_BYTES = 120e6  # per call: beyond the caches of most machines


def dot(left: jax.Array, right: jax.Array, axes: tuple[int, int], result: str | None) -> jax.Array:
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(left, right, contract, preferred_element_type=result)


# (multiply x [T, in] with w, whether w is transposed to [in, out])
VARIANTS: dict[str, tuple[Callable[[jax.Array, jax.Array], jax.Array], bool]] = {
    "ours": (lambda x, w: multiply(x, w), True),
    "weights on the left": (lambda x, w: dot(w, x, (0, 1), "float32").T, True),
    "weights [out, in]": (lambda x, w: dot(x, w, (1, 1), "float32"), False),
    "[out, in] on the left": (lambda x, w: dot(w, x, (1, 1), "float32").T, False),
    "result in the weights' dtype": (lambda x, w: dot(x, w, (1, 0), None), True),
}


def bench(dtype: str, shape: tuple[int, int], tokens: int, rounds: int) -> dict[str, float]:
    """GB/s per variant for weights [out, in] = shape and T = tokens."""
    layers = max(2, int(WEIGHT_BYTES / (shape[0] * shape[1] * jnp.dtype(dtype).itemsize)))
    weights = [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(layers)]
    transposed = [jnp.array(w.T) for w in weights]
    x = jax.random.normal(jax.random.key(99), (tokens, shape[1]), dtype)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    runs = {
        # x + i: a product that does not depend on its layer would be computed once.
        name: jax.jit(lambda x, ws, f=function: [f(x + i, w) for i, w in enumerate(ws)])
        for name, (function, _) in VARIANTS.items()
    }
    for round_number in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run(x, transposed if VARIANTS[name][1] else weights))
            if round_number:  # the first one compiles
                times[name].append(time.perf_counter() - started)
    size = sum(w.nbytes for w in weights) / 1e9
    return {name: round(size / statistics.median(values), 2) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rows = []
    for dtype in ("float32", "bfloat16"):
        for shape in ((1536, 576), (576, 1536), (49152, 576)):
            for tokens in (1, 2, 8, 16, 256):
                row = {"dtype": dtype, "out_in": shape, "tokens": tokens}
                rows.append({**row, "gb_per_second": bench(dtype, shape, tokens, arguments.rounds)})
                print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({"platform": jax.default_backend(), "rows": rows}))


if __name__ == "__main__":
    main()
