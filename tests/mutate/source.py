"""What a header consists of, as far as planting faults needs it: function bodies, the blocks and
statements in them, calls with their arguments, and what must stay as it is.

Relies on the format that clang-format gives: a comparison has spaces around it, the bracket of a
template argument list follows its name directly.
"""
import bisect
import dataclasses
import re

import lexer

OPEN = {"(": ")", "[": "]", "{": "}"}
KEYWORDS = set("""alignas alignof asm auto bool break case catch char class const const_cast constexpr
    continue decltype default delete do double dynamic_cast else enum explicit extern false float for
    friend goto if inline int long mutable namespace new noexcept nullptr operator private protected
    public reinterpret_cast requires return short signed sizeof static static_assert static_cast struct
    switch template this throw true try typedef typename union unsigned using virtual void volatile
    while __attribute__ __asm__""".split())
CASTS = {"static_cast", "const_cast", "reinterpret_cast", "dynamic_cast"}
# What stands between a function's parameters and its body; also macros such as CHUNKATTN_LAMBDA.
BEFORE_BODY = {"const", "noexcept", "override", "final", "mutable", "try", "else", "do"}
# Their parentheses hold what the compiler must know.
COMPILE_TIME = {"static_assert", "sizeof", "alignof", "decltype", "noexcept", "alignas", "requires",
                "__attribute__", "__asm__"}
STATEMENT_OF_COMPILE_TIME = {"using", "typedef", "enum", "template", "friend", "namespace"}


@dataclasses.dataclass(frozen=True)
class Function:
    name: str
    open: int  # its braces, as tokens
    close: int


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    open: int  # its brackets, as tokens
    close: int
    arguments: tuple  # (first, last) tokens of each
    braced: bool  # a list in braces


class Source:
    def __init__(self, text):
        self.text = text
        self.tokens = lexer.tokens(text)
        self.lines = [0] + [i + 1 for i, c in enumerate(text) if c == "\n"]
        self.partner = self._match_brackets()
        self.angles = self._match_angles()
        self.functions = []
        self._find_functions(0, len(self.tokens))
        self.fixed = set()  # tokens that the compiler must know, or that declare
        self.blocks = set()  # opening braces of blocks, as opposed to lists of values
        for function in self.functions:
            self._find_fixed(function)
            self._find_blocks(function)

    # ---- looking up ----------------------------------------------------------------------------

    def word(self, i):
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def line(self, position):
        return bisect.bisect_right(self.lines, position)

    def line_text(self, first, last):
        """Lines first to last as one."""
        return self.plain("\n".join(self.text.split("\n")[first - 1 : last]))

    @staticmethod
    def plain(text):
        """Text as one line, without comments at the ends of its lines."""
        return " ".join(re.sub(r"//[^\n]*", "", text).split())

    def span(self, first, last):
        return self.tokens[first].start, self.tokens[last].end

    def spaced(self, i):
        """Whether the token stands between spaces."""
        token = self.tokens[i]
        return (self.text[token.start - 1].isspace()
                and token.end < len(self.text) and self.text[token.end].isspace())

    # ---- brackets ------------------------------------------------------------------------------

    def _match_brackets(self):
        partner, stack = {}, []
        for i, token in enumerate(self.tokens):
            if token.kind != "sign":
                continue
            if token.text in OPEN:
                stack.append(i)
            elif token.text in OPEN.values() and stack:
                partner[stack.pop()] = i
        partner.update({close: open_ for open_, close in partner.items()})
        return partner

    def _match_angles(self):
        """Template argument and parameter lists: opening to closing bracket."""
        angles = {}
        for i, token in enumerate(self.tokens):
            if token.text != "<":
                continue
            before = self.tokens[i - 1]
            attached = before.end == token.start and (before.kind == "name" or before.text == "]")
            if before.text == "operator" or not (attached or before.text == "template") or self.spaced(i):
                continue
            depth, j = 0, i
            while j < len(self.tokens) and self.word(j) != ";":
                if self.word(j) in OPEN and j in self.partner:
                    j = self.partner[j]
                elif self.word(j) == "<" and not self.spaced(j):
                    depth += 1
                elif self.word(j) == ">":
                    depth -= 1
                    if depth == 0:
                        angles[i] = j
                        break
                j += 1
        return angles

    def skip(self, i):
        """The token after a bracket group that begins at i, or after i."""
        if self.word(i) in OPEN and i in self.partner:
            return self.partner[i] + 1
        if i in self.angles:
            return self.angles[i] + 1
        return i + 1

    # ---- functions -----------------------------------------------------------------------------

    def _find_functions(self, i, end):
        head = []  # of the declaration at hand, bracket groups left out
        while i < end:
            word = self.word(i)
            if word == ";" or (word == ":" and head and self.word(head[-1]) in ("public", "protected", "private")):
                head = []
                i += 1
                continue
            if word == "{":
                kind = self._declares(head, i)
                close = self.partner[i]
                if kind == "scope":
                    self._find_functions(i + 1, close)
                elif kind == "function":
                    self.functions.append(Function(self._name(head), i, close))
                if kind != "values":
                    head = []
                i = close + 1
                continue
            if word == "(" and len(head) == 1 and self.word(head[0]).endswith("_BEGIN"):
                head = []  # a macro that opens a namespace
                i = self.skip(i)
                continue
            head.append(i)
            i = self.skip(i)

    def _declares(self, head, brace):
        words = [self.word(i) for i in head
                 if not (self.word(i) == "(" and self.word(i - 1) in COMPILE_TIME)]
        if "enum" in words or "consteval" in words:
            return "other"
        if "namespace" in words or ("(" not in words and {"class", "struct", "union"} & set(words)):
            return "scope"
        before = self.tokens[brace - 1]
        if "=" in words and "operator" not in words:
            return "values"
        if ":" in words and before.kind == "name" and before.text not in BEFORE_BODY:
            return "values"  # a member that a constructor initialises
        return "function" if "(" in words else "values"

    def _name(self, head):
        words = [self.word(i) for i in head]
        if "operator" in words:
            return "operator"
        for i in head:
            if self.word(i) == "(" and self.tokens[i - 1].kind == "name" and self.word(i - 1) not in KEYWORDS:
                return self.word(i - 1)
        return ""

    # ---- what must stay ------------------------------------------------------------------------

    def _fix(self, first, last):
        self.fixed.update(range(first, last + 1))

    def _statement_end(self, i):
        while i < len(self.tokens) and self.word(i) not in (";", "}"):
            i = self.skip(i)
        return i

    def _find_fixed(self, function):
        i = function.open + 1
        while i < function.close:
            word, after = self.word(i), self.word(i + 1)
            if word in COMPILE_TIME and after == "(":
                self._fix(i, self.partner[i + 1])
            elif word == "constexpr" and self.word(i - 1) == "if":
                self._fix(i, self.partner[i + 1])
            elif word == "constexpr" and self.word(i - 1) != ")":
                self._fix(i, self._statement_end(i))
            elif word in STATEMENT_OF_COMPILE_TIME:
                self._fix(i, self._statement_end(i))
            elif word == "case":
                end = i
                while self.word(end) != ":":
                    end += 1
                self._fix(i, end)
            elif word == "[" and (after == "[" or self._is_bound(i)):
                self._fix(i, self.partner[i])
            elif word == "(" and self.word(i - 1) == "]" and self._is_lambda(self.partner[i - 1]):
                self._fix(i, self.partner[i])
            if i in self.angles:
                self._fix(i, self.angles[i])
            i += 1

    def _is_bound(self, bracket):
        """Whether the brackets hold the bound of an array that is declared: `float sums[group][2]`."""
        while self.word(bracket - 1) == "]":
            bracket = self.partner[bracket - 1]
        name, before = self.tokens[bracket - 1], self.tokens[bracket - 2]
        return (name.kind == "name" and name.text not in KEYWORDS
                and (before.kind == "name" and before.text not in ("return", "throw", "else", "case")
                     or bracket - 2 in self.angles.values()))

    def _is_lambda(self, bracket):
        before = self.tokens[bracket - 1]
        return before.text not in (")", "]") and (before.kind != "name" or before.text == "return")

    # ---- blocks, statements, calls -------------------------------------------------------------

    def _find_blocks(self, function):
        self.blocks.add(function.open)
        for i in range(function.open + 1, function.close):
            if self.word(i) == "{" and i in self.partner and self._is_block(i):
                self.blocks.add(i)

    def _is_block(self, brace):
        return self.word(brace - 1) in (")", "else", "do", "try") or self._has_statement(brace)

    def _has_statement(self, brace):
        if self.word(brace + 1) in ("if", "for", "while", "switch"):
            return True
        i = brace + 1
        while i < self.partner[brace]:
            if self.word(i) == ";":
                return True
            i = self.skip(i)
        return False

    def statements(self, function):
        """(first, last) tokens of each statement that ends with a semicolon, `if` and the like
        excluded, and whether it is all that an `if` without `else` guards."""
        found = []
        enclosing = [function.open]
        for i in range(function.open + 1, function.close):
            word = self.word(i - 1)
            if word in OPEN and i - 1 != function.open:
                enclosing.append(i - 1)
            elif word in OPEN.values() and len(enclosing) > 1 and self.partner.get(i - 1) == enclosing[-1]:
                enclosing.pop()
            if enclosing[-1] not in self.blocks:
                continue
            header = self._header_before(i)
            starts = (word == ";" or i - 1 in self.blocks or word in ("else", "do") or header is not None
                      or (word == "}" and self.partner.get(i - 1) in self.blocks))
            if not starts:
                continue
            end = self._statement_end(i)
            if self.word(end) == ";" and end < function.close:
                guarded = header == "if" and self.word(end + 1) != "else"
                found.append((i, end, guarded))
        return found

    def _header_before(self, i):
        """`if`, `for` or `while` where the token before i ends its parentheses (or an attribute after
        them), `if constexpr` likewise, else None."""
        i -= 1
        if self.word(i) == "]" and self.word(i - 1) == "]":
            i = self.partner[i] - 1
        if self.word(i) != ")" or i not in self.partner:
            return None
        before = self.partner[i] - 1
        if self.word(before) == "constexpr" and self.word(before - 1) == "if":
            return "if constexpr"
        return self.word(before) if self.word(before) in ("if", "for", "while") else None

    def calls(self, function):
        """Calls and lists of values in braces, outermost first."""
        found = []
        angle_before = {close: open_ for open_, close in self.angles.items()}
        for i in range(function.open + 1, function.close):
            if self.word(i) == "(":
                before = self.tokens[i - 1]
                if i - 1 in angle_before:  # f<T>(…)
                    before = self.tokens[angle_before[i - 1] - 1]
                name = before.text
                if before.kind != "name" or (name in KEYWORDS and name not in CASTS):
                    continue
                found.append(Call(name, i, self.partner[i], self._arguments(i), False))
            elif self.word(i) == "{" and i in self.partner and i not in self.blocks:
                found.append(Call("", i, self.partner[i], self._arguments(i), True))
        return found

    def _arguments(self, bracket):
        arguments, first, i = [], bracket + 1, bracket + 1
        close = self.partner[bracket]
        while i < close:
            if self.word(i) == ",":
                arguments.append((first, i - 1))
                first = i + 1
            i = self.skip(i)
        if first < close:
            arguments.append((first, close - 1))
        return tuple(arguments)
