"""Stand-ins for what the plugin imports of torch, vLLM 0.32 and prometheus_client, as far as it uses them.

Importing this makes them importable. `vllm` is what a test changes: the version, the platform, the configuration.
"""
import ctypes
import enum
import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace as Namespace

SIZES = {"torch.float32": (4, ctypes.c_float), "torch.bfloat16": (2, ctypes.c_uint16), "torch.float16": (2, ctypes.c_uint16),
         "torch.int32": (4, ctypes.c_int32), "torch.int64": (8, ctypes.c_int64), "torch.float8": (1, ctypes.c_uint8)}


class Dtype:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


DTYPES = {name: Dtype(name) for name in SIZES}


class Tensor:
    """Elements of ctypes memory, by strides."""

    def __init__(self, dtype, shape, strides=None, memory=None, offset=0, values=None):
        self.dtype, self.shape, self.offset = dtype, tuple(shape), offset
        self.strides = tuple(strides or self._dense())
        self.device = Namespace(type="cpu")
        size = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides))
        self.memory = memory if memory is not None else (SIZES[dtype.name][1] * size)(*(values or ()))

    def _dense(self):
        strides, step = [], 1
        for n in reversed(self.shape):
            strides.insert(0, step)
            step *= n
        return strides

    def stride(self, dimension=None):
        return self.strides if dimension is None else self.strides[dimension]

    def data_ptr(self):
        return ctypes.addressof(self.memory) + self.offset * SIZES[self.dtype.name][0]

    def numel(self):
        product = 1
        for n in self.shape:
            product *= n
        return product

    def is_contiguous(self):
        return all(n == 1 or s == d for n, s, d in zip(self.shape, self.strides, self._dense()))

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, i):
        if isinstance(i, slice):
            assert i.start is None
            return Tensor(self.dtype, (i.stop, *self.shape[1:]), self.strides, self.memory, self.offset)
        return Tensor(self.dtype, self.shape[1:], self.strides[1:], self.memory, self.offset + i * self.strides[0])

    def view(self, *shape):
        assert self.is_contiguous() and shape[-1] == -1
        known = 1
        for n in shape[:-1]:
            known *= n
        return Tensor(self.dtype, (*shape[:-1], self.numel() // known), None, self.memory, self.offset)

    def chunk(self, count, dim):
        shape = [*self.shape]
        shape[dim] //= count
        return [Tensor(self.dtype, shape, self.strides, self.memory, self.offset + i * shape[dim] * self.strides[dim])
                for i in range(count)]

    def detach(self):
        return self

    contiguous = detach

    def to(self, dtype):
        assert dtype is self.dtype
        return self

    def tolist(self):
        """Of the last dimension."""
        at = self.offset
        return list(self.memory[at:at + self.shape[0]]) if self.strides == (1,) else [self[i].tolist() for i in range(len(self))]


class AttentionType:
    DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER = "decoder", "encoder", "encoder_only", "encoder_decoder"


class CPUAttentionBackend:
    pass


@dataclass
class CPUAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    scheduler_metadata: object
    causal: bool = True
    dynamic_causal: object = None


class CPUAttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.layer_names, self.vllm_config = layer_names, vllm_config

    def build(self, common_prefix_len, m, fast_build=False):
        return CPUAttentionMetadata(m.num_actual_tokens, m.max_query_len, m.query_start_loc, m.max_seq_len, m.seq_lens,
                                    m.block_table_tensor, m.slot_mapping, "what CPU_ATTN's kernels need", m.causal)


class CPUAttentionBackendImpl:
    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                 logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None):
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, logits_soft_cap or 0
        self.attn_type, self.kv_sharing_target_layer_name = attn_type, kv_sharing_target_layer_name
        self.calls = []  # that came to CPU_ATTN

    def do_kv_cache_update(self, *arguments):
        self.calls.append("do_kv_cache_update")

    def forward(self, *arguments):
        self.calls.append("forward")
        return "CPU_ATTN's"


class AttentionBackendEnum(enum.Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


class MmapedDict:
    """prometheus_client's, without memory maps: what was written, by the file's name."""

    written = {}

    def __init__(self, name):
        self.values = MmapedDict.written.setdefault(str(name), {})
        open(name, "ab").close()

    def write_value(self, key, value, timestamp):
        self.values[key] = value

    @staticmethod
    def read_all_values_from_file(name):
        for key, value in MmapedDict.written[str(name)].items():
            yield key, value, 0.0, 0


def mmap_key(metric_name, name, labelnames, labelvalues, help_text):
    import json

    return json.dumps([metric_name, name, dict(zip(labelnames, labelvalues)), help_text], sort_keys=True)


config = Namespace(
    model_config=Namespace(dtype=DTYPES["torch.float32"], served_model_name="m"), kv_transfer_config=None,
    parallel_config=Namespace(rank=0, data_parallel_index=0),
    compilation_config=Namespace(static_forward_context={}))
platform = Namespace(is_cpu=lambda: True)
registered = {}  # of backends
collectors = []  # of metrics: (registry, path)

MODULES = {
    "torch": {**{name.split(".")[1]: dtype for name, dtype in DTYPES.items()}, "Tensor": Tensor, "get_num_threads": lambda: 2},
    "vllm": {"__version__": "0.32.0"},
    "vllm.platforms": {"current_platform": platform},
    "vllm.config": {"get_current_vllm_config": lambda: config,
                    "get_layers_from_vllm_config": lambda c, kind, names: {
                        name: c.compilation_config.static_forward_context[name] for name in names}},
    "vllm.model_executor": {}, "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.attention": {"Attention": object},
    "vllm.v1": {}, "vllm.v1.attention": {}, "vllm.v1.attention.backends": {},
    "vllm.v1.attention.backend": {"AttentionType": AttentionType},
    "vllm.v1.attention.backends.cpu_attn": {each.__name__: each for each in (
        CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata, CPUAttentionMetadataBuilder)},
    "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": AttentionBackendEnum,
                                            "register_backend": registered.__setitem__},
    "prometheus_client": {"REGISTRY": "the registry"},
    "prometheus_client.multiprocess": {"MultiProcessCollector": lambda registry, path: collectors.append((registry, path))},
    "prometheus_client.mmap_dict": {"MmapedDict": MmapedDict, "mmap_key": mmap_key},
}
for name, members in MODULES.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, sys.modules[name])
vllm = sys.modules["vllm"]
