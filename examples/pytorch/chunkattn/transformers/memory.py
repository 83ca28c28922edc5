"""K/V memory and attention for the slots of a model, and a step of it.

Layers with a window have a group of chunks of their own for each size of windows, which are given back as the
windows move on; the others have the tree's.
"""

import contextlib

import torch
import torch.nn.functional as F

import chunkattn

from . import budget, interface
from .states import Turn

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


class _Layers:
    """The slots of one geometry and one group. Heads of a size without kernels are padded with zeros."""

    def __init__(self, geometry, window, num_layers, threads, options):
        fitting = [size for size in chunkattn.head_sizes()
                   if size[0] >= geometry.key_dim and size[1] >= geometry.value_dim]  # fmt: skip
        key_dim, value_dim = min(fitting, key=sum)
        self.geometry, self.window, self.num_layers = geometry, window, num_layers
        self.attention = chunkattn.Attention(key_dim, value_dim, threads=threads, scale=geometry.scale, **options)
        self.more_key, self.more_value = key_dim - geometry.key_dim, value_dim - geometry.value_dim
        self.cache = None

    def bytes_per_token(self, dtype):
        elements = self.attention.head_dim + self.attention.value_dim
        scales = 8 if dtype == "int8" else 0
        return self.num_layers * self.geometry.num_kv_heads * (elements * SIZES[dtype] + scales)


class Memory:
    """K/V of all slots, for the chunks of one tree and of its groups.

    longest_window: slots with a larger one, or with any where it is 0, keep K/V of all tokens.
    """

    def __init__(self, slots, dtype, threads, options, longest_window):
        if dtype not in SIZES:
            raise ValueError(f"kv_dtype = {dtype!r}: expected one of {', '.join(map(repr, SIZES))}")
        self.slots, self.dtype = slots, dtype
        counts = {}
        self.layers_of_slot = []  # of each slot: its layers, and its number among them
        for slot in slots:
            kind = (slot.geometry, slot.window if slot.window and slot.window <= longest_window else None)
            self.layers_of_slot.append((kind, counts.get(kind, 0)))
            counts[kind] = counts.get(kind, 0) + 1
        layers = {kind: _Layers(*kind, count, threads, options) for kind, count in counts.items()}
        self.layers = list(layers.values())
        self.layers_of_slot = [(layers[kind], number) for kind, number in self.layers_of_slot]
        self.bytes_per_chunk = {None: 0}  # of the tree (None), and of the group of each window
        for l in self.layers:
            of_layers = budget.CHUNK * l.bytes_per_token(dtype)
            self.bytes_per_chunk[l.window] = self.bytes_per_chunk.get(l.window, 0) + of_layers
        self.tree = self.windows = None
        self.states = None  # of recurrent layers, if the model has any
        self.groups = {}  # those of `windows`, by their window

    def allocate(self, tree, window_chunks, states=None):
        """window_chunks: of each window, the chunks of its group. states: of recurrent layers."""
        self.tree, self.windows = tree, chunkattn.WindowedGroups(tree, window_chunks)
        self.groups = {group.window: group for group in self.windows}
        for layers in self.layers:
            layers.cache = layers.attention.make_cache(
                self.groups.get(layers.window, tree), self.dtype, layers.num_layers,
                layers.geometry.num_kv_heads)  # fmt: skip
        self.states = states
        if states is not None:
            states.attach(tree)

    def explainer(self, max_tokens):
        """Of what prompts find in the tree, and can be resumed from."""
        resume = None if not self.groups else self.windows.find
        if self.states is not None:
            resume = self.states.checkpoints.find
        return chunkattn.CacheExplainer(self.tree, max_tokens, resume=resume)

    @property
    def bytes_used(self):
        """Of chunks and states that sequences hold, or that are cached."""
        of_states = self.states.bytes_used if self.states is not None else 0
        return of_states + sum(self.bytes_per_chunk[window] * of.stats()["used_chunks"]
                               for window, of in {None: self.tree, **self.groups}.items())  # fmt: skip

    def is_ready(self, sequence, slot):
        """Whether a sequence can be added to a step: it has the windows of its next row, and a state in a slot."""
        return self.windows.is_ready(sequence) and (self.states is None or slot is not None)

    def resume(self, sequence):
        """Has a sequence computed from where its windows are, or its state, of which a slot is returned.

        Raises OutOfChunks.
        """
        if self.states is not None:  # beside which no layers have windows
            return self.states.resume(sequence)
        self.windows.resume(sequence)
        return None

    def add(self, step, sequence, slot, max_tokens):
        """Step.add(), to where a state is wanted: (what it says, Piece or None)."""
        if self.states is not None:
            return self.states.add(step, sequence, slot, max_tokens)
        return step.add(sequence, max_tokens), None

    def keep(self, pieces):
        """After the step of these pieces."""
        if self.states is not None:
            self.states.keep(pieces)

    def views(self, view):
        """By window: what the layers read of a step. Raises OutOfChunks."""
        return {None: view, **{window: group.view(view) for window, group in self.groups.items()}}


def rows_of(tensor):
    """The tensor, whose rows attention takes at most distances, or a copy of one that is expanded or has gaps in rows."""
    *strides, last = tensor.stride()
    return tensor if last == 1 and all(strides) else tensor.contiguous()


class Run:
    """Attention of one forward pass over the rows of a view."""

    def __init__(self, memory, view):
        self.memory, self.views, self.slot = memory, memory.views(view), 0

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
        query, key, value = rows_of(query), rows_of(key), rows_of(value)
        sinks = arguments.get("s_aux")
        out = query.new_empty(*query.shape[:3], layers.attention.value_dim)
        view = self.views[layers.window]
        layers.attention.write(layers.cache, number, view, key, value)
        layers.attention.run(
            layers.cache, number, view, query, out, window=slot.window, soft_cap=slot.soft_cap,
            sinks=None if sinks is None else sinks.detach().float().contiguous())  # fmt: skip
        return out[..., : slot.geometry.value_dim].contiguous() if layers.more_value else out


def forward(model, configs, memory, view, rows=None, pieces=()):
    """Logits of a view's rows, or of some of them: [rows][vocabulary]. pieces: whose states they go on from.

    Raises OutOfChunks, before anything is computed, where a group has no room.
    """
    run = Run(memory, view)
    turn = contextlib.nullcontext() if memory.states is None else Turn(memory.states, pieces).running()
    tokens = torch.from_numpy(view.tokens).long()[None]
    positions = torch.from_numpy(view.positions).long()[None]
    keep = {} if rows is None else {"logits_to_keep": torch.tensor(rows, dtype=torch.long)}
    with interface.running(configs, interface.STEP, run), turn, torch.inference_mode():
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False, **keep).logits[0]
    if run.slot != len(memory.slots):
        raise RuntimeError(f"attention was called {run.slot} times, expected {len(memory.slots)}")
    return logits
