"""llama.cpp's attention on the CPU, by the operations of ggml that its graphs are made of.

CHUNKATTN_LLAMA_LIB names the folder of libggml-base.so and libggml-cpu.so: a build of llama.cpp as
shared libraries. Its two ways, `-fa on` (one operation) and `-fa off` (two products and a softmax,
V stored transposed), each with unified K/V, where all sequences read the same cells and a mask
hides what is not theirs (`-kvu`), and with a stream of K/V for each sequence. int8 is Q8_0: blocks
of 32 values with a scale in 16 bits.
"""

import ctypes
import math
import os
import pathlib

import numpy as np

F32, F16 = 0, 1
TYPES = {"fp32": F32, "fp16": F16, "bf16": 30, "int8": 8}
ROW_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 34 / 32}  # of one element
num_threads = 2
libraries = {}


class InitParams(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("none", ctypes.c_bool)]


class ComputePlan(ctypes.Structure):
    _fields_ = [
        ("work_size", ctypes.c_size_t),
        ("work", ctypes.c_void_p),
        ("threads", ctypes.c_int),
        ("pool", ctypes.c_void_p),
        ("abort", ctypes.c_void_p),
        ("abort_data", ctypes.c_void_p),
        ("use_reference", ctypes.c_bool),
    ]


def ggml(name, result, *arguments):
    """A function of ggml, with its types."""
    if not libraries:
        folder = os.environ.get("CHUNKATTN_LLAMA_LIB", "")
        for part in ("base", "cpu"):
            path = pathlib.Path(folder) / f"libggml-{part}.so"
            libraries[part] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        libraries["cpu"].ggml_cpu_init()
    library = next(one for one in libraries.values() if hasattr(one, name))
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function


POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


def version():
    return "ggml " + ggml("ggml_version", ctypes.c_char_p)().decode()


def set_threads(threads):
    global num_threads
    num_threads = threads


class Graph:
    """Tensors, and operations on them, in memory of numpy's: on huge pages, as it asks for them."""

    def __init__(self, size):
        self.memory = np.empty(int(size) + (8 << 20), np.uint8)
        make = ggml("ggml_init", POINTER, InitParams)
        self.context = make(InitParams(self.memory.size, self.memory.ctypes.data, False))

    def tensor(self, kind, *shape):
        make = ggml("ggml_new_tensor_4d", POINTER, POINTER, INT, LONG, LONG, LONG, LONG)
        return make(self.context, kind, *shape)

    def fill(self, tensor, dtype, array):
        """Stores fp32 [..., row] as the type; rows of Q8_0 are whole blocks."""
        array = np.ascontiguousarray(array, np.float32)
        to = ggml("ggml_get_data", POINTER, POINTER)(tensor)
        if dtype == "fp32":
            ctypes.memmove(to, array.ctypes.data, array.nbytes)
        elif dtype == "fp16":
            half = array.astype(np.float16)
            ctypes.memmove(to, half.ctypes.data, half.nbytes)
        else:
            convert = ggml(
                "ggml_quantize_chunk", ctypes.c_size_t, INT, POINTER, POINTER, LONG, LONG, LONG,
                POINTER,
            )
            width = array.shape[-1]
            convert(TYPES[dtype], array.ctypes.data, to, 0, array.size // width, width, None)

    def read(self, tensor, shape):
        data = ggml("ggml_get_data", POINTER, POINTER)(tensor)
        kind = ctypes.POINTER(ctypes.c_float)
        return np.ctypeslib.as_array(ctypes.cast(data, kind), shape=shape).copy()

    def finish(self, tensor):
        """What computes `tensor`."""
        self.graph = ggml("ggml_new_graph", POINTER, POINTER)(self.context)
        ggml("ggml_build_forward_expand", None, POINTER, POINTER)(self.graph, tensor)
        self.plan = ggml("ggml_graph_plan", ComputePlan, POINTER, INT, POINTER)(
            self.graph, num_threads, None
        )
        self.work = np.empty(max(self.plan.work_size, 1), np.uint8)
        self.plan.work = self.work.ctypes.data
        self.compute = ggml("ggml_graph_compute", INT, POINTER, POINTER)

    def run(self):
        if self.compute(self.graph, ctypes.byref(self.plan)) != 0:
            raise RuntimeError("ggml_graph_compute failed")


class Llama:
    dtypes = tuple(TYPES)

    def __init__(self, case):
        self.case = case

    @classmethod
    def supports(cls, case):
        return case.dtype in cls.dtypes and (case.shared > 0 or not cls.shares)

    def set_bytes(self):
        return self.case.kv_bytes(self.shares)

    def arrays(self, problem):
        """Queries [streams][heads][rows][d], K and V [streams][KV heads][cells][d]."""
        case = self.case
        if not self.shares:
            keys = np.stack([problem.key(s) for s in range(case.batch)])
            values = np.stack([problem.value(s) for s in range(case.batch)])
            return problem.q[:, :, None], keys, values
        own = (case.num_kv_heads, case.batch * case.private, case.head_dim)
        joined = []
        for shared, private in (
            (problem.shared_k, problem.private_k),
            (problem.shared_v, problem.private_v),
        ):
            joined.append(np.concatenate([shared, private.swapaxes(0, 1).reshape(own)], axis=1))
        return problem.q.swapaxes(0, 1)[None], joined[0][None], joined[1][None]

    def mask(self):
        """[rows][cells], 0 where a row sees a cell."""
        case = self.case
        own = np.repeat(np.eye(case.batch, dtype=bool), case.private, axis=1)
        sees = np.concatenate([np.ones((case.batch, case.shared), bool), own], axis=1)
        return np.where(sees, 0.0, -np.inf)

    def load(self, problem):
        case = self.case
        q, k, v = self.arrays(problem)
        streams, _, rows, d = q.shape
        cells, heads = k.shape[2], case.num_kv_heads
        kind = TYPES[case.dtype]
        logits = 4.0 * streams * case.num_qo_heads * rows * cells
        graph = Graph(2 * ROW_BYTES[case.dtype] * k.size + 8 * q.nbytes + rows * cells * 2
                      + 3 * logits * self.keeps_logits)
        q_tensor = graph.tensor(F32, d, rows, case.num_qo_heads, streams)
        graph.fill(q_tensor, "fp32", q)
        k_tensor = graph.tensor(kind, d, cells, heads, streams)
        graph.fill(k_tensor, case.dtype, k)
        v_tensor = graph.tensor(kind, *self.value_shape(d, cells), heads, streams)
        graph.fill(v_tensor, case.dtype, self.stored(v))
        mask = None
        if self.shares:
            mask = graph.tensor(F16, cells, rows, 1, 1)
            graph.fill(mask, "fp16", self.mask())
        graph.result = self.attention(graph, q_tensor, k_tensor, v_tensor, mask)
        graph.finish(graph.result)
        graph.problem = problem
        return graph

    def copy(self, loaded):
        return self.load(loaded.problem)

    def run(self, loaded):
        loaded.run()
        return loaded


class FlashAttention(Llama):
    """`-fa on`"""

    keeps_logits = False

    @staticmethod
    def value_shape(d, cells):
        return d, cells

    @staticmethod
    def stored(v):
        return v

    def attention(self, graph, q, k, v, mask):
        make = ggml("ggml_flash_attn_ext", POINTER, *[POINTER] * 5, FLOAT, FLOAT, FLOAT)
        return make(graph.context, q, k, v, mask, 1 / math.sqrt(self.case.head_dim), 0.0, 0.0)

    def output(self, loaded):  # [streams][rows][heads][d]
        case = self.case
        return loaded.read(loaded.result, (case.batch, case.num_qo_heads, case.head_dim))


class Products(Llama):
    """`-fa off`"""

    keeps_logits = True

    @classmethod
    def supports(cls, case):  # llama.cpp does not quantise V that is stored transposed
        return super().supports(case) and case.dtype != "int8"

    @staticmethod
    def value_shape(d, cells):
        return cells, d

    @staticmethod
    def stored(v):
        return v.swapaxes(2, 3)

    def attention(self, graph, q, k, v, mask):
        multiply = ggml("ggml_mul_mat", POINTER, POINTER, POINTER, POINTER)
        softmax = ggml("ggml_soft_max_ext", POINTER, POINTER, POINTER, POINTER, FLOAT, FLOAT)
        logits = multiply(graph.context, k, q)
        scale = 1 / math.sqrt(self.case.head_dim)
        return multiply(graph.context, v, softmax(graph.context, logits, mask, scale, 0.0))

    def output(self, loaded):  # [streams][heads][rows][d]
        case = self.case
        rows = case.batch if self.shares else 1
        shape = (case.batch // rows, case.num_qo_heads, rows, case.head_dim)
        out = loaded.read(loaded.result, shape).swapaxes(1, 2)
        return out.reshape(case.batch, case.num_qo_heads, case.head_dim)


class FlashUnified(FlashAttention):
    name = "llama.cpp -fa on, shared cells"
    shares = True


class ProductsUnified(Products):
    name = "llama.cpp -fa off, shared cells"
    shares = True


class FlashStreams(FlashAttention):
    name = "llama.cpp -fa on"
    shares = False


class ProductsStreams(Products):
    name = "llama.cpp -fa off"
    shares = False


PEERS = [FlashUnified, ProductsUnified, FlashStreams, ProductsStreams]
