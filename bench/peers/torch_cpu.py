"""PyTorch's attention on the CPU: what ships, and what a careful user writes with it.

A peer is a class with `name`, `shares`, `dtypes`, `load(problem)` -> one set of its own tensors,
and `run(set)` -> output [batch][num_qo_heads][head_dim].
"""

import math

import torch
import torch.nn.functional as F

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def version():
    return f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def set_threads(threads):
    torch.set_num_threads(threads)


class Peer:
    shares = False
    dtypes = tuple(TYPES)

    def __init__(self, case):
        self.case = case
        self.type = TYPES[case.dtype]
        self.scale = 1 / math.sqrt(case.head_dim)

    @classmethod
    def supports(cls, case):
        return case.dtype in cls.dtypes and (case.shared > 0 or not cls.shares)

    def tensor(self, array):
        return torch.from_numpy(array).to(self.type).contiguous()

    def set_bytes(self):
        return self.case.kv_bytes(self.shares)

    def copy(self, loaded):
        """Another set of the same values in other memory."""
        return tuple(tensor.clone() for tensor in loaded)

    def output(self, result):
        return result.reshape(self.case.batch, self.case.num_qo_heads, -1).float().numpy()


class OwnCopies(Peer):
    """Every sequence has its own K/V, contiguous [batch][num_kv_heads][tokens][head_dim]."""

    def load(self, problem):
        case = self.case
        shape = (case.batch, case.num_kv_heads, case.tokens, case.head_dim)
        k, v = torch.empty(shape, dtype=self.type), torch.empty(shape, dtype=self.type)
        for to, shared, private in (
            (k, problem.shared_k, problem.private_k),
            (v, problem.shared_v, problem.private_v),
        ):
            to[:, :, : case.shared] = torch.from_numpy(shared)
            to[:, :, case.shared :] = torch.from_numpy(private)
        return self.tensor(problem.q), k, v


class Sdpa(OwnCopies):
    name = "PyTorch SDPA"

    def run(self, loaded):
        q, k, v = loaded
        grouped = self.case.group > 1
        return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=grouped)


class SdpaStacked(OwnCopies):
    """The query heads of a group as rows of one problem: K/V is read once per group."""

    name = "PyTorch SDPA, groups stacked"

    @classmethod
    def supports(cls, case):
        return super().supports(case) and case.group > 1

    def run(self, loaded):
        q, k, v = loaded
        case = self.case
        q = q.view(case.batch, case.num_kv_heads, case.group, case.head_dim)
        return F.scaled_dot_product_attention(q, k, v)


class Naive(OwnCopies):
    name = "PyTorch matmul, softmax, matmul"

    def run(self, loaded):
        q, k, v = loaded
        case = self.case
        q = q.view(case.batch, case.num_kv_heads, case.group, case.head_dim)
        p = torch.softmax(torch.matmul(q * self.scale, k.transpose(-1, -2)), dim=-1)
        return torch.matmul(p, v)


class SharedPrefix(Peer):
    """The prefix as one problem of batch x group rows per KV head, the rest per sequence, merged by
    their log-sum-exp: the caller says what is shared."""

    shares = True

    def load(self, problem):
        return tuple(
            self.tensor(array)
            for array in (
                problem.q,
                problem.shared_k,
                problem.shared_v,
                problem.private_k,
                problem.private_v,
            )
        )

    def run(self, loaded):
        q, shared_k, shared_v, private_k, private_v = loaded
        case = self.case
        rows = q.view(case.batch, case.num_kv_heads, case.group, case.head_dim)
        stacked = rows.transpose(0, 1).reshape(case.num_kv_heads, -1, case.head_dim)
        o1, lse1 = self.part(stacked.unsqueeze(0), shared_k.unsqueeze(0), shared_v.unsqueeze(0))
        o2, lse2 = self.part(rows, private_k, private_v)
        shape = (case.num_kv_heads, case.batch, case.group)
        o1 = o1.reshape(*shape, case.head_dim).transpose(0, 1)
        lse1 = lse1.reshape(shape).transpose(0, 1)
        # o1 + w (o2 - o1), w = exp(lse2) / (exp(lse1) + exp(lse2))
        weight = torch.sigmoid(lse2 - lse1).unsqueeze(-1)
        return torch.lerp(o1.float(), o2.float(), weight)


class SharedPrefixMatmul(SharedPrefix):
    name = "PyTorch shared prefix, matmuls"

    def part(self, q, k, v):
        logits = torch.matmul(q * self.scale, k.transpose(-1, -2)).float()
        top = logits.amax(dim=-1, keepdim=True)
        p = torch.exp_(logits.sub_(top))
        total = p.sum(dim=-1, keepdim=True)
        out = torch.matmul(p.to(self.type), v).float() / total
        return out, (top + total.log()).squeeze(-1)


class SharedPrefixFlash(SharedPrefix):
    name = "PyTorch shared prefix, flash"

    def part(self, q, k, v):
        return flash(q, k, v)


PEERS = [Sdpa, SdpaStacked, Naive, SharedPrefixMatmul, SharedPrefixFlash]
