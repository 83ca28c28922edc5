"""The tree as a picture: time goes to the right, branches stand below each other."""

import html
import math

WIDTH, ROW = 960, 22


def _leaves(children, node):
    below = children.get(node["id"], [])
    return sum(_leaves(children, child) for child in below) if below else 1


def _colour(node, most):
    if node["num_sequences"] == 0:
        return "#e4e4e4"  # cached
    share = math.log2(node["num_sequences"]) / max(1.0, math.log2(max(2, most)))
    return f"hsl({210 - 190 * share:.0f} 70% {82 - 12 * share:.0f}%)"


def tree_svg(tree, token_text=str, max_tokens=16):
    """An SVG of the tree: a node's width is its share of the longest path, its height that of the
    branches after it; the more sequences have it, the warmer its colour. Grey nodes are cached.

    token_text: what stands for a token, `tokenizer.decode` for instance.
    """
    nodes = tree.nodes(max_tokens)
    children, ends = {}, [1]
    for node in nodes:
        children.setdefault(node["parent"], []).append(node)
        ends.append(node["position"] + node["length"])
    by_token = WIDTH / max(ends)
    most = max([1] + [node["num_sequences"] for node in nodes])
    parts = []

    def draw(node, top):
        x, width = node["position"] * by_token, node["length"] * by_token
        rows = _leaves(children, node)
        text = " ".join(token_text(token) for token in node["first_tokens"])
        said = f"{node['length']} tokens, {node['num_sequences'] or 'cached, no'} sequences"
        shown = html.escape(text[: max(0, int(width / 7) - 1)])
        parts.append(
            f'<g><title>{html.escape(said)}: {html.escape(text)}</title>'
            f'<rect x="{x:.1f}" y="{top * ROW}" width="{max(1.0, width - 1):.1f}" height="{rows * ROW - 1}" '
            f'fill="{_colour(node, most)}"/>'
            f'<text x="{x + 4:.1f}" y="{top * ROW + 15}">{shown}</text></g>'
        )
        for child in children.get(node["id"], []):
            draw(child, top)
            top += _leaves(children, child)

    top = 0
    for root in children.get(0, []):
        draw(root, top)
        top += _leaves(children, root)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{max(1, top) * ROW}" '
        f'font-family="sans-serif" font-size="12" fill="#222">{"".join(parts)}</svg>'
    )
