"""vLLM's own attention on CPUs and chunkattn's over the same K/V, one layer, decoding or prefill; alone, in turn.

attention.py [--rounds N] [--threads N] [--kv-heads N] [--cold] [--avx2] [--only TEXT]: median and least processor time of
the process, by shape. vLLM's includes its scheduler metadata, chunkattn's its plan; both are made once a step for all
layers. Beside them what it takes to read this K/V once, by torch.sum: nobody can be faster than the machine reads.
"""
import argparse
import os
import statistics
import time

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--kv-heads", type=int, default=8, help="of 32 query heads")
parser.add_argument("--cold", action="store_true", help="other memory is read before each run, as weights are in a step")
parser.add_argument("--avx2", action="store_true", help="kernels for AVX2 of both (plugin: CHUNKATTN_VLLM_NATIVE=OFF)")
parser.add_argument("--only", default="", help="shapes that have this text")
arguments = parser.parse_args()
if arguments.avx2:
    os.environ["CHUNKATTN_CPU_ISA"] = "avx2"
os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
os.environ["OMP_WAIT_POLICY"] = "passive"

import ctypes

import torch

if arguments.avx2:  # vLLM chooses by this
    torch.cpu._is_avx512_supported = lambda: False
import vllm._custom_ops as ops  # loads its kernels
from chunkattn_vllm import library
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

current_platform.import_kernels()
torch.set_num_threads(arguments.threads)
HEADS, KV_HEADS, DIM, TYPES = 32, arguments.kv_heads, 128, {torch.float32: 0, torch.bfloat16: 2}
other = torch.ones(2**26 if arguments.cold else 0)


def compare(what, sequences, shared, own, dtype, page=128, queries=1):
    what = f"{what}, {HEADS}/{KV_HEADS}, {str(dtype)[6:]}"
    if arguments.only not in what:
        return
    length = shared + own
    columns, common = -(-length // page), shared // page
    table = torch.zeros(sequences, columns, dtype=torch.int32)
    pages = 1 + common
    for s in range(sequences):
        table[s, :common] = torch.arange(1, 1 + common)
        table[s, common:] = torch.arange(pages, pages + columns - common)
        pages += columns - common
    lens = torch.full((sequences,), length, dtype=torch.int32)
    starts = torch.arange(sequences + 1, dtype=torch.int32) * queries
    torch.manual_seed(0)
    key, value = (torch.randn(pages * page, KV_HEADS, DIM).to(dtype) for _ in range(2))
    q = torch.randn(sequences * queries, HEADS, DIM).to(dtype)
    slots = torch.arange(pages * page)
    scale, isa = DIM**-0.5, _get_attn_isa(dtype, page, DIM, "auto")

    def halves():
        memory = torch.zeros(pages, KV_HEADS, page, 2 * DIM, dtype=dtype)
        return memory.view(pages, KV_HEADS, 2 * page, DIM).chunk(2, dim=2)

    k1, v1 = halves()
    ops.cpu_attn_reshape_and_cache(key, value, k1, v1, slots, isa)
    k2, v2 = halves()
    out1, out2 = torch.zeros_like(q), torch.zeros_like(q)
    attention = library.attention(DIM, HEADS, KV_HEADS, TYPES[dtype], scale, arguments.threads)
    plan, layer = library.Plan(page, pages), library.layer(k2, v2)
    row = KV_HEADS * DIM
    library.check(library.load().chunkattn_write_slots(
        attention, ctypes.byref(layer), slots.data_ptr(), key.data_ptr(), row, value.data_ptr(), row, len(slots)))

    def stock():
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=sequences, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, seq_lens=lens, dtype=dtype,
            query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True)
        ops.cpu_attention_with_kv_cache(
            query=q, key_cache=k1, value_cache=v1, output=out1, query_start_loc=starts, seq_lens=lens, scale=scale,
            causal=True, alibi_slopes=None, sliding_window=-1, block_table=table, softcap=0, scheduler_metadata=metadata,
            s_aux=None)

    def ours():
        plan.build(table, lens, starts, sequences)
        library.check(library.load().chunkattn_run(
            attention, plan.handle, ctypes.byref(layer), None, q.data_ptr(), 0, len(q), out2.data_ptr(), None))

    as_much = torch.randn((pages - 1) * page * KV_HEADS * DIM * 2 * dtype.itemsize // 4)

    def read():
        as_much.sum()

    times = {stock: [], ours: [], read: []}
    for _ in range(arguments.rounds):
        for run in times:
            other.sum()
            start = time.process_time()
            run()
            times[run].append(1e3 * (time.process_time() - start))
    (m1, l1), (m2, l2), (m3, _) = ((statistics.median(t[1:]), min(t)) for t in times.values())
    apart = (out1.float() - out2.float()).abs().max().item()
    print(f"| {what} | {m1:.2f} ({l1:.2f}) | {m2:.2f} ({l2:.2f}) | {m1 / m2:.2f} ({l1 / l2:.2f}) | "
          f"{m3:.2f}: {4e-6 * len(as_much) / m3:.0f} GB/s | {apart:.0e} |", flush=True)


print(f"vLLM's kernels: {_get_attn_isa(torch.bfloat16, 128, DIM, 'auto')}{' for AVX2' if arguments.avx2 else ''}; chunkattn's: "
      + library.load().chunkattn_describe(
          library.attention(DIM, HEADS, KV_HEADS, 2, DIM**-0.5, arguments.threads)).decode().split(",")[0])
print("| one layer | vLLM's own, ms: median (least) | chunkattn, ms | ratio | reading alone, ms | largest difference |\n"
      + "| --- " * 6 + "|")
for dtype in (torch.bfloat16, torch.float32):
    compare("32 sequences, 2,048 shared and 64 own", 32, 2048, 64, dtype)
    compare("32 sequences, 4,096 shared and 64 own", 32, 4096, 64, dtype)
    compare("32 sequences, 2,048 own", 32, 0, 2048, dtype)
    compare("1 sequence, 2,048", 1, 0, 2048, dtype)
compare("prefill of 512 behind 2,048", 1, 0, 2560, torch.bfloat16, queries=512)
