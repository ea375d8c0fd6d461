"""A model's architecture without its weights: what can be known before anything is downloaded."""

from __future__ import annotations

from pathlib import Path

from sv_jax.checkpoints import cache as caches
from sv_jax.checkpoints.hf_config import model_config, read_config, read_json
from sv_jax.checkpoints.registry import CONFIGS, NAMES
from sv_jax.checkpoints.resolve import find_fetched
from sv_jax.config import ModelConfig, UserError


def find_config(model: str, *, cache_directory: Path | None = None) -> tuple[ModelConfig, str]:
    """The config that `model` names, and where it comes from, in a few words. Nothing is fetched or opened.

    Args:
      model: a packaged config (`registry.CONFIGS`), a Hugging Face directory or its config.json, or a name
        of the registry that an earlier start has fetched: their configs travel inside of the weights' file.
      cache_directory: where fetched models are; None: `default_cache_directory()`.

    Raises:
      UserError: there is no such config here, or it is not supported (see `hf_config.model_config`).
    """
    path = Path(model).expanduser()
    if model in CONFIGS:
        return model_config(read_json(CONFIGS[model])), "packaged config"
    if model in NAMES:
        cache = Path(cache_directory or caches.default_cache_directory()).expanduser()
        if (found := find_fetched(model, cache)) is None:
            raise UserError(
                f"model {model!r} has its config inside of its weights, which are not fetched yet; allowed: "
                f"{_allowed()}, or to run it once"
            )
        return found.config, found.provenance
    if path.is_dir():
        return read_config(path), "local directory"
    if path.is_file() and path.suffix == ".json":
        return model_config(read_json(path)), "local file"
    raise UserError(f"model {model!r} is no config that is here; allowed: {_allowed()}")


def _allowed() -> str:
    return f"a Hugging Face directory, a config.json, {', '.join(CONFIGS)}"
