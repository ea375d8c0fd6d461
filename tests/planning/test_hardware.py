"""The table of chips."""

import os
import re
import subprocess
import sys

import pytest

from sv_jax.config import UserError
from sv_jax.planning.hardware import PLATFORMS, smallest_topology


@pytest.mark.parametrize(
    ("platform", "chips", "expected"),
    [
        ("tpu:v5e", 1, ("v5e:1x1", 1)),
        ("tpu:v5e", 2, ("v5e:2x2", 4)),
        ("tpu:v5e", 8, ("v5e:4x2", 8)),
        ("tpu:v6e", 8, ("v6e:2x4", 8)),
        ("tpu:v6e", 9, ("v6e:4x4", 16)),
        ("tpu:v5e", 256, ("v5e:16x16", 256)),
        ("tpu:v5p", 3, ("v5p:2x2x1", 4)),
        ("tpu:v5p", 8, ("v5p:2x2x2", 8)),
        ("gpu:h100", 12, None),
    ],
)
def test_the_smallest_topology(platform, chips, expected):
    assert smallest_topology(platform, chips) == expected


def test_more_chips_than_there_are():
    with pytest.raises(
        UserError, match=r"a mesh of 257 chips is larger than any tpu:v5e .*allowed: up to 256"
    ):
        smallest_topology("tpu:v5e", 257)


def test_published_figures():
    table = {name: (chip.bandwidth / 1e9, chip.matrix_rate / 1e12) for name, chip in PLATFORMS.items()}
    assert table == {
        "tpu:v5e": (819, 197),
        "tpu:v6e": (1638, 918),
        "tpu:v5p": (2765, 459),
        "gpu:h100": (3350, 989),
        "gpu:h200": (4800, 989),
    }
    usable = {name: chip.memory / 2**30 for name, chip in PLATFORMS.items()}
    assert usable["tpu:v5e"] == 15.75 and usable["tpu:v6e"] == 31.25
    assert usable["gpu:h200"] * 2**30 == 141e9


@pytest.mark.parametrize("name", [name for name in PLATFORMS if name.startswith("tpu")])
def test_topologies_are_of_their_generation_and_grow(name):
    sizes = [smallest_topology(name, 1)[1]]
    while (size := sizes[-1] + 1) <= 256:
        topology, chips = smallest_topology(name, size)
        assert re.fullmatch(rf"{name.split(':')[1]}:\d+(x\d+)+", topology)
        sizes.append(chips)
    assert sizes == sorted(set(sizes)) and sizes[-1] >= 256


def test_the_compiler_knows_the_topologies():
    """By libtpu itself, where it is installed, in a process that has not loaded it."""
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    program = (
        "from jax.experimental import topologies\n"
        "from sv_jax.planning.hardware import PLATFORMS, smallest_topology\n"
        "for platform, chip in PLATFORMS.items():\n"
        "    for name in chip.topologies:\n"
        "        one = name.endswith((':1x1', ':1x1x1'))\n"
        "        bounds = {'chips_per_host_bounds': [1, 1, 1]} if one else {}\n"
        "        got = topologies.get_topology_desc(platform='tpu', topology_name=name, **bounds)\n"
        "        size = len(got.devices)\n"
        "        assert smallest_topology(platform, size) == (name, size), (name, size)\n"
        "        print(name)\n"
    )
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-c", program]
    got = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert got.returncode == 0, got.stderr
    assert len(got.stdout.split()) == sum(len(chip.topologies) for chip in PLATFORMS.values())
