"""Models of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from sv_jax.engine import LanguageModel, language_model, load_model
from tests.engine import tiny_directory


@pytest.fixture(scope="session", autouse=True)
def no_compilation_cache():
    """load_model would set it for the whole process, other tests included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "enable_compilation_cache", lambda directory: None)
        yield


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """load_model for a new tiny directory; `write` has options for tiny_directory.write."""

    def make(*, write: dict | None = None, **options) -> LanguageModel:
        folder: Path = tmp_path_factory.mktemp("model")
        directory = tiny_directory.write(folder / "hf", **(write or {}))
        return load_model(str(directory), cache_directory=folder / "cache", progress=False, **options)

    return make


@pytest.fixture(scope="session")
def model(load) -> LanguageModel:
    """Context 1100, no EOS id, one device, float32."""
    return load()
