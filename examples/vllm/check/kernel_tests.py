"""vLLM's own tests of its attention on CPUs, of chunkattn instead: a plugin of pytest, for the source of vllm of PyPI.

cd vllm-0.32.0/tests/kernels/attention
PYTHONPATH=.../examples/vllm/check python -m pytest --noconftest -p kernel_tests test_cpu_attn.py -k "paged_kv and auto"
What chunkattn does not take is left to vLLM's own functions (fp8, heads without kernels, encoders) or, if it has stored
K/V already, skipped (ALiBi with a window, attention that is not causal).
"""
import ctypes

import pytest
import torch
import vllm._custom_ops as ops
from chunkattn_vllm import library

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
stock = {name: getattr(ops, name) for name in ("cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache")}
calls = {"chunkattn": 0, "vLLM": 0}


def attention(tensor, num_qo_heads, num_kv_heads, scale, options):
    """None: it is left to vLLM's own."""
    if options or tensor.dtype not in TYPES:
        return None
    try:
        return library.attention(tensor.shape[-1], num_qo_heads, num_kv_heads, TYPES[tensor.dtype], scale,
                                 torch.get_num_threads())
    except library.Error:
        return None


def write(key, value, key_cache, value_cache, slot_mapping, isa, **options):
    ours = attention(key, key.shape[1], key.shape[1], 1.0, options)
    if ours is None:
        return stock["cpu_attn_reshape_and_cache"](key, value, key_cache, value_cache, slot_mapping, isa, **options)
    library.check(library.load().chunkattn_write_slots(
        ours, ctypes.byref(library.layer(key_cache, value_cache)), slot_mapping.data_ptr(), key.data_ptr(),
        key.stride(0), value.data_ptr(), value.stride(0), len(slot_mapping)))


def run(query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, alibi_slopes, sliding_window,
        block_table, softcap, scheduler_metadata, s_aux, dynamic_causal=None, **options):
    ours = attention(query, query.shape[1], key_cache.shape[1], scale, options)
    if ours is not None and (not causal or (alibi_slopes is not None and sliding_window > 0)):
        pytest.skip("chunkattn takes no ALiBi with a window, and attention that is causal alone")
    calls["vLLM" if ours is None else "chunkattn"] += 1
    if ours is None:
        return stock["cpu_attention_with_kv_cache"](
            query=query, key_cache=key_cache, value_cache=value_cache, output=output, query_start_loc=query_start_loc,
            seq_lens=seq_lens, scale=scale, causal=causal, alibi_slopes=alibi_slopes, sliding_window=sliding_window,
            block_table=block_table, softcap=softcap, scheduler_metadata=scheduler_metadata, s_aux=s_aux,
            dynamic_causal=dynamic_causal, **options)
    plan = library.Plan(key_cache.shape[2], key_cache.shape[0])
    plan.build(block_table, seq_lens, query_start_loc, len(seq_lens))
    tables = [None if t is None else t.to(torch.float32).contiguous() for t in (s_aux, alibi_slopes)]
    variant = library.Variant(max(sliding_window, 0), softcap, *(None if t is None else t.data_ptr() for t in tables))
    library.check(library.load().chunkattn_run(
        ours, plan.handle, ctypes.byref(library.layer(key_cache, value_cache)), ctypes.byref(variant), query.data_ptr(),
        query.stride(0), len(query), output.data_ptr(), None))


ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache = write, run


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"attention computed by chunkattn: {calls['chunkattn']} times, by vLLM: {calls['vLLM']}")
