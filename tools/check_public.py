#!/usr/bin/env python3
"""check_public.py [--list]: what users of the library can name.

Reads the public headers: those below include/chunkattn that are in no folder `detail`. No public declaration of the
core, which is directly there, names anything of `detail`, and the table in docs/reference.md lists each public type
(class, enum or alias at namespace scope, outside `detail`) and concept with its header and pages that speak of it.
--list prints them by header. What is counted in all (count_names) has a budget: check_budgets.py.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = ROOT / "include" / "chunkattn"
TABLE = ROOT / "docs" / "reference.md"

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
    """(scope, declaration) of all that is public: `scope` is the class or enum around it, as A::B, or empty.

    A declaration ends before its body, its initialiser or its semicolon; an enumerator is one, too."""
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
                if kind == "enum":
                    for enumerator in filter(None, (part.strip() for part in head.split(","))):
                        yield name, enumerator
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
                        inner = opened[1] if not name else f"{name}::{opened[1]}"
                        scopes.append((opened[0], name if opened[0] == "namespace" else inner))
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


def depths(text):
    """In how many brackets each character is: the opening one is in them, the closing one is not."""
    opened, closes = [], {")": "(", "]": "[", "}": "{", ">": "<"}
    for at, c in enumerate(text):
        if c in closes and closes[c] in opened and (c != ">" or opened[-1] == "<" and text[at - 1] != "-"):
            while opened.pop() != closes[c]:  # a `<` that is no bracket
                pass
        elif c in "([{<":
            opened.append(c)
        yield len(opened)


def signature(declaration):
    """Without the initialiser and the list of member initialisers."""
    for at, depth in enumerate(depths(declaration)):
        c = declaration[at]
        alone = c == "=" and declaration[at - 1 : at + 2].strip("= ") == "" and declaration[at + 1 : at + 2] != "="
        if depth == 0 and alone and not re.search(r"\b(using|operator ?)\b[^()]*$", declaration[:at]):
            return declaration[:at]
        if depth == 0 and c == ":" and declaration[at - 1] != ":" and declaration[at + 1] != ":" and ")" in declaration[:at]:
            return declaration[:at]
    return declaration


def without_template(declaration):
    """Without `template <...>`; a `requires` after it stays."""
    while declaration.startswith("template"):
        inside = list(depths(declaration))
        declaration = declaration[inside.index(0, declaration.index("<")) + 1 :].strip()
    return declaration


def names_of(scope, declaration):
    """(kind, name) of each name that a declaration gives its scope; constructors and the like have none."""
    declaration = without_template(declaration)
    if re.match(r"(friend|static_assert|using namespace)\b", declaration):
        return
    if found := re.match(r"concept (\w+)", declaration):
        yield "concepts", found[1]
    elif found := re.match(r"(?:class|struct|union|enum(?: class)?|using) (\w+)\b(?!::)", declaration):
        yield "nested types" if scope else "types", found[1]
    elif found := re.match(r"using [\w:]*::(\w+)", declaration):
        yield "functions of classes", found[1]
    elif found := re.search(r"\boperator ?(\(\)|\[\]|[^\w\s(]+|[\w:<>]+)", declaration):
        if found[1] != "=":
            yield "functions of classes" if scope else "free functions", "operator " + found[1]
    else:
        words = re.sub(r"\((min|max)\)", r" \1", signature(declaration))  # the form that macros leave alone
        words = outside_of_brackets(words)
        words = re.sub(r"\b(?:requires|explicit|decltype|alignas|noexcept) ?\(\)", "", words).strip()
        if found := re.search(r"(?<![~:\w])(\w+) ?\(\)", words):  # not of A::f(), which is declared elsewhere
            if found[1] != scope.split("::")[-1] and found.start() > 0:
                yield "functions of classes" if scope else "free functions", found[1]
        elif re.fullmatch(r"\w+", words):
            yield "enumerators", words
        elif re.search(r"\w \w|[*&] ?\w", words) and "()" not in words:
            for part in re.sub(r" = [^,]*", "", outside_of_brackets(declaration)).split(","):
                yield "fields" if scope else "constants", re.findall(r"\w+", part)[-1]


def outside_of_brackets(text):
    """`std::array<int, 2> a[4], f(int b)` -> `std::array a, f()`."""
    kept = ""
    for at, depth in enumerate(depths(text)):
        if depth == 0 and text[at] not in ">]}" or depth == 1 and text[at] == "(":
            kept += text[at]
    return kept


def count_names():
    """{kind: the names of it} of all public headers of C++, each as Class::name once, whatever its overloads.

    Counted is what a user can write: types and concepts, types in classes, functions, public fields, constants and
    enumerators. Not counted are macros, what a class has from a base in `detail`, and the C interface."""
    names = {}
    for path in public_headers():
        for scope, declaration in declarations(plain(path.read_text(encoding="utf-8"))):
            for kind, name in names_of(scope, declaration):
                names.setdefault(kind, set()).add(f"{scope}::{name}" if scope else name)
    return names


def public_headers():
    paths = sorted(path for path in HEADERS.rglob("*.*") if path.suffix in (".hpp", ".cuh"))
    return [path for path in paths if "detail" not in path.relative_to(HEADERS).parts]


def main():
    types, concepts, status = {}, {}, 0
    for path in public_headers():
        header = path.relative_to(HEADERS).as_posix()
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


if __name__ == "__main__":
    main()
