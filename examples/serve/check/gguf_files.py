"""The vocabulary of a GGUF file, and small files with a vocabulary and nothing else.

Written for the checks beside it, with nothing but the standard library.
"""
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


def write_vocabulary(path, values):
    """A file with these keys and no tensors. Lists are of strings, of ints or of floats."""
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
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)))
        for key, value in values.items():
            kind, raw = encoded(value)
            file.write(text(key) + struct.pack("<I", kind) + raw)
