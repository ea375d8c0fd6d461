"""Eight emulated CPU devices for every test, on any machine."""

import os
from types import SimpleNamespace

import pytest

# Before anything imports JAX: the tests of meshes need more devices than a machine may have.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
XLA_FLAGS = os.environ.get("XLA_FLAGS", "")
# Most of the time goes into compiling tiny programs; without LLVM's optimiser it is half as long.
os.environ["XLA_FLAGS"] = f"{XLA_FLAGS} --xla_backend_optimization_level=0"

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # reads the flags: what tests start in other processes shall run at full speed
if XLA_FLAGS:
    os.environ["XLA_FLAGS"] = XLA_FLAGS
else:
    del os.environ["XLA_FLAGS"]


@pytest.fixture(scope="module", autouse=True)
def _programs_of_one_module():
    """Compiled programs go with their module: each maps some pieces of memory, a process may have 65,530 of
    them, and XLA ends it with a segmentation fault when none is left."""
    yield
    jax.clear_caches()


@pytest.fixture
def fake(monkeypatch):
    """Puts a fake engine into the command line; `fake.configure(...)` sets up the model that it loads."""
    from sv_jax import generate, sharding
    from tests.fake_engine import FakeModel

    settings: dict = {}
    loaded: list[FakeModel] = []
    asked: list[int] = []

    def load_model(name, *, mesh, lazy, **options):
        assert lazy and asked.pop() == mesh[0] * mesh[1], "devices before the model, weights after the checks"
        loaded.append(FakeModel(mesh, **settings))
        loaded[-1].options = {"model": name, **options}
        return loaded[-1]

    monkeypatch.setattr(generate, "load_model", load_model)
    monkeypatch.setattr(sharding, "ensure_devices", asked.append)
    return SimpleNamespace(configure=settings.update, loaded=loaded, asked=asked)
