"""`monarch-backend doctor` says what is there, what is missing and how to get it."""

from __future__ import annotations

import json

import pytest
import torch

from monarch_backend.cli import main


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in (
        torch.__version__,
        "route cpu",
        "gloo",
        "NCCL" if not torch.version.hip else "RCCL",
        "torch_xla",
        "verbs",
    ):
        assert word in text


def test_json_has_a_remedy_for_all_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = {f["subject"]: f for f in json.loads(capsys.readouterr().out)}
    assert findings["route cpu"]["remedy"] == ""
    for name, finding in findings.items():
        if finding["state"] in ("none", "not installed", "not registered"):
            assert finding["remedy"], f"{name} is missing and nothing says how to get it"


def test_no_cpu_route_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert main(["doctor"]) == 1
    assert "built without Gloo" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: monarch-backend" in capsys.readouterr().err
