#!/usr/bin/env python3
"""Attention peers on an NVIDIA GPU: PyTorch's SDPA and, where they can be imported, FlashInfer,
FastTree (its artifact's kernel_bench folder, named by FASTTREE; Triton compiles it) and PAT
(prefix_attn, built for this PyTorch).

    python3 gpu_peers.py --json peers.json     # on a machine with a GPU and PyTorch
    python3 gpu_peers.py --self-check          # anywhere with numpy: the case construction alone

NEVER RUN ON A GPU YET: only the self-check has run. Read its first figures with suspicion.

Per case and peer: the time of an eager step and of one CUDA graph that runs through all K/V sets,
by set, as bench/cuda_sweep.cu times ours; sets rotate through at least 4 times the L2 cache. Where
nothing can be captured, instead of the graph: the same steps launched while the device waits, so
that the host's time is not in it. The machine's copy bandwidth and dense fp16 rate are measured in
the same run, and every time is also given as a ratio to the floor max(bytes / bandwidth, flops /
rate).
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import statistics
import sys
import time
import types

import numpy as np

from cases import (
    PAGE,
    TOLERANCE,
    Case,
    fill_pages,
    make_problem,
    page_table,
    reference,
    rotation,
    separate_page_table,
    small_case,
)


def gpu_cases():
    """The paper's Table 3 (all shared, half, none), private tails, and grouped queries."""
    made = []
    for tokens in (1024, 2048, 4096):
        made += [Case(32, 32, 32, tokens, private, "fp16") for private in (1, 64, 512)]
        made += [Case(32, 32, 32, tokens // 2, tokens // 2, "fp16")]
        made += [Case(32, 32, 32, 0, tokens, "fp16")]
    for batch in (64, 256):
        for shared in (4096, 32768):
            made += [Case(batch, 32, 8, shared, private, "fp16") for private in (64, 512)]
    return made


# --- the arrays that FlashInfer's wrappers take, made and checked without it ----------------------


def last_page_lengths(case, tokens):
    length = (tokens - 1) % PAGE + 1 if tokens else 0
    return np.full(case.batch, length, np.int32)


def paged_arrays(case, shares):
    """indptr, page indices and last page lengths of an ordinary paged decode."""
    table, pages = (page_table if shares else separate_page_table)(case, PAGE)
    indptr = np.arange(case.batch + 1, dtype=np.int32) * table.shape[1]
    last = last_page_lengths(case, case.private if shares else case.tokens)
    return table, pages, (indptr, table.reshape(-1), last)


def cascade_arrays(case):
    """Two levels, each (query indptr, page indptr, page indices, last page lengths): all queries on
    the prefix's pages, then each query on its own."""
    table, pages = page_table(case, PAGE)
    common = case.shared // PAGE
    own = table[:, common:]
    level0 = (
        np.array([0, case.batch], np.int32),
        np.array([0, common], np.int32),
        table[0, :common].copy(),
        np.array([PAGE], np.int32),
    )
    level1 = (
        np.arange(case.batch + 1, dtype=np.int32),
        np.arange(case.batch + 1, dtype=np.int32) * own.shape[1],
        own.reshape(-1).copy(),
        last_page_lengths(case, case.private),
    )
    return table, pages, (level0, level1)


PAT_PAGE = 32  # as its benchmark has it


def pat_arrays(case):
    """Lengths of the sequences, their pages, and how many pages there are."""
    table, pages = page_table(case, PAT_PAGE)
    return np.full(case.batch, case.tokens, np.int32), table, pages


def pat_pages(problem, table, pages):
    """K and V as [page][token in page][num_kv_heads][head_dim]."""
    return [rows.transpose(0, 2, 1, 3) for rows in fill_pages(problem, table, pages, PAT_PAGE)]


def attend_pages(problem, queries, k, v, indptr, indices, last):
    """numpy: each entry's queries over its pages. Returns out and log-sum-exp, double."""
    case = problem.case
    out = np.zeros(problem.q.shape)
    lse = np.full(problem.q.shape[:2], -np.inf)
    for entry in range(len(indptr) - 1):
        chosen = indices[indptr[entry] : indptr[entry + 1]]
        tokens = (len(chosen) - 1) * PAGE + last[entry]
        keys = np.concatenate(list(k[chosen]), axis=1)[:, :tokens].astype(np.float64)
        values = np.concatenate(list(v[chosen]), axis=1)[:, :tokens].astype(np.float64)
        for s in range(queries[entry], queries[entry + 1]):
            for head in range(case.num_qo_heads):
                q = problem.q[s, head].astype(np.float64) / math.sqrt(case.head_dim)
                logits = keys[head // case.group] @ q
                p = np.exp(logits - logits.max())
                out[s, head] = p @ values[head // case.group] / p.sum()
                lse[s, head] = logits.max() + math.log(p.sum())
    return out, lse


def check_pat(problem):
    """A sequence's pages, as far as its length goes, are its path."""
    lengths, table, pages = pat_arrays(problem.case)
    k, v = pat_pages(problem, table, pages)
    assert pages == len(np.unique(table))
    assert table.size - pages == (problem.case.batch - 1) * problem.case.shared // PAT_PAGE
    for s, length in enumerate(lengths):
        for rows, path in ((k, problem.key(s)), (v, problem.value(s))):
            tokens = np.concatenate(list(rows[table[s]]))[:length]
            assert np.array_equal(tokens.transpose(1, 0, 2), path), problem.case.name


def self_check():
    for case in {small_case(case) for case in gpu_cases()}:
        problem = make_problem(case)
        expected = reference(problem)
        singles = np.arange(case.batch + 1)
        for shares in (False, True) if case.shared else (False,):
            table, pages, arrays = paged_arrays(case, shares)
            k, v = fill_pages(problem, table, pages, PAGE)
            assert pages == len(np.unique(table))
            out, _ = attend_pages(problem, singles, k, v, *arrays)
            assert np.abs(out - expected).max() < 1e-12, case.name
        if case.shared:
            table, pages, levels = cascade_arrays(case)
            k, v = fill_pages(problem, table, pages, PAGE)
            (o1, l1), (o2, l2) = (attend_pages(problem, a[0], k, v, *a[1:]) for a in levels)
            weight = (1 / (1 + np.exp(l1 - l2)))[..., None]
            assert np.abs(o1 + weight * (o2 - o1) - expected).max() < 1e-12, case.name
            check_pat(problem)
        print(f"ok  {case.name}")


# --- peers: load(problem) -> a set, run(set) -> output --------------------------------------------


def optional(module, project):
    """The module or, where it cannot be imported, None, and why."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        print(f"{project} cannot be imported ({error}): left out", file=sys.stderr)
        return None


def make_peers():
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Peer:
        shares = False
        captured = True  # its launches are part of a graph

        def __init__(self, case):
            self.case = case

        @classmethod
        def objection(cls, case):
            """Why it does not run a case, or nothing."""
            if case.kv_bytes(cls.shares) > 8 << 30:
                return "own copies of the prefix are more than the host could make"
            if cls.shares and case.shared == 0:
                return "nothing is shared"
            return ""

        def tensor(self, array):
            return torch.from_numpy(np.ascontiguousarray(array)).to("cuda", torch.float16)

        def index(self, array):
            return torch.from_numpy(np.ascontiguousarray(array)).to("cuda")

        def copy(self, loaded):
            """New memory for K/V; queries and plans stay."""
            return (loaded[0], *(tensor.clone() for tensor in loaded[1:]))

        def set_bytes(self):
            return self.case.kv_bytes(self.shares)

    class Sdpa(Peer):
        """Own copies; the query heads of a group are rows of one problem."""

        def load(self, problem):
            case = self.case
            keys = np.stack([problem.key(s) for s in range(case.batch)])
            values = np.stack([problem.value(s) for s in range(case.batch)])
            q = self.tensor(problem.q)
            q = q.view(case.batch, case.num_kv_heads, case.group, case.head_dim)
            return q, self.tensor(keys), self.tensor(values)

        def run(self, loaded):
            with sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(*loaded)

    class SdpaEfficient(Sdpa):
        name, backend = "PyTorch SDPA, memory-efficient", SDPBackend.EFFICIENT_ATTENTION

    class SdpaFlash(Sdpa):
        name, backend = "PyTorch SDPA, flash", SDPBackend.FLASH_ATTENTION

    class SdpaCudnn(Sdpa):
        name, backend = "PyTorch SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION

    class SharedPrefix(Peer):
        """The prefix as one problem of batch x group rows, the rest per sequence, then a merge."""

        name, shares = "PyTorch shared prefix, flash", True

        def load(self, problem):
            arrays = (
                problem.q,
                problem.shared_k[None],
                problem.shared_v[None],
                problem.private_k,
                problem.private_v,
            )
            return tuple(self.tensor(array) for array in arrays)

        def run(self, loaded):
            q, shared_k, shared_v, private_k, private_v = loaded
            case = self.case
            rows = q.view(case.batch, case.num_kv_heads, case.group, case.head_dim)
            stacked = rows.transpose(0, 1).reshape(1, case.num_kv_heads, -1, case.head_dim)
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            o1, lse1 = flash(stacked, shared_k, shared_v)[:2]
            o2, lse2 = flash(rows, private_k, private_v)[:2]
            shape = (case.num_kv_heads, case.batch, case.group)
            o1 = o1.reshape(*shape, case.head_dim).transpose(0, 1).float()
            lse1 = lse1.reshape(shape).transpose(0, 1)
            weight = torch.sigmoid(lse2.reshape(lse1.shape) - lse1).unsqueeze(-1)
            return torch.lerp(o1, o2.float(), weight)

    class FastTree(Peer):
        """The tree of a prefix and its leaves; K/V as rows [token][head]. Split and tile sizes as its
        benchmark sets them."""

        name, shares = "FastTree", True

        def load(self, problem):
            case = self.case
            parts_k = [problem.shared_k, *problem.private_k]
            parts_v = [problem.shared_v, *problem.private_v]
            rows = [np.concatenate(list(parts), axis=1) for parts in (parts_k, parts_v)]
            nodes = []
            for n in range(case.batch + 1):
                node = types.SimpleNamespace(id=n, parent=0 if n else -1)
                node.seqlen = case.private if n else case.shared
                node.num_children = 0 if n else case.batch
                node.requests = [n - 1] if n else list(range(case.batch))
                nodes.append(node)
            starts = [0] + [case.shared + n * case.private for n in range(case.batch + 1)]
            self.params = fasttree.FastTreeParams()
            self.params.set_kv_group_num(case.group)
            self.params.set_q_tile_sizes([64, 16])
            self.params.set_kv_tile_sizes([32, 32])
            with contextlib.redirect_stdout(sys.stderr):  # it talks
                self.tables, _ = fasttree.fasttree_preparation(
                    nodes,
                    starts,
                    case.batch,
                    case.num_qo_heads,
                    case.num_kv_heads,
                    case.head_dim,
                    [1024, 128],
                    [132, 528],
                    [132, 132],
                    self.params,
                )
            return self.tensor(problem.q), *(self.tensor(r.transpose(1, 0, 2)) for r in rows)

        def run(self, loaded):
            q, k, v = loaded
            out = torch.empty_like(q)
            tiles = self.params.TSQs, self.params.TSKs
            scale = self.case.head_dim**-0.5
            fasttree.fasttree_decode(q, k, v, out, *self.tables, *tiles, scale)
            return out

    class Pat(Peer):
        """Its tree of pages decides which queries share a block, what is cut, and tile sizes."""

        name, shares = "PAT", True
        # It launches on streams of its own making and on the default one, whichever is current:
        # none of it would be in a graph.
        captured = False

        @classmethod
        def objection(cls, case):
            if case.group not in (1, 2, 4, 8) or case.head_dim not in (64, 128):
                return "PAT has groups of 1, 2, 4 or 8 and heads of 64 or 128 elements"
            return super().objection(case)

        def load(self, problem):
            case = self.case
            lengths, table, count = pat_arrays(case)
            self.table = torch.from_numpy(table)  # the tree points to it
            self.tree = prefix_attn.PrefixTreeCPP(PAT_PAGE)
            self.tree.build_radix_tree(lengths.tolist(), self.table)
            self.tree.pack_schedule(None, case.group, case.num_kv_heads)
            self.tree.kernel_info.to_gpu(torch.device("cuda", torch.cuda.current_device()))
            rows = pat_pages(problem, table, count)
            return self.tensor(problem.q[:, None]), *(self.tensor(r) for r in rows)

        def run(self, loaded):
            q, k, v = loaded
            out = torch.empty_like(q)
            prefix_attn.prefix_attn_with_kvcache(
                q=q,
                k_cache_paged=k,
                v_cache_paged=v,
                tree=self.tree,
                softmax_scale=self.case.head_dim**-0.5,
                out=out,
            )
            return out

    peers = [SdpaEfficient, SdpaFlash, SdpaCudnn, SharedPrefix]
    sys.path.append(os.environ.get("FASTTREE", ""))
    fasttree = optional("fasttree", "FastTree")
    if fasttree:
        peers.append(FastTree)
    prefix_attn = optional("prefix_attn", "PAT")
    if prefix_attn:
        peers.append(Pat)
    flashinfer = optional("flashinfer", "FlashInfer")
    if not flashinfer:
        return torch, peers

    class FlashInfer(Peer):
        tensor_cores = False

        def __init__(self, case):
            super().__init__(case)
            self.workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

        def pages(self, problem, table, count):
            k, v = fill_pages(problem, table, count, PAGE)
            return self.tensor(problem.q), self.tensor(k), self.tensor(v)

        def load(self, problem):
            case = self.case
            table, count, arrays = paged_arrays(case, self.shares)
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, "HND", use_tensor_cores=self.tensor_cores
            )
            self.wrapper.plan(
                *(self.index(array) for array in arrays),
                case.num_qo_heads,
                case.num_kv_heads,
                case.head_dim,
                PAGE,
                q_data_type=torch.float16,
                kv_data_type=torch.float16,
            )
            return self.pages(problem, table, count)

        def run(self, loaded):
            return self.wrapper.run(loaded[0], (loaded[1], loaded[2]))

    class SeparatePages(FlashInfer):
        name = "FlashInfer decode"

    class SharedPages(FlashInfer):
        name, shares = "FlashInfer decode, shared pages", True

    class SharedPagesTensorCores(SharedPages):
        name, tensor_cores = "FlashInfer decode on tensor cores, shared pages", True

    class Cascade(FlashInfer):
        name, shares = "FlashInfer cascade", True

        def load(self, problem):
            case = self.case
            table, count, levels = cascade_arrays(case)
            self.wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
                2, self.workspace, "HND"
            )
            self.wrapper.plan(
                *([self.index(level[i]) for level in levels] for i in range(4)),
                case.num_qo_heads,
                case.num_kv_heads,
                case.head_dim,
                PAGE,
                causal=False,
                q_data_type=torch.float16,
            )
            return self.pages(problem, table, count)

    peers += [SeparatePages, SharedPages, SharedPagesTensorCores, Cascade]
    return torch, peers


# --- measuring ------------------------------------------------------------------------------------


def event_times(torch, work, repeats):
    """Microseconds of each call of work(i) on the device."""
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for i, (start, stop) in enumerate(marks):
        start.record()
        work(i)
        stop.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(stop) for start, stop in marks]


def limits(torch):
    """Copy bandwidth (bytes read and written per second) and dense fp16 operations per second."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = statistics.median(event_times(torch, lambda _: b.copy_(a), 30)[10:])
    n = 8192
    x = torch.randn(n, n, dtype=torch.float16, device="cuda")
    y = torch.empty_like(x)
    matmul = statistics.median(event_times(torch, lambda _: torch.matmul(x, x, out=y), 30)[10:])
    return {"bytes_per_s": 2 * a.numel() / (copy * 1e-6), "flops_per_s": 2 * n**3 / (matmul * 1e-6)}


def graph_time(torch, peer, sets):
    """Microseconds of a step inside one graph of a step over each set."""
    expected = peer.run(sets[0]).float()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [peer.run(one) for one in sets]
    for out in outs:
        out.fill_(math.nan)
    graph.replay()
    if not all(torch.allclose(out.float(), expected, 0, TOLERANCE["fp16"]) for out in outs):
        raise RuntimeError("a replay does not do what an eager step does")
    replays = event_times(torch, lambda _: graph.replay(), 30)[5:]
    return statistics.median(replays) / len(sets)


def queued_time(torch, peer, sets, host_us):
    """The same of steps that were launched, in `host_us` each, while the device waited."""
    times = []
    for _ in range(30):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2000 * (200 + 2 * host_us * len(sets))))  # cycles, at most 2 GHz
        start.record()
        for one in sets:
            peer.run(one)
        if start.query():
            raise RuntimeError("the host was slower than the device")
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / len(sets))
    return statistics.median(times[5:])


def measure(torch, kind, case, problem, machine):
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    peer = kind(case)
    sets = [peer.load(problem)]
    for _ in range(1, rotation(peer.set_bytes(), l2)):
        sets.append(peer.copy(sets[0]))
    for one in sets[:3]:
        peer.run(one)
    torch.cuda.synchronize()
    eager = event_times(torch, lambda i: peer.run(sets[i % len(sets)]), 60)[10:]
    start = time.perf_counter()
    for i in range(50):
        peer.run(sets[i % len(sets)])
    host = 1e6 * (time.perf_counter() - start) / 50  # the queue is shorter than 50 only if slower
    torch.cuda.synchronize()
    best = statistics.median(eager)
    result = {"eager_us": best, "host_us": host, "sets": len(sets)}
    how = "graph" if kind.captured else "queued"
    try:
        if kind.captured:
            result["graph_us"] = graph_time(torch, peer, sets)
        else:
            result["queued_us"] = queued_time(torch, peer, sets, host)
        best = min(best, result[f"{how}_us"])
    except RuntimeError as error:
        result[f"{how}_failed"] = str(error).splitlines()[0]
    floor = 1e6 * max(
        case.least_bytes() / machine["bytes_per_s"], case.flops() / machine["flops_per_s"]
    )
    return result | {"floor_us": floor, "ratio": best / floor}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--self-check", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after these")
    arguments = parser.parse_args()
    if arguments.self_check:
        return self_check()

    torch, peers = make_peers()
    if not torch.cuda.is_available():
        sys.exit("no GPU that PyTorch can use; --self-check runs without one")
    machine = limits(torch)
    machine |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(machine))
    results = []
    begin = time.monotonic()
    for case in gpu_cases():
        if arguments.only not in case.name:
            continue
        if time.monotonic() - begin > arguments.seconds:
            print(json.dumps({"case": case.name, "failed": "not run, out of time"}), flush=True)
            continue
        small = make_problem(small_case(case), seed=1)
        expected = reference(small)
        problem = make_problem(case, seed=2)
        for kind in peers:
            row = {"case": case.name, "peer": kind.name, "shares": kind.shares}
            objection = kind.objection(case)
            if objection:
                print(json.dumps(row | {"left_out": objection}), flush=True)
                continue
            try:
                peer = kind(small_case(case))
                out = peer.run(peer.load(small)).reshape(expected.shape).float().cpu().numpy()
                row["max_error"] = float(np.abs(out - expected).max())
                if not row["max_error"] <= TOLERANCE["fp16"]:
                    raise RuntimeError(f"error {row['max_error']:.3g} against the reference")
                row |= measure(torch, kind, case, problem, machine)
            except (RuntimeError, TypeError, ValueError) as error:
                row["failed"] = str(error).splitlines()[0]
            torch.cuda.empty_cache()
            results.append(row)
            print(json.dumps(row), flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
