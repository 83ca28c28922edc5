"""The C interface from Python: four sequences that share a page of a paged engine's K/V.

attend.py LIBRARY, where LIBRARY is kernels.cpp compiled to a shared library.
"""
import ctypes as c
import math
import random
import sys

I32, I64, PTR = c.c_int32, c.c_int64, c.c_void_p


class Config(c.Structure):
    _fields_ = [(n, I32) for n in ("version", "head_dim", "value_dim", "num_qo_heads", "num_kv_heads", "kv_type",
                                   "qo_type", "num_threads")] + [("scale", c.c_float), ("accuracy", I32)]


class Tables(c.Structure):
    _fields_ = [("block_table", PTR), ("stride", I64), ("seq_lens", PTR), ("query_start_loc", PTR),
                ("num_sequences", I32)]


class Layer(c.Structure):
    _fields_ = [("k", PTR), ("v", PTR), ("num_pages", I32), ("page_size", I32), ("k_strides", I64 * 3),
                ("v_strides", I64 * 3), ("k_scale", PTR), ("v_scale", PTR), ("scales", I32),
                ("scale_strides", I64 * 2)]


lib = c.CDLL(sys.argv[1])
lib.chunkattn_error.restype = c.c_char_p
lib.chunkattn_attention_create.restype = lib.chunkattn_plan_create.restype = PTR  # else cut to 32 bits
lib.chunkattn_plan_build.argtypes = [PTR, PTR]
lib.chunkattn_run.argtypes = [PTR, PTR, PTR, PTR, PTR, I64, I32, PTR, PTR]
assert lib.chunkattn_c_version() == 3


def must(result):
    if result:
        sys.exit(lib.chunkattn_error().decode())


dim, page, pages, sequences = 64, 16, 5, 4  # one head
k, v, q = ((c.c_float * (rows * dim))(*(random.uniform(-1, 1) for _ in range(rows * dim)))
           for rows in (pages * page, pages * page, sequences))
out = (c.c_float * (sequences * dim))()
table, lens, starts = (I32 * 8)(0, 1, 0, 2, 0, 3, 0, 4), (I32 * 4)(20, 17, 32, 25), (I32 * 5)(0, 1, 2, 3, 4)

attention = lib.chunkattn_attention_create(c.byref(Config(version=3, head_dim=dim, num_qo_heads=1, num_kv_heads=1)))
plan = lib.chunkattn_plan_create(page, pages, -1)
must(not attention or not plan)
strides = (I64 * 3)(page * dim, page * dim, dim)
layer = Layer(c.addressof(k), c.addressof(v), pages, page, strides, strides)
must(lib.chunkattn_plan_build(plan, c.byref(Tables(c.addressof(table), 2, c.addressof(lens), c.addressof(starts), 4))))
must(lib.chunkattn_run(attention, plan, c.byref(layer), None, q, 0, sequences, out, None))

worst = 0
for s in range(sequences):
    places = [(table[2 * s + t // page] * page + t % page) * dim for t in range(lens[s])]
    weights = [math.exp(sum(q[s * dim + i] * k[at + i] for i in range(dim)) / 8) for at in places]
    mean = sum(w * v[at + 7] for w, at in zip(weights, places)) / sum(weights)
    worst = max(worst, abs(mean - out[s * dim + 7]))
print("off by less than 1e-5:", "yes" if worst < 1e-5 else "NO")
sys.exit(worst >= 1e-5)
