#!/usr/bin/env python3
"""Writes a Llama with random weights as GGUF, to measure with; it has no tokenizer. Needs nothing but Python.

usage: random_gguf.py FILE [--shape 8b-4-layers] [--type Q8_0] [--vocabulary N] [--context N]

--shape   8b-4-layers: Llama 3 8B with 4 of its 32 layers; or LAYERS,DIM,FFN,HEADS,KV_HEADS
--type    F16, Q8_0 or Q4_0, of all matrices
"""
import argparse
import os
import struct

SHAPES = {"8b-4-layers": (4, 4096, 14336, 32, 8)}
# Number in GGUF, elements and bytes of a block, scale of a block whose elements are to be about 1.
TYPES = {"F16": (1, 1, 2, None), "Q8_0": (8, 32, 34, 1 / 73), "Q4_0": (2, 32, 18, 1 / 4.6)}
ALIGNMENT = 32


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def metadata(pairs):
    out = b""
    for key, value in pairs.items():
        out += text(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        elif isinstance(value, float):
            out += struct.pack("<If", 6, value)
        else:
            out += struct.pack("<II", 4, value)
    return out


def blocks(kind, deviation):
    """About a megabyte of random blocks: weights with this standard deviation."""
    _, elements, size, scale = TYPES[kind]
    if scale is None:  # halves: sign, an exponent near that of the deviation, a random fraction
        exponent = 14
        while deviation < 2.0 ** (exponent - 15):
            exponent -= 1
        raw = os.urandom(2 << 19)
        return b"".join(struct.pack("<H", v & 0x83ff | exponent << 10) for (v,) in struct.iter_unpack("<H", raw))
    head = struct.pack("<e", deviation * scale)
    return b"".join(head + os.urandom(size - 2) for _ in range((1 << 20) // size))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--shape", default="8b-4-layers")
    parser.add_argument("--type", default="Q8_0", choices=list(TYPES))
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--context", type=int, default=131072)
    options = parser.parse_args()
    shape = SHAPES.get(options.shape) or tuple(int(n) for n in options.shape.split(","))
    layers, dim, ffn, heads, kv_heads = shape
    head_dim = dim // heads

    tensors = [("token_embd.weight", (dim, options.vocabulary)), ("output_norm.weight", (dim,)),
               ("output.weight", (dim, options.vocabulary))]
    for i in range(layers):
        tensors += [(f"blk.{i}.{name}.weight", size) for name, size in (
            ("attn_norm", (dim,)), ("attn_q", (dim, dim)), ("attn_k", (dim, kv_heads * head_dim)),
            ("attn_v", (dim, kv_heads * head_dim)), ("attn_output", (dim, dim)), ("ffn_norm", (dim,)),
            ("ffn_gate", (dim, ffn)), ("ffn_up", (dim, ffn)), ("ffn_down", (ffn, dim)))]
    pairs = metadata({
        "general.architecture": "llama", "general.name": f"random {options.shape}", "llama.context_length": options.context,
        "llama.embedding_length": dim, "llama.block_count": layers, "llama.feed_forward_length": ffn,
        "llama.attention.head_count": heads, "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 500000.0,
        "llama.rope.dimension_count": head_dim, "llama.vocab_size": options.vocabulary,
        "tokenizer.ggml.model": "no_vocab"})

    number, elements, size, _ = TYPES[options.type]
    infos, offset, sizes = b"", 0, []
    for name, extent in tensors:
        matrix = len(extent) == 2
        count = extent[0] * extent[1] if matrix else extent[0]
        length = count // elements * size if matrix else 4 * count
        infos += text(name) + struct.pack("<I", len(extent)) + b"".join(struct.pack("<Q", n) for n in extent)
        infos += struct.pack("<IQ", number if matrix else 0, offset)
        sizes.append((matrix, length))
        offset += (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    weights = blocks(options.type, dim ** -0.5)
    with open(options.file, "wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 13) + pairs + infos)
        out.write(bytes(-out.tell() % ALIGNMENT))
        for matrix, length in sizes:
            if matrix:
                for left in range(length, 0, -len(weights)):
                    out.write(weights[:left])
            else:
                out.write(struct.pack("<f", 1.0) * (length // 4))
            out.write(bytes(-out.tell() % ALIGNMENT))


if __name__ == "__main__":
    main()
