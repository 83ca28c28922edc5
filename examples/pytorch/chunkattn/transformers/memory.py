"""K/V memory and attention for the slots of a model, and a step of it."""

import torch
import torch.nn.functional as F

import chunkattn

from . import interface

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


class _Layers:
    """The slots of one geometry. Heads of a size without kernels are padded with zeros."""

    def __init__(self, geometry, num_layers, threads, options):
        fitting = [size for size in chunkattn.head_sizes()
                   if size[0] >= geometry.key_dim and size[1] >= geometry.value_dim]  # fmt: skip
        key_dim, value_dim = min(fitting, key=sum)
        self.geometry, self.num_layers = geometry, num_layers
        self.attention = chunkattn.Attention(key_dim, value_dim, threads=threads, scale=geometry.scale, **options)
        self.more_key, self.more_value = key_dim - geometry.key_dim, value_dim - geometry.value_dim
        self.cache = None

    def bytes_per_token(self, dtype):
        elements = self.attention.head_dim + self.attention.value_dim
        scales = 8 if dtype == "int8" else 0
        return self.num_layers * self.geometry.num_kv_heads * (elements * SIZES[dtype] + scales)


class Memory:
    """K/V of all slots for the chunks of one tree."""

    def __init__(self, slots, dtype, threads, options):
        if dtype not in SIZES:
            raise ValueError(f"kv_dtype = {dtype!r}: expected one of {', '.join(map(repr, SIZES))}")
        self.slots, self.dtype = slots, dtype
        counts = {}
        self.layers_of_slot = []  # of each slot: its layers, and its number among them
        for slot in slots:
            self.layers_of_slot.append((slot.geometry, counts.get(slot.geometry, 0)))
            counts[slot.geometry] = counts.get(slot.geometry, 0) + 1
        layers = {g: _Layers(g, count, threads, options) for g, count in counts.items()}
        self.layers = list(layers.values())
        self.layers_of_slot = [(layers[geometry], number) for geometry, number in self.layers_of_slot]
        self.bytes_per_chunk = chunkattn.Tree.chunk_size * sum(l.bytes_per_token(dtype) for l in self.layers)

    def allocate(self, tree):
        for layers in self.layers:
            layers.cache = layers.attention.make_cache(
                tree, self.dtype, layers.num_layers, layers.geometry.num_kv_heads)  # fmt: skip


class Run:
    """Attention of one forward pass over the rows of a view."""

    def __init__(self, memory, view):
        self.memory, self.view, self.slot = memory, view, 0

    def attend(self, module, query, key, value, attention_mask, arguments):
        at, self.slot = self.slot, self.slot + 1
        slot = self.memory.slots[at] if at < len(self.memory.slots) else None
        if slot is None or slot.module is not module:
            name = type(module).__name__
            raise RuntimeError(f"attention was called in another order than before: call {at} by {name}")
        layers, number = self.memory.layers_of_slot[at]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if layers.more_key:
            query, key = F.pad(query, (0, layers.more_key)), F.pad(key, (0, layers.more_key))
        if layers.more_value:
            value = F.pad(value, (0, layers.more_value))
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        sinks = arguments.get("s_aux")
        out = query.new_empty(*query.shape[:3], layers.attention.value_dim)
        layers.attention.write(layers.cache, number, self.view, key, value)
        layers.attention.run(
            layers.cache, number, self.view, query, out, window=slot.window, soft_cap=slot.soft_cap,
            sinks=None if sinks is None else sinks.detach().float().contiguous())  # fmt: skip
        return out[..., : slot.geometry.value_dim].contiguous() if layers.more_value else out


def forward(model, configs, memory, view, rows=None):
    """Logits of a view's rows, or of some of them: [rows][vocabulary]."""
    run = Run(memory, view)
    tokens = torch.from_numpy(view.tokens).long()[None]
    positions = torch.from_numpy(view.positions).long()[None]
    keep = {} if rows is None else {"logits_to_keep": torch.tensor(rows, dtype=torch.long)}
    with interface.running(configs, interface.STEP, run), torch.inference_mode():
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False, **keep).logits[0]
    if run.slot != len(memory.slots):
        raise RuntimeError(f"attention was called {run.slot} times, expected {len(memory.slots)}")
    return logits
