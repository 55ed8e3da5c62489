"""Check of docstrings and messages in `make lint`: long sentences, and words that describe code as a person."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "monarch_backend"

MAX_WORDS = 30
"""Of a sentence in a docstring."""

PERSONAL = re.compile(r"\b(who|whoever|whom|whomever|nobody|somebody|anybody|everybody|he|she|him|her)\b", re.I)

CODE_BLOCK = re.compile(r"^(\s*(>>>|\.\.\.|\|).*|\s{4,}\S.*)$", re.M)
CODE = re.compile(r"``[^`]*``")


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and description of each finding in a module."""
    tree = ast.parse(path.read_text())
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(id(statement.value))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or " " not in node.value:
            continue
        text = inspect.cleandoc(node.value) if id(node) in docstrings else node.value
        for word in PERSONAL.findall(CODE_BLOCK.sub("", CODE.sub("code", text))):
            yield node.lineno, f"{word!r}: name the process, thread or call instead"
        if id(node) in docstrings:
            for words in long_sentences(text):
                yield node.lineno, f"a sentence of {len(words)} words: {' '.join(words[:8])} ..."


def long_sentences(text: str) -> Iterator[list[str]]:
    """The words of each sentence that is too long. Code, tables and examples are no sentences."""
    for paragraph in re.split(r"\n\s*\n", CODE_BLOCK.sub("\n\n", CODE.sub("code", text))):
        for sentence in re.split(r"(?<=[.:;!?])\s+|\n\s*- ", paragraph):
            words = sentence.split()
            if len(words) > MAX_WORDS:
                yield words


def main() -> int:
    """Print the findings. Return the exit status: 1 if there are any."""
    status = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, what in findings(path):
            print(f"{path.relative_to(ROOT)}:{line}: {what}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
