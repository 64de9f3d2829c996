"""Options, as frozen values that refuse nonsense when they are made. No free dictionaries, no globals."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeVar, cast, get_args

from tensorferry.checks import expect, expect_one_of
from tensorferry.core.cost import LOCAL, STORAGE_COSTS
from tensorferry.core.names import nearest
from tensorferry.core.plan import Strictness
from tensorferry.errors import ConfigError, shown
from tensorferry.storage.base import StorageKind

__all__ = [
    "DTYPES",
    "Direct",
    "Folders",
    "LoadConfig",
    "LoaderUse",
    "ModelConfig",
    "ParallelConfig",
    "ReadOptions",
    "Strategy",
    "folders",
    "options_of",
]

KIB, MIB = 1 << 10, 1 << 20

Strategy = Literal["lazy", "eager", "prefetch"]
LoaderUse = Literal["trace", "stream"]
Direct = Literal["auto", "always", "never"]
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One folder or several."""

DTYPES = {
    "float16": "float16", "half": "float16", "bfloat16": "bfloat16", "float32": "float32", "float": "float32",
    "float64": "float64", "double": "float64", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32",
}  # fmt: skip
"""Types that models are built in: what people write, to torch's name of it."""

_DEVICE = re.compile(r"[a-z]+(:\d+)?")
_T = TypeVar("_T")


def _told(name: str, otherwise: int) -> int:
    """Return a number that torchrun and others like it put into the environment, or `otherwise` where they did not."""
    told = os.environ.get(name, "")
    return int(told) if told.isdecimal() and len(told) < 10 else otherwise


class _Suited(int):
    """A size that nobody gave: it changes with the kind of storage."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How bytes are read. Sizes are in bytes.

    max_staging: most that is staged at once, whatever the size of the checkpoint. max_read: largest single
    read. max_gap: largest hole between two needed ranges that is read over rather than skipped. waste: most bytes
    read for each byte needed. threads: reader threads; 0 for four to a core, which wait for the disk most of the time,
    for one to a core where most of what is read is in the system's page cache, or for eight where each request goes to
    another machine; ranks that share files divide the cores among them. At most eight in any case, but for object
    stores: sixteen, or as many as `max_staging` has room for, each with an answer of `max_read` bytes beside its stage.

    direct: whether reads go past the system's page cache: "auto" where the file lies on a disk of this machine and the
    bytes are not in the cache, "never", or "always", which is refused where a file system cannot; short runs, such as
    some columns of each row, go through the cache in any case. keep_cache: whether what a load brings into the page
    cache stays there; what was there before stays in either case.
    shared: whether other ranks on this machine load from the same files meanwhile. Then reads of which they need a
    quarter or more go through the page cache, for the disk to give them once. None: what ranks find out that load a
    model together, as with `load_model`; else where torchrun started several.
    turn: which of how many ranks that share files this one is, counted from 0: by strategy "lazy" each begins to read
    elsewhere, so that the disk gives one what the others will find in the cache. None: as with `shared`.
    exchange: whether ranks that share files and need parts of the same rows each read some of these and hand them on,
    rather than have the page cache do that, where a loader has them meet: that of vLLM does, and `load_model`. They
    begin at the same place then, whatever `turn` says. Not with direct "never", nor `mapped`.
    mapped: whether parameters on meta become views of the mapped files, where their bytes lie there just as they are
    wanted. That takes milliseconds and shares memory between processes, but the file must not change while they are in
    use, and a file that is cut short kills the process. What is written to them stays in this process.
    huge_pages: whether large parameters are asked to lie on huge pages.
    pinned: whether what goes to GPUs is staged in pinned memory, which they fetch it from on their own time.
    gpu_direct: whether GPUs read files by themselves, through kvikio: "never", "auto" where kvikio says that it can, or
    "always", which is refused where kvikio is not installed.
    storage_kind: what `max_read`, `max_gap` and `threads` are chosen for, where they are not given: "local" disks,
    "network" file systems, "remote" object stores; or "auto" for what the first file of an open checkpoint is found to
    lie on.
    """

    max_staging: int = 256 * MIB
    max_read: int = _Suited(2 * LOCAL.best)
    max_gap: int = _Suited(LOCAL.gap)
    waste: float = 4096.0
    threads: int = 0
    direct: Direct = "auto"
    keep_cache: bool = True
    shared: bool | None = None
    turn: tuple[int, int] | None = None
    exchange: bool = True
    mapped: bool = False
    huge_pages: bool = False
    pinned: bool = True
    gpu_direct: Direct = "never"
    storage_kind: StorageKind | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        expect_one_of("storage_kind", self.storage_kind, ["auto", *STORAGE_COSTS])
        for name in ("max_staging", "max_read", "max_gap", "waste", "threads"):
            value = getattr(self, name)
            allowed = (int, float) if name == "waste" else (int,)
            if isinstance(value, bool) or not isinstance(value, allowed):
                raise ConfigError(f"{name} must be a number, not {value!r}")
        expect_one_of("direct", self.direct, get_args(Direct))
        expect_one_of("gpu_direct", self.gpu_direct, get_args(Direct))
        for name in ("keep_cache", "exchange", "mapped", "huge_pages", "pinned"):
            expect(name, getattr(self, name), bool, "true or false")
        expect("shared", self.shared or False, bool, "true, false or null")
        self._refuse_turn()
        self._suit()
        if self.max_read < 4096 or self.max_staging < self.max_read:
            raise ConfigError(
                f"max_read ({self.max_read:,}) must be at least 4,096 and at most max_staging ({self.max_staging:,})"
            )
        if self.max_gap < 0 or self.waste < 1 or self.threads < 0:
            raise ConfigError("max_gap and threads must not be negative, and waste must be at least 1")

    def _refuse_turn(self) -> None:
        if self.turn is None:
            return
        if not isinstance(self.turn, Sequence) or [type(n) for n in self.turn] != [int, int]:
            raise ConfigError(f"turn must be two numbers, which rank of how many, not {self.turn!r}")
        object.__setattr__(self, "turn", tuple(self.turn))
        if not 0 <= self.turn[0] < self.turn[1]:
            raise ConfigError(f"turn {self.turn[0]} of {self.turn[1]}: ranks are counted from 0")
        if self.shared is False:
            raise ConfigError("turn is for ranks that share files: leave it out, or do not say that `shared` is false")

    def _suit(self) -> None:
        """Give the sizes that nobody gave."""
        cost = STORAGE_COSTS.get(self.storage_kind, LOCAL)
        for name, size in (("max_read", min(2 * cost.best, self.max_staging)), ("max_gap", cost.gap)):
            if isinstance(getattr(self, name), _Suited):
                object.__setattr__(self, name, _Suited(size))

    def settled(self, kind: StorageKind) -> Self:
        """Return these options for a checkpoint on storage of that kind, unless they say which kind it is."""
        return replace(self, storage_kind=kind) if self.storage_kind == "auto" else self

    def among(self, which: int, of: int) -> Self:
        """Return these options for the rank `which`, counted from 0, of `of` that share files, unless they say so."""
        if self.shared is False or self.turn is not None:
            return self
        return replace(self, shared=True, turn=(which, of)) if of > 1 else replace(self, shared=self.shared or False)

    @classmethod
    def suited_to(cls, kind: str, **options: Any) -> Self:
        """Return the options for a kind of storage, but for `options` that are given."""
        expect_one_of("storage kind", kind, list(STORAGE_COSTS))
        return cls(**{"storage_kind": kind, **options})

    @property
    def is_shared(self) -> bool:
        """Whether other ranks on this machine are taken to read the same files; see `shared`."""
        if self.shared is None:
            return (self.turn or (0, _told("LOCAL_WORLD_SIZE", 1)))[1] > 1
        return self.shared

    @property
    def hands_on(self) -> bool:
        """Whether this rank reads for others on this machine, and they for it, where a loader has them meet."""
        return self.is_shared and self.exchange and self.direct != "never" and not self.mapped

    @property
    def settled_turn(self) -> tuple[int, int]:
        """Which of how many ranks this one is taken to be that read the same files; the first of one if it is alone."""
        if not self.is_shared:
            return 0, 1
        told = _told("LOCAL_RANK", 0), _told("LOCAL_WORLD_SIZE", 1)
        return self.turn or (told if told[0] < told[1] else (0, 1))

    @property
    def workers(self) -> int:
        """How many reader threads there will be."""
        if self.storage_kind == "remote":
            return self.threads or min(16, max(1, self.max_staging // (2 * self.max_read)))
        near = self.storage_kind in ("auto", "local")
        return self.threads or min(8, max(2, int(4 * self._cores)) if near else 8)

    @property
    def copiers(self) -> int:
        """How many there will be where the page cache has most of what is read: one to a core, since none waits."""
        return self.threads or min(8, max(1, int(self._cores)))

    @property
    def _cores(self) -> float:
        """Cores of this machine for each rank that shares files."""
        return (os.cpu_count() or 1) / self.settled_turn[1]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How a model is divided among ranks, and which part is this one's. Checked when it is made; raises ConfigError.

    Sizes are counts of ranks, and ranks count from 0. tp: tensor parallel, ep: expert parallel, pp: pipeline parallel.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("tp", "ep", "pp"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            expect(f"{kind}_size", size, int, "a number of ranks")
            expect(f"{kind}_rank", rank, int, "the number of a rank")
            if size < 1:
                raise ConfigError(f"{kind}_size {size}: at least 1 is expected")
            if not 0 <= rank < size:
                raise ConfigError(f"{kind}_rank {rank}: 0 to {size - 1} is expected, with {kind}_size {size}")

    @classmethod
    def every_rank(cls, *, tp_size: int = 1, ep_size: int = 1, pp_size: int = 1) -> tuple[Self, ...]:
        """Return the configuration of each rank: stages one after the other, in each the ranks that share its layers.

        Where there are fewer expert-parallel ranks than tensor-parallel ones, neighbours have the same experts.
        """
        inside = max(tp_size, ep_size)
        return tuple(
            cls(tp_size, rank % tp_size, ep_size, rank * ep_size // inside, pp_size, stage)
            for stage in range(pp_size)
            for rank in range(inside)
        )

    @property
    def rank(self) -> int:
        """The number of this rank among all that share the model, pipeline stages outermost."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """How many ranks share the model by tensor and pipeline parallelism."""
        return self.pp_size * self.tp_size

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Return the configuration that plain data says. Raises ConfigError as `LoadConfig.from_dict` does."""
        return options_of(cls, options, what="ParallelConfig")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How weights are loaded, whatever the model. Checked when it is made; raises ConfigError.

    load_format: which loader; upper and lower case are one. download_dir: the Hub cache to use instead of the usual.
    device: where tensors go that have no memory yet, and where models are built; None for the CPU.
    ignore_patterns: file name patterns, one or several, of files that are neither fetched nor looked at.
    links_to: folders, one or several, that links in a checkpoint may lead into, beside its own.
    progress: whether to tell of it on standard error. strictness: what stops a load. read: how bytes are read.
    threads: reader threads, 0 for as many as suit the machine; more than one is for the strategy lazy.
    own_loader: what to do with a model that has a ``load_weights(iterable)``: "trace" it, so that just the bytes it
    uses are read, or "stream" every tensor through it. options: what the loader of that format takes beside these.
    parallel: which rank this is, for loaders that read what ranks have written.

    strategy: "lazy" reads what the plan needs, when it is needed. "eager" has one thread read the needed files from
    end to end, ahead of their use, for storage that is slow unless read in sequence. "prefetch" has one thread
    announce to the kernel what the plan needs, ahead of the reads. Both stay at most ``read.max_staging`` bytes ahead
    of what is used, so that neither memory nor page cache fills up, and no thread outlives the load.
    """

    load_format: str = "auto"
    download_dir: str | None = None
    device: str | None = None
    ignore_patterns: Sequence[str] = ("original/*",)
    links_to: Folders = ()
    strategy: Strategy = "lazy"
    threads: int = 0
    progress: bool = False
    strictness: Strictness = field(default_factory=Strictness)
    read: ReadOptions = field(default_factory=ReadOptions)
    own_loader: LoaderUse = "trace"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # Any: each loader has its own
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        self._set("load_format", _text("load_format", self.load_format).lower())
        self._set("download_dir", _path("download_dir", self.download_dir))
        self._set("device", _device(self.device))
        self._set("ignore_patterns", _patterns("ignore_patterns", self.ignore_patterns))
        self._set("links_to", folders("links_to", self.links_to))
        self._set("options", _named_options(self.options))
        expect_one_of("strategy", self.strategy, get_args(Strategy))
        expect_one_of("own_loader", self.own_loader, get_args(LoaderUse))
        expect("threads", self.threads, int, "a number of threads")
        expect("progress", self.progress, bool, "true or false")
        expect("strictness", self.strictness, Strictness, "a Strictness")
        expect("read", self.read, ReadOptions, "ReadOptions")
        expect("parallel", self.parallel, ParallelConfig, "a ParallelConfig")
        self._check_threads()

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Return the configuration that plain data says; `strictness`, `read` and `parallel` may be mappings, too.

        Raises ConfigError for an unknown key, naming the known ones, and for a value of the wrong type.
        """
        given = dict(options)
        kinds: dict[str, type[Any]] = {"strictness": Strictness, "read": ReadOptions, "parallel": ParallelConfig}
        for key, kind in kinds.items():
            if isinstance(given.get(key), Mapping):
                given[key] = options_of(kind, _listed_as_tuples(given[key]), what=key)
        return options_of(cls, given, what="LoadConfig")

    @property
    def reading(self) -> ReadOptions:
        """`read`, with the number of threads that was settled on."""
        return replace(self.read, threads=self.threads or self.read.threads or (0 if self.strategy == "lazy" else 1))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_threads(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"threads {self.threads}: 0 or more is expected")
        if self.threads and self.read.threads and self.threads != self.read.threads:
            raise ConfigError(f"threads {self.threads} contradicts read.threads {self.read.threads}: give one of them")
        threads = self.threads or self.read.threads
        if self.strategy != "lazy" and (self.read.direct == "always" or not self.read.keep_cache):
            raise ConfigError(
                f"strategy {self.strategy!r} reads through the page cache: leave direct and keep_cache out, or take "
                "the strategy 'lazy'"
            )
        if threads > 1 and self.strategy != "lazy":
            raise ConfigError(
                f"strategy {self.strategy!r} reads with one thread, and {threads} were asked for: leave threads out, "
                "or take the strategy 'lazy'"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and as what it is to be built. Checked when it is made; raises ConfigError.

    model: a folder, a weight file, an address such as ``s3://bucket/model``, or a name on the Hub. revision: a branch,
    tag or commit there. subfolder: where in the folder or repository its weights are. variant: such as ``fp16`` in
    ``model.fp16.safetensors``.
    dtype: "float32", "bfloat16" and so on, what parameters are made of where the model does not say otherwise; "auto"
    or None to leave it to whoever builds the model. quantization: the method, where the checkpoint does not name it.
    trust_remote_code: whether code that comes with the model may be run to build it; never needed to load weights.
    """

    model: str
    revision: str | None = None
    subfolder: str | None = None
    variant: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", _path("model", self.model) or _text("model", self.model))
        object.__setattr__(self, "dtype", _dtype(self.dtype))
        for name in ("revision", "subfolder", "variant", "quantization"):
            if getattr(self, name) is not None:
                _text(name, getattr(self, name))
        expect("trust_remote_code", self.trust_remote_code, bool, "true or false")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Return the configuration that plain data says. Raises ConfigError as `LoadConfig.from_dict` does."""
        return options_of(cls, options, what="ModelConfig")


def options_of(kind: type[_T], options: Mapping[str, Any], *, what: str) -> _T:
    """Return a `kind`, a dataclass that checks itself, made of `options`.

    Raises ConfigError for a key that `kind` does not have, with the keys that it has, and for one that it lacks.
    """
    known = {f.name: f for f in fields(cast("Any", kind))}
    for key in options:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            listed = ", ".join(known) or "nothing"
            raise ConfigError(f"{what} has no option {shown(str(key))!r}{hint} (it takes {listed})")
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} {value!r}: text is expected" + (f", not {type(value).__name__}" if value else ""))
    return value


def _path(name: str, value: object) -> str | None:
    if value is None or value == "":
        return None
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise ConfigError(f"{name} {value!r}: a path is expected, not {type(value).__name__}")
    return path


def _patterns(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"{name} {value!r}: a file name pattern or a list of them is expected")
    return tuple(value)


def folders(name: str, value: object) -> tuple[str, ...]:
    """Return one folder or several as text; raises ConfigError for what is none."""
    several = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(several, Sequence) or not all(
        isinstance(v, str | os.PathLike) and _path(name, v) for v in several
    ):
        raise ConfigError(f"{name} {value!r}: a folder or a list of them is expected")
    return tuple(map(os.fspath, several))


def _device(value: object) -> str | None:
    # A torch.device writes itself as the text that it is made of, so torch need not be imported to take one.
    text = str(value) if type(value).__module__ == "torch" else value
    if text is None:
        return None
    if not isinstance(text, str) or not _DEVICE.fullmatch(text):
        raise ConfigError(f"device {value!r}: a device such as 'cpu' or 'cuda:0' is expected")
    return text


def _dtype(value: object) -> str | None:
    text = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    if text is None or text == "auto":
        return None
    if not isinstance(text, str) or text not in DTYPES:
        raise ConfigError(f"dtype {value!r}: one of auto, {', '.join(DTYPES)} is expected")
    return DTYPES[text]


def _named_options(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"options {value!r}: a mapping from names to values is expected")
    return dict(value)


def _listed_as_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
