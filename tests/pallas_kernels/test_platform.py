from pallas_kernels.platform import LAYOUTS, cache_layout, plain_step_tokens, takes_ragged_experts


def test_layouts():
    assert [cache_layout(p) for p in ("cpu", "gpu", "tpu")] == ["BKSD", "BKSD", "BSKD"]
    assert set(LAYOUTS) == {"BKSD", "BSKD"}


def test_plain_step_is_padded_only_for_a_single_bfloat16_row_on_cpu():
    assert plain_step_tokens("cpu", "bfloat16", 1) == 2
    assert plain_step_tokens("cpu", "bfloat16", 4) == 1
    assert plain_step_tokens("cpu", "float32", 1) == 1
    assert plain_step_tokens("tpu", "bfloat16", 1) == 1


def test_only_prefill_on_tpu_takes_ragged_products():
    assert takes_ragged_experts("tpu", 65) and not takes_ragged_experts("tpu", 64)
    assert not any(takes_ragged_experts(platform, 4096) for platform in ("cpu", "gpu"))
