"""Which loader is for which `load_format`: a table, what a program registers, and the entry points of plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TypeVar

from tensorferry.config import LoadConfig
from tensorferry.core.names import nearest
from tensorferry.errors import ConfigError, shown
from tensorferry.formats.file_names import LOAD_FORMATS
from tensorferry.loaders.base import BaseModelLoader, checked

__all__ = ["GROUP", "LOADERS", "get_model_loader", "known_formats", "register_model_loader"]

GROUP = "tensorferry.model_loaders"
"""The entry-point group of plug-ins: the name is the load_format, the object a subclass of `BaseModelLoader`."""

LOADERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(LOAD_FORMATS, "tensorferry.loaders.default:DefaultModelLoader"),
        "gguf": "tensorferry.loaders.gguf:GGUFModelLoader",
        "npcache": "tensorferry.loaders.npcache:NpcacheLoader",
        "tensorizer": "tensorferry.loaders.tensorizer:TensorizerLoader",
        "fastsafetensors": "tensorferry.loaders.third_party.fastsafetensors:FastsafetensorsLoader",
        "instanttensor": "tensorferry.loaders.third_party.instanttensor:InstantTensorLoader",
        "runai_streamer": "tensorferry.loaders.third_party.runai:RunaiLoader",
        "runai_streamer_sharded": "tensorferry.loaders.third_party.runai_sharded:RunaiShardedLoader",
        "dummy": "tensorferry.loaders.dummy:DummyModelLoader",
        "sharded_state": "tensorferry.loaders.sharded_state:ShardedStateLoader",
    }
)
"""The loaders that come with tensorferry, as module and class; imported when one is first needed."""

_registered: dict[str, type[BaseModelLoader]] = {}

_L = TypeVar("_L", bound=type[BaseModelLoader])


def get_model_loader(load_config: LoadConfig) -> BaseModelLoader:
    """Return the loader that `load_config` asks for.

    Raises ConfigError for what is no LoadConfig; for a load_format that nobody offers, naming those that there are; for
    one that several offer; and for options that the loader does not take.
    """
    return _class_for(checked("load_config", load_config, LoadConfig).load_format)(load_config)


def register_model_loader(name: str) -> Callable[[_L], _L]:
    """Return a decorator that makes a class the loader of the load_format `name`, in this process.

    Raises ConfigError for a name that is taken, and for a class that is no `BaseModelLoader`.

    >>> @register_model_loader("nothing")
    ... class NothingLoader(BaseModelLoader):
    ...     def download_model(self, model_config): ...
    ...     def load_weights(self, model, model_config): ...
    >>> type(get_model_loader(LoadConfig(load_format="nothing"))).__name__
    'NothingLoader'
    """
    name = name.lower()

    def register(kind: _L) -> _L:
        _check_class(name, kind, f"the class {getattr(kind, '__qualname__', kind)!r}")
        if name in LOADERS or _registered.get(name, kind) is not kind:
            taken = "tensorferry" if name in LOADERS else _registered[name].__qualname__
            raise ConfigError(f"load_format {name!r} is already that of {taken}: register under another name")
        _registered[name] = kind
        return kind

    return register


def known_formats() -> tuple[str, ...]:
    """Return every load_format that there is a loader for, those of plug-ins last."""
    return tuple(dict.fromkeys((*LOADERS, *_registered, *(point.name.lower() for point in _plug_ins()))))


def _class_for(name: str) -> type[BaseModelLoader]:
    offers = [*_offers(name)]
    if not offers:
        known = known_formats()
        near = nearest(name, known)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"load_format {shown(name)!r} is not known{hint} (there are {', '.join(known)})")
    found = [find() for _, find in offers]
    if any(kind is not found[0] for kind in found):
        rivals = " and by ".join(who for who, _ in offers)
        raise ConfigError(f"load_format {name!r} is offered by {rivals}: remove one of them")
    _check_class(name, found[0], offers[0][0])
    return found[0]


def _offers(name: str) -> Iterator[tuple[str, Callable[[], type[BaseModelLoader]]]]:
    """Yield everybody who offers a loader of that name, in words, with a function that imports it."""
    if name in LOADERS:
        yield "tensorferry", lambda: _imported(LOADERS[name])
    if name in _registered:
        yield f"the registered class {_registered[name].__qualname__}", lambda: _registered[name]
    for point in _plug_ins():
        if point.name.lower() == name:
            package = point.dist.name if point.dist is not None else "an unknown package"
            yield f"the plug-in {point.value} of {package}", point.load


def _plug_ins() -> list[EntryPoint]:
    return list(entry_points(group=GROUP))


def _imported(where: str) -> type[BaseModelLoader]:
    module, _, attribute = where.partition(":")
    found: type[BaseModelLoader] = getattr(import_module(module), attribute)
    return found


def _check_class(name: str, kind: object, who: str) -> None:
    if not isinstance(kind, type) or not issubclass(kind, BaseModelLoader):
        raise ConfigError(f"load_format {name!r}: {who} is no subclass of tensorferry.loaders.BaseModelLoader")
