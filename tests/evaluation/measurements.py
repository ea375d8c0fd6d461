"""Made-up measurements, for the tests of what is made of them."""

from __future__ import annotations

from typing import Any

from sv_jax.evaluation.drift import DriftSetting, Measurement
from sv_jax.sparsity.config import AttentionSparsity


def setting(
    selector: str = "mean", keep: float = 0.25, block_size: int = 32, **attention: Any
) -> DriftSetting:
    return DriftSetting(selector, AttentionSparsity(keep=keep, block_size=block_size, **attention))


def measurement(
    case: str, under: DriftSetting, *, agreeing: int = 9, kl: float = 0.5, **more: Any
) -> Measurement:
    """10 positions of "copy/a/96" and the like; the case's middle part is the document."""
    kind, document, context = case.split("/")[:3]
    values: dict[str, Any] = {
        "positions": 10,
        "agreeing_prefix": 3,
        "steps": 2,
        "kv_bytes": 25_000.0,
        "dense_kv_bytes": 100_000.0,
        "found": None,
        "dense_found": None,
    }
    values = {**values, "agreeing": agreeing, "kl": kl, **more}
    return Measurement(case, kind, document, int(context), under, **values)
