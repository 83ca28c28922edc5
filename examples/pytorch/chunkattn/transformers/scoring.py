"""Log-probabilities of continuations.

Texts are computed in the order of a trie: what they begin with alike is computed once, while it is in use.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import numpy

import chunkattn

from .prompts import tokens_of
from .requests import Request, Work

PIECE = 1 << 20  # logits of which log-probabilities are taken at once: they stay in a processor's cache


@dataclasses.dataclass
class Score:
    """What the model says of the tokens of one continuation, each after the prompt and those before it."""

    tokens: list | None = None
    logprobs: list | None = None  # of each token, natural logarithms
    is_greedy: bool | None = None  # whether each token is the most probable one
    error: Exception | None = None  # why there are none of these

    @property
    def sum(self):
        """The log-probability of the whole continuation; raises its error if it has one."""
        if self.error is not None:
            raise self.error
        return math.fsum(self.logprobs)


class Batch:
    """What one call asks for."""

    left = 0  # continuations that do not have all their values


class Asked:
    """A continuation while it is scored."""

    __slots__ = ("batch", "begin", "missing", "score", "text")

    def __init__(self, batch, prompt, continuation):
        self.batch, batch.left = batch, batch.left + bool(continuation)
        self.begin = len(prompt) - 1  # position of the row that says what its first token is
        self.missing = len(continuation)
        self.score = Score(continuation, [None] * len(continuation), True)
        self.text = numpy.concatenate([prompt, numpy.array(continuation[:-1], numpy.int32)])  # what is computed


class Row:
    """A row of logits that is asked for: what follows one distinct text."""

    __slots__ = ("targets", "work")

    def __init__(self):
        self.targets = []  # (Asked, index of its token); None when it has been computed
        self.work = None  # who is to compute it, while that is live


class ScoredText(Work):
    """A text that is no beginning of another one, with the rows on its path that are asked for, by position."""

    def __init__(self, generator, where, text, rows):
        request = Request(next(generator._ids), text.tolist(), [], None, where, _has_events=False)
        super().__init__(request, 0, request.prompt, splits=True)
        self.rows, self.last, self.cancelled = rows, len(text) - 1, False

    @property
    def wanted(self):
        return not self.cancelled and self.rows[self.last].targets is not None

    def reuse(self):
        """Rows that are cached have no logits: from the first that nobody computes they are computed again."""
        first = min(at for at, row in self.rows.items()
                    if row.targets is not None and (row.work is None or row.work.sequence is None))  # fmt: skip
        for at, row in self.rows.items():
            if at >= first:
                row.work = self
        return {"max_reuse": first}

    def scored(self, added):
        rows = ((self.rows.get(added.position + i), added.first_row + i) for i in range(added.num_rows))
        return {row: at for row, at in rows if row is not None and row.targets is not None}


def take(rows, logits):
    """Notes what logits say of the tokens that are asked for. rows: by Row, the row of `logits`."""
    rows, at_once = list(rows.items()), max(1, PIECE // logits.shape[-1])
    for begin in range(0, len(rows), at_once):
        part = rows[begin : begin + at_once]
        where, first = [at for _, at in part], part[0][1]
        if where == list(range(first, first + len(part))):
            where = slice(first, first + len(part))  # not copied
        logprobs = logits[where].float().log_softmax(-1)
        most = logprobs.amax(-1).tolist()
        targets = [(i, asked, at) for i, (row, _) in enumerate(part) for asked, at in row.targets]
        tokens = [asked.score.tokens[at] for _, asked, at in targets]
        values = logprobs[[i for i, *_ in targets], tokens].tolist()
        for (i, asked, at), token, value in zip(targets, tokens, values):
            asked.score.logprobs[at] = value
            # Of several that are equally probable, the first one is greedy.
            asked.score.is_greedy &= value == most[i] and token == int(logprobs[i].argmax())
            asked.missing -= 1
            asked.batch.left -= asked.missing == 0
        for row, _ in part:
            row.targets = None


class Reader:
    """What a user gives, as tokens. A prompt that comes again is read once."""

    def __init__(self, generator):
        self.tokenizer = generator.tokenizer
        self.vocabulary = generator.model.get_input_embeddings().weight.shape[0]
        self.limit = generator._limit
        self.room = (generator.max_chunks - 1) * chunkattn.Tree.chunk_size
        self.known = {}  # by text or id: what has the id, so that nothing else gets it, and its tokens

    def prompt(self, given):
        key = given if isinstance(given, str) else id(given)
        if key not in self.known:
            self.known[key] = given, numpy.array(tokens_of(given, self.tokenizer, self.vocabulary), numpy.int32)
        return self.known[key][1]

    def pair(self, pair):
        if isinstance(pair, str) or not hasattr(pair, "__len__") or len(pair) != 2:
            raise ValueError(f"pair = {type(pair).__name__}: expected a prompt and a continuation")
        prompt, continuation = pair
        if isinstance(prompt, str) and isinstance(continuation, str) and continuation:
            # A tokenizer sees them as one text; spaces between them belong to the continuation.
            before = self.prompt(prompt.rstrip() or prompt)
            after = tokens_of(prompt + continuation, self.tokenizer, self.vocabulary)[len(before) :]
            if not after:
                raise ValueError(f"continuation = {continuation!r}: expected text that adds tokens to its prompt's")
        else:
            before = self.prompt(prompt)
            if isinstance(continuation, str) and self.tokenizer is not None:
                continuation = self.tokenizer(continuation, add_special_tokens=False)
            after = tokens_of(continuation, self.tokenizer, self.vocabulary, name="continuation", least=0)
        length = len(before) + len(after)
        if self.limit is not None and length - 1 > self.limit:
            raise ValueError(f"prompt and continuation = {length} tokens: expected at most the model's {self.limit} "
                             "positions and one more")  # fmt: skip
        if length > self.room:
            raise ValueError(f"prompt and continuation = {length} tokens: expected at most {self.room}, what K/V "
                             "memory has room for; raise kv_bytes")  # fmt: skip
        return before, after


def score(generator, prompt, continuations, where):
    if isinstance(continuations, (str, Mapping)) or not hasattr(continuations, "__iter__"):
        raise ValueError(f"continuations = {type(continuations).__name__}: expected a list of continuations")
    reader = Reader(generator)
    reader.prompt(prompt)  # raises what is wrong with it, once
    return _scores(generator, reader, [(prompt, each) for each in continuations], where)


def score_many(generator, pairs, where, strict=False, progress=None):
    return _scores(generator, Reader(generator), list(pairs), where, strict, progress)


def _scores(generator, reader, pairs, where, strict=False, progress=None):
    batch, scores, all_asked = Batch(), [], []
    for pair in pairs:
        try:
            asked = Asked(batch, *reader.pair(pair))
        except Exception as error:  # of this pair alone
            if strict:
                raise
            scores.append(Score(error=error))
            continue
        scores.append(asked.score)
        if asked.missing:
            all_asked.append(asked)
    texts, live, told = _texts(generator, all_asked, where), [], len(pairs)
    try:
        while True:
            if progress is not None:
                progress(told - batch.left)
                told = batch.left
            live = [work for work in live if work.wanted]
            for work in itertools.islice(texts, generator.max_sequences - len(live)):
                generator._submitted.append(work)
                live.append(work)
            if not live:
                return scores
            generator._advance()
    finally:
        for work in live:
            work.cancelled = True
        if live:
            generator._cancel(live[0].request)  # for the turn at which they leave


def _texts(generator, all_asked, where):
    """Yields each text that is no beginning of another, those with a common beginning one after the other."""
    all_asked.sort(key=lambda asked: asked.text.tobytes())  # in any order of tokens
    ready, text, rows = [], numpy.array([], numpy.int32), {}
    for asked in [*all_asked, None]:
        after = text[:0] if asked is None else asked.text
        shortest = min(len(text), len(after))
        differs = numpy.flatnonzero(text[:shortest] != after[:shortest])
        shared = int(differs[0]) if len(differs) else shortest
        if shared < len(text):
            ready.append((text, rows))
            rows = {at: row for at, row in rows.items() if at < shared}
        if not rows:  # of those that are ready, nothing more is asked
            for each in ready:
                yield ScoredText(generator, where, *each)
            ready = []
        text = after
        for at in range(asked.missing if asked is not None else 0):
            rows.setdefault(asked.begin + at, Row()).targets.append((asked, at))
