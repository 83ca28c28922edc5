"""OpenVINO's PagedAttention on the CPU: pages of 32 tokens, block tables, K/V written by the step.

Pages may be shared physically: tables that name the same page. The operation also stores the
step's K/V of one token per sequence, a thousandth of the work.
"""

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino.op import _PagedAttentionExtension

from cases import fill_pages, page_table, separate_page_table

PAGE = 32
TYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
num_threads = 2


def version():
    return f"OpenVINO {ov.__version__.split('-')[0]}"


def set_threads(threads):
    global num_threads
    num_threads = threads


def as_array(tensor):
    """The memory of a tensor; bf16 as the 16 bits that it is."""
    if tensor.element_type == ov.Type.bf16:
        return np.frombuffer(tensor.data, np.uint16).reshape(tensor.shape)
    return tensor.data


def to_bf16(array):
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def compile_operation(case, precision):
    """One PagedAttention operation as a model. What it does not use is an empty constant."""
    f32, i32, u8 = ov.Type.f32, ov.Type.i32, ov.Type.u8
    parameters = []

    def parameter(name, kind, shape):
        node = ops.parameter(ov.PartialShape(shape), kind, name=name)
        node.output(0).get_tensor().set_names({name})
        parameters.append(node)
        return node

    def constant(kind, shape, value=0):
        return ops.constant(np.full(shape, value), kind)

    d, heads = case.head_dim, case.num_kv_heads
    inputs = [
        parameter("query", f32, [-1, case.num_qo_heads * d]),
        parameter("key", f32, [-1, heads * d]),
        parameter("value", f32, [-1, heads * d]),
        parameter("key_cache.0", ov.Type.dynamic, [-1, heads, -1, d]),
        parameter("value_cache.0", ov.Type.dynamic, [-1, heads, -1, d]),
        parameter("past_lens", i32, [-1]),
        parameter("subsequence_begins", i32, [-1]),
        parameter("block_indices", i32, [-1]),
        parameter("block_indices_begins", i32, [-1]),
        constant(f32, [], d**-0.5),  # scale
        constant(i32, []),  # sliding window
        constant(f32, [0]),  # ALiBi slopes
        parameter("max_context_len", i32, []),
        constant(i32, [0]),  # score aggregation window
        constant(i32, [0]),  # rotated blocks, their angles, their table
        constant(i32, [0]),
        constant(f32, [0]),
        constant(f32, [0]),  # sparse prefill: threshold, block, stride
        constant(i32, []),
        constant(i32, []),
        constant(f32, [0]),  # sinks
        constant(i32, []),  # eviction by diversity
        constant(i32, [0]),
        constant(i32, [0]),
        constant(i32, [0]),
        constant(i32, [0]),  # token types
        constant(u8, [0]),  # bias among queries
        constant(i32, [0]),
    ]
    node = _PagedAttentionExtension([one.output(0) for one in inputs])
    info = node.get_rt_info()
    for name in ("k", "v"):
        info[f"num_{name}_heads"] = heads
        info[f"{name}_head_size"] = d
    model = ov.Model([ops.result(node.output(0))], parameters, "paged_attention")
    return ov.Core().compile_model(
        model,
        "CPU",
        {
            "INFERENCE_NUM_THREADS": num_threads,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
        },
    )


class Paged:
    dtypes = tuple(TYPES)

    def __init__(self, case):
        self.case = case
        self.compiled = compile_operation(case, TYPES[case.dtype])

    @classmethod
    def supports(cls, case):
        return case.dtype in cls.dtypes and (case.shared > 0 or not cls.shares)

    def set_bytes(self):
        return self.case.kv_bytes(self.shares)

    def tensors(self, pages, arrays=None):
        made = []
        for i, name in enumerate(("key_cache.0", "value_cache.0")):
            port = self.compiled.input(name)
            shape = [pages] + [port.partial_shape[axis].get_length() for axis in (1, 2, 3)]
            tensor = ov.Tensor(port.element_type, ov.Shape(shape))
            if arrays is not None:
                bf16 = port.element_type == ov.Type.bf16
                as_array(tensor)[...] = to_bf16(arrays[i]) if bf16 else arrays[i]
            made.append(tensor)
        return made

    def load(self, problem):
        case = self.case
        make = page_table if self.shares else separate_page_table
        table, pages = make(case, PAGE)
        caches = self.tensors(pages, fill_pages(problem, table, pages, PAGE))
        last_k = problem.private_k[:, :, -1].reshape(case.batch, -1)
        last_v = problem.private_v[:, :, -1].reshape(case.batch, -1)
        per_sequence = table.shape[1]
        fixed = {
            "query": problem.q.reshape(case.batch, -1),
            "key": last_k,
            "value": last_v,
            "past_lens": np.full(case.batch, case.tokens - 1, np.int32),
            "subsequence_begins": np.arange(case.batch + 1, dtype=np.int32),
            "block_indices": table.reshape(-1),
            "block_indices_begins": np.arange(case.batch + 1, dtype=np.int32) * per_sequence,
            "max_context_len": np.array(case.tokens, np.int32),
        }
        for name, array in fixed.items():
            fixed[name] = ov.Tensor(np.require(array, requirements="C"))
        return self.request(fixed, caches)

    def request(self, fixed, caches):
        request = self.compiled.create_infer_request()
        for name, tensor in fixed.items():
            request.set_tensor(name, tensor)
        request.set_tensor("key_cache.0", caches[0])
        request.set_tensor("value_cache.0", caches[1])
        return request, fixed, caches

    def copy(self, loaded):
        _, fixed, caches = loaded
        made = self.tensors(caches[0].shape[0])
        for to, source in zip(made, caches):
            as_array(to)[...] = as_array(source)
        return self.request(fixed, made)

    def run(self, loaded):
        loaded[0].infer()
        return loaded[0]

    def output(self, request):
        data = request.get_output_tensor(0).data
        return np.array(data, np.float32).reshape(self.case.batch, self.case.num_qo_heads, -1)


class SharedPages(Paged):
    name = "OpenVINO PagedAttention, shared pages"
    shares = True


class SeparatePages(Paged):
    name = "OpenVINO PagedAttention"
    shares = False


PEERS = [SeparatePages, SharedPages]
