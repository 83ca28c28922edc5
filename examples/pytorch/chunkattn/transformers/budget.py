"""How K/V memory is divided between the tree, the groups of layers with a window, and states of recurrent layers."""

import chunkattn

CHUNK = chunkattn.Tree.chunk_size
MOST = (1 << 31) - 1  # chunks of one kind
# What a chunk of the tree takes besides K/V, its tokens above all. It counts where there is no K/V.
BARE = 512
SPARE = 4  # states of recurrent layers on their way: as many prompts may end in one step, others in the next one


def chunks_of_window(window):
    """The most chunks that the window before the next token of a text touches, and that token's."""
    return (window + CHUNK - 2) // CHUNK + 1


class Division:
    """What stands beside so many chunks of the tree: for as many texts of the typical length as these have room for.

    bytes_per_chunk: of the tree's (None), and of the group's of each window. bytes_per_state: of one text, 0 if the
    model has no recurrent layers.
    """

    def __init__(self, bytes_per_chunk, step_tokens, typical_length, bytes_per_state=0, max_sequences=1, max_states=None):
        self.bytes_per_chunk, self.step_tokens, self.typical_length = bytes_per_chunk, step_tokens, typical_length
        self.bytes_per_state, self.max_sequences, self.max_states = bytes_per_state, max_sequences, max_states

    def texts(self, num_chunks):
        return -(-num_chunks * CHUNK // self.typical_length)

    def chunks_of_groups(self, num_chunks):
        """Of each window: the chunks of its group.

        They are for all texts and for the rows of a step; never more than the tree has, as each of them stands for one
        of the tree's.
        """
        of_step = -(-self.step_tokens // CHUNK) + 1
        return {window: min(num_chunks, self.texts(num_chunks) * chunks_of_window(window) + of_step)
                for window in self.bytes_per_chunk if window is not None}  # fmt: skip

    def states(self, num_chunks):
        """States of recurrent layers: of texts that are live at once, and of those that are kept.

        Of each text one is kept where others part from it, and one at its end. There are some for short texts, too.
        """
        texts = self.texts(num_chunks)
        return min(self.max_sequences, max(8, texts)), self.max_states or max(16, 2 * texts)

    def bytes_of(self, num_chunks):
        """Of so many chunks of the tree, and what stands beside them."""
        of_groups = sum(self.bytes_per_chunk[window] * n for window, n in self.chunks_of_groups(num_chunks).items())
        of_states = self.bytes_per_state * (sum(self.states(num_chunks)) + SPARE)
        return num_chunks * (self.bytes_per_chunk[None] or BARE) + of_groups + of_states

    def chunks_within(self, num_bytes):
        """The most chunks of the tree that fit."""
        least, most = 0, min(MOST, num_bytes)
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.bytes_of(middle) <= num_bytes else (least, middle - 1)
        return least
