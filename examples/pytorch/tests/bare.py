"""The package where there is no torch: a step over a shared prompt against NumPy in double precision."""
import sys

import numpy

import chunkattn

size, heads, kv_heads = chunkattn.head_sizes()[0], 4, 2
tree, attention, plan = chunkattn.Tree(max_chunks=100), chunkattn.Attention(*size, threads=1), chunkattn.Plan()
cache = attention.make_cache(tree, "float32", num_layers=1, num_kv_heads=kv_heads)
chats = [tree.insert([7] * 100 + [i]) for i in range(3)]
step = tree.begin_step()
for chat in chats:
    step.add(chat, 512)
view = plan.build(step)
tokens, positions = numpy.array(view.tokens), numpy.array(view.positions)
rng = numpy.random.default_rng(1)
q = rng.standard_normal((view.num_rows, heads, size[0]), numpy.float32)
k, v = (rng.standard_normal((view.num_rows, kv_heads, dim), numpy.float32) for dim in size)
out = numpy.empty((view.num_rows, heads, size[1]), numpy.float32)
attention.write(cache, 0, view, k, v)
attention.run(cache, 0, view, q, out)

# The prompt's tokens are computed once; a chat's last token sees them and itself.
shared = [int(numpy.flatnonzero((tokens == 7) & (positions == at))[0]) for at in range(100)]
worst = 0.0
for row in numpy.flatnonzero(positions == 100):
    seen = shared + [row]
    for head in range(heads):
        keys, values = (x[seen, head * kv_heads // heads].astype(numpy.float64) for x in (k, v))
        logits = keys @ q[row, head].astype(numpy.float64) / size[0] ** 0.5
        weights = numpy.exp(logits - logits.max())
        worst = max(worst, abs(weights @ values / weights.sum() - out[row, head]).max())
rows = int((positions == 100).sum())
print(f"chunkattn on Python {sys.version.split()[0]}, {rows} chats, worst {worst:.1e}; {chunkattn.instruction_set()}")
sys.exit(rows != 3 or not worst < 1e-5 or "torch" in sys.modules)
