"""The commands: a thin skin over the library. What they print is made elsewhere; how they end is in `ending`.

Results go to standard output, progress and errors to standard error. With ``--json``, standard output is one JSON
document, whose keys are documented and stay.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tensorferry.cli.ending import ending_well, printable
from tensorferry.core.plan import Strictness
from tensorferry.errors import ConfigError, PlanError
from tensorferry.progress import SILENT, Progress, for_stream

__all__ = ["app", "main"]

app = typer.Typer(
    name="tensorferry",
    help="Inspect, plan, load and verify the weights of language models.",
    epilog="Exit status: 0 good, 1 the checkpoint or the model is at fault, 2 the call is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A folder with a checkpoint, or one of its files.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
LoadFormat = Annotated[str, typer.Option(metavar="NAME", help="auto, hf, safetensors, mistral or pt.")]
Subfolder = Annotated[str | None, typer.Option(metavar="FOLDER", help="Where below PATH the weights are.")]
Variant = Annotated[str | None, typer.Option(metavar="WORD", help="Such as fp16 in model.fp16.safetensors.")]
Allow = Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Take these files, whatever else is there.")]
Ignore = Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Do not look at these files.")]
Dtype = Annotated[str | None, typer.Option(metavar="TYPE", help="Such as bfloat16; without it, the model's own.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse tensors that the model does not want, too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit with its status. arguments: instead of those of the process."""
    _make_streams_usable()
    # What the library warns of is part of what the commands print; without a handler, it would be there twice.
    logging.getLogger("tensorferry").addHandler(logging.NullHandler())
    app(None if arguments is None else list(arguments), prog_name="tensorferry")


def _make_streams_usable() -> None:
    """Give a process that was started without them outputs, and let those of a narrow encoding take every letter."""
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _version(wanted: bool) -> None:
    if wanted:
        from tensorferry import __version__

        typer.echo(f"tensorferry {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Inspect, plan, load and verify the weights of language models."""


@app.command("inspect")
def inspect_command(
    path: PathArgument,
    as_json: AsJson = False,
    load_format: LoadFormat = "auto",
    subfolder: Subfolder = None,
    variant: Variant = None,
    allow: Allow = None,
    ignore: Ignore = None,
    names: Annotated[
        str | None, typer.Option("--tensors", metavar="PATTERN", help="Only tensors with such names.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="A line for each tensor, instead of folding layers.")] = False,
) -> None:
    """Show what a checkpoint holds, from its headers alone."""
    with ending_well():
        from tensorferry.checkpoint import open_checkpoint
        from tensorferry.cli.inspecting import inspection, inspection_text

        with open_checkpoint(path, **_opening(load_format, subfolder, variant, allow, ignore)) as checkpoint:
            if as_json:
                _print_json(inspection(checkpoint, names))
            else:
                typer.echo(printable(inspection_text(checkpoint, names, every=every)))


@app.command("plan")
def plan_command(
    path: PathArgument,
    as_json: AsJson = False,
    load_format: LoadFormat = "auto",
    subfolder: Subfolder = None,
    variant: Variant = None,
    allow: Allow = None,
    ignore: Ignore = None,
    dtype: Dtype = None,
    strict: Strict = False,
) -> None:
    """Show what loading would read and where it would go.

    Into the transformers model that config.json names. Reads headers only; fails where checkpoint and model do not
    fit, with every problem.
    """
    with ending_well():
        from tensorferry.cli.loading import plan_checkpoint

        opening = _opening(load_format, subfolder, variant, allow, ignore)
        plan = plan_checkpoint(path, dtype=dtype, strict=_strictness(strict), **opening)
        typer.echo(plan.to_json() if as_json else printable(plan.explain()))
        if plan.fatal:
            count = f"{len(plan.fatal):,} problem" + ("s" if len(plan.fatal) > 1 else "")
            raise PlanError(f"{path}: checkpoint and model do not fit: {count}, told with the plan", plan.fatal)


@app.command("load")
def load_command(
    path: PathArgument,
    as_json: AsJson = False,
    load_format: LoadFormat = "auto",
    subfolder: Subfolder = None,
    variant: Variant = None,
    allow: Allow = None,
    ignore: Ignore = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where parameters go, such as cuda:0.")] = "cpu",
    dtype: Dtype = None,
    strict: Strict = False,
    check: Annotated[bool, typer.Option("--verify", help="Compare digests first; see verify.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, writable=True, help="Write the report as a page, too."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Load the transformers model that config.json names, and print the report."""
    with ending_well():
        _refuse_without_folder(html)
        from tensorferry.cli.loading import load_checkpoint

        opening = _opening(load_format, subfolder, variant, allow, ignore)
        report = load_checkpoint(
            path,
            device=device,
            dtype=dtype,
            strict=_strictness(strict),
            verify=check,
            progress=_progress(quiet),
            **opening,
        )
        typer.echo(report.to_json() if as_json else printable(str(report)))
        if html is not None:
            html.write_text(report.to_html(), encoding="utf-8")


@app.command("verify")
def verify_command(
    path: PathArgument,
    as_json: AsJson = False,
    load_format: LoadFormat = "auto",
    subfolder: Subfolder = None,
    variant: Variant = None,
    allow: Allow = None,
    ignore: Ignore = None,
    manifest: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="As sha256sum writes it.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Check headers and index, read every byte, and compare digests where there are some."""
    with ending_well():
        from tensorferry.verify import verify

        opening = _opening(load_format, subfolder, variant, allow, ignore)
        verified = verify(path, manifest=manifest, progress=_progress(quiet), **opening)
        if as_json:
            _print_json(verified.to_dict())
        else:
            typer.echo(printable(str(verified)))


def _opening(
    load_format: str, subfolder: str | None, variant: str | None, allow: list[str] | None, ignore: list[str] | None
) -> dict[str, Any]:
    return {
        "load_format": load_format,
        "subfolder": subfolder,
        "variant": variant,
        "allow_patterns": allow or None,
        "ignore_patterns": ignore or (),
    }


def _refuse_without_folder(page: Path | None) -> None:
    """Raise ConfigError for a page that could not be written, before the minutes that a load may take."""
    if page is not None and not page.absolute().parent.is_dir():
        raise ConfigError(f"--html {page}: there is no folder {page.absolute().parent}")


def _strictness(strict: bool) -> Strictness:
    return Strictness.strict() if strict else Strictness()


def _progress(quiet: bool) -> Progress:
    return SILENT if quiet else for_stream()


def _print_json(data: dict[str, Any]) -> None:
    # Indenting takes ten times as long, which shows for 90,000 tensors; programs do not need it.
    typer.echo(json.dumps(data, indent=2 if sys.stdout.isatty() else None))
