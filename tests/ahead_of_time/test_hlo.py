"""The reader of compiled programs: what it must find, and what it must not take for it."""

from sv_jax.ahead_of_time import hlo

TEXT = """HloModule jit_f, is_scheduled=true

%fused_copy (p: bf16[1,4,64,8]) -> bf16[1,4,64,8] {
  %p = bf16[1,4,64,8]{3,1,2,0} parameter(0)
  ROOT %copy.9 = bf16[1,4,64,8]{3,2,1,0} copy(%p)
}

%fused_read (q: bf16[1,4,64,8]) -> f32[4] {
  %q = bf16[1,4,64,8]{3,1,2,0} parameter(0)
  %copy.8 = bf16[1,4,64,8]{3,2,1,0} copy(%q)
  ROOT %sum = f32[4]{0} reduce(%copy.8)
}

%body (c: bf16[1,4,64,8]) -> bf16[1,4,64,8] {
  %c = bf16[1,4,64,8]{3,2,1,0} parameter(0)
  %early = (bf16[1,4,64,8]{3,2,1,0:T(8,128)S(1)}, bf16[1,4,64,8]{3,2,1,0:T(8,128)}, u32[]) copy-start(%c)
  %read = f32[4]{0} fusion(%c), kind=kLoop, calls=%fused_read
  %relayout = bf16[1,4,64,8]{3,2,1,0} fusion(%c), kind=kLoop, calls=%fused_copy
  %block_sparse_attention.2 = f32[4]{0} custom-call(%c), custom_call_target="tpu_custom_call"
  %gather = f32[8]{0} all-gather-start(%read), dimensions={0}
  %gathered = f32[8]{0} all-gather-done(%gather)
  ROOT %copy.1 = bf16[1,4,64,8]{3,2,1,0} copy(%relayout)
}

ENTRY %main (x: bf16[1,4,64,8]) -> bf16[1,4,64,8] {
  %x = bf16[1,4,64,8]{3,2,1,0} parameter(0)
  ROOT %loop = bf16[1,4,64,8]{3,2,1,0} while(%x), condition=%body, body=%body
}
"""
CACHE = (1, 4, 64, 8)


def test_copies_that_are_written_to_memory():
    found = hlo.materialised_copies(TEXT, CACHE)
    assert len(found) == 2
    assert "calls=%fused_copy" in found[0] and "copy(%relayout)" in found[1]
    assert hlo.materialised_copies(TEXT, (2, 4, 64, 8)) == []


def test_collectives_count_once():
    assert hlo.collectives(hlo.loop_instructions(TEXT)) == ["all-gather"]


def test_kernels_by_name():
    assert hlo.has_kernel(TEXT, "block_sparse_attention")
    assert not hlo.has_kernel(TEXT, "block_sparse")
    assert not hlo.has_kernel(TEXT.replace("tpu_custom_call", "something"), "block_sparse_attention")
