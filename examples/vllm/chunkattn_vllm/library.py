"""chunkattn/c/chunkattn.h by ctypes."""
import ctypes as c
import functools
import os
import pathlib

VERSION = 3  # CHUNKATTN_C_VERSION
I32, I64, F32, PTR = c.c_int32, c.c_int64, c.c_float, c.c_void_p

ACCURACIES = {"two_terms": 0, "one_term": 1}


class Error(RuntimeError):
    """A call was refused: the text names the argument, its value and what was expected."""


class Config(c.Structure):
    _fields_ = [(n, I32) for n in ("version", "head_dim", "value_dim", "num_qo_heads", "num_kv_heads", "kv_type",
                                   "qo_type", "num_threads")] + [("scale", F32), ("accuracy", I32)]


class Variant(c.Structure):
    _fields_ = [("window", I32), ("soft_cap", F32), ("sinks", PTR), ("alibi_slopes", PTR)]


class Tables(c.Structure):
    _fields_ = [("block_table", PTR), ("stride", I64), ("seq_lens", PTR), ("query_start_loc", PTR),
                ("num_sequences", I32)]


class Layer(c.Structure):
    _fields_ = [("k", PTR), ("v", PTR), ("num_pages", I32), ("page_size", I32), ("k_strides", I64 * 3),
                ("v_strides", I64 * 3), ("k_scale", PTR), ("v_scale", PTR), ("scales", I32),
                ("scale_strides", I64 * 2)]


class Sharing(c.Structure):
    _fields_ = [("num_tokens", I32), ("num_segments", I32), ("pages_read", I64), ("pages_alone", I64)]


@functools.cache
def load():
    """The library beside this file."""
    folder = pathlib.Path(__file__).parent
    files = sorted(folder.glob("libchunkattn_vllm.*"))
    if not files:
        raise FileNotFoundError(f"{folder}: expected libchunkattn_vllm.so, which `pip install` compiles")
    lib = c.CDLL(str(files[0]))
    if lib.chunkattn_c_version() != VERSION:
        raise RuntimeError(f"chunkattn_c_version() = {lib.chunkattn_c_version()}: expected {VERSION}")
    for name, result, arguments in (
        ("error", c.c_char_p, []),
        ("attention_create", PTR, [PTR]),
        ("describe", c.c_char_p, [PTR]),
        ("plan_create", PTR, [I32, I32, I32]),
        ("plan_destroy", None, [PTR]),
        ("plan_build", c.c_int, [PTR, PTR]),
        ("plan_sharing", c.c_int, [PTR, PTR]),
        ("write_slots", c.c_int, [PTR, PTR, PTR, PTR, I64, PTR, I64, I32]),
        ("run", c.c_int, [PTR, PTR, PTR, PTR, PTR, I64, I32, PTR, PTR]),
    ):
        function = getattr(lib, "chunkattn_" + name)
        function.restype, function.argtypes = result, arguments
    return lib


def check(result):
    """Raises what the last call was refused for."""
    if result:
        raise Error(load().chunkattn_error().decode())


@functools.cache
def attention(head_dim, num_qo_heads, num_kv_heads, element_type, scale, num_threads):
    """Attention for all layers that are alike; it stays for the life of the process."""
    accuracy = os.environ.get("CHUNKATTN_VLLM_ACCURACY", "two_terms")
    if accuracy not in ACCURACIES:
        raise Error(f"CHUNKATTN_VLLM_ACCURACY = {accuracy}: expected one of {', '.join(ACCURACIES)}")
    made = load().chunkattn_attention_create(c.byref(Config(
        version=VERSION, head_dim=head_dim, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads,
        kv_type=element_type, qo_type=element_type, num_threads=num_threads, scale=scale,
        accuracy=ACCURACIES[accuracy])))
    check(made is None)
    return made


class Plan:
    """The plan of one group of layers with the same page tables."""

    def __init__(self, page_size, num_pages, count=None):
        """`count(pages_read, pages_alone)` is called for each batch."""
        self.shape, self.count = (page_size, num_pages), count
        self.handle = load().chunkattn_plan_create(page_size, num_pages, 0)  # vLLM's null block is 0
        check(self.handle is None)
        self.destroy = load().chunkattn_plan_destroy  # when Python ends, load is gone before
        self.number = 0  # of the last batch

    def build(self, block_table, seq_lens, query_start_loc, num_sequences):
        """Makes the plan of a batch, from tensors of int32; its number."""
        tables = Tables(block_table.data_ptr(), block_table.stride(0), seq_lens.data_ptr(), query_start_loc.data_ptr(),
                        num_sequences)
        check(load().chunkattn_plan_build(self.handle, c.byref(tables)))
        if self.count is not None:
            sharing = Sharing()
            check(load().chunkattn_plan_sharing(self.handle, c.byref(sharing)))
            self.count(sharing.pages_read, sharing.pages_alone)
        self.number += 1
        return self.number

    def __del__(self):
        if hasattr(self, "destroy"):
            self.destroy(self.handle)


def layer(k, v):
    """K and V [page][head][token][dim] of one layer, tensors."""
    strides = lambda tensor: (I64 * 3)(*tensor.stride()[:3])
    return Layer(k.data_ptr(), v.data_ptr(), k.shape[0], k.shape[2], strides(k), strides(v))
