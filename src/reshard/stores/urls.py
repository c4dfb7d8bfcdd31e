"""Places that are named by a URL, or by a path of this machine."""

from __future__ import annotations

import os
import posixpath
import re

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?=://)")
# A drive of Windows has one letter.
_FLATTENED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)


def scheme_of(place: object) -> str:
    """The scheme of a URL, in lower case; empty for a path."""
    text = os.fspath(place) if isinstance(place, os.PathLike) else place
    match = _SCHEME.match(text) if isinstance(text, str) else None
    return match[0].lower() if match else ""


def path_of(place: str | os.PathLike[str]) -> str:
    """A URL of a local file as the path that it means; any other place as it is."""
    text = os.fspath(place)
    return text.partition("://")[2] if scheme_of(text) in ("file", "local") else text


def check_is_path(place: str | os.PathLike[str]) -> None:
    """Refuse a URL, also one that pathlib has made a path of: it would be a directory here."""
    match = _FLATTENED.match(os.fspath(place))
    if match:
        url = without_secrets(f"{match[1]}://{match[2]}")
        raise ValueError(
            f"{url!r} is a URL, and this storage is for directories. Pass it as text with "
            "checkpoint_id and no storage, or to ObjectStoreWriter and FsspecWriter or their "
            "readers. For a directory of that name, pass its absolute path"
        )


def without_secrets(url: str) -> str:
    """A URL as it may be shown: no password, and no query, which may hold a signature."""
    # Up to the last @ before the path: a password may have one in it.
    shown = re.sub(r"(?<=://)([^/:@]*):[^/]*@", r"\1@", url)
    return shown.partition("?")[0] if "://" in shown else shown


def object_url(url: str) -> str:
    """The URL of a place in a bucket in the form that places are compared in, without secrets."""
    shown = without_secrets(url)
    if "?" in url:
        raise ValueError(
            f"{shown} is followed by a question mark, after which nothing is used: leave it out, "
            "and pass what it says as storage_options"
        )
    scheme, names = scheme_of(url), [*filter(None, shown.partition("://")[2].split("/"))]
    if not names or shown.startswith(f"{scheme}:///"):
        raise ValueError(f"{shown} names no bucket: use {scheme}://bucket/name")
    if {".", ".."} & {*names}:
        raise ValueError(
            f"{shown} has '.' or '..' in it, which is a name like any other on an "
            "object store: write the URL without"
        )
    return f"{scheme}://{'/'.join(names)}"


def relative_location(own: str, other: str) -> str:
    """The place `other` as seen from `own`; ValueError if it lies within, or somewhere else."""
    (scheme, names), (other_scheme, other_names) = _split(own), _split(other)
    if scheme != other_scheme:
        raise ValueError(f"{without_secrets(other)} is on another store than {own}")
    if names == other_names:
        return "."
    if other_names[: len(names)] == names:
        raise ValueError(f"{without_secrets(other)} lies within {own}")
    parent = posixpath.relpath("/" + "/".join(other_names[:-1]), "/" + "/".join(names))
    return f"{parent}/{other_names[-1]}"


def location_at(own: str, location: str) -> str:
    """The place that `relative_location` gave a location for."""
    scheme, names = _split(f"{own}/{location}")
    return f"{scheme or '/'}{'/'.join(names)}"


def _split(place: str) -> tuple[str, list[str]]:
    """The scheme of a location, empty for a path of this machine, and the names in it."""
    scheme, mark, rest = place.rpartition("://")
    path = posixpath.normpath(f"/{rest}") if mark else os.path.abspath(rest)
    return f"{scheme}{mark}", [name for name in path.split("/") if name]
