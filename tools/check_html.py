#!/usr/bin/env python3
"""check_html.py FOLDER: every link, anchor and picture of the HTML pages in FOLDER has a target there.

Doxygen reports none of those that it could not resolve, so its output is what is looked at. Addresses of
other hosts are left alone.
"""

import pathlib
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.anchors, self.targets = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.anchors.update(of[name] for name in ("id", "name") if of.get(name))
        for name in ("href", "src", "data"):
            if of.get(name):
                self.targets.append((self.getpos()[0], of[name]))


def broken(folder):
    pages = {path.name: Page(path) for path in sorted(folder.glob("*.html"))}
    for name, page in pages.items():
        for line, target in page.targets:
            address = urlsplit(target)
            if address.scheme or address.netloc:
                continue
            file, anchor = unquote(address.path) or name, unquote(address.fragment)
            if not (folder / file).is_file():
                yield f"{name}:{line}: {target}: no such file"
            elif anchor and file in pages and anchor not in pages[file].anchors:
                yield f"{name}:{line}: {target}: no such anchor"


def main():
    folder = pathlib.Path(sys.argv[1])
    if not (folder / "index.html").is_file():
        sys.exit(f"{folder}: no index.html")
    found = list(broken(folder))
    print("\n".join(found + [f"{len(found)} broken targets"]))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
