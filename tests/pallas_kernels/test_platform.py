import pytest

from pallas_kernels.platform import (
    FEW_TOKENS,
    expert_products,
    heads_per_group,
    lies_by_columns,
    plain_step_tokens,
)


@pytest.mark.parametrize(
    ("platform", "head_dim", "kv_heads", "group"),
    [
        ("cpu", 64, 8, 1),
        ("gpu", 64, 8, 1),
        ("tpu", 64, 8, 2),
        ("tpu", 64, 3, 1),  # does not divide: lanes stay empty
        ("tpu", 96, 8, 4),
        ("tpu", 96, 2, 1),
        ("tpu", 128, 1, 1),
        ("tpu", 256, 4, 1),
    ],
)
def test_heads_lie_side_by_side_where_lanes_would_be_empty(platform, head_dim, kv_heads, group):
    assert heads_per_group(platform, head_dim, kv_heads) == group


def test_plain_step_is_padded_only_for_a_single_bfloat16_row_on_cpu():
    assert plain_step_tokens("cpu", "bfloat16", 1) == 2
    assert plain_step_tokens("cpu", "bfloat16", 4) == 1
    assert plain_step_tokens("cpu", "float32", 1) == 1
    assert plain_step_tokens("tpu", "bfloat16", 1) == 1


def test_experts_multiply_all_tokens_of_a_verify_step_on_tpu_alone():
    assert [expert_products("tpu", n) for n in (1, FEW_TOKENS, FEW_TOKENS + 1)] == [
        "whole",
        "whole",
        "ragged",
    ]
    assert {expert_products(platform, n) for platform in ("cpu", "gpu") for n in (1, 4096)} == {"tiles"}


def test_matrices_lie_by_columns_where_only_that_fills_lanes():
    assert lies_by_columns("tpu", 2048, 75968)  # Qwen3's head, over two chips
    assert not lies_by_columns("tpu", 4096, 64128)  # Llama 3's
    assert not lies_by_columns("tpu", 576, 75968)  # neither does: row by row
    assert not any(lies_by_columns(platform, 2048, 75968) for platform in ("cpu", "gpu"))
