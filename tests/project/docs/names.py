#!/usr/bin/env python3
"""names.py: every name that the pages call a function or member is declared.

In README.md and docs/*.md, outside of blocks, `name()`, `object.member`, `pointer->member` and `Type::member` in
backticks name something of the public headers (tools/check_public.py reads them), of the C interface, of the code that
the page is about (PAGES) or of what is not ours (FOREIGN); and `folder/header.hpp` is a file. The components that
docs/reference.md says all.hpp includes are those that it includes.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import check_public  # noqa: E402

# Code whose names a page may use beside the library's, where the page is about it.
PAGES = {
    "architecture.md": ["include/chunkattn", "examples"],
    "benchmarks.md": ["bench", "examples/serve"],
    "engines.md": ["examples/vllm", "examples/c"],
    "examples.md": ["examples"],
    "glossary.md": ["include/chunkattn"],
    "llama_cpp.md": ["examples/ggml"],
    "migration.md": ["include/chunkattn/tiers"],
    "pytorch.md": ["examples/pytorch"],
    "scheduling.md": ["bench"],
    "serve.md": ["examples/serve", "examples/pytorch"],
    "testing.md": ["include/chunkattn", "tests", "tools", "bench"],
}
CODE = {".hpp", ".cuh", ".h", ".ipp", ".cpp", ".cu", ".py", ".sh", ".in"}
FILES = r"\.(?:hpp|cuh|h|ipp|cpp|cu|py|sh|md|txt|json|jsonl|gguf|cmake|toml|yml|so|o|csv|html|js|safetensors|model|pc|zip|whl|bin)$"

# What is not ours: functions of CMake, Conan, vLLM and transformers, targets, a header of CUDA's, PTX.
FOREIGN = {"set", "find_package", "add_subdirectory", "target_link_libraries", "requires", "merge_attn_states", "generate_batch",
           "chunkattn::chunkattn", "chunkattn::cuda", "cuda_fp16.h", "mma.sync", "cp.async"}
NAMESPACES = {"", "chunkattn", "lanes"}
TESTS = r"(dev|docs)\.\w+$"  # their names


def public_names():
    """Each name that is declared, and each pair Class::name."""
    names = set()
    for group in check_public.count_names().values():
        for name in group:
            parts = name.split("::")
            names.update(parts)
            names.update("::".join(pair) for pair in zip(parts, parts[1:]))
    c = (ROOT / "include/chunkattn/c/chunkattn.h").read_text(encoding="utf-8")
    names.update(re.findall(r"\w+", re.sub(r"/\*.*?\*/", "", c, flags=re.S)))
    for path in (ROOT / "include/chunkattn").rglob("*.[hc]*"):
        text = path.read_text(encoding="utf-8")
        names.update(re.findall(r"#define (\w+)", text))
        if "detail" in path.parts:  # what is public there
            for scope, declaration in check_public.declarations(check_public.plain(text)):
                names.update(name for _, name in check_public.names_of(scope, declaration) if not scope)
    for path in (ROOT / "cmake").rglob("*.cmake"):
        names.update(re.findall(r"^ *function\((\w+)", path.read_text(encoding="utf-8"), flags=re.M))
    return names


def words_of(folder):
    """The identifiers of code, without comments and strings of C++."""
    words = set()
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in CODE and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            words.update(re.findall(r"[A-Za-z_]\w*", check_public.plain(text) if path.suffix not in {".py", ".sh"} else text))
    return words


def named(code):
    """(name, qualifier or "") of each function and member in a piece of code; headers as (path, None)."""
    if found := re.match(r"<?(?:chunkattn/)?([\w/]+\.(?:hpp|cuh|h|ipp))>?$", code):
        yield found[1], None
    elif not re.search(FILES, code.split(" ")[0]) and not re.match(rf"[-./$]|https?:|{TESTS}", code):
        if re.search(r" --?\w", code):  # a command
            return
        code = re.sub(r"(?<=\w)<[^<>()]*>", "", code)
        for found in re.finditer(r"(?:(\w+)::)?(?<![\w>:] )\b([A-Za-z_]\w*)\(", code):  # not of `Type object(`
            yield found[2], found[1] or ""
        for found in re.finditer(r"(?:(?<=[\w)\]])(?:\.|->)|\b([A-Za-z_]\w*)::)([A-Za-z_]\w*)\b(?!\.\w|\()", code):
            yield found[2], found[1] or ""


def lines_of(page):
    """(number, line) outside of blocks; of the migration page's tables what is written today."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    for number, line in enumerate(text.splitlines(), 1):
        yield number, re.sub(r"^\|[^|]*\|", "", line) if page.name == "migration.md" else line


def check_pages():
    public = public_names()
    files = [path.as_posix() for folder in ("include", "examples", "tests", "bench") for path in (ROOT / folder).rglob("*.*")]

    def is_there(code, name, qualifier, known):
        if qualifier is None:
            return name in FOREIGN or any(file.endswith("/" + name) for file in files)
        foreign = qualifier == "std" or name in FOREIGN or any(whole in code for whole in FOREIGN if re.search(r"\W", whole))
        version = re.match(r"chunkattn::v\d+_\d+$", code)
        return foreign or version or name in known and (qualifier in known or qualifier in NAMESPACES)

    count, faults = 0, []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        known = public.union(*(words_of(folder) for folder in PAGES.get(page.name, [])))
        for number, line in lines_of(page):
            for code in re.findall(r"`([^`]+)`", line):
                for name, qualifier in named(code):
                    count += 1
                    if not is_there(code, name, qualifier, known):
                        faults.append(f"{page.relative_to(ROOT)}:{number}: `{code}`: {name} is not declared")
    return count, faults


def check_umbrella():
    """What docs/reference.md lists as included by all.hpp is."""
    root = ROOT / "include/chunkattn"
    reached, left = set(), ["all.hpp"]
    while left:
        header = left.pop()
        if header in reached:
            continue
        reached.add(header)
        text = (root / header).read_text(encoding="utf-8")
        for name in re.findall(r'^ *#include "([^"]+)"', text, flags=re.M):
            left.append((root / header).parent.joinpath(name).resolve().relative_to(root).as_posix())
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    table = text[text.index("`all.hpp` does") :].split("\n\n")[1]
    for header in re.findall(r"^\| `([\w./]+)` \|", table, flags=re.M):
        if header not in reached:
            yield f"docs/reference.md: all.hpp does not include {header}"


if __name__ == "__main__":
    count, faults = check_pages()
    faults += check_umbrella()
    for fault in faults:
        print("FAILED:", fault)
    print(f"{count} names of functions, members and headers")
    sys.exit(bool(faults))
