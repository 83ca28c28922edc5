#!/usr/bin/env python3
"""doxygen_page.py FILE.md: the page as Doxygen takes it, on stdout (Doxyfile: FILTER_PATTERNS).

Doxygen knows neither anchors of another page nor files that are no input of its own. So each heading gets
a label made of its page and GitHub's name for it, links between pages name such labels, pictures lose their
folder, and links to other files of the repository lead to its address.
"""

import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ADDRESS = "https://github.com/chunkattn/chunkattn/blob/main/"
LINK = re.compile(r"`[^`\n]*`|(!?)(\[[^][]*(?:\[[^][]*\][^][]*)*\])\(([^()\s]+)\)")


def anchor(heading):
    """GitHub's name of a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def label(page, name=""):
    stem = page.stem.lower()
    return f"page_{stem}" + (f"_{name}" if name else "")


def is_page(path):
    return path.suffix == ".md" and path.is_file() and path.parent in (ROOT, ROOT / "docs")


def link(page, match):
    picture, text, target = match.groups()
    if not target:  # code, which has no links
        return match[0]
    text = LINK.sub(lambda inner: link(page, inner), text)
    if re.match(r"[a-z]+:", target):
        return f"{picture}{text}({target})"
    path, _, name = target.partition("#")
    file = pathlib.Path(os.path.normpath(page.parent / path)) if path else page
    if picture:
        return f"!{text}({file.name})"
    if is_page(file):
        return f"{text}(#{label(file, name)})"
    return f"{text}({ADDRESS}{file.relative_to(ROOT)})"


def main():
    page = pathlib.Path(sys.argv[1]).resolve()
    fenced = False
    text, names = [], {}
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        heading = re.match(r"(#+) (.*)", line)
        if heading and not fenced:
            name = anchor(heading[2]) if len(heading[1]) > 1 else ""
            names[name] = names.get(name, -1) + 1
            if names[name]:  # as GitHub numbers them
                name += f"-{names[name]}"
            line += f" {{#{label(page, name)}}}"
        text.append(line)
    # Not line by line: the text of a link may go over the end of one.
    parts = re.split(r"(^```.*?^```)", "\n".join(text), flags=re.M | re.S)
    parts[::2] = [LINK.sub(lambda match: link(page, match), part) for part in parts[::2]]
    print("".join(parts))


if __name__ == "__main__":
    main()
