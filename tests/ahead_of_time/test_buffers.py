import pytest

from sv_jax.ahead_of_time.buffers import array_bytes

TEXT = """\
allocation 3: size 4096, parameter 9, shape |bf16[2048]| at ShapeIndex {}:
 value: <1 param.1 @0> (size=4096,offset=0): bf16[2048]{0:T(1024)(128)(2,1)}
allocation 7: size 64, color 2, preallocated-temp:
 value: <2 counter @2> (size=64,offset=0): u32[]{:T(128)S(6)}
allocation 8: size 41472, preallocated-temp:
 value: <3 fusion.1 @0> (size=1000,offset=0): f32[1,250]{1,0:T(1,128)}
 value: <4 fusion.2{1} @0> (size=1000,offset=500): f32[1,250]{1,0:T(1,128)}
 value: <5 copy-start.1{} @0> (size=512,offset=16384): (bf16[64]{0:T(128)S(1)}, bf16[64]{0:T(128)}, u32[])
 value: <6 wide.param.3{} (phi) @0> (size=512,offset=32768): (s32[1,1]{1,0:T(1,128)}, f32[4]{0:T(128)})
 value: <7 late @0> (size=512,offset=40960): f32[128]{0:T(128)}
allocation 9: size 9999, color 1, preallocated-temp:
 value: <8 near @1> (size=9999,offset=0): f32[9]{0:T(128)S(1)}
"""


def test_arrays_of_main_memory_count_where_they_lie():
    """Parameters, other memories and tuples do not; what shares its place counts once."""
    assert array_bytes(TEXT) == 1500 + 512
    gpu = TEXT.replace("allocation 8: size 41472, pre", "allocation 8: size 41472, color 0, pre")
    assert array_bytes(gpu) == 1500 + 512


def test_another_text_is_refused():
    with pytest.raises(ValueError, match="no preallocated temporaries"):
        array_bytes(TEXT.replace("size 41472, preallocated-temp", "size 41472, maybe-live-out"))
