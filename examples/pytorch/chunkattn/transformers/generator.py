"""Continuous batching over one prefix tree, for decoder models of transformers."""

import collections
import contextlib
import inspect
import itertools
import threading
import weakref

import torch

import chunkattn

from . import budget, interface, layers, sampling, scoring, states
from .check import check_against_eager
from .memory import DTYPES, Memory, forward
from .prompts import rows_of, tokens_of, whole
from .requests import CANCELLED, ERROR, Event, Output, Request, Work

MAX_ADAPTER = (1 << 63) - 1  # those above are the generator's own


def _insert_options(tenant, adapter, priority):
    """Keywords of Tree.insert(), checked."""
    whole("tenant", tenant, 0, (1 << 64) - 1)
    whole("adapter", adapter, 0, MAX_ADAPTER)
    whole("priority", priority, -(1 << 31), (1 << 31) - 1)
    return {"tenant": tenant, "adapter": adapter, "priority": priority}


class Generator:
    """Generates with a decoder model of transformers, for many requests at once.

    All requests share one prefix tree: what their texts begin with alike is computed, stored and read once.
    A step is one forward pass, over one row of tokens: one of each text that decodes, and parts of prompts,
    at most `step_tokens` together. The model is not changed. Any thread may call a Generator; one at a time
    computes a step.

    model: on the CPU, of float32, bfloat16 or float16; of PEFT's and torch.compile()'s wrappers the model inside, not
    compiled. tokenizer: for prompts that are text, and for
    stop_strings. kv_bytes: of K/V memory at most, what is cached included; max_chunks instead of it counts
    chunks of Tree.chunk_size tokens. Layers with a sliding window have chunks of their own, which are given back
    as it moves on: of kv_bytes, or beside max_chunks, they get what as many texts of typical_length tokens hold as
    the other layers have room for, and a step. swa_full: they keep K/V of all tokens as other layers do.
    max_states: of a model with recurrent layers, how many of their states are kept for texts that begin alike, beside
    those of live texts; by default two for each text of typical_length. They count in kv_bytes.
    kv_dtype: the model's, or 'int8', or another. max_sequences: live at once.
    explain_tokens: so many evicted tokens are remembered, to say in Request.cache_report why a prompt was found in the
    cache, or was not; 0: nothing is said. retention, learns: see Tree. threads, reduce, accuracy: see Attention. check: whether two short texts
    are computed by the model's own attention, too, and compared.

    Raises Unsupported for a model that cannot run so; it says why.
    """

    def __init__(self, model, tokenizer=None, *, kv_bytes=1 << 30, max_chunks=None, kv_dtype=None, step_tokens=512,
                 max_sequences=256, typical_length=4096, swa_full=False, max_states=None, explain_tokens=0, retention="lru", learns=False,
                 threads=None, reduce="deterministic", accuracy="two_terms", check=True):  # fmt: skip
        for name, value in (("step_tokens", step_tokens), ("max_sequences", max_sequences), ("kv_bytes", kv_bytes),
                            ("typical_length", typical_length)):  # fmt: skip
            whole(name, value, 1)
        if max_chunks is not None:
            whole("max_chunks", max_chunks, 2)
        if max_states is not None:
            whole("max_states", max_states, 1)
        whole("explain_tokens", explain_tokens, 0, 1 << 30)
        if model.training:
            raise ValueError("model.training = True: expected a model in evaluation mode, see model.eval()")
        model = layers.unwrapped(model)
        if model.dtype not in DTYPES:
            raise layers.Unsupported(f"model.dtype = {model.dtype}: expected float32, bfloat16 or float16")
        self.model, self.tokenizer = model, tokenizer
        self.step_tokens, self.max_sequences = step_tokens, max_sequences
        self._configs = interface.configs_of(model)
        self._slots = layers.slots_of(model, self._configs)
        recurrent = states.layers_of(model, {id(slot.module) for slot in self._slots}) if layers.has_states(model) else []
        self._limit = layers.position_limit(model)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        threads = torch.get_num_threads() if threads is None else threads
        threads = threads if isinstance(threads, chunkattn.Threads) else chunkattn.Threads(threads)
        options = {"reduce": reduce, "accuracy": accuracy}
        longest = 0 if swa_full or recurrent else (self._limit or budget.MOST) - 1  # a longer window hides nothing
        self._memory = Memory(self._slots, kv_dtype or DTYPES[model.dtype], threads, options, longest)
        if check:
            check_against_eager(model, self._configs, self._slots, recurrent, threads, options)
        divided = budget.Division(self._memory.bytes_per_chunk, step_tokens, typical_length, states.bytes_of(recurrent),
                                  max_sequences, max_states)  # fmt: skip
        self.max_chunks = max_chunks or divided.chunks_within(kv_bytes)
        if self.max_chunks < 2:
            raise ValueError(f"kv_bytes = {kv_bytes}: expected room for two chunks at least, {divided.bytes_of(2)} bytes")
        self.tree = chunkattn.Tree(self.max_chunks, retention=retention, learns=learns)
        of_states = None
        if recurrent:
            self.max_sequences, num_kept = divided.states(self.max_chunks)
            of_states = states.States(recurrent, self.max_sequences, num_kept)
        self._memory.allocate(self.tree, divided.chunks_of_groups(self.max_chunks), of_states)
        self._explainer = self._memory.explainer(explain_tokens) if explain_tokens else None
        self._plan = chunkattn.Plan()
        self._waiting, self._live, self._events = collections.deque(), [], []
        # Of other threads, of what a step calls, and of Python's garbage collection: for the next turn.
        self._submitted, self._cancelled = collections.deque(), collections.deque()
        self._lock, self._in_turn = threading.RLock(), False
        self._ids, self._num_alone = itertools.count(1), 0
        self.stats = {"steps": 0, "rows": 0, "prompt_tokens": 0, "cached_tokens": 0, "recomputed_tokens": 0,
                      "new_tokens": 0, "preemptions": 0}  # fmt: skip

    # --- requests ----------------------------------------------------------------------------------

    def submit(self, prompt, generation_config=None, *, n=1, seed=None, tenant=0, adapter=0, priority=0, streamer=None,
               logits_processor=None, stopping_criteria=None, prefix_allowed_tokens_fn=None, **changes):  # fmt: skip
        """Takes a request, which joins in a step that has room for it. Returns the Request.

        prompt: token ids, or text, or what a tokenizer gives. generation_config and `changes` to it
        (max_new_tokens, do_sample, temperature, ...), logits_processor, stopping_criteria,
        prefix_allowed_tokens_fn and streamer: as for model.generate(). n: texts wanted. seed: text i draws
        from a stream of its own, by seed + i. tenant, adapter: whom K/V is shared with. priority: with
        retention='priority'. What the request's own processors, criteria or streamer raise ends it: its
        finish_reason is 'error', see Request.error.
        """
        return self._submit(prompt, generation_config, True, n=n, seed=seed, tenant=tenant, adapter=adapter,
                            priority=priority, streamer=streamer, logits_processor=logits_processor,
                            stopping_criteria=stopping_criteria, prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                            **changes)  # fmt: skip

    def _submit(self, prompt, generation_config, has_events, *, n=1, seed=None, tenant=0, adapter=0, priority=0,
                streamer=None, logits_processor=None, stopping_criteria=None, prefix_allowed_tokens_fn=None,
                **changes):  # fmt: skip
        tokens = tokens_of(prompt, self.tokenizer, self.model.get_input_embeddings().weight.shape[0])
        whole("n", n, 1)
        insert = _insert_options(tenant, adapter, priority)
        if seed is not None:
            whole("seed", seed, -(1 << 62), 1 << 62)
        if streamer is not None and n > 1:
            raise ValueError(f"n = {n}: expected 1 with a streamer")
        sampler = sampling.Sampler(
            self.model, generation_config, len(tokens), logits_processor=logits_processor,
            stopping_criteria=stopping_criteria, prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            tokenizer=self.tokenizer, seed=seed, n=n, limit=self._limit, changes=changes)  # fmt: skip
        room = (self.max_chunks - 1) * chunkattn.Tree.chunk_size
        if sampler.max_length > room:
            raise ValueError(f"max_length = {sampler.max_length}: expected at most {room}, what K/V memory has room "
                             "for; raise kv_bytes")  # fmt: skip
        request = Request(
            next(self._ids), tokens, [Output() for _ in range(n)], sampler,
            insert, streamer, _generator=weakref.ref(self), _has_events=has_events)  # fmt: skip
        if streamer is not None:
            streamer.put(torch.tensor([tokens]))
        self._submitted.append(Work(request, 0, list(tokens), splits=n > 1))
        return request

    def step(self):
        """One forward pass, if there is something to do.

        Returns the events since the last call, perhaps none: those of requests that were submitted.
        """
        self._advance()
        events, self._events = self._events, []
        return events

    def generate(self, prompts, generation_config=None, **options):
        """Runs prompts, and what else was submitted, to their ends. Returns their Requests in order.

        prompts: a list, or the rows that a tokenizer gives. options: as for submit(). What a processor,
        criterion or streamer of these requests raises is raised, and the others of them are cancelled.
        """
        rows = rows_of(prompts)
        if options.get("streamer") is not None and len(rows) > 1:
            raise ValueError(f"streamer = given for {len(rows)} prompts: expected one prompt, or submit()")
        requests = []
        try:
            for row in rows:
                requests.append(self._submit(row, generation_config, False, **options))
            running = requests
            while running:
                self._advance()
                for request in running:
                    if request.error is not None:
                        raise request.error
                running = [request for request in running if not request.finished]
        finally:
            for request in requests:
                request.cancel()
        return requests

    def stream(self, prompt, generation_config=None, **options):
        """Yields the new tokens of one prompt, while others advance as well. Leaving it cancels it."""
        request = self._submit(prompt, generation_config, False, **options)
        sent = 0
        try:
            while not request.finished or sent < len(request.tokens):
                if sent == len(request.tokens):
                    self._advance()
                for token in request.tokens[sent:]:
                    sent += 1
                    yield token
            if request.error is not None:
                raise request.error
        finally:
            request.cancel()

    def score(self, prompt, continuations, *, tenant=0, adapter=0, priority=0):
        """How probable continuations of a prompt are: a Score of each, in their order.

        The prompt is computed once, and so is what continuations begin with alike; they run in one batch, with
        what else was submitted. Prompt and continuations: as for submit(). Where both are text, a tokenizer sees
        them as one, and spaces at the prompt's end belong to the continuation. A continuation that is refused
        has an error, the others are scored. An empty one has the sum 0.
        """
        return scoring.score(self, prompt, continuations, _insert_options(tenant, adapter, priority))

    def score_many(self, pairs, *, tenant=0, adapter=0, priority=0, strict=False, progress=None):
        """As score(), of pairs of a prompt and a continuation. A pair that is refused has an error.

        strict: it is raised instead, before anything is computed. progress: is called with how many more have
        been scored.
        """
        return scoring.score_many(self, pairs, _insert_options(tenant, adapter, priority), strict, progress)

    @property
    def has_work(self):
        """Whether step() has something to do, or to report."""
        return bool(self._submitted or self._cancelled or self._waiting or self._live or self._events)

    @property
    def num_waiting(self):
        """Texts, or prompts of several, that are not live."""
        return len(self._waiting) + len(self._submitted)

    @property
    def num_live(self):
        return len(self._live)

    @property
    def kv_bytes_used(self):
        """K/V that texts hold, and what is cached, of all layers."""
        return self._memory.bytes_used

    def __repr__(self):
        return (f"<Generator of {type(self.model).__name__}: {self.num_live} live, {self.num_waiting} waiting; "
                f"{self.tree!r}>")  # fmt: skip

    # --- turns -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self):
        """Who has it may change what is live. What was asked for meanwhile is done at its end."""
        with self._lock:
            if self._in_turn:
                raise RuntimeError("a Generator was called by what its own step calls: expected submit() or "
                                   "cancel() there")  # fmt: skip
            self._in_turn = True
            try:
                self._sweep()
                yield
                self._sweep()
            finally:
                self._in_turn = False

    def _advance(self):
        """A step, for those that are to have one."""
        if self.model.training:
            raise RuntimeError("model.training = True: expected a model in evaluation mode, see model.eval()")
        with self._turn():
            self._admit()
            if self._waiting and not self._live:
                raise RuntimeError(
                    f"K/V memory has no room for request {self._waiting[0].request.id}: {self.tree.chunks_available} "
                    f"of {self.max_chunks} chunks are free; others were pinned, or taken by other sequences")  # fmt: skip
            alone = False
            while self._live and not self._try_step():
                if len(self._live) > 1:
                    self._preempt(len(self._live) - 1)
                elif alone:
                    raise RuntimeError("a sequence alone has no room")
                else:  # its path leads through chunks that others have cut: it goes a way of its own
                    alone = True
                    self._preempt(0)
                    self._admit(alone=True)

    def _cancel(self, request):
        """Now, if no step is running; else at its end."""
        self._cancelled.append(request)
        if self._lock.acquire(blocking=False):
            try:
                if not self._in_turn:
                    with self._turn():
                        pass
            finally:
                self._lock.release()

    def _sweep(self):
        """Requests come and go; what is no longer wanted leaves."""
        while self._submitted:
            self._waiting.append(self._submitted.popleft())
        while self._cancelled:
            self._end(self._cancelled.popleft(), CANCELLED)
        for work in self._live:
            if not work.wanted:
                self._leave(work)
        self._live = [work for work in self._live if work.wanted]
        self._waiting = collections.deque(work for work in self._waiting if work.wanted)

    # --- who is live -------------------------------------------------------------------------------

    def _admit(self, alone=False):
        """Work joins in its order while there is room for it, and a chunk for each to grow."""
        windows = self._memory.windows
        while self._waiting and len(self._live) < self.max_sequences:
            work = self._waiting[0]
            where = dict(work.request.insert, preempted=work.preempted, **work.reuse())

            def fits():
                needed = self.tree.chunks_needed(work.tokens, **where) + len(self._live) + 1
                work.promised = windows.chunks_needed(work.tokens, self.step_tokens, **where)
                promised = [work.promised, *(other.promised for other in self._live if other.promised)]
                return needed <= self.tree.chunks_available and all(
                    sum(of_group) + len(self._live) <= group.chunks_available
                    for of_group, group in zip(zip(*promised), windows))

            # Cached chunks that others have cut may cost more than they save: no request is to wait for that.
            if alone or (not self._live and not fits()):
                self._num_alone += 1
                where["adapter"] = (1 << 63) + self._num_alone
            if not fits():
                return
            report = self._explainer.explain(work.tokens, **where) if self._explainer and work.is_prompt else None
            if (sequence := self.tree.try_insert(work.tokens, **where)) is None:
                return
            self._waiting.popleft()
            work.sequence, work.decodes = sequence, False
            if work.is_prompt:
                work.request.cached_tokens = sequence.num_cached + sequence.num_pending
                work.request.cache_report = report
                self.stats["prompt_tokens"] += len(work.tokens)
                self.stats["cached_tokens"] += work.request.cached_tokens
            self._live.append(work)
            if alone:
                return

    def _preempt(self, at):
        """A sequence leaves, and waits in front of the others."""
        work = self._live.pop(at)
        self._leave(work)
        work.preempted = True
        self._waiting.appendleft(work)
        self.stats["preemptions"] += 1

    def _leave(self, work):
        """Who still knows the work, as an exception's traceback may, keeps no K/V."""
        sequence, slot = work.sequence, work.state
        work.sequence = work.state = None
        if slot is not None:
            self._memory.states.leave(sequence, slot)

    def _end(self, request, reason, error=None):
        """Ends all texts of a request that have not ended."""
        if error is not None and not request.finished:
            request.error = error
        for choice, output in enumerate(request.outputs):
            if output.finish_reason is None:
                self._report(request, choice, None, reason)

    def _report(self, request, choice, token, reason):
        """A new token of a text, or its end."""
        output = request.outputs[choice]
        output.finish_reason = reason
        if token is not None:
            output.tokens.append(token)
            self.stats["new_tokens"] += 1
        if request._has_events:
            self._events.append(Event(request, choice, token, reason))
        if request.streamer is None:
            return
        try:
            if token is not None:
                request.streamer.put(torch.tensor([token]))
            if reason is not None:
                request.streamer.end()
        except Exception as error:
            if reason is None:
                self._end(request, ERROR, error)
            elif request.error is None:
                request.error, output.finish_reason = error, ERROR

    # --- a step ------------------------------------------------------------------------------------

    def _try_step(self):
        """False, with nothing changed, if there is no room for those that decode, or nothing can run."""
        step, rows, pieces = self.tree.begin_step(), [], []
        try:
            rows, scored, pieces = self._fill(step)
            if not rows:
                return False
            view = self._plan.build(step)
            outputs = [(row, work) for row, work in rows if row is not None]
            works = [work for _, work in outputs]
            needed = list(dict.fromkeys([row for row, _ in outputs] + list(scored.values())))
            try:
                logits = forward(self.model, self._configs, self._memory, view, needed if self._keeps else None, pieces)
            except chunkattn.OutOfChunks:  # of layers with a window
                return False
            if not self._keeps:
                logits = logits[needed]
            chosen = self._choose(works, logits)
            if scored:
                index = {row: i for i, row in enumerate(needed)}
                scoring.take({who: index[row] for who, row in scored.items()}, logits)
            self.stats["steps"] += 1
            self.stats["rows"] += view.num_rows
            finished = step.finished()
        except BaseException:
            self._lose_states(rows, pieces)
            raise
        finally:
            step.cancel()
        self._memory.keep(pieces)
        self._commit(finished, works, chosen)
        return True

    def _fill(self, step):
        """A token of all that decode; then parts of prompts as far as `step_tokens` allows.

        Returns (row of its logits or None, work) of each sequence that was added, the rows that are scored, and of
        a model with recurrent layers the pieces of all rows.
        """
        decoding = [work for work in self._live if work.decodes]
        if decoding and not step.add_all([work.sequence for work in decoding]):
            return [], {}, []
        rows, scored = [(i, work) for i, work in enumerate(decoding)], {}
        pieces = [states.Piece(i, 1, work.state) for i, work in enumerate(decoding)]
        left = self.step_tokens - len(decoding)
        for work in self._live:
            if work.decodes:
                continue
            if left <= 0:
                break
            if not self._is_ready(work):
                continue
            added, piece = self._memory.add(step, work.sequence, work.state, left)
            if added:  # else it waits for what another one is to compute, or for a chunk
                work.promised = []  # what it takes now is not available to others
                rows.append((added.row.output_row if added.row.has_output else None, work))
                pieces.append(piece)
                scored.update(work.scored(added.row))
                left -= added.row.num_rows
        return rows, scored, pieces

    @staticmethod
    def _lose_states(rows, pieces):
        """A step has failed, perhaps after some layers: texts that were in it go on from states that are kept."""
        for (_, work), piece in zip(rows, pieces):
            if work.state is not None:
                work.state, work.decodes = None, False
                piece.drop()

    def _is_ready(self, work):
        """Whether what its next row needs is there, windows or a state, perhaps since tokens are to be computed again.

        Not asked before it has its turn: by then others may have computed what it needs.
        """
        sequence, memory = work.sequence, self._memory
        if memory.is_ready(sequence, work.state):
            return True
        if sequence.num_pending > 0:  # others compute what it begins with
            return False
        before = sequence.num_uncomputed
        try:
            work.state = memory.resume(sequence)
        except chunkattn.OutOfChunks:
            return False
        again = sequence.num_uncomputed - before
        self.stats["recomputed_tokens"] += again
        if work.is_prompt:
            work.request.cached_tokens -= again
            self.stats["cached_tokens"] -= again
        return True

    @staticmethod
    def _choose(works, logits):
        """The next token of each text: [(index of its work, choice, token, finish reason, error)]."""
        rows, owners = [], []
        for at, work in enumerate(works):
            outputs = work.request.outputs
            for choice in range(work.choice, len(outputs) if work.splits else work.choice + 1):
                if outputs[choice].finish_reason is None:
                    rows.append((work.request.sampler, choice, work.tokens, logits[at]))
                    owners.append((at, choice))
        return [(*owner, *choice) for owner, choice in zip(owners, sampling.choose(rows))]

    def _commit(self, finished, works, chosen):
        committed, forks = [0] * len(works), []  # 0: of a text that has failed, nothing continues it
        first = set()
        for at, choice, token, reason, error in chosen:
            if error is not None:
                continue
            work = works[at]
            if at not in first:  # the first of its texts that go on has the sequence
                first.add(at)
                committed[at], work.choice = token, choice
            elif reason is None:
                fork = self._fork(work, choice, work.tokens + [token], self.max_sequences - len(self._live) - len(forks))
                forks += [fork] if fork is not None else []
        finished.commit_all(committed)
        for work, token in zip(works, committed):
            work.tokens.append(token)
            work.splits, work.decodes = False, True
        self._live += forks
        for at, choice, token, reason, error in chosen:
            request = works[at].request
            if error is not None:
                self._end(request, ERROR, error)
            elif request.outputs[choice].finish_reason is None:  # else another text of it has failed
                self._report(request, choice, token, reason)

    def _fork(self, work, choice, tokens, num_more):
        """Another text continues a prompt that is computed, in a fork where there is memory for one."""
        fork = Work(work.request, choice, tokens)
        if num_more > 0:
            fork.sequence = work.sequence.try_fork()
            if fork.sequence is not None and fork.sequence.try_append(tokens[-1:]):
                if work.state is not None:
                    fork.state = self._memory.states.copied(work.state)
                if self._is_ready(fork):
                    fork.decodes = True
                    return fork
            fork.sequence = fork.state = None
        self._waiting.appendleft(fork)
        return None
