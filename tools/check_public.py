#!/usr/bin/env python3
"""check_public.py [--list]: what users of the library can name.

Reads the public headers: those below include/chunkattn that are in no folder `detail`. The core, which is directly
there, has at most MAX_CORE_TYPES public types (classes, enums and aliases at namespace scope, outside `detail`), it and
the components have MAX_TYPES, and MAX_CONCEPTS concepts; no public declaration of the core names anything of `detail`, and the table in docs/reference.md lists each with its header and
pages that speak of it. --list prints them by header.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = ROOT / "include" / "chunkattn"
TABLE = ROOT / "docs" / "reference.md"
MAX_CORE_TYPES, MAX_TYPES, MAX_CONCEPTS = 60, 94, 9

# What the macros of detail/support/config.hpp stand for, as far as scopes go.
MACROS = {
    "CHUNKATTN_NAMESPACE_BEGIN": "namespace chunkattn {",
    "CHUNKATTN_NAMESPACE_END": "}",
    "CHUNKATTN_ISA_NAMESPACE_BEGIN": "namespace chunkattn {",
    "CHUNKATTN_ISA_NAMESPACE_END": "}",
    "CHUNKATTN_ISA_DETAIL_BEGIN": "namespace detail {",
    "CHUNKATTN_ISA_DETAIL_END": "}",
}


def plain(text):
    """The source without comments, strings and directives, with the scopes that macros open."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', lambda m: '""' if m[0][0] == '"' else "", text, flags=re.S)
    text = re.sub(r"^ *#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)
    for name, meaning in MACROS.items():
        text = re.sub(rf"\b{name}\b", meaning, text)
    return re.sub(r"\bCHUNKATTN_(HD|INLINE|COLD)\b|\[\[[^]]*\]\]", "", text)


def declarations(text):
    """(scope, declaration) of all that is public: `scope` is the class around it, or empty.

    A declaration ends before its body, its initialiser or its semicolon."""
    scopes = [("namespace", "")]  # kinds: namespace, class, enum, hidden
    access = ["public"]
    start, at, parens = 0, 0, 0
    while at < len(text):
        c = text[at]
        if c in "([":
            parens += 1
        elif c in ")]":
            parens -= 1
        elif parens == 0 and c in "{};:":
            if c == ":":
                label = re.fullmatch(r"\s*(public|protected|private)\s*", text[start:at])
                if label:
                    access[-1] = label[1]
                    start = at + 1
                at += 1
                continue
            head = " ".join(text[start:at].split())
            kind, name = scopes[-1]
            visible = kind in ("namespace", "class") and access[-1] == "public"
            if c == "}":
                scopes.pop()
                access.pop()
                if kind != "namespace":  # what follows a class or a body up to its semicolon
                    tail = re.match(r"\s*;", text[at + 1 :])
                    at += tail.end() if tail else 0
            elif c == ";":
                if head and visible and kind != "enum":
                    yield name, head
            else:
                opened = opens(head)
                if opened is None:  # a body or an initialiser: to its end
                    if head and visible:
                        yield name, head
                    at = end_of_braces(text, at)
                    if re.match(r"\s*[,;{]|\s*(const|noexcept|requires)\b", text[at + 1 :]) and not head.endswith(")"):
                        at += 1  # an initialiser within a declaration: on to its end
                        while text[at] not in ";{":
                            at += 1
                        if text[at] == "{":
                            at = end_of_braces(text, at)
                else:
                    if opened[0] != "namespace" and visible:
                        yield name, head
                    if not visible or opened[1] == "detail":
                        at = end_of_braces(text, at)
                    else:
                        inner = opened[1] if opened[0] == "class" else name
                        scopes.append((opened[0], inner))
                        access.append("private" if opened[2] else "public")
            start = at + 1
        at += 1


def end_of_braces(text, at):
    depth = 0
    while True:
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at
        at += 1


def opens(head):
    """(kind, name, members are private) of the scope whose head this is; None: a body."""
    if found := re.match(r"(?:inline )?namespace ([\w:]*)$", head):
        return "namespace", found[1].split(":")[0] or "unnamed", False
    found = re.match(r"(?:template ?<.*> ?(?:requires .*)?)?(class|struct|enum(?: class)?|union) +(\w+)[^=(]*$", head)
    if not found:
        return None
    return ("enum" if found[1].startswith("enum") else "class"), found[2], found[1] == "class"


def signature(declaration):
    """Without the initialiser and the list of member initialisers."""
    depth = 0
    for at, c in enumerate(declaration):
        depth += (c in "(<[{") - (c in ")>]}")
        alone = c == "=" and declaration[at - 1 : at + 2].strip("= ") == "" and declaration[at + 1 : at + 2] != "="
        if depth <= 0 and alone and not re.search(r"\b(using|operator ?)\b[^()]*$", declaration[:at]):
            return declaration[:at]
        if depth == 0 and c == ":" and declaration[at - 1] != ":" and declaration[at + 1] != ":" and ")" in declaration[:at]:
            return declaration[:at]
    return declaration


def main():
    types, concepts, status = {}, {}, 0
    for path in sorted(HEADERS.rglob("*.*")):
        header = path.relative_to(HEADERS).as_posix()
        if "detail" in path.parts or path.suffix not in (".hpp", ".cuh"):
            continue
        for scope, declaration in declarations(plain(path.read_text(encoding="utf-8"))):
            if re.match(r"friend |static_assert", declaration):
                continue
            public = signature(declaration)
            if re.search(r"\bdetail::", public) and "/" not in header:
                status = 1
                print(f"FAILED: {header}: {scope + ': ' if scope else ''}{public[:150]}")
            if scope or path.name == "fwd.hpp" and not re.match(r"struct (Cpu|Cuda)$|.*(struct DeviceTraits|using DeviceStream)", declaration):
                continue
            head = re.sub(r"^template ?<.*?> ?(?=(?:class|struct|concept|using|enum)\b)", "", declaration)
            if found := re.match(r"concept (\w+)", head):
                concepts.setdefault(found[1], header)
            elif found := re.match(r"(?:class|struct|enum(?: class)?|using) (\w+)(?! ?<)\b", head):
                types.setdefault(found[1], header)
    if sys.argv[1:] == ["--list"]:
        for header in sorted(set(types.values()) | set(concepts.values())):
            names = [name for name in types if types[name] == header] + [f"{name} (concept)" for name in concepts if concepts[name] == header]
            print(f"{header}: {', '.join(names)}")
    core = [name for name in types if "/" not in types[name]]
    for what, found, most in (("types of the core", core, MAX_CORE_TYPES), ("types", types, MAX_TYPES), ("concepts", concepts, MAX_CONCEPTS)):
        if len(found) > most:
            status = 1
            print(f"FAILED: {len(found)} public {what}, more than {most}")
    rows = re.findall(r"^\| `([\w./]+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", TABLE.read_text(encoding="utf-8"), re.M)
    listed = {(name, header) for header, names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    declared = set((types | concepts).items())
    for name, header in sorted(declared ^ listed):
        status = 1
        print(f"FAILED: docs/reference.md {'lacks' if (name, header) in declared else 'has'} {name} of {header}")
    for page in {page for _, _, pages in rows for page in re.findall(r"\]\((\S+)\)", pages)}:
        if not (TABLE.parent / page).is_file():
            status = 1
            print(f"FAILED: docs/reference.md names {page}, which does not exist")
    if status == 0:
        print(f"{len(types)} public types, {len(core)} of them of the core, {len(concepts)} concepts, none of `detail` in what declares them")
    sys.exit(status)


main()
