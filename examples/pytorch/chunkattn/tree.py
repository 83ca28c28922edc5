"""The tree, and what stands beside it: groups of layers with a window, and states of recurrent layers."""

import weakref

from . import _core
from .picture import tree_svg


def _said(beside):
    stats = beside.stats()
    if isinstance(beside, Checkpoints):
        return f"{stats['count']} of {beside.max_count} states"
    return (f"window {beside.window}: {stats['used_chunks']} of {beside.max_chunks} chunks "
            f"({stats['cached_chunks']} cached)")  # fmt: skip


class Tree(_core.Tree):
    __doc__ = _core.Tree.__doc__

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._beside = []

    @property
    def windows(self):
        """The groups that were made for it and are still there, each a WindowedLayers."""
        made = [each for each in self._known() if not isinstance(each, Checkpoints)]
        return [layers for groups in made for layers in (groups if isinstance(groups, WindowedGroups) else [groups])]

    @property
    def checkpoints(self):
        """Those that were made for it and are still there."""
        return [each for each in self._known() if isinstance(each, Checkpoints)]

    def _known(self):
        return [each for known in self._beside if (each := known()) is not None]

    def _knows(self, beside):
        self._beside = [known for known in self._beside if known() is not None] + [weakref.ref(beside)]

    def __str__(self):
        return "\n".join([super().__str__().rstrip("\n"), *map(_said, self.windows + self.checkpoints)])

    def __repr__(self):
        return "; ".join([super().__repr__()[:-1], *map(_said, self.windows + self.checkpoints)]) + ">"

    _repr_svg_ = tree_svg


class Checkpoints(_core.Checkpoints):
    __doc__ = _core.Checkpoints.__doc__

    def __init__(self, tree, max_count, *, max_per_path=8):
        super().__init__(tree, max_count, max_per_path=max_per_path)
        self.max_count = max_count
        tree._knows(self)


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
