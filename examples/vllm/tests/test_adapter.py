"""The plugin without vLLM: over stand-ins, with the compiled library, by what vLLM 0.32 gave it (recorded.json)."""
import json
import logging
import math
import os
import pathlib
import random
import tempfile
import time
import unittest
from types import SimpleNamespace as Namespace
from unittest import mock

import stand_ins
from stand_ins import DTYPES, Tensor, config, vllm

import chunkattn_vllm
from chunkattn_vllm import backend, library, sharing

RECORDED = json.loads(pathlib.Path(__file__).with_name("recorded.json").read_text())
DIM, SCALE = 16, 0.3
SHORTER = RECORDED["layer"]["query"]["shape"][2] // DIM  # heads than recorded ones, which take long in Python
FLOAT = DTYPES["torch.float32"]
SEED = int(os.environ.get("CHUNKATTN_SEED", random.SystemRandom().getrandbits(32)))


def impl(**changes):
    """A layer as vLLM makes it."""
    arguments = dict(num_heads=4, head_size=DIM, scale=SCALE, num_kv_heads=2, alibi_slopes=None, sliding_window=None,
                     kv_cache_dtype="auto") | changes
    return backend.Impl(**arguments)


def as_recorded(name, rows, rng=None):
    """A tensor of a layer as recorded, of so many rows, with shorter heads."""
    said = RECORDED["layer"][name]
    shape = [rows, *said["shape"][1:-1], said["shape"][-1] // SHORTER]
    tensor = Tensor(DTYPES[said["dtype"]], shape, [s // SHORTER for s in said["strides"][:-1]] + [1])
    if rng is not None:
        tensor.memory[:] = [rng.uniform(-1, 1) for _ in tensor.memory]
    return tensor


def tables(step):
    """A step's CommonAttentionMetadata. What is behind the pages in the tables must not be read: pages that are none."""
    def tensor(name):
        said, rows = step[name], step[name]["values"]
        if name != "block_table":
            return Tensor(DTYPES[said["dtype"]], [len(rows)], said["strides"], values=rows)
        filled = [row + [10 ** 6] * (said["strides"][0] - len(row)) for row in rows]
        return Tensor(DTYPES[said["dtype"]], [len(rows), said["strides"][0]], said["strides"], values=sum(filled, []))

    return Namespace(**{name: step[name] for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len",
                                                      "causal")},
                     **{name: tensor(name) for name in ("seq_lens", "query_start_loc", "slot_mapping")},
                     block_table_tensor=tensor("block_table"))


def attention(q, keys, values, mask=lambda distance: True, cap=0.0, sink=None, slope=0.0):
    """A row over its keys, of which it is the last, as numbers of Python."""
    logits = []
    for i, key in enumerate(keys):
        s = SCALE * sum(map(float.__mul__, q, key))
        s = cap * math.tanh(s / cap) if cap else s
        logits.append(s + slope * (i - len(keys) + 1) if mask(len(keys) - 1 - i) else -math.inf)
    most = max(logits if sink is None else [*logits, sink])
    weights = [math.exp(s - most) for s in logits]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink - most))
    return [sum(w * v for w, v in zip(weights, column)) / total for column in zip(*values)]


class Case(unittest.TestCase):
    def setUp(self):
        config.compilation_config.static_forward_context.clear()
        config.parallel_config.rank = 0
        config.kv_transfer_config = None
        config.model_config.dtype = FLOAT
        backend.said.clear()
        backend.counters.cache_clear()

    def place(self, layers, **changes):
        """Layers with K/V memory, and the builder of their group."""
        for number, each in enumerate(layers):
            kv = as_recorded("kv_cache", RECORDED["layer"]["kv_cache"]["shape"][0])
            kv.memory[:] = [math.nan] * len(kv.memory)  # of what is not written nothing may be read
            config.compilation_config.static_forward_context[f"layer.{number}"] = Namespace(impl=each, kv_cache=kv)
        return backend.Builder(None, list(config.compilation_config.static_forward_context), config, "cpu")


class Register(Case):
    def setUp(self):
        super().setUp()
        stand_ins.registered.clear()
        stand_ins.collectors.clear()

    def register(self, says=None, **environment):
        with mock.patch.dict(os.environ, environment):
            os.environ.pop(sharing.FOLDER, None)
            if says is None:
                with self.assertNoLogs("vllm.chunkattn", logging.WARNING):
                    chunkattn_vllm.register()
            else:
                with self.assertLogs("vllm.chunkattn", logging.WARNING) as logged:
                    chunkattn_vllm.register()
                self.assertIn(says, logged.output[0])
        return dict(stand_ins.registered)

    def test_versions(self):
        place = {stand_ins.AttentionBackendEnum.CPU_ATTN: "chunkattn_vllm.backend.Backend"}
        for version, taken in (("0.30.0", True), ("0.31.2", True), ("0.32.0", True), ("0.32.1rc1+cpu", True),
                               ("0.29.9", False), ("0.33.0", False), ("0.3.2", False), ("1.32.0", False), ("dev", False)):
            stand_ins.registered.clear()
            with self.subTest(version), mock.patch.object(vllm, "__version__", version):
                says = None if taken else f"not used: vLLM {version}: expected one of 0.30.x, 0.31.x, 0.32.x"
                self.assertEqual(self.register(says), place if taken else {})
                self.assertEqual(len(stand_ins.collectors), int(taken))
                stand_ins.collectors.clear()

    def test_off_and_other_devices(self):
        self.assertEqual(self.register(CHUNKATTN_VLLM="off"), {})
        with mock.patch.object(stand_ins.platform, "is_cpu", lambda: False):
            self.assertEqual(self.register(), {})

    def test_library(self):
        for name, value, says in (("__file__", "/none/library.py", "expected libchunkattn_vllm.so"),
                                  ("VERSION", -1, "chunkattn_c_version() = 3: expected -1")):
            library.load.cache_clear()
            with self.subTest(name), mock.patch.object(library, name, value):
                self.assertEqual(self.register(says), {})
        library.load.cache_clear()

    def test_metrics_are_added_once_and_their_folder_is_named_to_children(self):
        with mock.patch.dict(os.environ):
            os.environ.pop(sharing.FOLDER, None)
            sharing.show()
            sharing.show()
            folder = os.environ[sharing.FOLDER]
        self.assertEqual(stand_ins.collectors, [("the registry", folder)])
        self.assertTrue(os.path.isdir(folder))


class Fallbacks(Case):
    def test_each_reason(self):
        sinks = Tensor(FLOAT, [4])
        slopes = Tensor(FLOAT, [4])
        cases = [
            ("attention of type encoder_only", dict(attn_type="encoder_only")),
            ("K/V of fp8", dict(kv_cache_dtype="fp8")),
            ("ALiBi with a window, a soft cap or sinks", dict(alibi_slopes=slopes, sliding_window=8)),
            ("ALiBi with a window, a soft cap or sinks", dict(alibi_slopes=slopes, logits_soft_cap=30.0)),
            ("ALiBi with a window, a soft cap or sinks", dict(alibi_slopes=slopes, sinks=sinks)),
            ("sinks with a soft cap", dict(sinks=sinks, logits_soft_cap=30.0)),
            ("config.head_dim = 24", dict(head_size=24)),
        ]
        for reason, changes in cases:
            backend.said.clear()
            with self.subTest(reason, **changes), self.assertLogs("vllm.chunkattn") as logged:
                left = impl(**changes)
                self.assertIsNone(left.attention)
                self.assertIn(f"chunkattn leaves layers to CPU_ATTN: {reason}", logged.output[0])
                left.do_kv_cache_update(None, None, None, None, None)
                self.assertEqual(left.forward(*[None] * 7), "CPU_ATTN's")
                self.assertEqual(left.calls, ["do_kv_cache_update", "forward"])

    def test_models_and_connectors(self):
        for reason, change in (("a model of torch.float8", lambda: setattr(config.model_config, "dtype", DTYPES["torch.float8"])),
                               ("a KV connector", lambda: setattr(config, "kv_transfer_config", object()))):
            self.setUp()
            change()
            with self.subTest(reason), self.assertLogs("vllm.chunkattn") as logged:
                self.assertIsNone(impl().attention)
                self.assertIn(reason, logged.output[0])

    def test_kv_of_another_layer(self):
        for target, taken in ((impl(), True), (impl(head_size=24), False)):
            config.compilation_config.static_forward_context["target"] = Namespace(impl=target)
            self.assertEqual(impl(kv_sharing_target_layer_name="target").attention is not None, taken)

    def test_a_reason_is_said_once(self):
        with self.assertLogs("vllm.chunkattn") as logged:
            for _ in range(3):
                impl(head_size=24)
        self.assertEqual(len(logged.output), 1)

    def test_groups_of_both(self):
        """CPU_ATTN's own metadata is made where a layer of the group was left, and only there."""
        m = tables(RECORDED["steps"][1])
        for layers, theirs, ours in (([impl(), impl()], None, True), ([impl(), impl(head_size=24)], "what CPU_ATTN's kernels need", True),
                                     ([impl(head_size=24)], "what CPU_ATTN's kernels need", False)):
            self.setUp()
            made = self.place(layers).build(0, m)
            self.assertEqual(made.scheduler_metadata, theirs)
            self.assertEqual(getattr(made, "plan", None) is not None, ours)
            self.assertIs(made.block_table, m.block_table_tensor)
            self.assertEqual((made.num_actual_tokens, made.max_query_len, made.max_seq_len),
                             (m.num_actual_tokens, m.max_query_len, m.max_seq_len))


class Steps(Case):
    def run_recorded(self, expected, **changes):
        """All recorded steps through two layers: each row is as `expected` says."""
        rng = random.Random(SEED)
        layers = [impl(**changes), impl(**changes)]
        builder = self.place(layers)
        known = [{}, {}]  # of each layer by slot: K and V of all heads
        for step in RECORDED["steps"]:
            m = tables(step)
            metadata = builder.build(0, m)
            rows = step["num_actual_tokens"]
            for number, (layer, mine) in enumerate(zip(layers, known)):
                kv = config.compilation_config.static_forward_context[f"layer.{number}"].kv_cache
                q, k, v = (as_recorded(name, rows, rng) for name in ("query", "key", "value"))
                layer.do_kv_cache_update(None, k, v, kv, m.slot_mapping)
                for row, slot in enumerate(step["slot_mapping"]["values"]):
                    mine[slot] = [(k[row][head].tolist(), v[row][head].tolist()) for head in range(2)]
                out = as_recorded("output", rows)
                self.assertIs(layer.forward(None, q, k, v, kv, metadata, out), out)
                starts = step["query_start_loc"]["values"]
                for r, (length, pages) in enumerate(zip(step["seq_lens"]["values"], step["block_table"]["values"])):
                    for row in range(starts[r], starts[r + 1]):
                        seen = length - (starts[r + 1] - row) + 1
                        slots = [32 * pages[i // 32] + i % 32 for i in range(seen)]
                        for head in range(0, 4, 3):
                            at = [mine[slot][head // 2] for slot in slots]
                            want = expected(q[row][head].tolist(), [key for key, _ in at], [value for _, value in at], head)
                            got = out[row][head].tolist()
                            self.assertTrue(all(abs(a - b) < 1e-5 for a, b in zip(got, want)), (row, head, got, want))

    def test_recorded_steps(self):
        with mock.patch.dict(os.environ):
            os.environ.pop(sharing.FOLDER, None)
            os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
            self.run_recorded(lambda q, k, v, head: attention(q, k, v))
            totals = backend.counters("m", 0).totals
        self.assertEqual(totals["steps"], len(RECORDED["steps"]))
        # As the tables have it: each page once in a step, and once for each request.
        pages = [step["block_table"]["values"] for step in RECORDED["steps"]]
        lengths = [step["seq_lens"]["values"] for step in RECORDED["steps"]]
        used = [[tuple(row[:-(-length // 32)]) for row, length in zip(*both)] for both in zip(pages, lengths)]
        self.assertEqual(totals["pages_alone"], sum(len(row) for step in used for row in step))
        self.assertEqual(totals["pages_read"], sum(len(set().union(*step)) for step in used))

    def test_variants(self):
        sinks = [0.5, -1.0, 2.0, 0.0]
        slopes = [0.5, 0.25, 0.125, 0.0625]
        for changes, expected in (
            (dict(sliding_window=20), lambda q, k, v, head: attention(q, k, v, lambda distance: distance < 20)),
            (dict(logits_soft_cap=0.5), lambda q, k, v, head: attention(q, k, v, cap=0.5)),
            (dict(sinks=Tensor(FLOAT, [4], values=sinks)), lambda q, k, v, head: attention(q, k, v, sink=sinks[head])),
            (dict(alibi_slopes=Tensor(FLOAT, [4], values=slopes)), lambda q, k, v, head: attention(q, k, v, slope=slopes[head])),
        ):
            self.setUp()
            with self.subTest(**changes), mock.patch.object(sharing, "folder", lambda: None):
                self.run_recorded(expected, **changes)

    def test_what_is_refused(self):
        builder = self.place([impl()])
        layer = config.compilation_config.static_forward_context["layer.0"]
        for change, error, says in (
            ({"causal": False}, NotImplementedError, "not causal: run it with CHUNKATTN_VLLM=off"),
            ({"seq_lens": Tensor(DTYPES["torch.int64"], [4])}, TypeError, "seq_lens is torch.int64"),
            ({"block_table_tensor": Tensor(DTYPES["torch.int32"], [4, 4], [8, 2])}, TypeError, "block_table is torch.int32"),
            ({"seq_lens": Tensor(DTYPES["torch.int32"], [4], values=[-7, 78, 85, 86])}, library.Error, "seq_lens[0] = -7"),
        ):
            m = tables(RECORDED["steps"][1])
            vars(m).update(change)
            with self.subTest(says), self.assertRaises(error) as raised:
                builder.build(0, m)
            self.assertIn(says, str(raised.exception))

        m = tables(RECORDED["steps"][1])
        rows = m.num_actual_tokens
        q, k, v, out = (as_recorded(name, rows) for name in ("query", "key", "value", "output"))
        half = Tensor(DTYPES["torch.float16"], k.shape)
        short = Tensor(DTYPES["torch.int32"], [rows])
        for slots, key, cache, says in ((short, k, layer.kv_cache, "slot_mapping, key and value are of torch.int32"),
                                        (m.slot_mapping, half, layer.kv_cache, "key and value are of torch.int64, torch.float16"),
                                        (m.slot_mapping, k, Tensor(half.dtype, layer.kv_cache.shape), "kv_cache is of torch.float16")):
            with self.subTest(says), self.assertRaises(TypeError) as raised:
                layer.impl.do_kv_cache_update(None, key, v, cache, slots)
            self.assertIn(says, str(raised.exception))
        gaps = Tensor(FLOAT, k.shape, [k.stride(0), 2 * DIM, 1])
        with self.assertRaisesRegex(ValueError, "key has shape .*: expected 32 elements of each token without gaps"):
            layer.impl.do_kv_cache_update(None, gaps, v, layer.kv_cache, m.slot_mapping)
        metadata = builder.build(0, m)
        with self.assertRaisesRegex(TypeError, "output are of torch.float32 and torch.float16"):
            layer.impl.forward(None, q, k, v, layer.kv_cache, metadata, Tensor(half.dtype, out.shape))
        builder.build(0, tables(RECORDED["steps"][2]))
        with self.assertRaisesRegex(RuntimeError, "the plan of batch 1 is gone: batch 2 of the same layers"):
            layer.impl.forward(None, q, k, v, layer.kv_cache, metadata, out)

    def test_kv_memory_of_another_size(self):
        """As after vLLM's first runs: the plan is made anew, and knows how many pages there are."""
        builder, m = self.place([impl()]), tables(RECORDED["steps"][1])
        layer = config.compilation_config.static_forward_context["layer.0"]
        plan = builder.build(0, m).plan
        self.assertIs(builder.build(0, m).plan, plan)
        layer.kv_cache = Tensor(FLOAT, [7, *layer.kv_cache.shape[1:]])
        self.assertIsNot(builder.build(0, m).plan, plan)
        layer.kv_cache = Tensor(FLOAT, [6, *layer.kv_cache.shape[1:]])
        with self.assertRaisesRegex(library.Error, r"block_table\[26\] = 6: expected from 0 to 5"):
            builder.build(0, m)

    def test_what_is_left_in_a_layer_of_ours(self):
        layer = impl()
        for arguments in ([None] * 7, [None] * 5 + [object(), None, 2.0], [None] * 5 + [object(), None, None, 2.0]):
            self.assertEqual(layer.forward(*arguments), "CPU_ATTN's")  # the warm-up, and outputs with scales


class Counting(Case):
    def count(self, rounds=1, pause=0.0):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(
                os.environ, {sharing.FOLDER: folder, "VLLM_LOG_STATS_INTERVAL": "0.2"}):
            os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
            builders = [self.place([impl()]) for _ in range(2)]  # two groups of layers
            for _ in range(rounds):
                for step in RECORDED["steps"][1:4]:
                    for builder in builders:
                        builder.build(0, tables(step))
                time.sleep(pause)
            return chunkattn_vllm.statistics()

    def test_statistics_are_what_was_written_for_metrics(self):
        stand_ins.MmapedDict.written.clear()
        found = self.count()
        self.assertEqual(found["steps"], 6)
        self.assertGreater(found["pages_alone"], found["pages_read"])
        (values,) = stand_ins.MmapedDict.written.values()  # one file for both groups
        said = {json.loads(key)[1]: (json.loads(key)[2], value) for key, value in values.items()}
        self.assertEqual(said, {f"vllm:chunkattn_{name}_total": ({"model_name": "m", "engine": "0"}, value)
                                for name, value in found.items()})

    def test_one_worker_of_an_engine_counts(self):
        config.parallel_config.rank = 1
        self.assertEqual(self.count(), {"steps": 0, "pages_read": 0, "pages_alone": 0})

    def test_the_folder_of_several_api_servers(self):
        with mock.patch.dict(os.environ, {sharing.FOLDER: "/ours", "PROMETHEUS_MULTIPROC_DIR": "/vllms"}):
            self.assertEqual(sharing.folder(), "/vllms")

    def test_the_log_says_now_and_then_what_was_shared(self):
        with self.assertLogs("vllm.chunkattn") as logged:
            found = self.count(rounds=2, pause=0.5)
        lines = [record.getMessage() for record in logged.records if "K/V blocks" in record.getMessage()]
        read, alone = found["pages_read"] // 2, found["pages_alone"] // 2
        expected = f"chunkattn: 6 steps read {read} K/V blocks; without sharing {alone}: {alone / read:.2f} times as many"
        self.assertEqual(lines, [expected, expected])  # each time what has come since

    def test_nothing_is_said_where_nothing_is_computed(self):
        with self.assertNoLogs("vllm.chunkattn"):
            sharing.Counters("m", 0)
            time.sleep(0.1)


if __name__ == "__main__":
    print(f"seed {SEED}, recorded with vLLM {RECORDED['vllm']}")
    unittest.main()
