"""Where a command is told to look: paths of this machine, and addresses, which stay the text that they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tensorferry.storage.object_uri import is_uri

__all__ = ["PLACE"]


class _Place(click.Path):
    """A path as a Path; an address such as ``s3://bucket/model`` as text, as a Path would take a slash from it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what `value` is."""
        return value if is_uri(value) else super().convert(value, param, ctx)


PLACE = _Place(path_type=Path)
