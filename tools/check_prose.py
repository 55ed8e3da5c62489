"""Check of docstrings and messages in `make lint`: long sentences, and words that describe code as a person.

    python tools/check_prose.py [--list PACKAGE]

A package may have as many findings as ALLOWED says. The number only falls: the check fails when there are more, and
also when there are fewer, until ALLOWED is lowered. `--list` prints each finding of one package.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "monarch_backend"

MAX_WORDS = 30
"""Of a sentence in a docstring."""

PERSONAL = re.compile(r"\b(who|whoever|whom|whomever|nobody|somebody|anybody|everybody|he|she|him|her)\b", re.I)

CODE_BLOCK = re.compile(r"^(\s*(>>>|\.\.\.|\|).*|\s{4,}\S.*)$", re.M)

ALLOWED = {
    "_rdma": 1,
}
"""Findings by package. Rewrite text that you touch, then lower the number here."""


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
        for word in PERSONAL.findall(CODE_BLOCK.sub("", node.value)):
            yield node.lineno, f"{word!r}: name the process, thread or call instead"
        if id(node) in docstrings:
            for words in long_sentences(node.value):
                yield node.lineno, f"a sentence of {len(words)} words: {' '.join(words[:8])} ..."


def long_sentences(text: str) -> Iterator[list[str]]:
    """The words of each sentence that is too long. Code, tables and examples are no sentences."""
    for paragraph in re.split(r"\n\s*\n", CODE_BLOCK.sub("\n\n", text)):
        for sentence in re.split(r"(?<=[.:;!?])\s+", paragraph):
            words = sentence.split()
            if len(words) > MAX_WORDS:
                yield words


def package_of(path: Path) -> str:
    """The package directly below monarch_backend, or the module."""
    return path.relative_to(PACKAGE).parts[0]


def main() -> int:
    """Return the exit status: 1 if a package has another number of findings than ALLOWED says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="PACKAGE", help="print the findings of this package")
    wanted = parser.parse_args().list
    counts: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, what in findings(path):
            counts[package_of(path)] += 1
            if wanted == package_of(path):
                print(f"{path.relative_to(ROOT)}:{line}: {what}")
    status = 0
    for package in sorted({*counts, *ALLOWED}):
        found, allowed = counts[package], ALLOWED.get(package, 0)
        if found > allowed:
            print(f"{package}: {found} findings, allowed are {allowed}; see `tools/check_prose.py --list {package}`")
            status = 1
        elif found < allowed:
            print(f"{package}: {found} findings, {allowed} were allowed: lower the number in tools/check_prose.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
