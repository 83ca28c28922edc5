"""The four operators: where a fault can be planted, and as what text.

A fault is a run-time choice (switch.hpp), so that one build holds them all. Edits only insert text
within a line and nest, so lines keep their numbers and several faults can share an expression.
"""
import dataclasses
import re

from source import KEYWORDS

COMPARISONS = {"<": ("Less", "<="), "<=": ("LessEqual", "<"), ">": ("Greater", ">="), ">=": ("GreaterEqual", ">"),
               "==": ("Equal", "!="), "!=": ("NotEqual", "==")}
INTEGER = re.compile(r"(0[xX][0-9a-fA-F']+|[0-9][0-9']*)[uUlL]*$")
MACRO = re.compile(r"_?[A-Z][A-Z0-9]*_[A-Z0-9_]+$")
ZEROS = {"0", "0.0", "0.0f", "false"}
ASSIGNS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^="}
OPERATORS = ("comparison", "deleted statement", "off by one", "swapped arguments")


@dataclasses.dataclass(frozen=True)
class Fault:
    operator: str
    start: int  # of the text that it changes
    end: int
    wraps: tuple  # (start, end, before, after): text to insert, @ for the fault's number
    replacement: str  # what the text becomes, for people


@dataclasses.dataclass(frozen=True)
class Finder:
    source: object

    def faults(self, function):
        found = []
        calls = self.source.calls(function)
        found += self._comparisons(function)
        found += self._numbers_and_sums(function)
        found += self._arguments_off_by_one(calls)
        found += self._assigned_off_by_one(function)
        found += self._deleted(function)
        found += self._swapped(calls)
        return found

    def _free(self, first, last):
        return not any(i in self.source.fixed for i in range(first, last + 1))

    # ---- comparison ----------------------------------------------------------------------------

    def _comparisons(self, function):
        s = self.source
        for i in range(function.open + 1, function.close):
            if s.word(i) in COMPARISONS and s.spaced(i) and self._free(i, i):
                tag, becomes = COMPARISONS[s.word(i)]
                start, end = s.span(i, i)
                text = f" ::mutant::{tag}<@>{{}} {s.word(i)}"
                yield Fault("comparison", start, end, ((start, end, "", text),), becomes)

    # ---- off by one ----------------------------------------------------------------------------

    def _numbers_and_sums(self, function):
        s = self.source
        for i in range(function.open + 1, function.close):
            token = s.tokens[i]
            if not self._free(i, i):
                continue
            if token.kind == "number" and INTEGER.match(token.text):
                yield from self._shifted(i, i)
            elif token.text in "+-" and s.spaced(i) and self._is_sum(i):
                for by in (1, -1):
                    yield Fault("off by one", token.start, token.end,
                                ((token.start, token.end, f"+ ::mutant::off<@>({by}) ", ""),),
                                f"{'+' if by > 0 else '-'} 1 {token.text}")

    def _is_sum(self, i):
        """A sum or difference of two values that has no literal of its own to be off by one."""
        before, after = self.source.tokens[i - 1], self.source.tokens[i + 1]
        value = before.kind == "name" and before.text not in KEYWORDS or before.text in (")", "]")
        return value and after.kind not in ("number", "string") and after.text != "="

    def _shifted(self, first, last):
        start, end = self.source.span(first, last)
        text = self.source.text[start:end]
        shown = "({} {} 1)" if self.source.tokens[last].kind == "number" else "{} {} 1"
        for by in (1, -1):
            yield Fault("off by one", start, end,
                        ((start, end, "::mutant::shift<@>(", f", {by})"),), shown.format(text, "+" if by > 0 else "-"))

    def _is_path(self, first, last):
        """A variable: names joined by . -> and ::"""
        words = [self.source.word(i) for i in range(first, last + 1)]
        names = [w for w in words if w not in (".", "->", "::")]
        if any(MACRO.match(w) for w in names):  # often an operand that is part of an instruction
            return False
        return (self._free(first, last) and words[0] not in (".", "->") and words[-1] not in (".", "->", "::")
                and all(w.isidentifier() and (w not in KEYWORDS or w == "this" != words[-1]) for w in names)
                and len(words) == 2 * len(names) - 1 + (words[0] == "::"))

    def _arguments_off_by_one(self, calls):
        for call in calls:
            for first, last in call.arguments:
                if self._is_path(first, last):
                    yield from self._shifted(first, last)

    def _assigned_off_by_one(self, function):
        s = self.source
        for i in range(function.open + 1, function.close):
            if s.word(i) not in ASSIGNS or s.word(i - 2) in ("&", "&&"):  # a reference stays one
                continue
            last = i
            while s.word(last + 1) not in (";", ",", ")", "}", "(", "[", "{", ""):
                last += 1
            if s.word(last + 1) == ";" and last > i and self._is_path(i + 1, last):
                yield from self._shifted(i + 1, last)

    # ---- deleted statement ---------------------------------------------------------------------

    def _deleted(self, function):
        s = self.source
        for first, last, guarded in s.statements(function):
            if self._free(first, last) and self._is_expression(first, last, guarded):
                start, end = s.span(first, last)
                yield Fault("deleted statement", start, end,
                            ((start, end, "{ if (!::mutant::on<@>()) ", " }"),), "/* deleted */;")

    def _is_expression(self, first, last, guarded):
        """Not a declaration, nor a control statement other than a jump that may be left out."""
        s = self.source
        word = s.word(first)
        if word in ("break", "continue"):
            return True
        if word == "return":
            return first + 1 == last or guarded
        if word in ("++", "--", "*", "("):
            return first < last
        if s.tokens[first].kind != "name" or (word in KEYWORDS and word != "this"):
            return False
        i = first + 1
        while s.word(i) == "::" or s.word(i - 1) == "::" or i in s.angles:
            i = s.skip(i)
        return s.word(i) in ASSIGNS or s.word(i) in ("(", "[", ".", "->", "++", "--")

    # ---- swapped arguments ---------------------------------------------------------------------

    def _swapped(self, calls):
        s = self.source
        for call in calls:
            for (a, b), (c, d) in zip(call.arguments, call.arguments[1:]):
                if not (self._free(a, d) and self._can_move(a, b) and self._can_move(c, d)):
                    continue
                (start, middle), (after, end) = s.span(a, b), s.span(c, d)
                left, right = (" ".join(s.text[x:y].split()) for x, y in ((start, middle), (after, end)))
                if left == right or {left, right} <= ZEROS:
                    continue
                yield Fault("swapped arguments", start, end,
                            ((start, middle, *self._or_else(left, right)), (after, end, *self._or_else(right, left))),
                            f"{right}, {left}")

    def _can_move(self, first, last):
        """Not a lambda, a list of values or a text, and without a comment in it."""
        s = self.source
        start, end = s.span(first, last)
        kinds = {s.tokens[i].kind for i in range(first, last + 1)}
        return (s.word(first) not in ("{", "[", ".") and "string" not in kinds
                and not any(i in s.blocks for i in range(first, last + 1))
                and "//" not in s.text[start:end] and "/*" not in s.text[start:end])

    @staticmethod
    def _or_else(usual, other):
        return f"(::mutant::on<@>() ? ::mutant::as<@, decltype(({usual}))>({other}) : (", "))"
