"""SamplingParams: what is accepted, refused and by default."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import sv_jax
from sv_jax.config import UserError
from sv_jax.sampling_params import RANGES, SamplingParams

GOOD = {
    "temperature": [0, 0.7, 1, 100.0],
    "top_k": [0, 1, 2**31 - 1],
    "top_p": [1e-9, 0.5, 1],
    "min_p": [0, 0.05, 1.0],
    "seed": [0, 2**32 - 1],
    "repetition_penalty": [1e-3, 1, 1.3],
    "presence_penalty": [-2, 0.5, 2],
    "frequency_penalty": [-2.0, 0, 2.0],
}
BAD = {
    "temperature": [-0.1, math.nan, math.inf, "1", None, True, 10**400, 1e39],
    "top_k": [-1, 1.0, True, "40", 2**31],
    "top_p": [0, -0.5, 1.01, math.nan],
    "min_p": [-0.01, 1.5, math.inf, math.nan],
    "seed": [-1, 2**32, 0.0, 10**400],
    "repetition_penalty": [0, -1.0, math.nan, math.inf],
    "presence_penalty": [-2.01, 2.01, math.nan],
    "frequency_penalty": [-3, 3, -math.inf],
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


def test_tables_name_every_field():
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert names == list(RANGES) == list(GOOD) == list(BAD)


def test_default_is_greedy_without_penalties():
    assert SamplingParams().greedy and not SamplingParams(temperature=0.1).greedy
    assert dataclasses.astuple(SamplingParams()) == (0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("name, value", cases(GOOD))
def test_good_values(name, value):
    got = getattr(SamplingParams(**{name: value}), name)
    assert got == value and type(got) is RANGES[name].type


@pytest.mark.parametrize("name, value", cases(BAD))
def test_bad_values_are_named_with_what_is_allowed(name, value):
    with pytest.raises(UserError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} {value!r} is not allowed; allowed: {RANGES[name].allowed}"


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3))
    assert (type(params.temperature), type(params.top_k)) == (float, int)
    with pytest.raises(UserError):
        SamplingParams(top_k=np.float32(3))


def test_equal_and_hashed_by_value():
    assert SamplingParams(temperature=1) == SamplingParams(temperature=1.0)
    assert len({SamplingParams(temperature=1), SamplingParams(temperature=1.0)}) == 1


def test_is_part_of_the_package():
    assert sv_jax.SamplingParams is SamplingParams
