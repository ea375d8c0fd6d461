"""Eight emulated CPU devices for every test, on any machine."""

import os

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
