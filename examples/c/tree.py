"""An engine loop from Python: two prompts share 40 tokens, and each gets five more.

tree.py LIBRARY, where LIBRARY is kernels.cpp compiled to a shared library.
"""
import ctypes as c
import math
import random
import sys

I32, I64, U64, PTR = c.c_int32, c.c_int64, c.c_uint64, c.c_void_p


class TreeConfig(c.Structure):
    _fields_ = [("version", I32), ("chunk_size", I32), ("max_chunks", I64)] + [
        (n, I32) for n in ("sharing", "min_run", "no_retention", "by_priority", "learns", "fair")] + [
        (n, I64) for n in ("high_watermark", "low_watermark", "max_pinned", "ttl")]  # fmt: skip


class Config(c.Structure):
    _fields_ = [(n, I32) for n in ("version", "head_dim", "value_dim", "num_qo_heads", "num_kv_heads", "kv_type",
                                   "qo_type", "num_threads")] + [("scale", c.c_float), ("accuracy", I32)]


class Layer(c.Structure):
    _fields_ = [("k", PTR), ("v", PTR), ("num_pages", I32), ("page_size", I32), ("k_strides", I64 * 3),
                ("v_strides", I64 * 3), ("k_scale", PTR), ("v_scale", PTR), ("scales", I32),
                ("scale_strides", I64 * 2)]


class Row(c.Structure):
    _fields_ = [("sequence", U64)] + [
        (n, I32) for n in ("index", "position", "first_row", "num_rows", "num_drafts", "has_output")]


class Added(c.Structure):
    _fields_ = [("reason", I32), ("reserved", I32), ("waits_for", U64), ("blocked_index", I64), ("row", Row)]


lib = c.CDLL(sys.argv[1])
lib.chunkattn_error.restype = c.c_char_p
for name in ("attention_create", "tree_create", "step_begin", "step_plan_create"):
    getattr(lib, f"chunkattn_{name}").restype = PTR  # else cut to 32 bits
for name in ("step_num_rows", "step_rows"):
    getattr(lib, f"chunkattn_{name}").restype = I64
assert lib.chunkattn_c_version() == 3


def must(succeeded):
    if not succeeded:
        raise RuntimeError(lib.chunkattn_error().decode())


def call(name, *arguments):
    must(getattr(lib, f"chunkattn_{name}")(*arguments) == 0)


def made(name, *arguments):
    got = getattr(lib, f"chunkattn_{name}")(*arguments)
    must(got)
    return PTR(got)


def floats(count, values=()):
    data = (c.c_float * count)()
    data[:len(values)] = values
    return data


DIM, CHUNK, CHUNKS = 64, 16, 32
k_memory, v_memory = floats(CHUNKS * CHUNK * DIM), floats(CHUNKS * CHUNK * DIM)
strides = (I64 * 3)(CHUNK * DIM, CHUNK * DIM, DIM)
layer = Layer(c.cast(k_memory, PTR), c.cast(v_memory, PTR), CHUNKS, CHUNK, strides, strides)
attention = made("attention_create", c.byref(Config(version=3, head_dim=DIM, num_qo_heads=1, num_kv_heads=1)))
tree = made("tree_create", c.byref(TreeConfig(version=3, chunk_size=CHUNK, max_chunks=CHUNKS)))
plan = made("step_plan_create")


def vector(kind, token, position):  # stands for a model
    return [math.sin((token + 1) * (i + 1) * kind + position) for i in range(DIM)]


def expected(tokens):
    q = vector(3, tokens[-1], len(tokens) - 1)
    weights = [math.exp(sum(a * b for a, b in zip(q, vector(5, t, p))) / 8) for p, t in enumerate(tokens)]
    values = [vector(7, t, p) for p, t in enumerate(tokens)]
    return [sum(w * v[i] for w, v in zip(weights, values)) / sum(weights) for i in range(DIM)]


shared = [random.Random(1).randrange(1000) for _ in range(40)]
texts = [shared + [1, 2, 3], shared + [7, 8]]
sequences = []
for text in texts:
    handle = PTR()
    call("tree_insert", tree, (I32 * len(text))(*text), I64(len(text)), None, c.byref(handle))
    sequences.append(handle)
computed, worst = 0, 0.0
for _ in range(6):
    step = made("step_begin", tree)
    for handle in sequences:
        added = Added()
        call("step_add", step, handle, I64(0), None, None, I64(0), c.byref(added))
        assert added.reason == 0
    call("step_build", step, plan)
    rows = lib.chunkattn_step_num_rows(step)
    computed += rows
    tokens, positions = (I32 * rows)(), (I32 * rows)()
    call("step_tokens", step, 0, tokens, I64(rows))
    call("step_positions", step, positions, I64(rows))
    q, k, v = ([x for t, p in zip(tokens, positions) for x in vector(kind, t, p)] for kind in (3, 5, 7))
    q, k, v, out = floats(len(q), q), floats(len(k), k), floats(len(v), v), floats(len(q))
    call("write", attention, plan, c.byref(layer), k, I64(0), v, I64(0), rows)
    call("run", attention, plan, c.byref(layer), None, q, I64(0), rows, out, None)
    call("step_finish", step)
    outputs = (Row * 2)()
    must(lib.chunkattn_step_rows(step, outputs, I64(2)) == 2)
    for text, row in zip(texts, outputs):
        last = row.first_row + row.num_rows - 1
        worst = max(worst, max(abs(a - b) for a, b in zip(out[last * DIM : (last + 1) * DIM], expected(text))))
        text.append((31 * text[-1] + len(text)) % 1000)  # stands for sampling
        call("step_commit", step, c.byref(row), (I32 * 1)(text[-1]), I64(1))
    lib.chunkattn_step_destroy(step)
for handle in sequences:
    lib.chunkattn_sequence_destroy(handle)
lib.chunkattn_plan_destroy(plan), lib.chunkattn_tree_destroy(tree), lib.chunkattn_attention_destroy(attention)
print(f"{computed} rows computed; off by {worst:.1e}")
assert computed == 40 + 3 + 2 + 2 * 5 and worst < 1e-5
