"""The loader that vLLM gets for load format tensorferry. Its stages are vLLM's; what fills the model is ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tensorferry import api
from tensorferry.checkpoint import Checkpoint
from tensorferry.compat.vllm import engine
from tensorferry.compat.vllm.options import assumed, load_config, options_for
from tensorferry.compat.vllm.planning import Planned, party_of, planned, reading_together, refuse_misfit, uses_of
from tensorferry.compat.vllm.quantizing import stream_online
from tensorferry.compat.vllm.reloading import Needs, is_elsewhere, needs_of, remember, restored, taken
from tensorferry.compat.vllm.settling import settle
from tensorferry.compat.vllm.sources import open_for, sources_of
from tensorferry.compat.vllm.telling import progress_in, tell, warnings_in
from tensorferry.config import LoadConfig, ReadOptions
from tensorferry.execute.borrowed import Borrowed
from tensorferry.execute.exchange import sharing, told_of
from tensorferry.loaders.sources import locate
from tensorferry.parallel import Ranks
from tensorferry.progress import SILENT, Progress
from tensorferry.report import Report
from tensorferry.timing import timed

__all__ = ["TensorferryLoader"]

_unsettled: ContextVar[Mapping[Any, list[Borrowed]]] = ContextVar("_unsettled", default=MappingProxyType({}))
"""The loader that waits for a model to be post-processed, with what is to be settled then."""


class TensorferryLoader(engine.BaseModelLoader):
    """Fills models of vLLM by plan: each rank reads the bytes that its own parameters need.

    vLLM builds the model, calls `load_weights`, and post-processes. The ``load_weights`` of the model is traced and
    what it copies is read straight into its parameters; the rest is streamed through it. Nothing is written on any rank
    before the plans of all ranks have no problem, and where one rank fails, all raise what it met.

    Raises ConfigError for what `VllmOptions` does not know. report: of the last load, None before.
    """

    def __init__(self, load_config_: Any) -> None:
        super().__init__(load_config_)
        self.options = options_for(load_config_)
        self.config = load_config(load_config_)
        self.report: Report | None = None

    def download_model(self, model_config: Any) -> None:
        """Fetch the weights from the Hub, unless they are here."""
        (source,) = sources_of(model_config, None, self._weights(model_config))
        locate(source, self.config, self.config.load_format)

    def load_model(self, vllm_config: Any, model_config: Any, **more: Any) -> nn.Module:
        """Do all that vLLM does; what it loads for is known meanwhile.

        Parameters may have the pages of files until vLLM has made of them what it uses; those that are left are copied
        then.
        """
        with engine.loading_for(vllm_config), self._borrowing() as borrowed:
            made: nn.Module = super().load_model(vllm_config=vllm_config, model_config=model_config, **more)
            for each in borrowed:
                settle(made, each, engine.log)
            return made

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fill `model`. Raises LocateError, FormatError, PlanError, ReadError, FinalizeError, on all ranks the same."""
        ranks = engine.agreement(model_config)
        seconds: dict[str, float] = {}
        with warnings_in(engine.log), ExitStack() as until_loaded:
            with ranks.together():
                with timed(seconds, "open"):
                    checkpoint = until_loaded.enter_context(self._opened(model_config, model))
                online = engine.quantizes_while_loading(model)
                load = None if online else self._planned(model, checkpoint, model_config)
                if load is not None and load.borrowed is not None:
                    _unsettled.get()[self].append(load.borrowed)
                party = until_loaded.enter_context(closing(party_of(load)))
                mine = json.dumps([uses_of(load), party.offer, told_of(checkpoint.storage, checkpoint.catalogue.files)])
            uses, offers, files = zip(*map(json.loads, ranks.exchanged(mine)), strict=True)
            with ranks.together():
                if load is not None:
                    refuse_misfit(load, uses)
            with ranks.together(touches=True):
                if load is None:
                    config = self._assumed(model_config)
                    report = stream_online(model, checkpoint, config, self._progress, ranks.watch)
                else:
                    rank = engine.ranks(model_config).rank
                    with reading_together(load, party, offers, rank, self._read_options(files, rank)):
                        report = self._run(model, load, ranks.watch)
        needs = None if load is None else taken(load.own.traced, checkpoint.catalogue)
        remember(model, str(model_config.model), needs)
        self.report = replace(report, seconds={**seconds, **report.seconds})
        tell(engine.log, self.report, checkpoint.catalogue.nbytes)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Return all (name, tensor) for vLLM's ``reload_weights``; of a model that was loaded here, what it needs.

        They come from where the option `weights` says, unless vLLM says another place than when the model was loaded.
        Values that this rank's plan does not need are not read, and are zero. The checkpoint is opened, and compared
        with the plan, before this returns: PlanError says what does not fit, and nothing has been touched then.
        """
        ranks = engine.agreement(model_config)
        with warnings_in(engine.log), ExitStack() as if_refused:
            with ranks.together():
                moved = is_elsewhere(model, str(model_config.model))
                checkpoint = if_refused.enter_context(self._opened(model_config, model, moved=moved))
                needs = needs_of(model, checkpoint)
            if_refused.pop_all()
        return self._restored(checkpoint, needs, self._assumed(model_config))

    def _restored(
        self, checkpoint: Checkpoint, needs: Needs | None, config: LoadConfig
    ) -> Iterator[tuple[str, torch.Tensor]]:
        with checkpoint, closing(restored(checkpoint, needs, config)) as tensors:
            yield from tensors

    def _planned(self, model: nn.Module, checkpoint: Checkpoint, model_config: Any) -> Planned:
        shared = partial(engine.shared_with_served, model, model_config)
        borrows = self in _unsettled.get() and self.options.borrow
        config = self._assumed(model_config)
        return planned(model, checkpoint, config, engine.has_default_scales, shared, borrows=borrows)

    @contextmanager
    def _borrowing(self) -> Iterator[list[Borrowed]]:
        """Have loads borrow memory within the block, as somebody settles what they have borrowed before it ends."""
        borrowed = list[Borrowed]()
        token = _unsettled.set({self: borrowed})
        try:
            yield borrowed
        finally:
            _unsettled.reset(token)
            with ExitStack() as closing_all:
                for each in borrowed:
                    closing_all.callback(each.close)

    def _assumed(self, model_config: Any) -> LoadConfig:
        return assumed(self.config, engine.ranks(model_config))

    def _read_options(self, files: Sequence[str], rank: int) -> ReadOptions:
        """Return how this rank reads, told the files of all. Nobody knows whether other engines share those of one."""
        alone = len(files) == 1
        return assumed(self.config, Ranks(1, 0)).read if alone else self.config.read.among(*sharing(files, rank))

    def _run(self, model: nn.Module, load: Planned, watch: Any) -> Report:
        own = load.own
        own.watch = watch
        report = api.run(
            model, own.prepared, executor=own.executor, progress=self._progress, watch=watch, schedule=load.schedule
        )
        left = (name for name, share in own.lacking.items() if not share.written)
        return replace(own.account(report), computed=(*load.computed, *left), post_processed=())

    def _opened(self, model_config: Any, model: nn.Module, *, moved: bool = False) -> Checkpoint:
        weights = None if moved else self._weights(model_config)
        return open_for(sources_of(model_config, model, weights), self.config)

    def _weights(self, model_config: Any) -> str | None:
        return None if engine.is_drafted(model_config) else self.options.weights

    @property
    def _progress(self) -> Progress:
        tells = getattr(self.load_config, "use_tqdm_on_load", True) and engine.is_first_rank()
        return progress_in(engine.log) if tells else SILENT
