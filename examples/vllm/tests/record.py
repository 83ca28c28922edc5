"""Writes recorded.json, what vLLM gives the plugin in some steps: record.py MODEL. MODEL: random_models.py's llama.

Four requests share 70 tokens. Their prompts come in pieces of 64 tokens, among steps of decoding."""
import json
import os
import pathlib
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import vllm
from chunkattn_vllm import backend

steps, layer = [], {}


def tensor(t):
    return {"dtype": str(t.dtype), "shape": list(t.shape), "strides": list(t.stride())}


def listed(t):
    return {"dtype": str(t.dtype), "strides": list(t.stride()), "values": t.tolist()}


class Builder(backend.Builder):
    def build(self, common_prefix_len, m, fast_build=False):
        made = super().build(common_prefix_len, m, fast_build)
        if made.plan is not None and m.num_actual_tokens < 200:  # not the warm-up
            pages = -(-m.seq_lens.max().item() // 32)
            table = listed(m.block_table_tensor)
            table["values"] = [row[:pages] for row in table["values"]]  # behind them is what earlier steps left
            steps.append({"block_table": table, "seq_lens": listed(m.seq_lens),
                          "query_start_loc": listed(m.query_start_loc), "slot_mapping": listed(m.slot_mapping),
                          "num_reqs": m.num_reqs, "num_actual_tokens": m.num_actual_tokens,
                          "max_query_len": m.max_query_len, "max_seq_len": m.max_seq_len, "causal": m.causal})
        return made


class Impl(backend.Impl):
    def forward(self, of, query, key, value, kv_cache, attn_metadata, output, *rest, **named):
        if steps and not layer:
            layer.update({"query": tensor(query), "key": tensor(key), "value": tensor(value), "output": tensor(output),
                          "kv_cache": tensor(kv_cache)})
        return super().forward(of, query, key, value, kv_cache, attn_metadata, output, *rest, **named)


backend.Backend.get_builder_cls = staticmethod(lambda: Builder)
backend.Backend.get_impl_cls = staticmethod(lambda: Impl)
llm = vllm.LLM(sys.argv[1], enforce_eager=True, dtype="float32", max_model_len=256, skip_tokenizer_init=True,
               block_size=32, max_num_batched_tokens=64, num_gpu_blocks_override=24)
steps.clear()
shared = list(range(10, 80))
prompts = [{"prompt_token_ids": shared + [100 + i] * (7 * i + 1)} for i in range(4)]
llm.generate(prompts, vllm.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False), use_tqdm=False)
out = pathlib.Path(__file__).with_name("recorded.json")
lines = ",\n  ".join(json.dumps(step) for step in steps)
out.write_text(f'{{"vllm": "{vllm.__version__}", "layer": {json.dumps(layer)},\n "steps": [\n  {lines}]}}\n')
print(len(steps), "steps,", out.stat().st_size, "bytes")
