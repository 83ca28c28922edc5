"""Small models with random weights, one for each kind of attention: random_models.py FOLDER [NAME...]."""
import sys

import torch
import transformers as t

COMMON = dict(vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
              num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, initializer_range=0.08,
              bos_token_id=1, eos_token_id=2, pad_token_id=0)
MODELS = {
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**COMMON)),
    "llama_head_32": lambda: t.LlamaForCausalLM(t.LlamaConfig(**COMMON | {"head_dim": 32, "hidden_size": 128})),
    "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**COMMON)),
    "mistral_window": lambda: t.MistralForCausalLM(t.MistralConfig(**COMMON, sliding_window=100)),
    "gemma2_cap_window": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(
        **COMMON, sliding_window=96, attn_logit_softcapping=20.0, query_pre_attn_scalar=64)),
    "gemma3_window": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(
        **COMMON, sliding_window=64, query_pre_attn_scalar=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"])),
    "gpt_oss_sinks_window": lambda: t.GptOssForCausalLM(t.GptOssConfig(
        **COMMON, sliding_window=128, num_local_experts=4, num_experts_per_tok=2)),
    "bloom_alibi": lambda: t.BloomForCausalLM(t.BloomConfig(
        vocab_size=512, hidden_size=256, n_layer=3, n_head=4, initializer_range=0.08, bos_token_id=1, eos_token_id=2,
        pad_token_id=0)),
    "llama_head_96": lambda: t.LlamaForCausalLM(t.LlamaConfig(**COMMON | {"head_dim": 96, "hidden_size": 192})),
}

for name in sys.argv[2:] or MODELS:
    torch.manual_seed(1)
    model = MODELS[name]().float()
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            torch.nn.init.normal_(parameter, std=1.0)
    model.save_pretrained(f"{sys.argv[1]}/{name}")
