"""GGUF file -> Hugging Face directory, once: dequantise, undo llama.cpp's renaming and row order."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sv_jax.checkpoints import cache as caches
from sv_jax.checkpoints import gguf_config, gguf_tokenizer, safetensors_io
from sv_jax.checkpoints.gguf_file import GgufFile
from sv_jax.checkpoints.gguf_names import ARCHITECTURES, Architecture, hugging_face_name
from sv_jax.checkpoints.progress import progress_bar
from sv_jax.config import UserError

CONVERTER_VERSION = 1  # part of the cache key: raise it whenever the converted files change
DTYPES = {"float32": safetensors_io.DTYPES["F32"], "bfloat16": safetensors_io.DTYPES["BF16"]}
TIED_TOLERANCE = 0.3  # relative difference of two quantisations of one matrix; unrelated ones differ by 1.4


def interleaved_to_halves(rows: int, heads: int) -> np.ndarray:
    """Where each Hugging Face row of a query or key matrix lies in a `llama` GGUF, [rows].

    Per head llama.cpp stores RoPE pairs side by side (0 0' 1 1' 2 2'), Hugging Face in two halves
    (0 1 2 0' 1' 2').
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def convert(path: Path, directory: Path, dtype: str, *, title: str, progress: bool = True) -> None:
    """Write the Hugging Face directory of the GGUF file `path` into the existing, empty `directory`.

    dtype: "float32" or "bfloat16". title: shown in the progress bar.
    Raises UserError for what cannot be converted: architecture, tokenizer, rope scaling, tensor types,
    tensors without a name in the architecture's table.
    """
    file = GgufFile(path)
    architecture = ARCHITECTURES[gguf_config.architecture_name(file.metadata)]
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{path} lacks the tensor token_embd.weight")
    source_of, tied = _sources(file)
    vocab_size = file.shape(source_of["model.embed_tokens.weight"])[0]
    config = gguf_config.config_dict(file.metadata, set(file.tensors), vocab_size, tied=tied)
    factors = next(file.blocks("rope_freqs.weight")) if "rope_freqs.weight" in file.tensors else None
    config["rope_scaling"] = gguf_config.rope_scaling(file.metadata, config, factors)
    config["torch_dtype"] = dtype
    tokenizer, tokenizer_config = gguf_tokenizer.build(file.metadata)

    bar = progress_bar(f"dequantising {title}", len(source_of), "tensor", progress=progress)
    pending = _pending(file, architecture, source_of, config, bar)
    caches.check_space(directory, sum(math.prod(shape) for _, shape, _ in pending) * DTYPES[dtype].itemsize)
    with bar:
        safetensors_io.write_shards(directory, pending, DTYPES[dtype])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    _write_json(directory / "generation_config.json", gguf_config.generation_config(file.metadata))
    _write_json(directory / "config.json", config)


def _pending(
    file: GgufFile, architecture: Architecture, source_of: dict[str, str], config: dict[str, Any], bar: tqdm
) -> list[safetensors_io.Pending]:
    """What is to be written: per tensor its name, shape, and blocks in Hugging Face's row order."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    pending: list[safetensors_io.Pending] = []
    for name, stored in source_of.items():
        shape, part = file.shape(stored), name.split(".")[-2]
        permuted = architecture.permuted and part in heads
        order = interleaved_to_halves(shape[0], heads[part]) if permuted else None
        pending.append((name, shape, functools.partial(_counted, file, stored, order, bar)))
    return pending


def _counted(file: GgufFile, stored: str, order: np.ndarray | None, bar: tqdm) -> Iterator[np.ndarray]:
    yield from file.blocks(stored, order)
    bar.update()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sources(file: GgufFile) -> tuple[dict[str, str], bool]:
    """({Hugging Face name: GGUF name}, whether head and embedding are tied)."""
    architecture = ARCHITECTURES[file.metadata["general.architecture"]]
    used, skipped = architecture.tied_duplicate
    names = {name: hugging_face_name(architecture, name) for name in file.tensors}
    unknown = sorted(name for name, to in names.items() if to is None and name not in architecture.skipped)
    if unknown:
        names_of = ", ".join(unknown[:10])
        raise UserError(
            f"{file.path.name} holds {len(unknown)} tensors without a place in the model: {names_of}"
        )
    sources = {to: name for name, to in names.items() if to is not None}
    tied = used not in file.tensors
    if not tied and _same_matrix(file, used, skipped):
        tied = True
        del sources["lm_head.weight"]
        sources["model.embed_tokens.weight"] = used
    return sources, tied


def _same_matrix(file: GgufFile, one: str, other: str) -> bool:
    """Whether two tensors are quantisations of one matrix, judged on rows spread over it.

    GGUF does not say whether embeddings are tied; some converters write the shared matrix twice.
    """
    if file.shape(one) != file.shape(other):
        return False
    rows = np.unique(np.linspace(0, file.shape(one)[0] - 1, 256).astype(np.int64))
    a, b = file.rows(one, rows), file.rows(other, rows)
    return float(np.linalg.norm(a - b)) <= TIED_TOLERANCE * float(np.linalg.norm(a))
