"""Command line of the fuzzer: ``python -m tests.fuzz TARGET [options of libFuzzer]`` or ``python -m tests.fuzz seeds``.

Only the first form needs atheris. New inputs and failed inputs are written to build/fuzz/TARGET. Only ``seeds`` writes
to tests/fuzz/corpus. The command also accepts other folders. ``python -m tests.fuzz TARGET -set_cover_merge=1
-use_counters=0 tests/fuzz/corpus/TARGET build/fuzz/TARGET`` adds inputs to the corpus that reach new lines.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = Path(__file__).resolve().parent / "corpus"
TARGETS = ("handshake", "frames")


def _without_torch() -> None:
    """Install a package of the same name whose ``__init__`` does not run.

    It would import torch, which no target needs.
    """
    package = types.ModuleType("monarch_backend")
    package.__path__ = [str(ROOT / "monarch_backend")]
    package.__spec__ = importlib.machinery.ModuleSpec("monarch_backend", None, is_package=True)
    sys.modules["monarch_backend"] = package


def _write_seeds() -> None:
    for target in TARGETS:
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in importlib.import_module(f"tests.fuzz.{target}").SEEDS.items():
            (folder / name).write_bytes(data)


def _fuzz(target: str, options: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["monarch_backend", "tests.fuzz"]):
        module = importlib.import_module(f"tests.fuzz.{target}")
    found = ROOT / "build" / "fuzz" / target
    found.mkdir(parents=True, exist_ok=True)
    again = f"{sys.executable} -m tests.fuzz {target}"  # libFuzzer runs this command again with -merge and -fork
    folders = [] if any(option[:1] != "-" for option in options) else [str(found), str(CORPUS / target)]
    atheris.Setup([again, f"-artifact_prefix={found}/failed-", *options, *folders], module.one)
    atheris.Fuzz()


def main() -> None:
    """Run one target until libFuzzer's options end it, or write the seeds."""
    if len(sys.argv) < 2 or sys.argv[1] not in (*TARGETS, "seeds"):
        raise SystemExit(f"usage: python -m tests.fuzz {'|'.join((*TARGETS, 'seeds'))} [options of libFuzzer]")
    _without_torch()
    if sys.argv[1] == "seeds":
        _write_seeds()
    else:
        _fuzz(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
