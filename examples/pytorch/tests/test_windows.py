"""Layers with a sliding window, whose K/V is given back as it moves on, in Generator.

    python -m unittest test_windows
"""

import contextlib
import io
import pathlib
import random
import runpy
import threading
import unittest
import unittest.mock

import models
import torch
import transformers
from test_transformers import SEED, Recorder, alone, check_logits, run_all

import chunkattn
from chunkattn.transformers import Generator, budget, layers
from chunkattn.transformers.memory import Memory

TOLERANCE = 1e-4
FAMILIES = {
    "gemma2": (transformers.Gemma2Config, dict(query_pre_attn_scalar=24, attn_logit_softcapping=3.0)),
    "gemma3": (transformers.Gemma3TextConfig, {}),
    "gpt_oss": (transformers.GptOssConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
    "mistral": (transformers.MistralConfig, {}),
    "cohere2": (transformers.Cohere2Config, dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "exaone4": (transformers.Exaone4Config, {}),
}


def make(family, window, layer_types=models.MIXED):
    kind, options = FAMILIES[family]
    options = options if family == "exaone4" else options | dict(head_dim=32)
    if family != "mistral":  # whose layers all have the window
        options = options | dict(layer_types=list(layer_types), num_hidden_layers=len(layer_types))
    config = kind(**models.COMMON | dict(max_position_embeddings=32768) | options, sliding_window=window)
    return models.make(config, SEED)


@contextlib.contextmanager
def with_another_window(model, layer, window):
    """The model's layer has a smaller window than it says, in its own attention and here."""

    def narrow(module, args, named):
        mask = named.get("attention_mask")
        if mask is not None and mask.dtype.is_floating_point:  # of eager attention
            rows = torch.arange(mask.shape[-2])[:, None] - torch.arange(mask.shape[-1])
            named["attention_mask"] = mask.masked_fill(rows >= window, torch.finfo(mask.dtype).min)
        return args, named

    def slots_of(*args):
        slots = slots_before(*args)
        slots[layer].window = window
        return slots

    slots_before = layers.slots_of
    handle = model.model.layers[layer].self_attn.register_forward_pre_hook(narrow, with_kwargs=True)
    try:
        with unittest.mock.patch.object(layers, "slots_of", slots_of):
            yield
    finally:
        handle.remove()


class WindowsTest(unittest.TestCase):
    def draw(self):
        return random.Random(f"{SEED} {self.id()}")

    def texts(self, draw, count, length):
        """Prompts that part from earlier ones in random places."""
        texts = [[draw.randrange(211) for _ in range(length)]]
        while len(texts) < count:
            known = draw.choice(texts)
            texts.append(known[: draw.randrange(len(known))] + [draw.randrange(211) for _ in range(draw.randrange(1, 150))])
        return texts

    def check_text(self, model, prompt, tokens, expected):
        """Equal, or parted where two tokens were as likely."""
        if tokens != expected:
            at = next(i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b)
            logits = alone(model, prompt + tokens[:at])[-1]
            self.assertLess(abs(float(logits[tokens[at]] - logits[expected[at]])),
                            2 * TOLERANCE * float(logits.abs().max()))  # fmt: skip

    def check_idle(self, generator):
        """Nothing is held any more, but for what is cached, within its bounds."""
        self.assertEqual(generator.tree.stats()["live_sequences"], 0)
        for group in generator.tree.windows:
            stats = group.stats()
            self.assertEqual(stats["used_chunks"], stats["cached_chunks"])
            self.assertLessEqual(stats["peak_used_chunks"], group.max_chunks)

    def test_texts_of_each_family(self):
        """As by transformers' generate(), with and without giving back; and the rows are those that are said."""
        options = dict(max_new_tokens=6, eos_token_id=None, do_sample=False)
        for family in FAMILIES:
            with self.subTest(family):
                draw = random.Random(f"{SEED} {family}")
                window = draw.randrange(30, 130)
                model = make(family, window)
                prompts = self.texts(draw, 6, 500)
                expected = []
                for prompt in prompts:
                    ids = torch.tensor([prompt])
                    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
                    expected.append(theirs[0, len(prompt) :].tolist())
                for swa_full in (False, True):
                    ours = Generator(model, step_tokens=draw.randrange(40, 200), swa_full=swa_full)
                    self.assertEqual([group.window for group in ours.tree.windows], [] if swa_full else [window])
                    requests = []
                    for prompt in prompts:  # some at once, others after those before
                        requests.append(ours.submit(prompt, **options))
                        while draw.randrange(2) and ours.has_work:
                            ours.step()
                    run_all(ours)
                    for request, text in zip(requests, expected):
                        self.check_text(model, request.prompt, request.tokens, text)
                    stats = ours.stats
                    self.assertEqual(stats["preemptions"], 0)
                    self.assertEqual(stats["rows"], stats["prompt_tokens"] - stats["cached_tokens"]
                                     + stats["new_tokens"] - len(prompts))  # fmt: skip
                    self.assertEqual(stats["cached_tokens"], sum(request.cached_tokens for request in requests))
                    self.assertEqual(stats["recomputed_tokens"],
                                     sum(group.stats()["recomputed_tokens"] for group in ours.tree.windows))
                    self.check_idle(ours)

    def test_random_requests(self):
        """Forks, cancelled requests, and too little memory of either kind, with one window, two, or nothing else."""
        for trial in range(6):
            draw = random.Random(f"{SEED} {trial}")
            family = draw.choice(sorted(FAMILIES))
            window = draw.randrange(2, 200)
            kinds = draw.choice([models.MIXED, ["sliding_attention"] * 2, ["sliding_attention"] * 2 + ["full_attention"]])
            options = dict(max_chunks=draw.randrange(15, 40), step_tokens=draw.randrange(20, 200),
                           typical_length=draw.randrange(200, 5000), max_sequences=draw.randrange(2, 9))  # fmt: skip
            with self.subTest(family, window=window, kinds=kinds, **options), contextlib.ExitStack() as stack:
                model = make(family, window, kinds)
                if len(kinds) == 3 and family != "mistral":
                    stack.enter_context(with_another_window(model, 1, draw.randrange(1, window)))
                ours = Generator(model, **options)
                requests = []
                for prompt in self.texts(draw, 12, 400):
                    recorder = Recorder()
                    sampled = dict(n=draw.randrange(2, 4), do_sample=True, seed=1) if draw.randrange(3) == 0 else {}
                    requests.append((ours.submit(prompt, max_new_tokens=draw.randrange(1, 40), eos_token_id=None,
                                                 logits_processor=[recorder], **sampled), recorder))  # fmt: skip
                    for _ in range(draw.randrange(6)):
                        ours.step()
                        ours.tree.check_invariants()
                    if draw.randrange(4) == 0:
                        draw.choice(requests)[0].cancel()
                    if draw.randrange(8) == 0:
                        ours.tree.clear()
                run_all(ours)
                for request, recorder in requests:
                    if request.finish_reason == "cancelled":
                        continue
                    self.assertLess(check_logits(self, model, request, recorder, TOLERANCE), TOLERANCE)
                self.check_idle(ours)

    def test_groups_that_are_short(self):
        """The tree has room, windows have not: texts wait or are preempted, and all come out as if alone."""
        draw, window = self.draw(), 150
        model = make("gemma3", window)
        prompts = [[draw.randrange(200) for _ in range(150)] for _ in range(6)]
        ours = Generator(model, max_chunks=100, step_tokens=64, typical_length=1 << 20)
        group, = ours.tree.windows
        self.assertEqual(group.max_chunks, budget.chunks_of_window(window) + 2)
        requests = ours.generate(prompts, max_new_tokens=80, eos_token_id=None)
        self.assertGreater(ours.stats["preemptions"], 0)
        self.assertGreater(ours.tree.chunks_available, 50)
        self.assertGreaterEqual(min(request.cached_tokens for request in requests), 0)  # of when they joined first
        for request in requests:
            whole, = Generator(model, swa_full=True).generate([request.prompt], max_new_tokens=80, eos_token_id=None)
            self.check_text(model, request.prompt, request.tokens, whole.tokens)
        recorder = Recorder()  # of forks, for which there is no room
        request, = ours.generate([prompts[0][:140]], n=8, do_sample=True, seed=3, max_new_tokens=9, eos_token_id=None,
                                 logits_processor=[recorder])  # fmt: skip
        self.assertLess(check_logits(self, model, request, recorder, TOLERANCE), TOLERANCE)
        self.check_idle(ours)

    def test_admission(self):
        """Texts join when there is room for them beside those that have joined: none is preempted."""
        ours = Generator(make("gemma3", 261), max_chunks=200, step_tokens=128, typical_length=4000, check=False)
        for length, new in ((152, 122), (377, 32), (363, 131), (299, 115), (306, 121), (368, 46), (26, 117), (38, 141),
                            (309, 87), (221, 33)):  # fmt: skip
            ours.submit([length % 211] * length, max_new_tokens=new, eos_token_id=None)
        most = 0
        while ours.has_work:
            ours.step()
            most = max(most, ours.num_live)
        self.assertEqual((ours.stats["preemptions"], ours.stats["recomputed_tokens"]), (0, 0))
        self.assertGreaterEqual(most, 4)

    def test_windows_that_others_need(self):
        """Texts over a prefix that is cached without its window: the first computes it again, others find it."""
        draw = self.draw()
        ours = Generator(make("gemma3", 100), step_tokens=128, check=False)
        prefix = [draw.randrange(211) for _ in range(500)]
        ours.generate([prefix + [1] * 300], max_new_tokens=2, eos_token_id=None)
        requests = [ours.submit(prefix + [i] * 50, max_new_tokens=2, eos_token_id=None) for i in range(2, 10)]
        run_all(ours)
        self.assertEqual([request.cached_tokens >= 500 for request in requests].count(False), 1)
        self.assertLess(ours.stats["recomputed_tokens"], 502)

    def test_no_room_to_resume(self):
        """Of a prompt, and of a fork: it waits."""
        ours, calls, resume = Generator(make("gemma3", 100), check=False), [], chunkattn.WindowedGroups.resume

        def short(groups, sequence):
            calls.append(sequence)
            if len(calls) in (1, 3):
                raise chunkattn.OutOfChunks("no chunk")
            return resume(groups, sequence)

        with unittest.mock.patch.object(chunkattn.WindowedGroups, "resume", short):
            request, = ours.generate([[5] * 150], n=3, max_new_tokens=4, eos_token_id=None)
        self.assertEqual(len(calls), 5)
        calls.clear()
        self.assertEqual([output.tokens for output in request.outputs], [request.tokens] * 3)
        self.assertEqual(len(request.tokens), 4)
        self.check_idle(ours)

    def test_scores(self):
        """What a model says of continuations is the same where windows are computed again, or texts preempted."""
        draw = self.draw()
        model = make(draw.choice(sorted(FAMILIES)), draw.randrange(10, 150))
        texts = self.texts(draw, 10, 300)
        pairs = []
        for text in texts:
            at = draw.randrange(1, len(text) - 1)
            pairs.append((text[:at], text[at : at + draw.randrange(1, 30)]))
        ours = Generator(model, max_chunks=draw.randrange(12, 30), step_tokens=draw.randrange(20, 150),
                         typical_length=draw.randrange(200, 5000), max_sequences=4)  # fmt: skip
        ours.generate(texts[:2], max_new_tokens=3, eos_token_id=None)  # what they begin with is cached
        for (prompt, continuation), score in zip(pairs, ours.score_many(pairs, strict=True)):
            rows = alone(model, prompt + continuation)[len(prompt) - 1 : -1].log_softmax(-1)
            expected = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
            self.assertLess(float((torch.tensor(score.logprobs) - expected).abs().max()),
                            TOLERANCE * float(expected.abs().max()))  # fmt: skip
        self.check_idle(ours)

    def test_memory(self):
        """kv_bytes counts both pools, and all that fits is used."""
        draw = self.draw()
        for family in ("gemma3", "mistral"):
            model = make(family, 200)
            for _ in range(4):
                size = dict(step_tokens=draw.randrange(1, 600), typical_length=draw.randrange(1, 9000))
                kv_bytes = draw.randrange(2 << 20, 64 << 20)
                ours = Generator(model, kv_bytes=kv_bytes, check=False, **size)
                group, = ours.tree.windows
                memory = ours._memory
                for made in memory.layers:
                    self.assertEqual(made.cache.bytes_per_chunk, memory.bytes_per_chunk[made.window])
                of_group = group.max_chunks * memory.bytes_per_chunk[200]
                of_tree = ours.max_chunks * (memory.bytes_per_chunk[None] or budget.BARE)
                self.assertLessEqual(of_tree + of_group, kv_bytes)
                divided = budget.Division(memory.bytes_per_chunk, **size)
                self.assertGreater(divided.bytes_of(ours.max_chunks + 1), kv_bytes)
                self.assertLessEqual(group.max_chunks, ours.max_chunks)
            with self.assertRaisesRegex(ValueError, r"kv_bytes = 9: expected room for two chunks at least, (\d+) bytes"):
                Generator(model, kv_bytes=9)
        with self.assertRaisesRegex(ValueError, "typical_length = 0: expected at least 1"):
            Generator(model, typical_length=0)
        for window in [1, 2, 64, 65, 66, *(draw.randrange(1, 1000) for _ in range(9))]:
            touched = [(begin + window - 1) // 64 + 1 for begin in range(64)]
            self.assertEqual(budget.chunks_of_window(window), max(touched))
        divided = budget.Division({None: 5, 100: 7, 4000: 7}, 512, 4096)
        self.assertEqual(divided.chunks_of_groups(640), {100: 10 * 3 + 9, 4000: 10 * 64 + 0})  # ten texts, and one step
        self.assertEqual(divided.chunks_of_groups(641), {100: 11 * 3 + 9, 4000: 641})
        for window, expected in ((32767, [32767]), (32768, []), (40000, [])):  # of 32,768 positions
            ours = Generator(make("gemma3", window), check=False)
            self.assertEqual([group.window for group in ours.tree.windows], expected)

    def test_memory_of_layers(self):
        """Layers of several sizes and windows: each pool counts the bytes of its own."""
        draw = self.draw()
        sizes = [layers.Geometry(*draw.choice([(1, 64, 64), (2, 64, 48), (3, 20, 64)]), 1.0) for _ in range(12)]
        windows = [draw.choice([None, 20, 300, 5000]) for _ in sizes]
        slots = [layers.Slot(None, "", 6, size, window, None, False) for size, window in zip(sizes, windows)]
        memory = Memory(slots, "float32", chunkattn.Threads(1), {}, longest_window=300)
        memory.allocate(chunkattn.Tree(10), {window: 10 for window in memory.bytes_per_chunk if window})
        made = dict.fromkeys(memory.bytes_per_chunk, 0)
        for of_size in memory.layers:
            made[of_size.window] += of_size.cache.bytes_per_chunk
        self.assertEqual(made, memory.bytes_per_chunk)
        self.assertEqual(set(made), {None} | {window for window in windows if window in (20, 300)})
        self.assertEqual([of_size.window for of_size, _ in memory.layers_of_slot],
                         [window if window in (20, 300) else None for window in windows])  # fmt: skip

    def test_what_is_held(self):
        """Of a text that decodes, no more than its window; both pools are shown."""
        ours = Generator(make("gemma3", 128), kv_bytes=64 << 20, step_tokens=256)
        request = ours.submit([i % 211 for i in range(1500)], max_new_tokens=90, eos_token_id=None)
        group, = ours.tree.windows
        while ours.has_work:
            ours.step()
            stats = group.stats()
            held = stats["used_chunks"] - stats["cached_chunks"]
            self.assertLessEqual(held, budget.chunks_of_window(128) + (0 if request.tokens else 4))
            expected = (ours.tree.stats()["used_chunks"] * 64 * 1 + stats["used_chunks"] * 64 * 1) * 2 * 2 * 64 * 4
            self.assertEqual(ours.kv_bytes_used, expected)
        self.assertGreater(ours.tree.stats()["used_chunks"], 20)
        said = f"window 128: {stats['used_chunks']} of {group.max_chunks} chunks ({stats['cached_chunks']} cached)"
        self.assertIn(said, str(ours.tree))
        self.assertIn(said, repr(ours.tree))
        self.assertEqual(repr(ours), f"<Generator of Gemma3ForCausalLM: 0 live, 0 waiting; {ours.tree!r}>")
        ours.tree.clear()
        self.assertEqual((ours.kv_bytes_used, group.stats()["used_chunks"]), (0, 0))


    def test_page(self):
        """The program of docs/pytorch.md prints what stands there."""
        page = pathlib.Path(__file__).resolve().parents[3] / "docs" / "pytorch.md"
        text = page.read_text(encoding="utf-8").split("**Sliding windows**")[1]
        program, output = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "output"))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(program, str(page), "exec"), {})
        self.assertEqual(said.getvalue(), output)


class BindingTest(unittest.TestCase):
    """WindowedLayers by itself."""

    def test_refusals(self):
        tree, other = chunkattn.Tree(100), chunkattn.Tree(5)
        for wanted, options in (("window = 0", (0, 5)), ("max_chunks = 0", (5, 0))):
            with self.subTest(wanted), self.assertRaisesRegex(ValueError, wanted):
                chunkattn.WindowedLayers(tree, *options)
        layers = chunkattn.WindowedLayers(tree, 20, 3, max_cached_chunks=1)
        self.assertEqual((layers.window, layers.max_chunks, layers.max_cached_chunks), (20, 3, 1))
        plan, sequence = chunkattn.Plan(), tree.insert(range(300))
        step = tree.begin_step()
        step.add(sequence, 300)
        self.assertFalse(layers.is_ready(sequence))
        with self.assertRaisesRegex(ValueError, "call resume\\(\\) before add"):
            layers.view(plan.build(step))
        step.cancel()
        self.assertEqual((layers.window_end(sequence), layers.resume(sequence)), (0, 0))
        with self.assertRaisesRegex(ValueError, "position = 7: expected 0"):
            layers.resume(sequence, 7)
        step = tree.begin_step()
        step.add(sequence, 300)
        self.assertEqual((layers.chunks_needed(step), layers.chunks_available), (5, 3))
        view = plan.build(step)
        with self.assertRaises(chunkattn.OutOfChunks):
            layers.view(view)
        step.cancel()
        step = tree.begin_step()
        step.add(sequence, 100)
        view = plan.build(step)
        near = layers.view(view)
        with self.assertRaisesRegex(ValueError, "view = of layers with a window"):
            layers.view(near)
        self.assertEqual(near.tokens.tolist(), list(range(100)))
        attention = chunkattn.Attention(64)
        cache = attention.make_cache(layers, "float32", 1, 1)
        rows = torch.zeros(100, 1, 64)
        attention.write(cache, 0, near, rows, rows)
        with self.assertRaisesRegex(ValueError, r"variant = without .*: expected SlidingWindow\{20\}"):
            attention.run(cache, 0, near, rows, torch.empty_like(rows))
        with self.assertRaisesRegex(ValueError, "another tree|of its own"):
            attention.write(attention.make_cache(tree, "float32", 1, 1), 0, near, rows, rows)
        step.finished()
        with self.assertRaisesRegex(ValueError, "plan = out of date"):
            layers.view(view)
        with self.assertRaisesRegex(ValueError, "sequence = of another tree"):
            layers.is_ready(other.insert([1]))

    def test_groups(self):
        """Admitted and resumed as one."""
        tree, plan = chunkattn.Tree(100), chunkattn.Plan()
        for wrong in ({"a": 5}, {20: -1}, {20: None}):
            with self.subTest(wrong), self.assertRaisesRegex(ValueError, "windows = .*: expected of each window, the"):
                chunkattn.WindowedGroups(tree, wrong)
        with self.assertRaisesRegex(ValueError, "window = 0: expected at least 1 key"):
            chunkattn.WindowedGroups(tree, {20: 5, 0: 5})
        groups = chunkattn.WindowedGroups(tree, {20: 4, 100: 7})
        self.assertEqual([(group.window, group.max_chunks) for group in groups], [(20, 4), (100, 7)])
        self.assertEqual(tree.windows, list(groups))
        with self.assertRaises(IndexError):
            groups[2]
        text = list(range(400))
        self.assertEqual(groups.chunks_needed(text, 64), [3, 4])
        self.assertIsNone(groups.try_insert(text, 256))  # the first group has no room for such steps
        self.assertEqual(tree.stats()["live_sequences"], 0)
        sequence = groups.try_insert(text, 64, tenant=3)
        waits = groups.try_insert(text + [1], 64, tenant=3)
        self.assertEqual((groups.is_ready(sequence), groups.is_ready(waits)), (True, False))
        with self.assertRaisesRegex(ValueError, r"num_pending\(\) = 400: expected 0"):
            groups.resume(waits)
        while sequence.num_uncomputed:
            step = tree.begin_step()
            step.add(sequence, 64)
            self.assertTrue(groups.has_room(step))
            view = plan.build(step)
            near = [group.view(view) for group in groups]
            self.assertEqual([v.num_rows for v in near], [view.num_rows] * 2)
            step.finished()
        self.assertEqual(groups.resume(waits), 400)
        self.assertEqual((groups.find(text + [2], tenant=3), groups.find(text + [2])), (400, 0))
        step = tree.begin_step()
        step.add(waits)
        wide = tree.insert(range(1000, 1300))
        groups.resume(wide)
        step.add(wide)
        self.assertFalse(groups.has_room(step))
        step.cancel()
        none = chunkattn.WindowedGroups(tree, {})
        self.assertEqual((len(none), none.chunks_needed(text, 9), len(none.try_insert(text, 9))), (0, [], 400))

    def test_plans_that_are_read(self):
        """While a kernel reads a plan's arrays, they are not made again."""
        tree, plan = chunkattn.Tree(100), chunkattn.Plan()
        near = chunkattn.WindowedLayers(tree, 2000, 100)
        sequence = tree.insert(range(2000))
        near.resume(sequence)
        step = tree.begin_step()
        step.add(sequence)
        view = plan.build(step)
        near_view = near.view(view)
        attention = chunkattn.Attention(64, threads=1)
        cache = attention.make_cache(near, "float32", 1, 8)
        rows, out = torch.randn(2000, 8, 64), torch.empty(2000, 8, 64)
        attention.write(cache, 0, near_view, rows, rows)
        attention.run(cache, 0, near_view, rows, out, window=2000)
        again = torch.empty_like(out)
        thread = threading.Thread(target=attention.run, args=(cache, 0, near_view, rows, again), kwargs={"window": 2000})
        refusals = []
        thread.start()
        while thread.is_alive():
            try:
                near.view(view)
            except ValueError as error:
                refusals.append(str(error))
        thread.join()
        self.assertEqual(set(refusals), {"plan = in use: expected one that no kernel is reading"})
        self.assertTrue(torch.equal(again, out))

    def test_lifetimes(self):
        """A view keeps its group, a group its tree; a tree keeps no group."""
        tree = chunkattn.Tree(100)
        layers = chunkattn.WindowedLayers(tree, 20, 30)
        sequence, plan = tree.insert(range(100)), chunkattn.Plan()
        layers.resume(sequence)
        step = tree.begin_step()
        step.add(sequence)
        near = layers.view(plan.build(step))
        self.assertEqual(tree.windows, [layers])
        del layers
        self.assertEqual(len(tree.windows), 1)
        self.assertEqual(int(near.segments["num_pieces"].sum()), 2)
        step.finished()
        del near
        self.assertEqual(tree.windows, [])
        layers = chunkattn.WindowedLayers(tree, 20, 30)
        cache = chunkattn.Attention(64, threads=1).make_cache(layers, "float32", 1, 1)
        del layers
        self.assertEqual([group.window for group in tree.windows], [20])
        del cache
        self.assertEqual(tree.windows, [])
        layers = chunkattn.WindowedLayers(tree, 20, 30)
        del tree
        self.assertFalse(layers.is_ready(sequence))
        tree = chunkattn.Tree(100)
        sequence, groups = tree.insert([1]), chunkattn.WindowedGroups(tree, {30: 40})
        first = groups[0]
        del tree
        self.assertEqual(len(groups.try_insert([1, 2], 2)), 2)
        del groups
        self.assertFalse(first.is_ready(sequence))
        self.assertIn("window 30", repr(first))


class FiguresTest(unittest.TestCase):
    def test_bench(self):
        """bench/pytorch/windows.py, of short texts."""
        page = pathlib.Path(__file__).resolve().parents[3] / "bench" / "pytorch" / "windows.py"
        bench = runpy.run_path(str(page))
        model = bench["make"](bench["gpt_oss"]())
        prompts = [[7] * 900 + [i] * 100 for i in range(2)]
        expected, whole, _, _ = bench["run"](model, prompts, True)
        texts, used, peak, rows = bench["run"](model, prompts, False)
        self.assertEqual(texts, expected)
        self.assertLess(used, 0.75 * whole)
        self.assertLessEqual(used, peak)
        self.assertLess(peak, 1.1 * whole)
        self.assertLessEqual(rows, 2 * 1000)


if __name__ == "__main__":
    unittest.main()
