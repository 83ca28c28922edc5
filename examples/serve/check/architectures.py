#!/usr/bin/env python3
"""Models of each architecture against `transformers`, and quantised tensors against `gguf`.

usage: architectures.py SERVE SERVE_TENSOR [--seed S]   needs the packages gguf, numpy, torch and transformers

Small models with random weights are written as GGUF under the names that gguf's own tables give their tensors. What
`serve score` says of random tokens, in fp32, must lie within 1e-3 of transformers' eager attention; where layers have
a window, `serve generate` must write what transformers does, with K/V behind it given back and kept. One model is
written in several files. Blocks of random bytes of each quantised type must be what gguf makes of them."""
import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PEERS_PYTHON = pathlib.Path(__file__).resolve().parents[3] / "build/peers/venv/bin/python"
try:
    import gguf
    import numpy as np
    import torch
    import transformers
except ImportError as error:
    if PEERS_PYTHON.exists() and pathlib.Path(sys.executable) != PEERS_PYTHON:
        os.execv(PEERS_PYTHON, [str(PEERS_PYTHON), *sys.argv])
    print(f"SKIPPED: needs Python's packages gguf, numpy, torch and transformers ({error}); ./dev peers installs them")
    sys.exit(77)

BOUND = 1e-3
VOCABULARY = 300
WINDOW = 16
NEW = 20  # tokens of a text
# heads * head_dim is the width of the stream in the first, and not in the others, where they may differ
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
         "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
OTHER_HEADS = {"num_attention_heads": 4, "head_dim": 8}
MODELS = {
    "Llama": ("llama", transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "Mistral": ("llama", transformers.MistralConfig, {"sliding_window": WINDOW, **OTHER_HEADS}),
    "Mistral without a window": ("llama", transformers.MistralConfig, {"sliding_window": None, **OTHER_HEADS}),
    "Qwen 2": ("qwen2", transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "Qwen 3": ("qwen3", transformers.Qwen3Config, {**OTHER_HEADS, "tie_word_embeddings": False}),
    "Phi-3": ("phi3", transformers.Phi3Config, {"sliding_window": WINDOW, "tie_word_embeddings": False}),
    "Gemma 3": ("gemma3", transformers.Gemma3TextConfig,
                {"sliding_window": WINDOW, "num_hidden_layers": 7, "query_pre_attn_scalar": 8, **OTHER_HEADS}),
}
MODELS["Gemma 3, positions / 8"] = (*MODELS["Gemma 3"][:2], {**MODELS["Gemma 3"][2], "rope_parameters": {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},  # as from 4B on
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}})
QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]


def random_model(config):
    """Weights of a size that leaves activations at about 1; norms and biases that matter."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name:
                weights.copy_((0.0 if config.model_type.startswith("gemma") else 1.0) + 0.2 * torch.randn_like(weights))
            elif weights.dim() == 1:
                weights.normal_(std=0.5)
            else:
                weights.normal_(std=weights.shape[-1] ** -0.5)
    return model


def as_gguf_has_it(architecture, config, name, weights):
    """What llama.cpp's converter does to a tensor."""
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        weights = weights.reshape(heads, 2, -1, weights.shape[-1]).swapaxes(1, 2).reshape(weights.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        weights = weights + 1
    return np.ascontiguousarray(weights, dtype=np.float32)


def write_vocabulary(writer):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab"] + [f"<{i}>" for i in range(VOCABULARY - 3)])
    writer.add_token_types([1] * 3 + [4] * (VOCABULARY - 3))
    writer.add_token_merges(["a b"])


def write_model(path, architecture, model, tensors_a_file=0):
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_file)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    else:
        writer.add_rope_dimension_count(head_dim)
    if getattr(config, "sliding_window", None) and config.model_type not in ("qwen2", "qwen3"):
        writer.add_sliding_window(config.sliding_window)
    write_vocabulary(writer)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture),
                                     config.num_hidden_layers)
    for name, weights in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, ending = name.rsplit(".", 1)
        tensor = as_gguf_has_it(architecture, config, name, weights.numpy())
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(serve, path, sequences, folder):
    tokens, logits = folder / "tokens.json", folder / "logits"
    tokens.write_text(json.dumps(sequences))
    subprocess.run([serve, "score", "--model", path, "--tokens", tokens, "--weights", "fp32", "--kv", "fp32",
                    "--products", "own", "--threads", "1", "--logits", logits],
                   check=True, stdout=subprocess.DEVNULL)
    return np.fromfile(logits, np.float32).reshape(-1, VOCABULARY)


def name_of(token):
    return ["a", "b", "ab"][token] if token < 3 else f"<{token - 3}>"


def texts_of(serve, path, prompts, folder, windows):
    """Of prompts that join two by two, while others decode."""
    prompts = ["".join(map(name_of, tokens)) for tokens in prompts]
    (folder / "prompts.json").write_text(json.dumps([{"prompt": text, "max_tokens": NEW} for text in prompts]))
    out = subprocess.run([serve, "generate", "--model", path, "--prompts", folder / "prompts.json", "--stagger", "4",
                          "--chunk-size", "8", "--windows", windows, "--weights", "fp32", "--kv", "fp32", "--products",
                          "own", "--threads", "1"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [out.split(text)[1].split("\n")[0] for text in prompts]


def compare_texts(serve, path, model, rng, folder):
    """Prompts that begin alike, of several windows each."""
    shared = [rng.randrange(3, VOCABULARY) for _ in range(5 * WINDOW)]
    prompts = [shared[:rng.randrange(1, 5 * WINDOW)] + [rng.randrange(3, VOCABULARY) for _ in range(8)] for _ in range(6)]
    expected = []
    for tokens in prompts:
        with torch.inference_mode():
            for _ in range(NEW):
                tokens = tokens + [int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
        expected.append("".join(map(name_of, tokens[-NEW:])))
    same = [texts_of(serve, path, prompts, folder, windows) == expected for windows in ("give-back", "keep")]
    print(f"{'':<25} {len(prompts)} texts of {NEW} tokens: {'the same' if all(same) else 'OTHERS'}")
    return all(same)


def compare_models(serve, folder, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    good = True
    for name, (architecture, config_of, values) in MODELS.items():
        model = random_model(config_of(**{**SHAPE, **values}))
        sequences = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 17, 100)]
        with torch.inference_mode():
            expected = np.concatenate([model(torch.tensor([tokens])).logits[0].numpy() for tokens in sequences])
        path = folder / f"{architecture}.gguf"
        write_model(path, architecture, model)
        logits = logits_of(serve, path, sequences, folder)
        worst = np.abs(logits - expected).max()
        print(f"{name:<25} {len(logits)} positions, logits up to {np.abs(expected).max():.1f}: {worst:.1e} apart")
        good &= bool(worst <= BOUND) and bool(expected.std() > 0.3)
        if getattr(model.config, "sliding_window", None) and architecture not in ("qwen2", "qwen3"):
            good &= compare_texts(serve, path, model, rng, folder)
    write_model(folder / "split.gguf", "gemma3", model, tensors_a_file=20)
    parts = sorted(folder.glob("split-*.gguf"))
    same = np.array_equal(logits_of(serve, parts[0], sequences, folder), logits)
    print(f"in {len(parts)} files: {'the same' if same else 'OTHER'} logits")
    return good and same and len(parts) > 3


@np.errstate(all="ignore")
def compare_tensors(serve_tensor, folder, seed):
    rng = np.random.default_rng(seed)
    path, good = folder / "quantised.gguf", True
    writer = gguf.GGUFWriter(path, "llama")
    expected = {}
    for name in QUANTISED:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (64, 1024 // elements * size), np.uint8)
        writer.add_tensor(name, data, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, floats in expected.items():
        out = subprocess.run([serve_tensor, path, name], check=True, stdout=subprocess.PIPE).stdout
        ours = np.frombuffer(out, np.float32).reshape(floats.shape)
        finite = np.isfinite(floats)
        good &= bool(finite.mean() > 0.5) and np.array_equal(finite, np.isfinite(ours))
        # A product and a sum may be rounded once or twice: what that is depends on the greatest of the block.
        rounding = 1e-6 * np.abs(np.where(finite, floats, 0)).reshape(-1, 256).max(-1).repeat(256).reshape(floats.shape)
        exact = (ours == floats)[finite]
        good &= exact.mean() > 0.5 and bool((np.abs(np.where(finite, ours - floats, 0)) <= rounding).all())
        print(f"{name:<7} {finite.sum()} finite elements, {exact.mean():.1%} of the same bits")
    return good


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("serve_tensor")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, --seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        good = compare_tensors(arguments.serve_tensor, folder, arguments.seed)
        good &= compare_models(arguments.serve, folder, arguments.seed)
    print("as they should be" if good else "FAILED: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
