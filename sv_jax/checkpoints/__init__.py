"""Models by name, directory, GGUF file or hub id: resolve them, load parameters, tokenize."""

from sv_jax.checkpoints.cache import default_cache_directory
from sv_jax.checkpoints.loader import load_params
from sv_jax.checkpoints.registry import REGISTRY
from sv_jax.checkpoints.resolve import Checkpoint, resolve
from sv_jax.checkpoints.tokenizer import Tokenizer

__all__ = ["REGISTRY", "Checkpoint", "Tokenizer", "default_cache_directory", "load_params", "resolve"]
