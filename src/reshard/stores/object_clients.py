"""Requests to an object store: options, retries, and errors that say what to do.

obstore retries what may pass, with exponential backoff and jitter, up to a total time. Two things
are added: an endpoint that never answered is given up soon, and a body that ends early is asked
for again. The texts of servers are not shown: they may hold parts of credentials.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from reshard.stores.protocol import VersionConflict
from reshard.stores.urls import object_url, without_secrets

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 120.0
_FIRST_SECONDS = 2.5
"""How long an endpoint that never answered is tried."""
_REQUEST_SECONDS = 60.0
_SILENT_SECONDS = (4.0, 10.0)
"""How long a server may send nothing: one that never answered, and, at least, any other."""
_CONCURRENCY = 8
_BACKOFF_SECONDS = (0.1, 5.0)
_OWN_OPTIONS = ("store", "retry_seconds", "concurrency")
_ENDPOINTS = (
    *("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3"),
    *("azure_endpoint", "azure_storage_endpoint"),
)
"""The names that obstore has for one setting."""
_STATUS = re.compile(r"status code: (\d{3})")
_BODY = "response body"
"""What errors of a body that broke off speak of."""
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")

_answered: set[tuple[str, str]] = set()
"""Which buckets of which endpoints have answered this process, and were not given up since."""


class PermanentError(OSError):
    """A request that was refused, and will be again."""

    is_unsupported = False


class BrokenOffError(OSError):
    """An answer that ended in its body: what was asked for is done."""


class UnreachableError(OSError):
    """A server that has not answered any more, for as long as it was asked."""


def _obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError as error:
        raise ImportError(
            "object stores need obstore, which is not installed. Install it with: "
            "pip install 'reshard[object]'"
        ) from error


def open_clients(url: str, options: Mapping[str, Any] | None) -> Clients:
    """What makes the requests to the bucket of a URL."""
    return Clients(url, dict(options or {}))


class Clients:
    """Makes requests to one bucket, and counts them. Safe to use from several threads."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._api = _obstore()
        self._errors = importlib.import_module("obstore.exceptions")
        self.retry_seconds = _positive(options, "retry_seconds", _RETRY_SECONDS)
        self.concurrency = max(1, int(_positive(options, "concurrency", _CONCURRENCY)))
        self.root = _root_of(url)
        given = options.get("store")
        config = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
        if given is None:
            at_first, at_least = _SILENT_SECONDS
            silence = min(_REQUEST_SECONDS, max(at_least, self.retry_seconds))
            self._patient = self._make(config, self.retry_seconds, silence)
            self._brisk = self._make(config, min(_FIRST_SECONDS, self.retry_seconds), at_first)
            # An upload that fails is aborted by obstore, for which there is as much time again.
            self._uploading = self._make(config, self.retry_seconds / 2, silence)
        else:
            _check_ready(given, self.root)
            self._patient = self._brisk = self._uploading = given
        self._identity = (self.root, _endpoint(getattr(given, "config", None) or config))
        self._lock = threading.Lock()
        self.requests = 0

    def __repr__(self) -> str:
        return f"Clients({self.root!r})"

    def _make(self, config: dict[str, Any], retry_seconds: float, silent_seconds: float) -> Any:
        endpoint = _endpoint(config)
        if endpoint and not re.fullmatch(r"https?://[^\s/]\S*", endpoint):
            # obstore would panic, which no handler of errors sees.
            raise ValueError(
                f"the endpoint {without_secrets(endpoint)!r} is no address: it begins with http:// "
                "or https://, and has no spaces"
            )
        stores = importlib.import_module("obstore.store")
        scheme, _, bucket = self.root.partition("://")
        low, high = _BACKOFF_SECONDS
        high = min(high, retry_seconds / 4)
        settings = {
            "retry_config": {
                "max_retries": 1000,
                "retry_timeout": timedelta(seconds=retry_seconds),
                "backoff": {
                    "init_backoff": timedelta(seconds=low),
                    "max_backoff": timedelta(seconds=high),
                    "base": 2,
                },
            },
            **config,
        }
        settings["client_options"] = {
            "timeout": timedelta(seconds=_REQUEST_SECONDS),
            "read_timeout": timedelta(seconds=silent_seconds),
            # Asking a server of one's own without TLS is said by its address.
            "allow_http": endpoint.startswith("http://"),
            **(config.get("client_options") or {}),
        }
        try:
            if scheme in ("s3", "s3a"):
                return stores.S3Store(bucket, **settings)
            if scheme == "gs":
                return stores.GCSStore(bucket, **settings)
            if scheme in ("az", "azure"):
                return stores.AzureStore(bucket, **settings)
            return stores.AzureStore.from_url(self.root, **settings)
        except (self._errors.BaseError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"storage_options for {self.root} cannot be used: {reason}. They have the names of "
                f"obstore's settings, and {', '.join(_OWN_OPTIONS)}"
            ) from None

    # URLs

    def normal_url(self, url: str) -> str:
        """A URL in the form that places are compared in, without secrets."""
        return object_url(os.fspath(url))

    def is_for(self, url: str) -> bool:
        """Whether a URL leads to this bucket."""
        return _root_of(url) == self.root

    def path_in_bucket(self, url: str) -> str:
        return url.removeprefix(self.root).strip("/")

    # Requests

    def call(self, verb: str, path: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make one request. `name` is how an error names the object."""
        function = getattr(self._api, verb)
        return self._ask(lambda store: function(store, path, *args, **kwargs), verb, name)

    def list(self, prefix: str, name: str) -> tuple[Sequence[Mapping[str, Any]], Sequence[str]]:
        """The objects right under a prefix, and the prefixes under it."""
        found = self._ask(
            lambda store: self._api.list_with_delimiter(store, prefix or None), "list", name
        )
        return found["objects"], found["common_prefixes"]

    def get_range(
        self, path: str, name: str, begin: int, nbytes: int, e_tag: str | None = None
    ) -> tuple[Mapping[str, Any], memoryview]:
        """What the store says of an object, and some of its bytes: fewer if it ends before.

        With a tag it must still be the object that had it.
        """
        options: dict[str, Any] = {"range": (begin, begin + nbytes)}
        if e_tag is not None:
            options["if_match"] = e_tag

        def get(store: Any) -> tuple[Mapping[str, Any], memoryview]:
            try:
                found = self._api.get(store, path, options=options)
            except self._errors.GenericError as error:
                if _status(error) != 416:
                    raise
                # It ends before.
                return self._api.head(store, path), memoryview(b"")
            return found.meta, self._content(found, min(nbytes, int(found.meta["size"]) - begin))

        try:
            about, content = self._ask(get, "get", name)
        except VersionConflict:
            raise OSError(
                errno.ESTALE,
                "the object was replaced while it was read. Read the checkpoint again",
                name,
            ) from None
        return about, content

    def _content(self, answer: Any, nbytes: int) -> memoryview:
        try:
            found = memoryview(answer.bytes())
        except self._errors.GenericError as error:
            if _status(error) != 416:
                raise
            # obstore asked for the rest of an answer that broke off, and the object is a
            # shorter one now.
            raise self._errors.GenericError(f"the {_BODY} is that of an old object") from None
        if len(found) != nbytes:
            raise self._errors.GenericError(f"the {_BODY} has {len(found)} bytes of {nbytes}")
        return found

    def _ask(self, request: Callable[[Any], Any], verb: str, name: str) -> Any:
        """Make a request, and make it again while that may help.

        obstore does most of this, but not if the answer breaks off in its body, or if the
        connection breaks during a conditional put: that may have been done. Those who put on a
        condition look whether what is in the way is their own.
        """
        with self._lock:
            self.requests += 1
        began = time.monotonic()
        pause, longest = _BACKOFF_SECONDS
        while True:
            is_known = self._identity in _answered
            try:
                found = request(self._patient if is_known else self._brisk)
            except (self._errors.BaseError, OSError) as error:
                if self._is_answer(error):
                    # There is a server, which is to be waited for.
                    _answered.add(self._identity)
                    is_known = True
                limit = self.retry_seconds if is_known else min(_FIRST_SECONDS, self.retry_seconds)
                wait = random.uniform(pause / 2, pause)  # noqa: S311 - no secret
                if not self._may_pass(error) or time.monotonic() + wait > began + limit:
                    raise self._given_up(error, verb, name, is_known) from None
                time.sleep(wait)
                pause = min(longest, pause * 2)
            else:
                _answered.add(self._identity)
                return found

    def open_upload(self, path: str, name: str, part_bytes: int) -> Upload:
        """An object that is uploaded in parts."""
        return Upload(self, path, name, part_bytes)

    def start_upload(self, path: str, part_bytes: int) -> Any:
        return self._api.open_writer(
            self._uploading, path, buffer_size=part_bytes, max_concurrency=self.concurrency
        )

    def count(self, requests: int) -> None:
        with self._lock:
            self.requests += requests

    def guarded(self, work: Callable[[], Any], verb: str, name: str) -> Any:
        """Do something that makes requests; its errors say what to do."""
        try:
            return work()
        except (self._errors.BaseError, OSError) as error:
            raise self._given_up(error, verb, name, is_known=True) from None

    def _given_up(self, error: Exception, verb: str, name: str, is_known: bool) -> Exception:
        explained = self._explained(error, verb, name, is_known)
        if isinstance(explained, UnreachableError):
            # Whatever is to be cleared up does not wait as long once more.
            _answered.discard(self._identity)
        return explained

    def _explained(self, error: Exception, verb: str, name: str, is_known: bool) -> Exception:
        """The same error in words that help, and without what the server said."""
        status, code = _status(error), _CODE.search(str(error))
        said = " ".join(filter(None, [str(status or ""), code[1] if code else ""]))
        said = f" ({said})" if said else ""
        errors = self._errors
        if code is not None and code[1] in ("NoSuchBucket", "ContainerNotFound"):
            return PermanentError(
                errno.ENXIO,
                f"the bucket does not exist{said}. Make it, or correct the URL",
                self.root,
            )
        if isinstance(error, FileNotFoundError | errors.NotFoundError) or status == 404:
            return FileNotFoundError(errno.ENOENT, f"there is no such object{said}", name)
        if isinstance(error, errors.AlreadyExistsError):
            return FileExistsError(errno.EEXIST, "there is such an object already", name)
        if isinstance(error, errors.PreconditionError) or status == 412:
            return VersionConflict(f"{name} has changed")
        if isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError) or (
            status in (401, 403)
        ):
            return PermissionError(
                errno.EACCES,
                f"the store refuses to {_WORDS[verb]}{said}. Check the credentials, the region and "
                "what they may do with this bucket",
                name,
            )
        if isinstance(error, errors.NotSupportedError) or status == 501:
            unsupported = PermanentError(errno.ENOTSUP, f"the store cannot do that{said}", name)
            unsupported.is_unsupported = True
            return unsupported
        if status is not None and not self._may_pass(error):
            return PermanentError(errno.EINVAL, f"the store refuses to {_WORDS[verb]}{said}", name)
        if not is_known and not self._is_answer(error):
            return PermanentError(
                errno.EHOSTUNREACH,
                f"nothing answers at {without_secrets(self._identity[1]) or 'its endpoint'}. Check "
                "the endpoint and the network",
                name,
            )
        kind = OSError
        if status is None:
            kind = BrokenOffError if _BODY in str(error) else UnreachableError
        return kind(
            errno.EIO,
            f"the store did not {_WORDS[verb]}{said} within {self.retry_seconds:.0f} s, although "
            "it was asked again and again. Look after it, or raise retry_seconds",
            name,
        )

    def _is_answer(self, error: Exception) -> bool:
        """Whether the server has answered, if only in part."""
        return self._is_verdict(error) or _status(error) is not None or _BODY in str(error)

    def _may_pass(self, error: Exception) -> bool:
        status = _status(error)
        if self._is_verdict(error):
            return False
        return status is None or status in (408, 429) or (status >= 500 and status != 501)

    def _is_verdict(self, error: Exception) -> bool:
        """Whether the server has said what is wrong with the request."""
        kinds = self._errors
        return isinstance(
            error,
            FileNotFoundError
            | FileExistsError
            | PermissionError
            | kinds.NotFoundError
            | kinds.AlreadyExistsError
            | kinds.PreconditionError
            | kinds.NotModifiedError
            | kinds.PermissionDeniedError
            | kinds.UnauthenticatedError
            | kinds.NotSupportedError
            | kinds.InvalidPathError,
        )


_WORDS = {
    "get": "read this",
    "head": "show this",
    "list": "list this",
    "put": "write this",
    "delete": "delete this",
    "copy": "copy this",
}


class Upload:
    """An upload in parts, which ends as an object or as nothing."""

    def __init__(self, clients: Clients, path: str, name: str, part_bytes: int) -> None:
        self._clients, self._path, self._name = clients, path, name
        self._part_bytes = part_bytes
        self._stream = clients.start_upload(path, part_bytes)
        self._nbytes = 0
        # What was written before the first request, which begins the upload.
        self._first: list[bytes] | None = []
        self._is_reachable = True

    def write(self, data: memoryview) -> None:
        try:
            self._write(data)
        except BrokenOffError:
            if self._first is None:
                raise
            # An upload was begun that has no name here: begin another one.
            self._stream = self._clients.start_upload(self._path, self._part_bytes)
            for early in self._first:
                self._write(memoryview(early))
            self._write(data)
        self._nbytes += len(data)
        if self._nbytes >= self._part_bytes:
            self._first = None
        elif self._first is not None:
            self._first.append(bytes(data))

    def _write(self, data: memoryview) -> None:
        self._request(lambda: self._stream.write(data))

    def close(self) -> None:
        self._request(self._stream.close)
        # One to begin, one to end.
        self._clients.count(-(-self._nbytes // self._part_bytes) + 2)

    def abort(self) -> None:
        """Leave nothing on the server, as far as it can be reached."""
        stream, reason = self._stream, OSError(errno.ECANCELED, "the upload was given up")
        try:
            if self._is_reachable:
                self._request(lambda: stream.__exit__(OSError, reason, None))
                return
        except OSError as error:
            # The reason why it is given up matters more.
            logger.warning("an upload could not be given up: %s", error)
        logger.warning("parts of an upload may be left on the store: %s", self._name)

    def _request(self, work: Callable[[], Any]) -> None:
        try:
            self._clients.guarded(work, "put", self._name)
        except UnreachableError:
            self._is_reachable = False
            raise


def _positive(options: Mapping[str, Any], name: str, default: float) -> float:
    """A setting of our own."""
    value = options.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} in storage_options is a positive number, not {value!r}")
    return float(value)


def _root_of(url: str) -> str:
    scheme, _, path = object_url(url).partition("://")
    return f"{scheme}://{path.partition('/')[0]}"


def _check_ready(store: Any, root: str) -> None:
    """Refuse a store that leads elsewhere than the URL says."""
    config = getattr(store, "config", None) or {}
    bucket = config.get("bucket") or config.get("container_name")
    wanted = root.partition("://")[2].partition("@")[0]
    if bucket is not None and bucket != wanted:
        raise ValueError(
            f"the store in storage_options is one of the bucket {bucket!r}, and the URL names "
            f"{wanted!r}: pass a store of that bucket, or correct the URL"
        )
    prefix = getattr(store, "prefix", None)
    if prefix:
        raise ValueError(
            f"the store in storage_options has the prefix {str(prefix)!r}: pass one without, and "
            "say in the URL where the checkpoint is"
        )


def _endpoint(config: Mapping[str, Any]) -> str:
    """The address of the server as options or the environment give it; empty if they do not."""
    found = {
        name.lower(): text for name, text in {**(config.get("config") or {}), **config}.items()
    }
    given = next((found[name] for name in _ENDPOINTS if found.get(name)), None)
    if given is not None:
        return str(given)
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _status(error: Exception) -> int | None:
    """The HTTP status of an answer; None if there was none."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None
