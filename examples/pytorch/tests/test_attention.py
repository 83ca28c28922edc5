"""The tree, plans and attention from Python, against torch's own arithmetic in double precision.

    python -m unittest test_attention
"""

import gc
import multiprocessing
import os
import pathlib
import random
import threading
import time
import unittest
import xml.etree.ElementTree

import numpy
import torch

import chunkattn

SEED = int(os.environ.get("CHUNKATTN_TEST_SEED", random.SystemRandom().randrange(2**31)))
print(f"seed {SEED} (CHUNKATTN_TEST_SEED)")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIZE = min(chunkattn.head_sizes(), key=sum)


def compiled_types():
    """Types of K/V that kernels were compiled for."""
    tree, attention = chunkattn.Tree(), chunkattn.Attention(*SIZE, threads=1)
    found = []
    for name in ("float32", "float16", "bfloat16", "int8"):
        try:
            attention.make_cache(tree, name, 1, 1)
            found.append(name)
        except ValueError:
            print(f"\nskipped: K/V of {name}, which this build has no kernels for")
    return found


def reference(q, k, v, position, *, scale, window=None, keep=0, soft_cap=None, sinks=None, alibi=None):
    """One row: q [heads][dim] over k, v [tokens][kv_heads][dim], in double precision."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("hd,thd->ht", q.double(), k) * scale
    at = torch.arange(k.shape[0])
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if alibi is not None:
        logits = logits + alibi.double()[:, None] * (at - position)
    seen = at <= position
    if window is not None:
        seen &= (position - at < window) | (at < keep)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None]], 1)
    weights = logits.softmax(-1)[:, : k.shape[0]]
    return torch.einsum("ht,thd->hd", weights, v), logits.logsumexp(-1)


def spread(draw, tensor):
    """A tensor [rows][heads][dim] of that, and all the memory around its rows, which is NaN."""
    rows, heads, dim = tensor.shape
    gap, heads_first = draw.choice([0, 1, 7]), draw.random() < 0.5
    shape = (heads, rows, dim + gap) if heads_first else (rows, heads + draw.choice([0, 3]), dim + gap)
    around = torch.full(shape, torch.nan, dtype=tensor.dtype)
    view = (around.transpose(0, 1) if heads_first else around)[:, :heads, :dim]
    view.copy_(tensor)
    return view, around


class Simulation:
    """Sequences that share prefixes, with K and V drawn from their tokens alone, and q by row."""

    def __init__(self, draw, size, dtype, qo_dtype, kv_heads=2, qo_heads=6):
        self.draw, self.size, self.qo_dtype, self.drawn = draw, size, qo_dtype, {}
        self.kv_heads, self.qo_heads = kv_heads, qo_heads
        self.tree = chunkattn.Tree(max_chunks=200)
        self.attention = chunkattn.Attention(*size, threads=2)
        self.cache = self.attention.make_cache(self.tree, dtype, 2, kv_heads)
        self.plan = chunkattn.Plan()
        self.kv_dtype = DTYPES.get(dtype, torch.float32)

    def kv(self, tokens):
        """K and V [tokens][kv_heads][dim], of a token and its position."""
        for at in enumerate(map(int, tokens)):
            if at not in self.drawn:
                source = torch.Generator().manual_seed(1000003 * at[1] + at[0])
                self.drawn[at] = torch.randn(self.kv_heads, sum(self.size), generator=source)
        both = torch.stack([self.drawn[at] for at in enumerate(map(int, tokens))]).to(self.kv_dtype).to(self.qo_dtype)
        return both[..., : self.size[0]].contiguous(), both[..., self.size[0] :].contiguous()

    def step(self, sequences, max_tokens, **variant):
        """Computes a step; returns (position, sequence, q, out, lse) of each row, and commits tokens."""
        step = self.tree.begin_step()
        added = [(sequence, step.add(sequence, max_tokens)) for sequence in sequences]
        added = [(sequence, result.row) for sequence, result in added if result]
        view = self.plan.build(step)
        k, v = (torch.cat(parts) for parts in zip(*(
            [x[row.position : row.position + row.num_rows] for x in self.kv(sequence.tokens())]
            for sequence, row in added)))  # fmt: skip
        q = torch.randn(view.num_rows, self.qo_heads, self.size[0]).to(self.qo_dtype)
        out = torch.full((1, view.num_rows, self.qo_heads, self.size[1]), torch.nan, dtype=self.qo_dtype)
        lse = torch.full((view.num_rows, self.qo_heads), torch.nan)
        self.attention.write(self.cache, 1, view, spread(self.draw, k)[0], spread(self.draw, v)[0])
        apart, around = spread(self.draw, out[0])
        self.attention.run(self.cache, 1, view, spread(self.draw, q)[0], apart, lse, **variant)
        out = apart.clone()[None]
        apart.fill_(torch.nan)
        assert around.isnan().all(), "something between the rows of out was written"
        rows = [(row.position + i, sequence.tokens(), q[row.first_row + i], out[0, row.first_row + i],
                 lse[row.first_row + i]) for sequence, row in added for i in range(row.num_rows)]  # fmt: skip
        finished = step.finished()
        for row in finished.rows():
            finished.commit(row, self.draw.randrange(97))
        return rows


class AttentionTest(unittest.TestCase):
    def check(self, size, dtype, qo_dtype=torch.float32, **variant):
        draw = random.Random(f"{SEED} {size} {dtype}")
        torch.manual_seed(draw.randrange(2**31))
        run = Simulation(draw, size, dtype, qo_dtype)
        shared = [draw.randrange(97) for _ in range(draw.randrange(60, 150))]
        sequences = [run.tree.insert(shared[: draw.randrange(1, 150)] + [i] * draw.randrange(1, 40)) for i in range(5)]
        # What rounding of K/V, probabilities and outputs costs, of the largest |v| (about 4).
        tolerance = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 4e-3, "int8": 0.12}[dtype]
        tolerance += {torch.float32: 0, torch.float16: 4e-3, torch.bfloat16: 3e-2}[qo_dtype]
        worst, rows_seen = 0.0, 0
        for number in range(12):
            if number == 6:
                sequences.append(sequences[0].fork())
                sequences[-1].append([3, 4])
            if number == 8:
                del sequences[1]
                sequences.append(run.tree.insert(shared + [96, 95]))
            rows = run.step(sequences, 40, **variant)
            self.assertFalse(any(out.isnan().any() or lse.isnan().any() for *_, out, lse in rows))
            for position, tokens, q, out, lse in draw.sample(rows, min(len(rows), 12)):
                k, v = run.kv(tokens[: position + 1])
                expected, log = reference(q, k, v, position, scale=size[0] ** -0.5, **variant)
                worst = max(worst, float((out.double() - expected).abs().max()))
                self.assertLess(float((lse - log).abs().max()), 40 * tolerance)
                rows_seen += 1
            run.tree.check_invariants()
        self.assertGreater(rows_seen, 50)
        self.assertLess(worst, tolerance, f"{size} {dtype} {qo_dtype} {variant}")

    def test_types_and_sizes(self):
        for size in chunkattn.head_sizes():
            for dtype in compiled_types():
                with self.subTest(size=size, dtype=dtype):
                    self.check(size, dtype, DTYPES.get(dtype, torch.float32))

    def test_variants(self):
        for variant in (
            {"window": 7}, {"window": 50, "keep": 4}, {"soft_cap": 2.5}, {"soft_cap": 1.5, "window": 33},
            {"sinks": torch.randn(6)}, {"sinks": torch.randn(6), "window": 20}, {"alibi": torch.rand(6) / 8},
        ):  # fmt: skip
            with self.subTest(variant=variant):
                self.check(SIZE, "float32", **variant)

    def test_no_kernels_for_a_size(self):
        with self.assertRaisesRegex(ValueError, r"head_dim = 7:7: expected one that this package was built with"):
            chunkattn.Attention(7, threads=1)


class TensorsTest(unittest.TestCase):
    def setUp(self):
        self.tree = chunkattn.Tree()
        self.attention = chunkattn.Attention(*SIZE, threads=1)
        self.cache = self.attention.make_cache(self.tree, "float32", 1, 2)
        self.sequence = self.tree.insert(range(10))
        self.step = self.tree.begin_step()
        self.assertTrue(self.step.add(self.sequence))
        self.plan = chunkattn.Plan()
        self.view = self.plan.build(self.step)
        self.k, self.v = torch.randn(10, 2, SIZE[0]), torch.randn(10, 2, SIZE[1])
        self.q, self.out = torch.randn(10, 2, SIZE[0]), torch.zeros(10, 2, SIZE[1])

    def refused(self, expected, call, error=ValueError):
        with self.assertRaisesRegex(error, expected):
            call()

    def test_without_a_copy(self):
        for dtype in DTYPES.values():
            out = self.out.to(dtype)
            at = out.data_ptr()
            self.attention.write(self.cache, 0, self.view, self.k.to(dtype), self.v.to(dtype))
            self.attention.run(self.cache, 0, self.view, self.q.to(dtype), out)
            self.assertEqual(out.data_ptr(), at)
            self.assertTrue(torch.allclose(out[0].float(), self.v.to(dtype)[0].float(), atol=1e-2))
        out = numpy.zeros((10, 2, SIZE[1]), numpy.float32)
        self.attention.run(self.cache, 0, self.view, self.q.numpy(), out)
        self.assertNotEqual(float(abs(out).sum()), 0)

    def test_refused(self):
        run, write = self.attention.run, self.attention.write
        cache, view, k, v, q, out = self.cache, self.view, self.k, self.v, self.q, self.out
        self.refused(r"k.shape = \(9, 2, \d+\): expected \(10, heads", lambda: write(cache, 0, view, k[:9], v))
        wide = torch.randn(10, 2, 2 * SIZE[0])[..., ::2]
        self.refused(r"k.stride\(-1\) = 2: expected 1", lambda: write(cache, 0, view, wide, v))
        self.refused("v.stride_token = 0: expected at least the row's", lambda: write(cache, 0, view, k, v[:1].expand_as(v)))
        self.refused("out.stride_head = 1: expected at least the row's",
                     lambda: run(cache, 0, view, q, torch.zeros(5000).as_strided(out.shape, (200, 1, 1))))
        self.refused("k.dtype", lambda: write(cache, 0, view, k.double(), v))
        self.refused("k = .*tensor or array in host memory", lambda: write(cache, 0, view, k.to("meta"), v))
        self.refused("v.type = half: expected that of k, float", lambda: write(cache, 0, view, self.q, v.half()))
        self.refused("out = .*written", lambda: run(cache, 0, view, q, numpy.broadcast_to(out.numpy(), out.shape)))
        self.refused("soft_cap and sinks", lambda: run(cache, 0, view, q, out, soft_cap=1, sinks=torch.zeros(2)))
        self.refused("Sinks::logits", lambda: run(cache, 0, view, q, out, sinks=torch.zeros(3)))
        self.refused("SlidingWindow::size = 0", lambda: run(cache, 0, view, q, out, window=0))
        self.refused("layer = 1: expected 0 to num_layers - 1, 0", lambda: run(cache, 1, view, q, out))
        self.refused("dtype = 'int3'", lambda: self.attention.make_cache(self.tree, "int3", 1, 1))
        other = chunkattn.Attention(*SIZE, threads=1).make_cache(chunkattn.Tree(), "float32", 1, 2)
        self.refused("tree", lambda: run(other, 0, view, q, out))
        self.step.finished()
        self.refused("out of date", lambda: run(cache, 0, view, q, out))
        self.refused("out of date", lambda: view.pieces)
        self.refused("step = ended", self.step.finished)

    def test_other_threads_run_meanwhile(self):
        tree, attention = chunkattn.Tree(), chunkattn.Attention(*SIZE, threads=1)
        cache, plan = attention.make_cache(tree, "float32", 1, 8), chunkattn.Plan()
        sequence = tree.insert(range(3000))
        step = tree.begin_step()
        step.add(sequence)
        view = plan.build(step)
        q = torch.randn(3000, 8, SIZE[0])
        out = torch.empty(3000, 8, SIZE[1])
        attention.write(cache, 0, view, q, out.normal_())
        inside, counted = threading.Event(), []

        def count():
            inside.wait()
            n = 0
            while inside.is_set():
                n += 1
                time.sleep(0.001)
            counted.append(n)

        thread = threading.Thread(target=count)
        thread.start()
        inside.set()
        begin = time.perf_counter()
        attention.run(cache, 0, view, q, out)
        lasted = time.perf_counter() - begin
        inside.clear()
        thread.join()
        # With the GIL held it would have come to nothing but its first round.
        self.assertGreater(lasted, 0.02)
        self.assertGreater(counted[0], 3, f"in {lasted:.3f} s")

    def test_a_forked_process_has_threads_of_its_own(self):
        for threads in (1, 2):
            tree, attention = chunkattn.Tree(), chunkattn.Attention(*SIZE, threads=threads)
            cache, plan = attention.make_cache(tree, "float32", 1, 8), chunkattn.Plan()
            sequence = tree.insert(range(300))
            step = tree.begin_step()
            step.add(sequence)
            view = plan.build(step)
            q, v = torch.randn(300, 8, SIZE[0]), torch.randn(300, 8, SIZE[1])
            out, again = torch.empty(300, 8, SIZE[1]), torch.zeros(300, 8, SIZE[1])
            attention.write(cache, 0, view, q, v)
            attention.run(cache, 0, view, q, out)
            expected = out.numpy().tobytes()

            def work():
                # Nothing of torch that starts threads: its runtime waits for the parent's.
                attention.write(cache, 0, view, q, v)
                attention.run(cache, 0, view, q, again)
                os._exit(0 if again.numpy().tobytes() == expected else 1)

            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            child.join(60)
            if child.is_alive():
                child.kill()
            self.assertEqual(child.exitcode, 0)
            attention.run(cache, 0, view, q, again)
            self.assertEqual(again.numpy().tobytes(), expected)


class DocumentationTest(unittest.TestCase):
    def test_program(self):
        """The program of docs/pytorch.md runs as it stands there."""
        if "bfloat16" not in compiled_types() or (64, 64) not in chunkattn.head_sizes():
            self.skipTest("this build has no kernels for heads of 64 in bfloat16")
        page = pathlib.Path(__file__).resolve().parents[3] / "docs" / "pytorch.md"
        programs = [block.split("```")[0] for block in page.read_text(encoding="utf-8").split("```python\n")[1:]]
        program, = [text for text in programs if text.startswith("import torch, chunkattn")]
        names = {}
        exec(compile(program, str(page), "exec"), names)
        self.assertEqual([chat.tokens()[-1] for chat in names["chats"]], [42] * 3)
        self.assertFalse(names["out"].isnan().any())


class TreeTest(unittest.TestCase):
    def compute(self, tree, *sequences):
        step = tree.begin_step()
        for sequence in sequences:
            self.assertTrue(step.add(sequence))
        chunkattn.Plan().build(step)
        return step.finished()

    def test_tokens(self):
        tree = chunkattn.Tree()
        given = [[1, 2, 3], (1, 2, 3), range(1, 4), numpy.array([1, 2, 3]), torch.tensor([1, 2, 3]),
                 torch.tensor([1, 2, 3], dtype=torch.int32)]  # fmt: skip
        for tokens in given:
            sequence = tree.insert(tokens)
            self.assertEqual(sequence.tokens().tolist(), [1, 2, 3])
            self.assertEqual(len(sequence), 3)
        for bad, said in (
            ("abc", "tokens = "), ([1, 2.5], "2.5"), ([2**31], "2147483648"), ([], r"tokens = \[\]"), (7, "tokens"),
            (torch.tensor([2**40]), "1099511627776"), (torch.zeros(2), "tokens"),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, said):
                tree.insert(bad)

    def test_sharing_and_name_spaces(self):
        tree = chunkattn.Tree()
        first = tree.insert(range(100))
        self.compute(tree, first)
        self.assertEqual(tree.match_prefix(range(90)), (90, 0))
        self.assertEqual(tree.match_prefix(range(90), tenant=1), (0, 0))
        self.assertEqual(tree.match_prefix(range(90), adapter=1), (0, 0))
        second = tree.insert(list(range(80)) + [0] * 5)
        self.assertEqual(second.num_cached, 80)
        self.assertEqual((first.num_shared, second.num_shared), (80, 80))
        self.assertEqual(tree.insert(range(100), tenant=1).num_cached, 0)
        fork = first.fork(50)
        self.assertEqual(len(fork), 50)
        fork.truncate(20)
        self.assertEqual(len(fork), 20)
        tree.check_invariants()

    def test_who_comes_back_is_counted_apart(self):
        tree = chunkattn.Tree()
        for preempted in (False, True, True):
            sequence = tree.insert(range(100), preempted=preempted)
            self.compute(tree, sequence)
            del sequence
        stats = tree.stats()
        counted = {name: stats[name] for name in stats if name.startswith(("prompt_", "cached_", "preempted_"))}
        self.assertEqual(counted, {"prompt_tokens": 100, "cached_tokens": 0, "preempted_inserts": 2,
                                   "preempted_tokens": 200, "preempted_cached_tokens": 198})  # fmt: skip
        self.assertEqual(stats["inserts"], 3)

    def test_what_is_evicted_first(self):
        for retention in ("lru", "priority"):
            tree = chunkattn.Tree(max_chunks=4, retention=retention)
            for prompt, priority in ((1, 5), (2, 0)):
                sequence = tree.insert([prompt] * 64, priority=priority)
                self.compute(tree, sequence)
                del sequence
            self.assertEqual(tree.stats()["retained_chunks"], 2)
            self.compute(tree, tree.insert([3] * 190))
            kept = [tree.match_prefix([prompt] * 64)[0] for prompt in (1, 2)]
            self.assertEqual(kept, [0, 64] if retention == "lru" else [64, 0], retention)

    def test_prompts_that_are_none(self):
        tree = chunkattn.Tree(max_chunks=4)
        sequence = tree.insert([1])
        for call in (tree.insert, tree.try_insert, sequence.append, sequence.try_append):
            for empty in ([], (), numpy.zeros(0, numpy.int32)):
                with self.assertRaisesRegex(ValueError, r"^tokens = \[\]: expected at least one token$"):
                    call(empty)
        for call in (tree.insert, tree.try_insert, tree.match_prefix, tree.chunks_needed, tree.pin, sequence.append,
                     sequence.try_append):  # fmt: skip
            with self.assertRaisesRegex(ValueError, "^tokens = <class 'NoneType'>: expected a list of integers"):
                call(None)
        self.assertEqual((len(sequence), tree.chunks_needed([]), tree.match_prefix([])), (1, 0, (0, 0)))

    def test_out_of_chunks(self):
        tree = chunkattn.Tree(max_chunks=2)
        with self.assertRaisesRegex(chunkattn.OutOfChunks, "this never fits"):
            tree.insert(range(1000))
        self.assertTrue(issubclass(chunkattn.OutOfChunks, RuntimeError))
        self.assertIsNone(tree.try_insert(range(1000)))
        self.assertEqual(tree.chunks_available, 2)

    def test_pins(self):
        tree = chunkattn.Tree(max_chunks=4, max_pinned=1)
        for prompt in (1, 2):
            sequence = tree.insert([prompt] * 64)
            self.compute(tree, sequence)
            del sequence
        pin = tree.pin([1] * 64)
        self.assertEqual(len(pin), 64)
        self.compute(tree, tree.insert([3] * 190))
        self.assertEqual([tree.match_prefix([prompt] * 64)[0] for prompt in (1, 2)], [64, 0])

    def test_steps(self):
        tree = chunkattn.Tree()
        first, second = tree.insert(range(10)), tree.insert(range(12))
        step = tree.begin_step()
        held = step.add(second)
        self.assertFalse(held)
        self.assertEqual((held.reason, held.waits_for), ("waits_for_sequence", first.id))
        with self.assertRaisesRegex(ValueError, "row"):
            held.row
        self.assertTrue(step.add(first, 4))
        self.assertEqual(step.num_rows, 4)
        plan = chunkattn.Plan()
        old, view = plan.build(step), plan.build(step)
        self.assertEqual((old.is_current, view.is_current), (False, True))
        self.assertEqual(view.tokens.tolist(), [0, 1, 2, 3])
        in_flight = step.submitted()
        self.assertEqual(in_flight.finished().rows(), [])
        del first
        finished = self.compute(tree, second)
        row = finished.rows()[0]
        self.assertEqual((row.sequence, row.position, row.output_row), (second.id, 4, 7))
        finished.commit(row, 99)
        self.assertEqual(second.tokens()[-1], 99)
        step = tree.begin_step()
        step.add(second, drafts=[1, 2, 3], parents=[-1, 0, 0])
        self.assertEqual(plan.build(step).positions.tolist(), [12, 13, 14, 14])
        finished = step.finished()
        finished.commit(finished.rows()[0], [1, 3, 5], leaf=2)
        self.assertEqual(second.tokens()[-3:].tolist(), [1, 3, 5])

    def test_a_step_that_is_dropped_is_cancelled(self):
        tree = chunkattn.Tree()
        sequence = tree.insert([1, 2])
        step = tree.begin_step()
        step.add(sequence)
        with self.assertRaisesRegex(ValueError, "open"):
            tree.begin_step()
        del step
        self.assertEqual(sequence.num_uncomputed, 2)
        self.assertEqual(tree.stats()["cancelled_steps"], 1)

    def test_arrays_outlive_their_plan(self):
        tree, plan = chunkattn.Tree(), chunkattn.Plan()
        sequences = [tree.insert([7] * 100), tree.insert([7] * 100 + [8])]
        step = tree.begin_step()
        for sequence in sequences:
            step.add(sequence)
        view = plan.build(step)
        segments, pieces, writes, rows = view.segments, view.pieces, view.writes, view.row_kv_len
        self.assertEqual(segments["row_end"][0], view.num_rows)
        self.assertEqual(segments["num_sequences"][0], 2)
        self.assertEqual(int(pieces["length"][: segments["num_pieces"][0]].sum()), segments["length"][0])
        self.assertEqual(len(writes), 101)  # what both have is computed once
        kept = [array.copy() for array in (segments, pieces, writes, rows)]
        del step, view, plan, sequences, tree
        gc.collect()
        for array, copy in zip((segments, pieces, writes, rows), kept):
            self.assertTrue((array == copy).all())

    def test_handles_outlive_the_tree(self):
        tree = chunkattn.Tree()
        sequence = tree.insert([1, 2])
        del tree
        self.assertFalse(sequence.is_live)
        with self.assertRaisesRegex(ValueError, "orphaned"):
            sequence.tokens()
        self.assertIn("left", repr(sequence))

    def test_pictures(self):
        tree = chunkattn.Tree()
        empty = xml.etree.ElementTree.fromstring(tree._repr_svg_())
        self.assertEqual(len(empty), 0)
        sequences = [tree.insert([7] * 100 + [i] * 9) for i in range(3)]
        self.assertIn("3 sequences", repr(tree))
        self.assertIn("7 7 7", str(tree))
        self.assertIn("digraph", tree.to_dot())
        names = {7: "<&>"}
        picture = xml.etree.ElementTree.fromstring(chunkattn.tree_svg(tree, lambda token: names.get(token, "x")))
        boxes = [group[1] for group in picture]
        self.assertEqual(len(boxes), 4)
        self.assertEqual(len({box.get("y") for box in boxes}), 3)
        self.assertEqual(len(sequences), 3)

    def test_stubs(self):
        folder = os.path.dirname(chunkattn.__file__)
        with open(os.path.join(folder, "_core.pyi"), encoding="utf-8") as file:
            text = file.read()
        for name in ("class Tree:", "class Attention:", "def begin_step(self) -> Step:", "soft_cap: float | None"):
            self.assertIn(name, text)


if __name__ == "__main__":
    unittest.main()
