"""Wire layouts, reachability, device discovery in /sys, settings, error texts and provider choice, without devices."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import _verbs
from monarch_backend._verbs import Region, VerbsError, available, describe, discovery, errors
from monarch_backend._verbs.config import from_environment
from monarch_backend._verbs.connections.accepted_peers import ways
from monarch_backend._verbs.providers import provider
from monarch_backend._verbs.wire_format import (
    INFINIBAND,
    ROCE_V1,
    ROCE_V2,
    ConnectReply,
    ConnectRequest,
    Endpoint,
    Gid,
    Pairing,
    QpEndpoint,
    pack,
    unpack,
)


def v4(text: str) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes(map(int, text.split(".")))


def endpoint(*gids: tuple[int, bytes], ethernet: bool = True, lid: int = 0) -> Endpoint:
    return Endpoint(0, "nic0", 1, ethernet, lid, 5, 16, 16, [Gid(i, kind, raw) for i, (kind, raw) in enumerate(gids)])


OFFER = ConnectRequest(bytes(8), [endpoint((ROCE_V2, v4("10.0.0.1")))], [QpEndpoint(0, 17, 5)])
ANSWER = ConnectReply(bytes(8), [Pairing(0, 0, 17, 5, 5, 16, 1, bytes(16), 0, True)])
REGION = Region(1, 4096, 8192, True, [77])


# ---- layouts


@pytest.mark.parametrize("message", [OFFER, ANSWER, REGION])
def test_messages_survive_an_encode_decode_round_trip(message: Any) -> None:
    assert unpack(type(message), pack(message)) == message


@pytest.mark.parametrize("message", [OFFER, ANSWER, REGION])
def test_corrupt_bytes_at_any_position_are_refused(message: Any) -> None:
    """Truncated or changed bytes give a VerbsError or another message of the same kind."""
    data = pack(message)
    for end in range(len(data)):
        with pytest.raises(VerbsError):
            unpack(type(message), data[:end])
    for place in range(len(data)):
        for changed in (data[place] ^ 1, data[place] ^ 0x80, 0xC1):
            try:
                got = unpack(type(message), data[:place] + bytes([changed]) + data[place + 1 :])
            except VerbsError:
                continue
            assert type(got) is type(message)
            assert place >= 5


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes are no region"),
        (b"x" * 100_000, "100000 bytes are no region"),
        (b"nonsense", "begin with b'nons' are no region"),
        (pack(OFFER), "begin with b'mvof'"),
        (b"mvre\x09" + pack(REGION)[5:], "version 9, and this process speaks 1: install the same release"),
        (pack(REGION) + b"\0", "the region cannot be read"),
        (b"mvre\x01\xc1", "the region cannot be read"),
    ],
)
def test_decode_errors_name_the_message(data: bytes, words: str) -> None:
    with pytest.raises(VerbsError, match=words):
        Region.from_bytes(data)


# ---- reachability


def test_the_nearest_address_of_the_best_kind_is_tried_first() -> None:
    far, near = (ROCE_V2, v4("192.168.3.4")), (ROCE_V2, v4("10.0.7.9"))
    link = (ROCE_V2, b"\xfe\x80" + bytes(13) + b"\x01")
    ours = endpoint((ROCE_V1, v4("10.0.7.1")), link, (ROCE_V2, v4("10.0.7.1")))
    found = ways(ours, endpoint(link, far, near))
    assert [(w.ours.index, w.theirs.index) for w in found] == [(2, 2), (2, 1), (1, 0)]
    assert all(w.is_global for w in found)


def test_kinds_of_addresses_do_not_mix() -> None:
    assert not ways(endpoint((ROCE_V1, v4("10.0.0.1"))), endpoint((ROCE_V2, v4("10.0.0.2"))))
    assert not ways(endpoint((ROCE_V2, v4("10.0.0.1"))), endpoint((ROCE_V2, bytes.fromhex("fd77" + "0" * 27 + "1"))))
    assert not ways(endpoint(), endpoint((ROCE_V2, v4("10.0.0.1"))))


def test_infiniband_goes_by_lid_within_a_subnet_and_by_gid_beyond() -> None:
    def port(prefix: int, lid: int) -> Endpoint:
        return endpoint((INFINIBAND, bytes([prefix] * 8) + bytes([lid] * 8)), ethernet=False, lid=lid)

    [same] = ways(port(1, 5), port(1, 6))
    assert not same.is_global
    [routed] = ways(port(1, 5), port(2, 6))
    assert routed.is_global
    assert not ways(port(1, 5), port(1, 0))  # LID 0: no subnet manager has configured the port
    assert not ways(port(1, 5), endpoint((ROCE_V2, v4("10.0.0.1"))))


# ---- devices in /sys


def make_port(
    root: Path, name: str, state: str = "4: ACTIVE", link: str = "Ethernet", node: str = "1", gids: Any = ()
) -> None:
    port = root / name / "ports" / "1"
    for folder in (port / "gids", port / "gid_attrs" / "types", root / name / "device"):
        folder.mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text(link + "\n")
    (root / name / "device" / "numa_node").write_text(node + "\n")
    for index in range(4):
        (port / "gids" / str(index)).write_text("0000:" * 7 + "0000\n")
    for index, kind, text in gids:
        (port / "gids" / str(index)).write_text(text + "\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


V4_GID = (3, "RoCE v2", "0000:0000:0000:0000:0000:ffff:0a4d:0001")


def test_ports_and_their_addresses_are_found(tmp_path: Path) -> None:
    make_port(tmp_path, "rxe0", gids=[V4_GID])
    make_port(tmp_path, "mlx5_0", "1: DOWN", "InfiniBand", "-1")
    down, up = discovery.survey(tmp_path)
    assert (down.device, down.active, down.ethernet, down.node) == ("mlx5_0", False, False, -1)
    assert (up.device, up.active, up.ethernet, up.node) == ("rxe0", True, True, 1)
    assert up.gids == (Gid(3, ROCE_V2, v4("10.77.0.1")),)


def test_doctor_lists_ports_limits_and_missing_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONARCH_RDMA_DEVICES", raising=False)
    make_port(tmp_path / "ib", "rxe0", gids=[V4_GID])
    make_port(tmp_path / "ib", "rxe1", "1: DOWN")
    facts = {fact.subject: fact for fact in describe(tmp_path / "ib", tmp_path / "dev")}
    assert facts["verbs port rxe0:1"].state == "ACTIVE, Ethernet, memory node 1; 3: RoCEv2 10.77.0.1"
    assert "link" in facts["verbs port rxe1:1"].remedy
    assert "--device" in facts[str(tmp_path / "dev")].remedy
    assert facts["locked memory"].state
    assert "uverbs" in facts["verbs route"].remedy


def test_why_verbs_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONARCH_RDMA_DEVICES", raising=False)
    assert "no verbs device" in str(available(tmp_path / "none"))
    make_port(tmp_path / "ib", "rxe0", gids=[V4_GID])
    monkeypatch.setenv("MONARCH_RDMA_DEVICES", "mlx5_0")
    assert "MONARCH_RDMA_DEVICES: rxe0:1 ACTIVE" in str(available(tmp_path / "ib"))
    monkeypatch.setenv("MONARCH_RDMA_DEVICES", "rxe0:1")
    assert "--device" in str(available(tmp_path / "ib", tmp_path / "dev"))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    monkeypatch.setattr(provider, "installed", list)
    assert "python3-pyverbs" in str(available(tmp_path / "ib", tmp_path / "dev"))
    monkeypatch.setattr(provider, "installed", lambda: ["ibverbs"])
    assert available(tmp_path / "ib", tmp_path / "dev") is None


def test_a_port_that_is_down_may_be_up_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONARCH_RDMA_DEVICES", raising=False)
    monkeypatch.setattr(provider, "installed", lambda: ["ibverbs"])
    make_port(tmp_path / "ib", "rxe0", "1: DOWN", gids=[V4_GID])
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    assert "no port is both ACTIVE and permitted" in str(available(tmp_path / "ib", tmp_path / "dev"))
    assert available(tmp_path / "ib", tmp_path / "dev", up=False) is None
    monkeypatch.setenv("MONARCH_RDMA_DEVICES", "mlx5_0")
    assert "MONARCH_RDMA_DEVICES: rxe0:1 DOWN" in str(available(tmp_path / "ib", tmp_path / "dev", up=False))


def test_memory_nodes_have_distances(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "distance").write_text("10 21\n")
    assert discovery.distance(0, 1, tmp_path) == 21
    assert discovery.distance(0, 0, tmp_path) == discovery.distance(-1, 1, tmp_path) == 10


# ---- settings, errors, packages


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEVICES", "mlx5_0:x"),
        ("DEVICES", ":1"),
        ("GID_INDEX", "-1"),
        ("QPS_PER_PEER", "0"),
        ("TIMEOUT", "32"),
        ("RETRIES", "8"),
        ("TRAFFIC_CLASS", "256"),
    ],
)
def test_invalid_settings_are_named(name: str, value: str) -> None:
    with pytest.raises(VerbsError, match=f"MONARCH_RDMA_{name}='{value}'"):
        from_environment({f"MONARCH_RDMA_{name}": value})


def test_defaults_when_the_environment_is_silent() -> None:
    assert from_environment({}) == _verbs.Settings()
    assert from_environment({"MONARCH_RDMA_GID_INDEX": "3"}).gid_index == 3


def test_completion_error_has_its_status_and_pickles() -> None:
    error = errors.completion_error("read", 12, 0x81, "rxe0", "host 2")
    assert "read failed: transport retry counter exceeded (peer host 2, device rxe0, vendor code 0x81)" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.status, again.device, again.peer) == ("transport retry counter exceeded", "rxe0", "host 2")
    assert isinstance(error, ConnectionError)
    assert errors.status_text(99) == "status 99"


def test_an_unknown_package_is_named() -> None:
    with pytest.raises(VerbsError, match="MONARCH_VERBS_PROVIDER='rdma': known are pyverbs and ibverbs"):
        provider.load("rdma")


def test_the_first_package_that_loads_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        if name.endswith(".pyverbs"):
            raise ImportError("compiled for another Python")
        return "the wheel"

    monkeypatch.setattr(provider.importlib, "import_module", load)
    assert provider.load() == "the wheel"
    with pytest.raises(VerbsError, match=r"pyverbs: compiled for another Python.*python3-pyverbs"):
        provider.load("pyverbs")


def test_provider_package_is_imported_lazily() -> None:
    code = (
        "import sys; from monarch_backend._verbs import Engine, available, describe; Engine(); available(); "
        "describe(); assert not {'pyverbs', 'ibverbs'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})


def test_no_adapter_leans_on_the_packages_enums() -> None:
    """pyverbs 59 renamed the module with the enums of pyverbs 44."""
    for name in ("pyverbs", "ibverbs"):
        source = Path(provider.__file__).with_name(f"{name}.py").read_text()
        imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
        assert not {module for module in imported if module and "enums" in module}
