"""Each program of the page "My program hangs" hangs or fails, and the shown lines tell its cause."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "hangs.md").read_text()
SECTIONS = {text.splitlines()[0]: text for text in PAGE.split("\n## ")[1:]}
TIMEOUT_S = 90.0


def _comparable(text: str, folder: Path) -> list[str]:
    """Return lines without what differs from run to run: pids, durations, the folder, the host."""
    text = re.sub(r"\d+(\.\d+)? (us|ms|s|times|steps)\b", r"_ \2", text.replace(str(folder), "/home/me"))
    text = re.sub(r"pids? \d+(, \d+)*", "pid _", text)
    return [
        re.sub(r"^\[rank\d+\]: ", "", re.sub(r"host [\w.-]+", "host _", line)).strip() for line in text.splitlines()
    ]


@pytest.mark.parametrize("title", SECTIONS)
def test_shown_lines_tell_the_cause(title: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL)
    script = dict(blocks)["python"]
    start, *look = [text.strip() for kind, text in blocks if kind == "sh"]
    wanted = _comparable(dict(blocks)["text"], Path("/none"))
    (tmp_path / script.splitlines()[0].removeprefix("# ")).write_text(script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = dict(os.environ, OMP_NUM_THREADS="1", PATH=path)
    log = tmp_path / "output"
    deadline = time.monotonic() + TIMEOUT_S
    with log.open("w") as file, subprocess.Popen(start.split(), cwd=tmp_path, env=env, stdout=file, stderr=file) as run:
        try:
            while True:
                if look:
                    ran = subprocess.run(look[0].split(), cwd=tmp_path, env=env, capture_output=True, text=True)
                    said = ran.stdout + ran.stderr
                else:
                    run.wait(TIMEOUT_S)
                    said = log.read_text()
                lines = _comparable(said, tmp_path)
                missing = [each for each in wanted if not any(line.startswith(each) for line in lines)]
                if not missing or not look or time.monotonic() > deadline:
                    break
            assert not missing, said + log.read_text()
            assert bool(look) == (run.poll() is None)
        finally:
            run.terminate()
            try:
                run.wait(30)
            finally:
                run.kill()


def test_page_has_the_twelve_causes() -> None:
    assert len(SECTIONS) == 12
    anchors = re.findall(r"\]\(#(.*?)\)", PAGE)
    assert anchors == [re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in SECTIONS]
