"""C++ text as tokens: just enough to find expressions, statements and calls in formatted headers."""
import dataclasses
import re

PATTERN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
  | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
  | (?P<number>\.?[0-9](?:[eEpP][+-]|'?[0-9a-zA-Z_.])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<sign>::|->|\+\+|--|<=>|[-+*/%&|^]=|==|!=|<=|>=|&&|\|\||\.\.\.|.)
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Token:
    kind: str  # string, number, name or sign
    text: str
    start: int
    end: int


def tokens(text):
    """The tokens of a header, without comments and preprocessor lines. `<<` and `>>` are two."""
    found = []
    for match in PATTERN.finditer(text):
        if match.lastgroup not in ("space", "directive"):
            found.append(Token(match.lastgroup, match.group(), match.start(), match.end()))
    return found
