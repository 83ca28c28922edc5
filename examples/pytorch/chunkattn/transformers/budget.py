"""How K/V memory is divided between the tree and the groups of layers with a window.

bytes_per_chunk: of the tree's (None), and of the group's of each window.
"""

import chunkattn

CHUNK = chunkattn.Tree.chunk_size
MOST = (1 << 31) - 1  # chunks of one kind
# What a chunk of the tree takes besides K/V, its tokens above all. It counts where there is no K/V.
BARE = 512


def chunks_of_window(window):
    """The most chunks that the window before the next token of a text touches, and that token's."""
    return (window + CHUNK - 2) // CHUNK + 1


def chunks_of_groups(num_chunks, bytes_per_chunk, step_tokens, typical_length):
    """Of each window: the chunks of its group, beside so many of the tree.

    They are for as many texts of the typical length as the tree has room for, and for the rows of a step; never more
    than the tree has, as each of them stands for one of the tree's.
    """
    texts = -(-num_chunks * CHUNK // typical_length)
    of_step = -(-step_tokens // CHUNK) + 1
    return {window: min(num_chunks, texts * chunks_of_window(window) + of_step)
            for window in bytes_per_chunk if window is not None}  # fmt: skip


def bytes_of(num_chunks, bytes_per_chunk, step_tokens, typical_length):
    """Of so many chunks of the tree, and of their groups."""
    groups = chunks_of_groups(num_chunks, bytes_per_chunk, step_tokens, typical_length)
    of_groups = sum(bytes_per_chunk[window] * count for window, count in groups.items())
    return num_chunks * (bytes_per_chunk[None] or BARE) + of_groups


def chunks_within(num_bytes, bytes_per_chunk, step_tokens, typical_length):
    """The most chunks of the tree that fit, with their groups."""
    least, most = 0, min(MOST, num_bytes)
    while least < most:
        middle = (least + most + 1) // 2
        fits = bytes_of(middle, bytes_per_chunk, step_tokens, typical_length) <= num_bytes
        least, most = (middle, most) if fits else (least, middle - 1)
    return least
