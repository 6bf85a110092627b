"""Rows that are no request's, and layers that attend one after the other, in kernels of a file."""

import pytest
from nights import by_night

from kvfuzz.errors import Exit

DECODE = """
import torch
from kvfuzz.kernels.builtin.paged_attention import paged_attention as right


def paged_attention(
    query, key_cache, value_cache, output, block_table, seq_lens, k_scale, v_scale, softmax_scale,
    kv_cache_layout="NHD", window=0, softcap=0.0, sinks=None, alibi_slopes=None,
):
    right(
        query, key_cache, value_cache, output, block_table, seq_lens, k_scale, v_scale,
        softmax_scale, kv_cache_layout, window, softcap, None, sinks, alibi_slopes,
    )
    idle = torch.nonzero(seq_lens == 0).flatten() + {behind}
    output[idle[idle < len(output)]] = torch.nan
"""

SHARED = """
from kvfuzz.kernels.builtin.shared_kv_attention import shared_kv_attention as right

LAST = {{}}


def shared_kv_attention(
    query, key, value, key_cache, value_cache, output, block_table, query_start_loc, seq_lens,
    max_query_len, max_seq_len, k_scale, v_scale, softmax_scale, kv_cache_layout="NHD", window=0,
    softcap=0.0, sinks=None, alibi_slopes=None,
):
    step = (key_cache.data_ptr(), block_table.data_ptr(), seq_lens.data_ptr(), output.shape)
    if {keeps} and LAST.get("step") == step:
        query = LAST["query"]
    LAST.update(step=step, query=query.clone())
    right(
        query, None, None, key_cache, value_cache, output, block_table, query_start_loc, seq_lens,
        max_query_len, max_seq_len, k_scale, v_scale, softmax_scale, kv_cache_layout, window,
        softcap, None, sinks, alibi_slopes,
    )
"""


def _file(tmp_path, text, **chosen):
    path = tmp_path / "kernels.py"
    path.write_text(text.format(**chosen))
    return path


@pytest.mark.parametrize(
    ("keeps", "expected"), [by_night("False", Exit.CLEAN), ("True", Exit.FINDING)]
)
def test_what_one_layer_leaves_to_the_next_of_its_step_shows(tmp_path, campaign, keeps, expected):
    path = _file(tmp_path, SHARED, keeps=keeps)
    code, found, _ = campaign(
        f"{path}:shared_kv_attention", where="shared_by=2|3,reach=near", max_cases=10
    )
    assert code == expected
    assert {each.seed.property for each in found} <= {"oracle"}


@pytest.mark.parametrize(("behind", "expected"), [(0, Exit.CLEAN), (1, Exit.FINDING)])
def test_a_decode_may_leave_anything_in_the_row_of_an_idle_request_alone(
    tmp_path, campaign, behind, expected
):
    path = _file(tmp_path, DECODE, behind=behind)
    where = "idle=some,row_count=more,reach=near"
    code, found, _ = campaign(f"{path}:paged_attention", where=where, max_cases=10)
    assert code == expected
    assert {each.seed.property for each in found} <= {"frame"}
