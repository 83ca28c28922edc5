"""The vocabulary of a GGUF file; small files with a vocabulary, and with random weights.

Written for the checks beside it, with nothing but the standard library.
"""
import array
import random
import struct

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class Reader:
    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = file.read()
        self.at = 0

    def number(self, code):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self):
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size:self.at].decode()

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.number("I"), self.number("Q")
            return [self.value(element) for _ in range(count)]
        return self.number(NUMBERS[kind])


def metadata(path):
    """All keys and values of a file."""
    reader = Reader(path)
    if reader.data[:4] != b"GGUF":
        raise SystemExit(f"{path}: not a GGUF file")
    reader.at = 16  # magic, version, number of tensors
    return {reader.string(): reader.value(reader.number("I")) for _ in range(reader.number("Q"))}


def write_vocabulary(path, values, tensors=()):
    """A file with these keys. Lists are of strings, of ints or of floats.

    tensors: (name, shape with the number of inputs first, array of floats)"""
    def text(value):
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    def encoded(value):
        if isinstance(value, bool):
            return 7, struct.pack("<?", value)
        if isinstance(value, int):
            return 4, struct.pack("<I", value)
        if isinstance(value, float):
            return 6, struct.pack("<f", value)
        if isinstance(value, str):
            return STRING, text(value)
        if isinstance(value[0], str):
            return ARRAY, struct.pack("<IQ", STRING, len(value)) + b"".join(map(text, value))
        kind = 5 if isinstance(value[0], int) else 6
        return ARRAY, struct.pack(f"<IQ{len(value)}{NUMBERS[kind]}", kind, len(value), *value)

    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)))
        for key, value in values.items():
            kind, raw = encoded(value)
            file.write(text(key) + struct.pack("<I", kind) + raw)
        offset = 0
        for name, shape, numbers in tensors:
            file.write(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset))
            offset += (4 * len(numbers) + 31) // 32 * 32
        for _, _, numbers in tensors:
            file.write(bytes(-file.tell() % 32) + numbers.tobytes())


def byte_names():
    """What GPT-2's vocabulary calls each byte: itself if it can be seen, else a character above 255."""
    names, above = [], 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            names.append(chr(byte))
        else:
            names.append(chr(above))
            above += 1
    return names


def write_tiny_chat_model(path, seed, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
                          template="{{'<|im_start|>' + message['role']}}<|im_end|>"):
    """A Llama with random weights that takes chats: a token for each byte, ChatML by default, 2 layers of 8 heads.

    No token ends a text."""
    dim, hidden, layers, heads = 64, 96, 2, 8
    special = list(special)
    tokens = special + byte_names() + ["ab"]
    rng = random.Random(seed)

    def matrix(name, outputs, inputs):
        scale = (3 / inputs) ** 0.5
        numbers = array.array("f", (rng.uniform(-scale, scale) for _ in range(outputs * inputs)))
        return name + ".weight", (inputs, outputs), numbers

    def norm(name):
        return name + ".weight", (dim,), array.array("f", [1.0] * dim)

    tensors = [matrix("token_embd", len(tokens), dim), norm("output_norm"), matrix("output", len(tokens), dim)]
    for layer in range(layers):
        block = f"blk.{layer}."
        tensors += [matrix(block + name, dim, dim) for name in ("attn_q", "attn_k", "attn_v", "attn_output")]
        tensors += [norm(block + "attn_norm"), norm(block + "ffn_norm"), matrix(block + "ffn_gate", hidden, dim),
                    matrix(block + "ffn_up", hidden, dim), matrix(block + "ffn_down", dim, hidden)]
    write_vocabulary(path, {
        "general.architecture": "llama", "llama.block_count": layers, "llama.embedding_length": dim,
        "llama.feed_forward_length": hidden, "llama.attention.head_count": heads, "llama.context_length": 1024,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [4] * len(special) + [1] * 257, "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": template}, tensors)
