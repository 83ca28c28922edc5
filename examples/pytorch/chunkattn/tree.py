"""The tree, and what stands beside it: groups of layers with a window."""

import weakref

from . import _core
from .picture import tree_svg


def _said(layers):
    stats = layers.stats()
    return (f"window {layers.window}: {stats['used_chunks']} of {layers.max_chunks} chunks "
            f"({stats['cached_chunks']} cached)")  # fmt: skip


class Tree(_core.Tree):
    __doc__ = _core.Tree.__doc__

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._windows = []

    @property
    def windows(self):
        """The WindowedLayers that were made for it and are still there."""
        return [layers for known in self._windows if (layers := known()) is not None]

    def __str__(self):
        return "\n".join([super().__str__().rstrip("\n"), *map(_said, self.windows)])

    def __repr__(self):
        return "; ".join([super().__repr__()[:-1], *map(_said, self.windows)]) + ">"

    _repr_svg_ = tree_svg


class WindowedLayers(_core.WindowedLayers):
    __doc__ = _core.WindowedLayers.__doc__

    def __init__(self, tree, window, max_chunks, *, max_cached_chunks=None):
        super().__init__(tree, window, max_chunks, max_cached_chunks=max_cached_chunks)
        tree._windows = [known for known in tree._windows if known() is not None] + [weakref.ref(self)]
