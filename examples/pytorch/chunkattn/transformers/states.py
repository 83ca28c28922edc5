"""States of recurrent layers: what convolutions, Mamba 2 and linear attention have in place of K/V.

A state is what transformers' own cache keeps for a layer. For each part of it there is one tensor, with a row for each
text that is live and for each state that is kept where texts may part (Checkpoints). In a step a layer's own forward()
goes on from such rows, once for all texts that have as many tokens in it.
"""

import contextlib
import dataclasses
import inspect
import weakref

import torch
import transformers

import chunkattn

from . import budget, interface
from .layers import Unsupported, cache_with_states

ARGUMENTS = ("cache", "cache_params", "past_key_values")  # names that forward() may have for a cache
PARTS = ("conv_states", "recurrent_states")
# Relative difference that rounding may make between tokens computed at once and one after the other.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


class Layer:
    """A module with a state, and how its forward() goes on from one."""

    def __init__(self, module, name, index, argument, cache):
        self.module, self.name, self.argument = module, name, argument
        self.cache, self.part = cache, cache.layers[index]  # of all layers, and of this one, which holds a call's state
        self.keys, self.sizes = [], []  # of each tensor of a state: (its dictionary, key), and (shape for one text, dtype)
        self.by_token = False  # whether it goes on from a state with one token at a time alone

    def learn(self, hidden):
        """Finds out what its state is. Returns the output for [texts][tokens][...] from no token on."""
        out = self.module.forward(hidden, **{self.argument: self.cache})
        for name in PARTS:
            tensors = getattr(self.part, name)
            if not isinstance(tensors, dict):
                raise Unsupported(f"{self.name}: the cache of transformers {transformers.__version__} has other states "
                                  "than newer ones: expected 5.19 or newer")  # fmt: skip
            for key, tensor in tensors.items():
                if tensor is not None:
                    self.keys.append((tensors, key))
                    self.sizes.append((tensor.shape[1:], tensor.dtype))
        if not self.keys or not isinstance(out, torch.Tensor):
            raise Unsupported(f"{self.name}: its state is not in transformers' cache")
        return out

    def advance(self, forward, hidden, state):
        """The output for [texts][tokens][...]; `state`, a tensor for each key, becomes the one after them."""
        for (tensors, key), tensor in zip(self.keys, state):
            tensors[key] = tensor
        out = forward(hidden, **{self.argument: self.cache})
        for (tensors, key), tensor in zip(self.keys, state):
            if tensors[key] is not tensor:
                tensor.copy_(tensors[key])
            tensors[key] = None
        return out

    def zeros(self, num_texts):
        """The states of no token."""
        return [torch.zeros(num_texts, *shape, dtype=dtype) for shape, dtype in self.sizes]


def layers_of(model, attending):
    """The modules with a state, in their order; attending: those that call attention. Raises Unsupported."""
    config = model.config.get_text_config(decoder=True)
    (cache, expected), found = cache_with_states(model), {}
    for path, module in model.named_modules():
        index, parameters = getattr(module, "layer_idx", None), inspect.signature(module.forward).parameters
        argument = next((each for each in ARGUMENTS if each in parameters), None)
        if index not in expected or argument is None or id(module) in attending:
            continue
        inner = found.get(index)
        if inner is None or path.startswith(inner.name + "."):  # a layer that has it as a part comes before it
            found[index] = Layer(module, path, index, argument, cache)
    if missing := [index for index in expected if index not in found]:
        raise Unsupported(f"{type(model).__name__}: no module of layer {missing[0]} takes transformers' cache, which has a "
                          "state for it")  # fmt: skip
    layers = [found[index] for index in expected]
    draw, known = torch.Generator().manual_seed(1), {}
    with torch.inference_mode():
        for layer in layers:
            hidden = torch.randn(2, 9, config.hidden_size, generator=draw).to(model.dtype)
            try:
                out = layer.learn(hidden)
                if type(layer.module) not in known:
                    known[type(layer.module)] = _goes_by_token(layer, hidden, out)
            except Unsupported:
                raise
            except Exception as error:
                raise Unsupported(f"{layer.name} does not run from a state by itself: {type(error).__name__}: "
                                  f"{error}") from error  # fmt: skip
            layer.by_token = known[type(layer.module)]
    return layers


def _goes_by_token(layer, hidden, expected):
    """Whether a layer goes on from a state only token by token. Raises Unsupported if it does not at all."""
    for by_token, lengths in ((False, (4, 1, 4)), (True, (1,) * 9)):
        state = layer.zeros(len(hidden))
        parts = [layer.advance(layer.module.forward, part, state) for part in hidden.split(lengths, dim=1)]
        difference = (torch.cat(parts, dim=1) - expected).float().norm() / expected.float().norm().clamp(min=1e-30)
        if difference <= TOLERANCE[hidden.dtype]:
            return by_token
    raise Unsupported(f"{layer.name}: does not go on from a state: tokens after it differ from those of the whole text "
                      f"by {float(difference):.2g} of them")  # fmt: skip


class Slot:
    """A row of the states' tensors, until nobody has it."""

    __slots__ = ("__weakref__", "index", "pool")

    def __init__(self, pool, index):
        self.pool, self.index = pool, index

    def __del__(self):
        self.pool.free.append(self.index)


@dataclasses.dataclass
class Piece:
    """Rows of one text in a step. The state after the first num_kept of them is to be kept: the one in `slot`, or, where
    more rows follow, the one in `kept`."""

    first_row: int
    num_rows: int
    slot: Slot
    sequence: object = None
    num_kept: int = 0
    kept: Slot | None = None

    def drop(self):
        """Who still knows it, as an exception's traceback may, has no states."""
        self.slot = self.kept = None


class States:
    """The states of a model, for the sequences of one tree: num_live of those, and num_kept others."""

    def __init__(self, layers, num_live, num_kept):
        self.layers, self.num_live, self.num_kept = layers, num_live, num_kept
        count = num_live + num_kept + budget.SPARE
        with torch.inference_mode():  # memory that was never used takes no room
            self.tensors = [[torch.empty(count, *shape, dtype=dtype) for shape, dtype in layer.sizes] for layer in layers]
        self.free = list(reversed(range(count)))
        self.count, self.checkpoints = count, None
        self.cut = weakref.WeakSet()  # Slots for states that are to be kept of a step that runs

    def attach(self, tree):
        self.checkpoints = chunkattn.Checkpoints(tree, self.num_kept)

    @property
    def bytes_used(self):
        return (self.count - len(self.free)) * bytes_of(self.layers)

    def take(self):
        if not self.free:
            self.checkpoints.stats()  # lets go what the tree has no more
        return Slot(self, self.free.pop())

    @torch.inference_mode()
    def copied(self, source):
        """A Slot with the state of another one, or of no token."""
        slot = self.take()
        for tensors in self.tensors:
            for tensor in tensors:
                if source is None:
                    tensor[slot.index].zero_()
                else:
                    tensor[slot.index].copy_(tensor[source.index])
        return slot

    def resume(self, sequence):
        """Has a sequence computed from the nearest state on; returns a copy of it."""
        return self.copied(self.checkpoints.resume(sequence)[1])

    def add(self, step, sequence, slot, max_tokens):
        """Adds rows to a step up to where a state is wanted, or to the end: (what Step.add() says, Piece or None)."""
        wanted = self.checkpoints.next(sequence)
        before = None if wanted is None else wanted - sequence.num_scheduled
        can_cut = len(self.cut) + self.checkpoints.stats()["count"] < self.num_kept + budget.SPARE
        if before is not None and not (can_cut and wanted == len(sequence) - 1):
            max_tokens = min(max_tokens, before)  # else the last token is no step of its own
        added = step.add(sequence, max_tokens)
        if not added:
            return added, None
        piece = Piece(added.row.first_row, added.row.num_rows, slot, sequence)
        if before is not None and before <= piece.num_rows:
            piece.num_kept = before
            if before < piece.num_rows:
                piece.kept = self.take()
                self.cut.add(piece.kept)
        return added, piece

    def keep(self, pieces):
        """After their step."""
        for piece in sorted(pieces, key=lambda piece: piece.kept is None):  # those of others are copied after these
            if piece.num_kept > 0:
                end = piece.sequence.num_scheduled - piece.num_rows + piece.num_kept
                if piece.kept is None:
                    piece.kept = self.copied(piece.slot)
                self.cut.discard(piece.kept)
                self.checkpoints.save(piece.sequence, end, piece.kept)
                piece.kept = None

    def leave(self, sequence, slot):
        """A sequence leaves, whose state is in `slot`: it stays for texts that go on from here."""
        if sequence.num_scheduled > 0:
            self.checkpoints.save(sequence, sequence.num_scheduled, slot)


def bytes_of(layers):
    """Of the states of one text."""
    return sum(shape.numel() * dtype.itemsize for layer in layers for shape, dtype in layer.sizes)


class Turn:
    """What recurrent layers compute in one step: the rows of several texts, each from its own state on.

    In passes one after the other, each by (first_row, slot) of texts with as many rows in it, and what is copied then.
    """

    def __init__(self, states, pieces):
        self.states = states
        self.passes = {}  # for layers that go on token by token (True), and for others
        for by_token in {layer.by_token for layer in states.layers}:
            passes = self.passes[by_token] = []
            for piece in pieces:
                ends = range(1, piece.num_rows + 1) if by_token else {piece.num_kept or piece.num_rows, piece.num_rows}
                begin = 0
                for at, end in enumerate(sorted(ends)):
                    if at == len(passes):
                        passes.append(({}, []))
                    groups, copies = passes[at]
                    groups.setdefault(end - begin, []).append((piece.first_row + begin, piece.slot.index))
                    if end == piece.num_kept and piece.kept is not None:
                        copies.append((piece.slot.index, piece.kept.index))
                    begin = end
            for groups, _ in passes:
                for count, parts in groups.items():
                    first, slots = torch.tensor(parts).T
                    groups[count] = first[:, None] + torch.arange(count), slots

    def advance(self, layer, tensors, forward, hidden):
        out = None
        for groups, copies in self.passes[layer.by_token]:
            for rows, slots in groups.values():
                if len(slots) == 1:
                    state = [tensor[slots[0] : slots[0] + 1] for tensor in tensors]
                    part = layer.advance(forward, hidden[:, rows[0, 0] : rows[0, -1] + 1], state)
                else:
                    state = [tensor[slots] for tensor in tensors]
                    part = layer.advance(forward, hidden[0, rows], state)
                    for tensor, after in zip(tensors, state):
                        tensor[slots] = after
                if out is None:
                    out = part.new_empty(1, hidden.shape[1], *part.shape[2:])
                out[0, rows] = part
            for source, target in copies:
                for tensor in tensors:
                    tensor[target] = tensor[source]
        return out

    @contextlib.contextmanager
    def running(self):
        """Within it the modules with a state compute these rows. After an error no state of them is of use."""
        replaced = []
        try:
            for layer, tensors in zip(self.states.layers, self.states.tensors):
                before = layer.module.__dict__.get("forward")
                replaced.append((layer.module, before))
                layer.module.forward = self._forward(layer, tensors, layer.module.forward)
            yield
        finally:
            for module, before in replaced:
                if before is None:
                    del module.forward
                else:
                    module.forward = before

    def _forward(self, layer, tensors, forward):
        def advance(hidden_states, *args, **kwargs):
            interface.current_run()
            return self.advance(layer, tensors, forward, hidden_states)

        return advance
