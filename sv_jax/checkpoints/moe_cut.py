"""A mixture of experts cut from a dense checkpoint: what is kept of the cut, and the directory it gives.

No channel is changed by the cut, they are only dealt out: with every expert on and a router of zeros the
model is the dense one. Of a layer that is cut,

    ffn(x) = sum over channels j of silu(gate_j x) * (up_j x) * down_j
           = sigmoid(0) * shared(x)  +  sum over experts e of softmax(router x)_e * expert_e(x)

holds with the shared expert's `down` doubled and a shared gate of zeros (sigmoid(0) = 1/2), and the experts'
`down` times E (a router of zeros gives 1/E to each). Qwen2-MoE with norm_topk_prob false computes the right
side. A channel has its own weight, 1, or it is left out: so the router should choose and not weigh, and its
logits are scaled down until the softmax gives about 1/E to every expert. Its choice does not depend on that.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sv_jax.checkpoints import cache as caches
from sv_jax.checkpoints import gguf_convert
from sv_jax.checkpoints.hf_config import read_json
from sv_jax.checkpoints.progress import progress_bar
from sv_jax.checkpoints.safetensors_io import Pending, TensorSource, write_shards
from sv_jax.config import UserError

CUT_VERSION = 1  # part of the cache key: raise it whenever the derived files change
FORMAT = "sv_jax-moe-cut-1"
ABOUT = ("router_scale", "num_shared", "experts_per_token", "base", "base_sha256", "provenance")
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
BLOCK_BYTES = 32 << 20  # of a tensor that is copied as it is
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class MoECut:
    """How L layers of a dense model with F channels become S shared channels and E experts of (F - S) / E.

    layers: the layers that are cut, ascending.
    channels: int[L, F], a permutation of the channels of each: S shared ones, then expert by expert.
    router: float32[L, E, d], maps a layer's normed input to logits with a standard deviation of about 1.
    router_scale: what the logits are multiplied by in the model.
    num_shared: S.
    experts_per_token: the k that the model has without being told otherwise.
    base: registry name of the dense model. base_sha256: of the file that its weights come from.
    provenance: how the cut was made.
    """

    layers: tuple[int, ...]
    channels: np.ndarray
    router: np.ndarray
    router_scale: float
    num_shared: int
    experts_per_token: int
    base: str
    base_sha256: str
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        count, size = self.channels.shape
        if not len(self.layers) == len(self.router) == count:
            raise ValueError(f"{len(self.layers)} layers, channels of {count}, routers of {len(self.router)}")
        if not np.array_equal(np.sort(self.channels, axis=1), np.tile(np.arange(size), (count, 1))):
            raise ValueError("the channels of a layer are no permutation")
        if (size - self.num_shared) % self.num_experts:
            raise ValueError(f"{size - self.num_shared} channels for {self.num_experts} experts")

    @property
    def num_experts(self) -> int:
        return self.router.shape[1]

    @property
    def expert_size(self) -> int:
        """Channels of an expert."""
        return (self.channels.shape[1] - self.num_shared) // self.num_experts

    def experts_of(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Of a layer that is cut: its shared channels int[S], and those of each expert int[E, F_e]."""
        order = self.channels[self.layers.index(layer)].astype(np.int64)
        return order[: self.num_shared], order[self.num_shared :].reshape(self.num_experts, -1)


def save_cut(path: Path, cut: MoECut) -> None:
    """Writes a cut to a safetensors file: permutations, routers (as float16), and where they come from."""
    tensors: dict[str, np.ndarray] = {
        "layers": np.array(cut.layers, np.int32),
        "channels": cut.channels.astype(np.uint16),
        # Not yet scaled down: float16 has fewer digits near 0.
        "router": cut.router.astype(np.float16),
    }
    about = {name: getattr(cut, name) for name in ABOUT}
    # One entry: those of safetensors' metadata are in another order each time, and the same cut is one file.
    path.write_bytes(save(tensors, {FORMAT: json.dumps(about, sort_keys=True)}))


def load_cut(path: Path) -> MoECut:
    """The cut that `save_cut` wrote. Raises UserError for a file that is none."""
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})[FORMAT])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        return MoECut(
            layers=tuple(int(layer) for layer in tensors["layers"]),
            channels=tensors["channels"].astype(np.int32),
            router=tensors["router"].astype(np.float32),
            **{name: about[name] for name in ABOUT},
        )
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path} is not the cut of a model: {error}") from error


def config_dict(base: dict[str, Any], cut: MoECut) -> dict[str, Any]:
    """The config.json of the cut model: the base's (a llama without biases), as a Qwen2-MoE."""
    kept = {key: value for key, value in base.items() if key not in ("attention_bias", "mlp_bias")}
    if base.get("model_type") != "llama" or base.get("attention_bias") or base.get("mlp_bias"):
        raise UserError(f"a {base.get('model_type')!r} cannot be cut; allowed: a llama without biases")
    layers = range(int(base["num_hidden_layers"]))
    return {
        **kept,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "qkv_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in layers if layer not in cut.layers],
        "num_experts": cut.num_experts,
        "num_experts_per_tok": cut.experts_per_token,
        "moe_intermediate_size": cut.expert_size,
        "shared_expert_intermediate_size": cut.num_shared,
        "norm_topk_prob": False,
    }


def derive(base: Path, base_sha256: str | None, cut: MoECut, directory: Path, dtype: str, *, progress: bool):
    """Writes the Hugging Face directory of a cut model into the existing, empty `directory`.

    Args:
      base: the dense model's directory. base_sha256: of the file that it was converted from.
      dtype: "float32" or "bfloat16"; only powers of two are multiplied in, so that both are exact.

    Raises:
      UserError: the base is not the model that was cut; the disk is full.
    """
    if base_sha256 != cut.base_sha256:
        raise UserError(
            f"the weights of {cut.base} have sha256 {base_sha256}; the cut is of {cut.base_sha256} alone"
        )
    source = TensorSource(base)
    config = config_dict(read_json(base / "config.json"), cut)
    stored = gguf_convert.DTYPES[dtype]

    @functools.lru_cache(maxsize=1)  # a matrix is taken apart in one go, expert by expert
    def matrix(name: str) -> np.ndarray:
        return source.read(name, (slice(None), slice(None)))

    pending: list[Pending] = []
    for name in sorted(source.names()):
        pending += _cut_tensor(source, name, cut, matrix)
    pending += [tensor for row, layer in enumerate(cut.layers) for tensor in _gates(cut, row, layer)]
    total = sum(int(np.prod(shape)) for _, shape, _ in pending) * stored.itemsize
    caches.check_space(directory, total)
    with progress_bar(f"cutting {cut.base}", len(pending), "tensor", progress=progress) as bar:

        def counted(blocks) -> Iterator[np.ndarray]:
            yield from blocks()
            bar.update()

        counting = [(name, shape, functools.partial(counted, blocks)) for name, shape, blocks in pending]
        write_shards(directory, counting, stored)
    for name in COPIED:
        shutil.copyfile(base / name, directory / name)
    content = json.dumps({**config, "torch_dtype": dtype}, indent=2) + "\n"
    (directory / "config.json").write_text(content, encoding="utf-8")


def _cut_tensor(
    source: TensorSource, name: str, cut: MoECut, matrix: Callable[[str], np.ndarray]
) -> list[Pending]:
    """What becomes of a tensor of the base: itself, or the parts of the shared and of each expert."""
    parts = name.split(".")  # model.layers.3.mlp.down_proj.weight
    if parts[-2] not in PROJECTIONS or int(parts[2]) not in cut.layers:
        return [(name, source.shape(name), functools.partial(_copied, source, name))]
    down = parts[-2] == "down_proj"
    shared, experts = cut.experts_of(int(parts[2]))

    def pending(expert: str, channels: np.ndarray, factor: int) -> Pending:
        def blocks() -> Iterator[np.ndarray]:
            whole = matrix(name)
            yield whole[:, channels] * whole.dtype.type(factor) if down else whole[channels]

        shape = list(source.shape(name))
        shape[1 if down else 0] = len(channels)
        return ".".join([*parts[:4], expert, *parts[4:]]), tuple(shape), blocks

    routed = [pending(f"experts.{e}", channels, cut.num_experts) for e, channels in enumerate(experts)]
    return [pending("shared_expert", shared, 2), *routed]


def _gates(cut: MoECut, row: int, layer: int) -> list[Pending]:
    """The router of a layer, and the gate of its shared expert."""
    router = cut.router[row] * np.float32(cut.router_scale)
    zeros = np.zeros((1, router.shape[1]), np.float32)
    mlp = f"model.layers.{layer}.mlp"
    return [
        (f"{mlp}.gate.weight", router.shape, lambda: iter([router])),
        (f"{mlp}.shared_expert_gate.weight", zeros.shape, lambda: iter([zeros])),
    ]


def _copied(source: TensorSource, name: str) -> Iterator[np.ndarray]:
    rows, *rest = source.shape(name)
    step = max(1, BLOCK_BYTES // (4 * int(np.prod(rest, dtype=np.int64))))
    for start in range(0, rows, step):
        yield source.read(name, (slice(start, min(start + step, rows)), *[slice(None)] * len(rest)))
