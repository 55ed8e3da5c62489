"""A package index as a folder of static files (PEP 503): `python -m tools.wheels.index dist build/wheels/index`.

`pip install --index-url URL/simple/ monarch_backend` installs from it, wherever the folder is served.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import html
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from functools import partial
from pathlib import Path
from zipfile import ZipFile

PROJECT = "monarch-backend"


def metadata(wheel: Path) -> Message:
    """Return the fields of a wheel's metadata."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def write_index(distributions: Path, folder: Path) -> Path:
    """Copy all distributions into an index in `folder`, which is made anew. Return the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    project = folder / "simple" / PROJECT
    project.mkdir(parents=True)
    links = []
    for path in sorted([*distributions.glob("*.whl"), *distributions.glob("*.tar.gz")]):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        note = ""
        if path.suffix == ".whl":
            pythons = html.escape(metadata(path)["Requires-Python"])
            note = f' data-requires-python="{pythons}"'
        links.append(f'<a href="{path.name}#sha256={digest}"{note}>{path.name}</a><br>')
        shutil.copy2(path, project / path.name)
    (project / "index.html").write_text(_page(PROJECT, links))
    (folder / "simple" / "index.html").write_text(_page("Simple index", [f'<a href="{PROJECT}/">{PROJECT}</a>']))
    return folder


def _page(title: str, lines: list[str]) -> str:
    body = "\n".join(lines)
    return f"<!DOCTYPE html>\n<html>\n<head><title>{title}</title></head>\n<body>\n{body}\n</body>\n</html>\n"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback. Yields the URL of the index in it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple/"
        finally:
            server.shutdown()
            thread.join()


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("distributions", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    folder = write_index(args.distributions, args.folder)
    print(f"{folder}: {len(list(folder.rglob('*.whl')))} wheels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
