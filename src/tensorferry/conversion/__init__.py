"""Converting checkpoints to another format, naming or type, whole or not at all. Models are not known here."""

from __future__ import annotations

from tensorferry.conversion.converting import convert
from tensorferry.conversion.report import Conversion

__all__ = ["Conversion", "convert"]
