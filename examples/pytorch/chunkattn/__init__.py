"""chunkattn: a prefix-aware KV cache, and exact attention that reads shared K/V once, on CPUs.

`Tree`, `Plan` and `Attention` are the C++ library's; `chunkattn.transformers.Generator` runs models of
transformers on them.
"""

import sys

from . import _core
from ._core import (
    AddResult,
    CacheExplainer,
    Finished,
    InFlight,
    KvCache,
    OutOfChunks,
    Pin,
    Plan,
    Sequence,
    Step,
    ScheduledSequence,
    Threads,
    View,
    head_sizes,
    instruction_set,
)
from .picture import tree_svg
from .tree import Checkpoints, Tree, WindowedGroups, WindowedLayers

__all__ = [
    "AddResult", "Attention", "CacheExplainer", "Checkpoints", "Finished", "InFlight", "KvCache", "OutOfChunks", "Pin", "Plan",
    "Sequence", "Step", "ScheduledSequence", "Threads", "Tree", "View", "WindowedGroups", "WindowedLayers",
    "head_sizes", "instruction_set", "tree_svg",
]  # fmt: skip


class Attention(_core.Attention):
    """Attention over a tree, for one size of heads.

    threads: a `Threads`, or how many; by default as many as torch uses, where torch is imported.
    scale: the factor of q·k, by default 1 / sqrt(head_dim).
    """

    def __init__(self, head_dim, value_dim=None, *, threads=None, scale=None, reduce="deterministic",
                 accuracy="two_terms"):  # fmt: skip
        if threads is None:
            threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 0
        if not isinstance(threads, Threads):
            threads = Threads(threads)
        super().__init__(head_dim, value_dim, threads=threads, scale=scale, reduce=reduce, accuracy=accuracy)

