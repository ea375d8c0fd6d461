"""Speculative decoding with sparse verification, in JAX.

    import sv_jax
    model = sv_jax.load_model("smollm2-135m")
    result = model.generate(["The capital of France is"], max_new_tokens=32)

The jitted functions of the loop are in `sv_jax.speculation`; `model.target` and `model.params` are what they
take.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sv_jax.config import UserError
    from sv_jax.engine import GenerationResult, LanguageModel, load_model
    from sv_jax.sampling_params import SamplingParams
    from sv_jax.sparsity.config import AttentionSparsity, SparsityConfig

__all__ = [
    "AttentionSparsity",
    "GenerationResult",
    "LanguageModel",
    "SamplingParams",
    "SparsityConfig",
    "UserError",
    "load_model",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # JAX is imported when it is used, not for --help.
    if name == "UserError":
        from sv_jax.config import UserError

        return UserError
    if name == "SamplingParams":
        from sv_jax.sampling_params import SamplingParams

        return SamplingParams
    if name in ("AttentionSparsity", "SparsityConfig"):
        import sv_jax.sparsity.config

        return getattr(sv_jax.sparsity.config, name)
    if name in __all__:
        import sv_jax.engine

        return getattr(sv_jax.engine, name)
    raise AttributeError(f"module 'sv_jax' has no attribute {name!r}")
