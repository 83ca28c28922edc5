"""SmolLM2-135M from a file of llama.cpp (./dev model) as a folder that vLLM loads: smollm2.py GGUF FOLDER."""
import json
import os
import sys

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

reader = GGUFReader(sys.argv[1])
value = lambda key: reader.fields[key].contents()
HEADS, KV_HEADS = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
NAMES = dict(attn_q="self_attn.q_proj", attn_k="self_attn.k_proj", attn_v="self_attn.v_proj",
             attn_output="self_attn.o_proj", ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj",
             attn_norm="input_layernorm", ffn_norm="post_attention_layernorm")
weights = {}
for tensor in reader.tensors:
    array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    part = tensor.name.split(".")
    if part[0] == "blk":
        if heads := {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part[2]):  # llama.cpp interleaves what RoPE rotates
            array = array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        name = f"model.layers.{part[1]}.{NAMES[part[2]]}.weight"
    else:
        name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part[0]]
    weights[name] = np.ascontiguousarray(array)
os.makedirs(sys.argv[2], exist_ok=True)
save_file(weights, f"{sys.argv[2]}/model.safetensors", metadata={"format": "pt"})


def write(name, content):
    with open(f"{sys.argv[2]}/{name}", "w") as file:
        json.dump(content, file)


words = value("tokenizer.ggml.tokens")
write("config.json", dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=len(words), hidden_act="silu",
    hidden_size=value("llama.embedding_length"), intermediate_size=value("llama.feed_forward_length"),
    num_hidden_layers=value("llama.block_count"), num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
    head_dim=value("llama.embedding_length") // HEADS, max_position_embeddings=8192, tie_word_embeddings=True,
    rms_norm_eps=float(value("llama.attention.layer_norm_rms_epsilon")), rope_theta=float(value("llama.rope.freq_base")),
    bos_token_id=1, eos_token_id=2, torch_dtype="float32", attention_bias=False, mlp_bias=False))
write("tokenizer_config.json", dict(tokenizer_class="PreTrainedTokenizerFast", bos_token=words[1], eos_token=words[2],
                                    model_max_length=8192))
merges = [tuple(pair.split(" ")) for pair in value("tokenizer.ggml.merges")]
tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer.save(f"{sys.argv[2]}/tokenizer.json")
