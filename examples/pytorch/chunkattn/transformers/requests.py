"""Requests and what becomes of them."""

import dataclasses

STOP, LENGTH, CANCELLED, ERROR = "stop", "length", "cancelled", "error"


@dataclasses.dataclass
class Output:
    """One text of a request."""

    tokens: list = dataclasses.field(default_factory=list)  # new ones, the one that ended it included
    finish_reason: str | None = None  # 'stop', 'length', 'cancelled' or 'error'


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, and the texts that continue it."""

    id: int
    prompt: list
    outputs: list
    sampler: object = dataclasses.field(repr=False)
    insert: dict = dataclasses.field(repr=False)  # keywords of Tree.insert()
    streamer: object = dataclasses.field(default=None, repr=False)
    cached_tokens: int = 0  # of the prompt, found when it joined and not computed again for windows or states
    # Why it was found in the cache, or was not, when it joined: see CacheExplainer.explain(); with explain_tokens.
    cache_report: dict | None = dataclasses.field(default=None, repr=False)
    error: Exception | None = None  # what a processor, criterion or streamer of this request raised
    _generator: object = dataclasses.field(default=None, repr=False)  # a weak reference
    _has_events: bool = dataclasses.field(default=True, repr=False)

    @property
    def tokens(self):
        """The new tokens of the first text."""
        return self.outputs[0].tokens

    @property
    def finish_reason(self):
        """Of the first text: None while it runs, then 'stop', 'length', 'cancelled' or 'error'."""
        return self.outputs[0].finish_reason

    @property
    def finished(self):
        return all(output.finish_reason for output in self.outputs)

    def cancel(self):
        """Ends all texts that have not ended. Any thread may call it; during a step it counts at its end."""
        generator = self._generator()
        if generator is not None:
            generator._cancel(self)


@dataclasses.dataclass(frozen=True)
class Event:
    """A new token of one text, or its end."""

    request: Request
    choice: int
    token: int | None  # None: it was cancelled, or failed
    finish_reason: str | None


class Work:
    """What is computed as one sequence: a text of a request, or its prompt for all texts."""

    def __init__(self, request, choice, tokens, splits=False):
        self.request, self.choice = request, choice
        self.tokens = tokens  # all known ones
        self.splits = splits  # the texts after this one fork off with the next output
        self.sequence = None  # while it is live
        self.state = None  # a Slot with the state of recurrent layers after all rows that are computed
        self.promised = []  # of each group of layers with a window, the chunks that it is to take
        self.decodes = False
        self.preempted = False  # it has been live before

    @property
    def is_prompt(self):
        """Whether it is a prompt that joins for the first time, and nothing of it is computed."""
        return len(self.tokens) == len(self.request.prompt) and not self.preempted

    @property
    def output(self):
        return self.request.outputs[self.choice]

    def reuse(self):
        """How it joins: keywords of Tree.insert()."""
        return {}

    def scored(self, added):
        """Of its rows in a step, what asks for their logits beside its output: rows by who asks."""
        return {}

    @property
    def wanted(self):
        rest = self.request.outputs[self.choice :] if self.splits else [self.output]
        return any(output.finish_reason is None for output in rest)
