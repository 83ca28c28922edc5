"""Small models with random weights, one of each architecture that is tried."""

import torch
import transformers as t

COMMON = dict(vocab_size=211, hidden_size=64, intermediate_size=96, max_position_embeddings=4096,
              num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)  # fmt: skip
MIXED = ["sliding_attention", "full_attention"]


def configurations():
    """(name, configuration): what makes an architecture different is on."""
    yield "llama", t.LlamaConfig(**COMMON, head_dim=64)
    yield "mistral", t.MistralConfig(**COMMON, head_dim=32, sliding_window=13)
    yield "qwen2", t.Qwen2Config(**COMMON)
    yield "qwen3", t.Qwen3Config(**COMMON, head_dim=64)
    yield "gemma2", t.Gemma2Config(**COMMON, head_dim=32, layer_types=MIXED, sliding_window=17,
                                   query_pre_attn_scalar=24, attn_logit_softcapping=3.0)  # fmt: skip
    yield "gemma3", t.Gemma3TextConfig(**COMMON, head_dim=32, layer_types=MIXED, sliding_window=11)
    yield "phi3", t.Phi3Config(**COMMON, sliding_window=19, pad_token_id=0)
    yield "olmo2", t.Olmo2Config(**COMMON)
    yield "stablelm", t.StableLmConfig(**COMMON, partial_rotary_factor=0.25)
    yield "gpt_oss", t.GptOssConfig(**COMMON, head_dim=64, layer_types=MIXED, sliding_window=9,
                                    num_local_experts=4, num_experts_per_tok=2)  # fmt: skip
    yield "deepseek_v3", t.DeepseekV3Config(
        **COMMON | dict(num_key_value_heads=4), q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32,
        qk_rope_head_dim=16, v_head_dim=24, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=32, first_k_dense_replace=1, n_shared_experts=1)  # fmt: skip
    yield "mixtral", t.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)
    yield "qwen2_moe", t.Qwen2MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                        shared_expert_intermediate_size=32)  # fmt: skip
    yield "olmoe", t.OlmoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2)
    yield "gemma", t.GemmaConfig(**COMMON, head_dim=32)
    yield "granite", t.GraniteConfig(**COMMON, attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0)
    yield "cohere", t.CohereConfig(**COMMON, use_qk_norm=True, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    yield "cohere2", t.Cohere2Config(**COMMON, layer_types=MIXED, sliding_window=15, pad_token_id=0, bos_token_id=1,
                                     eos_token_id=2)  # fmt: skip
    yield "phi", t.PhiConfig(**COMMON, partial_rotary_factor=0.5)
    yield "gpt2", t.GPT2Config(vocab_size=211, n_positions=4096, n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
                               eos_token_id=0, scale_attn_by_inverse_layer_idx=True)  # fmt: skip
    yield "gpt_neox", t.GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}, rotary_pct=0.25)
    yield "starcoder2", t.Starcoder2Config(**COMMON, sliding_window=21)
    yield "exaone4", t.Exaone4Config(**COMMON, layer_types=MIXED, sliding_window=12)
    yield "smollm3", t.SmolLM3Config(**COMMON, no_rope_layers=[1, 0], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    yield "glm4", t.Glm4Config(**COMMON, head_dim=32, pad_token_id=0, eos_token_id=2)
    yield "nemotron", t.NemotronConfig(**COMMON)
    yield "granite_hybrid", hybrid(["full_attention"] * 2)


def hybrid(layer_types):
    """As granite-4.0-micro if all layers are attention, else as granite-4.0-h-micro."""
    return t.GraniteMoeHybridConfig(
        **COMMON, layer_types=layer_types, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=96,
        position_embedding_type="rope", attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0,
        mamba_n_heads=8, mamba_d_state=8)  # fmt: skip


def make(config, seed):
    """The model, with weights large enough for attention to matter."""
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 2)
            elif parameter.dim() > 1:
                parameter.mul_(4)
    return model
