"""Whether a model computes the same on the tree as by its own attention."""

import torch

import chunkattn

from . import interface
from .layers import Unsupported
from .memory import DTYPES, Memory, forward
from .states import States

# Relative difference of all logits of a text. 16 bits round at other steps; a wrong mask or position
# differs by far more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


class _Text:
    def __init__(self, sequence):
        self.sequence, self.state, self.logits = sequence, None, {}  # by position


def _step(step, plan, model, configs, memory, texts, max_tokens):
    """Of texts whose next tokens need nothing of others'."""
    added, pieces = [], []
    for text in texts:
        if not memory.is_ready(text.sequence, text.state):
            if text.sequence.num_pending > 0:
                continue
            text.state = memory.resume(text.sequence)
        result, piece = memory.add(step, text.sequence, text.state, max_tokens)
        if result:
            added.append((text, result.row))
            pieces.append(piece)
    logits = forward(model, configs, memory, plan.build(step), pieces=pieces)
    for text, row in added:
        for i in range(row.num_rows):
            text.logits[row.position + i] = logits[row.first_row + i]
    step.finished()
    memory.keep(pieces)


def check_against_eager(model, configs, slots, recurrent, threads, options):
    """Two texts that share a part, computed in some steps. Raises Unsupported where logits differ."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    shared = [(31 * i + 5) % vocabulary for i in range(9)]
    texts = [shared + [(7 * i + 3) % vocabulary for i in range(5)],
             shared + [(11 * i + 1) % vocabulary for i in range(8)]]  # fmt: skip
    memory = Memory(slots, DTYPES[model.dtype], threads, options, longest_window=0)
    tree = chunkattn.Tree(max_chunks=8)
    memory.allocate(tree, {}, States(recurrent, num_live=2, num_kept=4) if recurrent else None)
    plan = chunkattn.Plan()
    live = [_Text(tree.insert(text)) for text in texts]
    while any(text.sequence.num_uncomputed for text in live):
        step = tree.begin_step()
        try:
            _step(step, plan, model, configs, memory, live, 20 if live[0].logits else 6)
        except Exception as error:
            raise Unsupported(f"{type(model).__name__} does not run without masks, over one row of two texts: "
                              f"{type(error).__name__}: {error}") from error  # fmt: skip
        finally:
            step.cancel()
    for text, of_text in zip(texts, (text.logits for text in live)):
        try:
            with interface.running(configs, "eager"), torch.inference_mode():
                expected = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()
        except Exception as error:
            raise Unsupported(f"{type(model).__name__} does not run by its own eager attention, with which it is "
                              f"compared (check=False leaves that out): {type(error).__name__}: {error}") from error  # fmt: skip
        at = sorted(of_text)
        ours = torch.stack([of_text[position] for position in at]).float()
        difference = float((ours - expected[at]).norm() / expected[at].norm().clamp(min=1e-30))
        if not difference <= TOLERANCE[model.dtype]:
            raise Unsupported(f"{type(model).__name__}: logits of two texts in one row differ from its own by "
                              f"{difference:.2g} of them: tokens depend on each other in another way than by causal "
                              "attention")  # fmt: skip
