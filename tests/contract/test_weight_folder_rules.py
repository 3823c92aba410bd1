"""Which folders a disk update may name: local ones under an allowed root, and nothing else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.weights.folder import open_update_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "allowed"
    for folder in (root / "step-1", root / "linked-inside", tmp_path / "outside" / "step-1"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"")
    (root / "step-2").symlink_to(root / "step-1")
    (root / "escape").symlink_to(tmp_path / "outside")
    (root / "escape-missing").symlink_to(tmp_path / "nowhere")
    (root / "holds-escape").mkdir()
    (root / "holds-escape" / "model.safetensors").symlink_to(tmp_path / "outside" / "step-1" / "model.safetensors")
    (root / "file").write_bytes(b"")
    (root / "linked-inside" / "shard.safetensors").symlink_to(root / "step-1" / "model.safetensors")
    return root


def refusal(uri: str, root: Path) -> str:
    with pytest.raises(InvalidRequest) as error:
        open_update_folder(uri, root)
    assert error.value.field == "uri"
    return str(error.value)


def test_folders_under_a_root_are_taken(root: Path) -> None:
    assert open_update_folder(str(root / "step-1"), root) == root / "step-1"
    assert open_update_folder(str(root / "step-2"), root) == root / "step-1"
    assert open_update_folder(str(root / "linked-inside"), root) == root / "linked-inside"
    alias = root.parent / "alias"
    alias.symlink_to(root)
    assert open_update_folder(str(alias / "step-1"), alias) == root / "step-1"


def test_case_n5_every_refusal_reads_the_same(root: Path, tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    port = listener.getsockname()[1]
    bad = [
        "",
        "someone/some-repo",
        "step-1",
        "hf://someone/some-repo",
        f"http://127.0.0.1:{port}/x",
        f"file://{root}/step-1",
        f"file:{root}/step-1",
        f"{root}/../outside/step-1",
        f"{root}/step-1/../step-1",
        f"{root}/step-1\0",
        f"{root}/\ud83d",
        str(tmp_path / "outside" / "step-1"),
        str(tmp_path / "missing"),
        "/etc",
        f"{root}/escape",
        f"{root}/escape/step-1",
        f"{root}/escape/missing",
        f"{root}/escape-missing",
        f"{root}/holds-escape",
        f"{root}/missing",
        f"{root}/file",
        f"{root}-sibling/step-1",
        f"{root}/" + "x" * 5000,
    ]
    assert len({refusal(uri, root) for uri in bad}) == 1
    with pytest.raises(TimeoutError):
        listener.accept()
    listener.close()


def test_no_root_allows_nothing(root: Path) -> None:
    with pytest.raises(InvalidRequest):
        open_update_folder(str(root / "step-1"), None)
    with pytest.raises(InvalidRequest):
        open_update_folder("/", root / "missing")
