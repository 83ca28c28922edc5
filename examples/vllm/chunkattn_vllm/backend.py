"""vLLM's attention on CPUs by chunkattn. Each layer that it cannot compute stays with CPU_ATTN, vLLM's own."""
import ctypes
import functools
import logging
from dataclasses import dataclass

import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from . import library, sharing

log = logging.getLogger("vllm.chunkattn")
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # those of chunkattn.h
said = set()


@functools.cache
def counters(model, engine):
    """Those of this process; each group of layers has a builder of its own."""
    return sharing.Counters(model, engine)


def say_once(text):
    if text not in said:
        said.add(text)
        log.info(text)


class Backend(CPUAttentionBackend):
    """CPU_ATTN, whose layers may be chunkattn's. K/V memory is shaped as CPU_ATTN's, filled otherwise."""

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder


@dataclass
class Metadata(CPUAttentionMetadata):
    plan: library.Plan | None = None
    number: int = 0  # of this batch


class Builder(CPUAttentionMetadataBuilder):
    """Makes the plan of a step, once for the layers of a group."""

    plan = None

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names).values()
        ours = [layer for layer in layers if getattr(layer.impl, "attention", None)]
        if not ours:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        m = common_attn_metadata
        if m.causal is not True:
            raise NotImplementedError("chunkattn: this model asks for attention that is not causal: run it with "
                                      "CHUNKATTN_VLLM=off")
        if len(ours) == len(layers):
            made = Metadata(
                num_actual_tokens=m.num_actual_tokens, max_query_len=m.max_query_len,
                query_start_loc=m.query_start_loc, max_seq_len=m.max_seq_len, seq_lens=m.seq_lens,
                block_table=m.block_table_tensor, slot_mapping=m.slot_mapping, scheduler_metadata=None)
        else:  # the others need what CPU_ATTN's kernels need
            made = Metadata(**vars(super().build(common_prefix_len, m, fast_build)))
        pages, _, page_size, _ = ours[0].kv_cache.shape
        if self.plan is None or self.plan.shape != (page_size, pages):
            self.plan = library.Plan(page_size, pages, self._count())
        tensors = m.block_table_tensor, m.seq_lens, m.query_start_loc
        for name, tensor in zip(("block_table", "seq_lens", "query_start_loc"), tensors):
            if tensor.dtype != torch.int32 or tensor.stride(-1) != 1 or tensor.device.type != "cpu":
                raise TypeError(f"chunkattn: {name} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}: "
                                "expected int32 on the CPU, without gaps")
        made.plan, made.number = self.plan, self.plan.build(*tensors, m.num_reqs)
        return made

    def _count(self):
        """Where batches are counted: of the workers of one engine the first does, all plan the same."""
        config, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        if parallel.rank != 0:
            return None
        name = config.served_model_name
        return counters(name[0] if isinstance(name, list) else name, getattr(parallel, "data_parallel_index", 0)).add


class Impl(CPUAttentionBackendImpl):
    """One layer: chunkattn's if `attention` is set, else CPU_ATTN's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.attention, self.variant, self.memory = None, None, None
        self.dtype = get_current_vllm_config().model_config.dtype
        reason = self._why_not()
        if reason is None:
            try:
                self.attention = library.attention(self.head_size, self.num_heads, self.num_kv_heads,
                                                   TYPES[self.dtype], self.scale, torch.get_num_threads())
                say_once("chunkattn: " + library.load().chunkattn_describe(self.attention).decode())
            except library.Error as error:
                reason = str(error)
        if reason is not None:
            say_once(f"chunkattn leaves layers to CPU_ATTN: {reason}")

    def _why_not(self):
        config = get_current_vllm_config()
        alibi, sinks = self.alibi_slopes is not None, self.sinks is not None
        windowed, capped = self.sliding_window > 0, self.logits_soft_cap != 0
        if self.attn_type != AttentionType.DECODER:
            return f"attention of type {self.attn_type}"
        if self.dtype not in TYPES:
            return f"a model of {self.dtype}"
        if self.kv_cache_dtype not in ("auto", str(self.dtype).removeprefix("torch.")):
            return f"K/V of {self.kv_cache_dtype}"
        if alibi and (windowed or capped or sinks):
            return "ALiBi with a window, a soft cap or sinks"
        if sinks and capped:
            return "sinks with a soft cap"
        if config.kv_transfer_config is not None:
            return "a KV connector, which moves K/V as CPU_ATTN packs it"
        if self.kv_sharing_target_layer_name is not None:
            target = config.compilation_config.static_forward_context[self.kv_sharing_target_layer_name]
            if target.impl.attention is None:
                return "K/V of a layer that was left"
        return None

    @staticmethod
    def _rows(name, tensor, elements):
        if tensor.stride(-1) != 1 or tensor[0].numel() != elements or not tensor[0].is_contiguous():
            raise ValueError(f"chunkattn: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: "
                             f"expected {elements} elements of each token without gaps")
        return tensor.data_ptr(), tensor.stride(0)

    def _layer(self, kv_cache):
        """`kv_cache` [page][head][token][2 * dim] as K of all tokens, then V, in each page and head."""
        if self.memory is None or self.memory[0] != kv_cache.data_ptr():
            if kv_cache.dtype != self.dtype:
                raise TypeError(f"chunkattn: kv_cache is of {kv_cache.dtype}: expected {self.dtype}")
            pages, heads, page_size, _ = kv_cache.shape
            k, v = kv_cache.view(pages, heads, 2 * page_size, -1).chunk(2, dim=2)
            self.memory = (kv_cache.data_ptr(), library.layer(k, v))
        return ctypes.byref(self.memory[1])

    def _variant(self):
        """The window, cap, sinks and slopes for chunkattn; sinks are known once weights are loaded."""
        if self.variant is None:
            self.tables = [None if t is None else t.detach().to(torch.float32).contiguous()
                           for t in (self.sinks, self.alibi_slopes)]  # which it points to
            self.variant = library.Variant(max(self.sliding_window, 0), self.logits_soft_cap,
                                           *(None if t is None else t.data_ptr() for t in self.tables))
        return ctypes.byref(self.variant)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        if self.attention is None:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        tokens = min(len(slot_mapping), len(key))
        if tokens == 0:
            return
        if slot_mapping.dtype != torch.int64 or key.dtype != self.dtype or value.dtype != self.dtype:
            raise TypeError(f"chunkattn: slot_mapping, key and value are of {slot_mapping.dtype}, {key.dtype} and "
                            f"{value.dtype}: expected int64 and {self.dtype}")
        size = self.num_kv_heads * self.head_size
        library.check(library.load().chunkattn_write_slots(
            self.attention, self._layer(kv_cache), slot_mapping.data_ptr(), *self._rows("key", key, size),
            *self._rows("value", value, size), tokens))

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None):
        if self.attention is None or attn_metadata is None or output_scale is not None or output_block_scale is not None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                                   output_block_scale)
        plan, size = attn_metadata.plan, self.num_heads * self.head_size
        if plan.number != attn_metadata.number:
            raise RuntimeError(f"chunkattn: the plan of batch {attn_metadata.number} is gone: batch {plan.number} of the "
                               "same layers has been prepared")
        if query.dtype != self.dtype or output.dtype != self.dtype or not output.is_contiguous():
            raise TypeError(f"chunkattn: query and output are of {query.dtype} and {output.dtype}: expected "
                            f"{self.dtype}, output without gaps")
        library.check(library.load().chunkattn_run(
            self.attention, plan.handle, self._layer(kv_cache), self._variant(), *self._rows("query", query, size),
            min(len(query), len(output)), output.data_ptr(), None))
        return output
