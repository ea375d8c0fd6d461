from pallas_kernels.platform import LAYOUTS, cache_layout, plain_step_tokens


def test_layouts():
    assert [cache_layout(p) for p in ("cpu", "gpu", "tpu")] == ["BKSD", "BKSD", "BSKD"]
    assert set(LAYOUTS) == {"BKSD", "BSKD"}


def test_plain_step_is_padded_only_for_a_single_bfloat16_row_on_cpu():
    assert plain_step_tokens("cpu", "bfloat16", 1) == 2
    assert plain_step_tokens("cpu", "bfloat16", 4) == 1
    assert plain_step_tokens("cpu", "float32", 1) == 1
    assert plain_step_tokens("tpu", "bfloat16", 1) == 1
