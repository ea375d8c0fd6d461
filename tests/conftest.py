"""Eight emulated CPU devices for every test, on any machine."""

import os

# Before anything imports JAX: the tests of meshes need more devices than a machine may have.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
