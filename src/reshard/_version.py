"""Part of DCP's surface. A build of torch may set a version here; Reshard has none to derive."""

_derived_version: str | None = None
