"""Errors that the answer of a job's host raises in the command that has asked it."""

from __future__ import annotations

import pytest

from monarch_backend._job import inspection


@pytest.mark.parametrize("name", ["PermissionError", "LookupError", "TimeoutError"])
def test_refusal_of_a_host_raises_its_error(name: str) -> None:
    with pytest.raises((OSError, LookupError), match=r"^why$") as raised:
        inspection._raise((name, "why"))
    assert raised.type.__name__ == name


@pytest.mark.parametrize("name", ["SystemExit", "print", "gaierror"])
def test_refusal_with_another_name_raises_lookup_error(name: str) -> None:
    with pytest.raises(LookupError, match=rf"^the host has answered with an error: {name}: why$"):
        inspection._raise((name, "why"))
