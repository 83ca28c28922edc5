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
        """The groups that were made for it and are still there, each a WindowedLayers."""
        made = [groups for known in self._windows if (groups := known()) is not None]
        return [layers for groups in made for layers in (groups if isinstance(groups, WindowedGroups) else [groups])]

    def _knows(self, groups):
        self._windows = [known for known in self._windows if known() is not None] + [weakref.ref(groups)]

    def __str__(self):
        return "\n".join([super().__str__().rstrip("\n"), *map(_said, self.windows)])

    def __repr__(self):
        return "; ".join([super().__repr__()[:-1], *map(_said, self.windows)]) + ">"

    _repr_svg_ = tree_svg


class WindowedLayers(_core.WindowedLayers):
    __doc__ = _core.WindowedLayers.__doc__

    def __init__(self, tree, window, max_chunks, *, max_cached_chunks=None):
        super().__init__(tree, window, max_chunks, max_cached_chunks=max_cached_chunks)
        tree._knows(self)


class WindowedGroups(_core.WindowedGroups):
    __doc__ = _core.WindowedGroups.__doc__

    def __init__(self, tree, windows):
        super().__init__(tree, windows)
        tree._knows(self)
