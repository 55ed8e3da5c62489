"""Check of comments, docstrings and messages in `make lint`: long sentences, and persons where code is meant."""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MAX_WORDS = 30
"""Of a sentence in a docstring."""

PERSONAL = re.compile(r"\b(who|whoever|whom|whomever|nobody|somebody|anybody|everybody|he|she|him|her)\b", re.I)

CODE_BLOCK = re.compile(r"^(\s*(>>>|\.\.\.|\|).*|\s{4,}\S.*|\S.*\S {2,}\S.*)$", re.M)
"""Also the rows of a table: a term, two or more spaces, its explanation."""

CODE = re.compile(r"``?[^`]*``?")


def python_text(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line and text of each comment, docstring and, in the package, message; whether it is a docstring."""
    source = path.read_text()
    in_package = path.is_relative_to(ROOT / "monarch_backend")
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(id(statement.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            if id(node) in docstrings:
                yield node.lineno, inspect.cleandoc(node.value), True
            elif in_package:
                yield node.lineno, node.value, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def cpp_comments(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line and text of each comment that starts with two slashes."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        comment = re.search(r"(?<!:)//(.*)", line)
        if comment:
            yield number, comment[1], False


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and description of each finding in a file."""
    for line, text, is_docstring in (python_text if path.suffix == ".py" else cpp_comments)(path):
        prose = CODE.sub("code", text)
        for word in PERSONAL.findall(CODE_BLOCK.sub("", prose) if is_docstring else prose):
            yield line, f"{word!r}: name the process, thread or call instead"
        for words in long_sentences(text) if is_docstring else ():
            yield line, f"a sentence of {len(words)} words: {' '.join(words[:8])} ..."


def long_sentences(text: str) -> Iterator[list[str]]:
    """The words of each sentence that is too long. Code, tables and examples are no sentences."""
    for paragraph in re.split(r"\n\s*\n", CODE_BLOCK.sub("\n\n", CODE.sub("code", text))):
        for sentence in re.split(r"(?<=[.:;!?])\s+|\n\s*- ", paragraph):
            words = sentence.split()
            if len(words) > MAX_WORDS:
                yield words


def main() -> int:
    """Print the findings. Return the exit status: 1 if there are any."""
    patterns = ["*.py", "csrc/*.h", "csrc/*.cpp", "csrc/*.inc", "csrc/*.pml"]
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    status = 0
    for path in sorted(ROOT / name for name in listed.split()):
        for line, what in findings(path):
            print(f"{path.relative_to(ROOT)}:{line}: {what}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
