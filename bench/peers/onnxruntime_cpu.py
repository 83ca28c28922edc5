"""ONNX Runtime's GroupQueryAttention on the CPU: a cache per sequence, updated in place."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

TYPES = {"fp32": (np.float32, TensorProto.FLOAT), "fp16": (np.float16, TensorProto.FLOAT16)}
num_threads = 2


def version():
    return f"ONNX Runtime {onnxruntime.__version__}"


def set_threads(threads):
    global num_threads
    num_threads = threads


def make_session(case):
    kind = TYPES[case.dtype][1]
    d, heads = case.head_dim, case.num_kv_heads
    info = helper.make_tensor_value_info
    node = helper.make_node(
        "GroupQueryAttention",
        ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total"],
        ["output", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=case.num_qo_heads,
        kv_num_heads=heads,
        scale=d**-0.5,
    )
    query, token = ["b", 1, case.num_qo_heads * d], ["b", 1, heads * d]
    cache = ["b", heads, "n", d]
    graph = helper.make_graph(
        [node],
        "attention",
        [
            info("query", kind, query),
            info("key", kind, token),
            info("value", kind, token),
            info("past_key", kind, cache),
            info("past_value", kind, cache),
            info("seqlens_k", TensorProto.INT32, ["b"]),
            info("total", TensorProto.INT32, [1]),
        ],
        [
            info("output", kind, query),
            info("present_key", kind, cache),
            info("present_value", kind, cache),
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


class GroupQueryAttention:
    name = "ONNX Runtime GroupQueryAttention"
    shares = False
    dtypes = tuple(TYPES)

    def __init__(self, case):
        self.case = case
        self.type = TYPES[case.dtype][0]
        self.session = make_session(case)

    @classmethod
    def supports(cls, case):
        return case.dtype in cls.dtypes

    def set_bytes(self):
        return self.case.kv_bytes(shares=False)

    def load(self, problem):
        case = self.case
        shape = (case.batch, case.num_kv_heads, case.tokens, case.head_dim)
        caches = []
        for shared, private in (
            (problem.shared_k, problem.private_k),
            (problem.shared_v, problem.private_v),
        ):
            cache = np.empty(shape, self.type)
            cache[:, :, : case.shared] = shared
            cache[:, :, case.shared :] = private
            caches.append(cache)
        inputs = {
            "query": problem.q.reshape(case.batch, 1, -1),
            "key": problem.private_k[:, :, -1].reshape(case.batch, 1, -1),
            "value": problem.private_v[:, :, -1].reshape(case.batch, 1, -1),
        }
        inputs = {name: array.astype(self.type) for name, array in inputs.items()}
        inputs["seqlens_k"] = np.full(case.batch, case.tokens - 1, np.int32)
        inputs["total"] = np.array([case.tokens], np.int32)
        return self.bind(inputs, caches)

    def bind(self, inputs, caches):
        """Past and present are the same memory, so that the step writes one token in place."""
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        binding = self.session.io_binding()
        keep = [value(caches[0]), value(caches[1]), value(np.zeros_like(inputs["query"]))]
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, value(array))
        for i, name in enumerate(("key", "value")):
            binding.bind_ortvalue_input(f"past_{name}", keep[i])
            binding.bind_ortvalue_output(f"present_{name}", keep[i])
        binding.bind_ortvalue_output("output", keep[2])
        return binding, keep, inputs, caches

    def copy(self, loaded):
        return self.bind(loaded[2], [cache.copy() for cache in loaded[3]])

    def run(self, loaded):
        self.session.run_with_iobinding(loaded[0])
        return loaded[1][2]

    def output(self, result):
        out = result.numpy().astype(np.float32)
        return out.reshape(self.case.batch, self.case.num_qo_heads, -1)


PEERS = [GroupQueryAttention]
