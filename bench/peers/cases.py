"""The decode cases that all peers run, their data, the least work they need, and a reference.

A case is one step of decode attention: `batch` sequences with one query token each, whose first
`shared` tokens of keys and values (K/V) are common to all and whose last `private` tokens are not.
Needs numpy alone.
"""

import dataclasses
import glob
import math
import os

import numpy as np

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
PAGE = 64  # tokens; other page sizes where a peer fixes its own


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    num_qo_heads: int
    num_kv_heads: int
    shared: int
    private: int
    dtype: str
    head_dim: int = 128

    @property
    def name(self):
        heads = f"{self.num_qo_heads}/{self.num_kv_heads}"
        return f"b{self.batch} {heads} {self.shared}+{self.private} {self.dtype}"

    @property
    def group(self):
        return self.num_qo_heads // self.num_kv_heads

    @property
    def tokens(self):
        """Tokens of one sequence."""
        return self.shared + self.private

    def kv_bytes(self, shares=True):
        """Bytes of K and V: the prefix once, or once per sequence."""
        tokens = self.batch * self.private + self.shared * (1 if shares else self.batch)
        return 2 * ELEMENT_BYTES[self.dtype] * self.num_kv_heads * self.head_dim * tokens

    def least_bytes(self):
        """Bytes that any kernel must move: K and V once, fp32 queries in and outputs out."""
        return self.kv_bytes() + 2 * 4 * self.batch * self.num_qo_heads * self.head_dim

    def flops(self):
        """Multiplications and additions of QK' and PV."""
        return 4.0 * self.batch * self.num_qo_heads * self.head_dim * self.tokens


def cases(dtypes=("fp32", "fp16", "bf16")):
    """The list: what is shared shrinks to nothing, with and without grouped queries."""
    lengths = [(1024, 64), (2048, 64), (4096, 64), (0, 1024)]
    return [
        Case(32, 32, num_kv_heads, shared, private, dtype)
        for num_kv_heads in (32, 8)
        for shared, private in lengths
        for dtype in dtypes
    ]


def small_case(case):
    """The same geometry, small enough to check every output against the reference."""
    return dataclasses.replace(
        case, batch=3, shared=min(case.shared, 128), private=min(case.private, 64) or 64
    )


@dataclasses.dataclass
class Problem:
    """fp32 arrays; queries [batch][num_qo_heads][head_dim], the prefix's K/V
    [num_kv_heads][shared][head_dim], the rest [batch][num_kv_heads][private][head_dim]."""

    case: Case
    q: np.ndarray
    shared_k: np.ndarray
    shared_v: np.ndarray
    private_k: np.ndarray
    private_v: np.ndarray

    def key(self, sequence):
        """K of a sequence's whole path, [num_kv_heads][tokens][head_dim]."""
        return np.concatenate([self.shared_k, self.private_k[sequence]], axis=1)

    def value(self, sequence):
        return np.concatenate([self.shared_v, self.private_v[sequence]], axis=1)


def make_problem(case, seed=None):
    """Random data of unit variance; the seed is printed where none is given."""
    if seed is None:
        seed = int(os.environ.get("CHUNKATTN_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
        print(f"  seed {seed}", flush=True)
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    heads, d = case.num_kv_heads, case.head_dim
    return Problem(
        case,
        normal(case.batch, case.num_qo_heads, d),
        normal(heads, case.shared, d),
        normal(heads, case.shared, d),
        normal(case.batch, heads, case.private, d),
        normal(case.batch, heads, case.private, d),
    )


def reference(problem):
    """The attention output in double precision, [batch][num_qo_heads][head_dim]."""
    case = problem.case
    out = np.empty(problem.q.shape)
    for s in range(case.batch):
        k, v = problem.key(s).astype(np.float64), problem.value(s).astype(np.float64)
        for head in range(case.num_qo_heads):
            logits = k[head // case.group] @ problem.q[s, head].astype(np.float64)
            logits /= math.sqrt(case.head_dim)
            p = np.exp(logits - logits.max())
            out[s, head] = p @ v[head // case.group] / p.sum()
    return out


# Largest error against the reference on the case's own fp32 data, so it includes rounding K/V and
# the queries to the type. A mistake in the set-up is off by 0.1 and more.
TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2, "int8": 3e-2}


def last_level_cache_bytes():
    """The largest cache that Linux reports for the first core; 32 MiB where nothing does."""
    largest = 0
    for path in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        largest = max(largest, int(text.rstrip("KMG")) * unit)
    return largest or 32 << 20


def rotation(set_bytes, cache_bytes=None):
    """Number of K/V sets to take in turn so that each is cold: 4 times the last-level cache."""
    return max(1, math.ceil(4 * (cache_bytes or last_level_cache_bytes()) / max(set_bytes, 1)))


def page_table(case, page):
    """Physically shared pages. The prefix must fill whole pages; each sequence's own pages follow.

    Returns (table [batch][pages of a sequence], number of pages).
    """
    assert case.shared % page == 0, "the prefix must end at a page boundary"
    common, own = case.shared // page, -(-case.private // page)
    table = np.empty((case.batch, common + own), np.int32)
    table[:, :common] = np.arange(common)
    table[:, common:] = common + np.arange(case.batch * own).reshape(case.batch, own)
    return table, common + case.batch * own


def separate_page_table(case, page):
    """The same without sharing: every sequence has its own copy of the prefix."""
    own = -(-case.tokens // page)
    return np.arange(case.batch * own, dtype=np.int32).reshape(case.batch, own), case.batch * own


def fill_pages(problem, table, pages, page):
    """K and V as [page][num_kv_heads][token in page][head_dim]; unused slots are zero."""
    case = problem.case
    shape = (pages, case.num_kv_heads, page, case.head_dim)
    k, v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    done = set()
    for s in range(case.batch):
        full_k, full_v = problem.key(s), problem.value(s)
        for i, chunk in enumerate(table[s]):
            if chunk in done:
                continue
            done.add(chunk)
            tokens = full_k[:, i * page : (i + 1) * page]
            k[chunk, :, : tokens.shape[1]] = tokens
            v[chunk, :, : tokens.shape[1]] = full_v[:, i * page : (i + 1) * page]
    return k, v
