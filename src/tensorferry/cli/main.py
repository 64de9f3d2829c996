"""The commands, and how their errors end: a thin skin over the library.

Exit status: 0 good, 1 the checkpoint or the model is at fault, 2 the call is. Results go to standard output, progress
and errors to standard error. ``--json`` prints one JSON document whose keys are documented and stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tensorferry.cli.inspecting import inspection, inspection_table
from tensorferry.core.plan import Strictness
from tensorferry.errors import ConfigError, TensorferryError
from tensorferry.progress import SILENT, Progress, for_stream

__all__ = ["app", "main"]

app = typer.Typer(
    name="tensorferry",
    help="Inspect, plan, load and verify the weights of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

PathArgument = Annotated[Path, typer.Argument(help="A folder with a checkpoint, or one of its files.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
LoadFormat = Annotated[str, typer.Option(help="auto, hf, safetensors, mistral or pt.")]
Subfolder = Annotated[str | None, typer.Option(help="The folder below PATH that holds the weights.")]
Variant = Annotated[str | None, typer.Option(help="Such as fp16 in model.fp16.safetensors.")]
Dtype = Annotated[str | None, typer.Option(help="Such as bfloat16; the model's own without it.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse tensors that the model does not want, too.")]
Names = Annotated[str | None, typer.Option("--tensors", help="Only tensors whose names match, such as '*.norm.*'.")]
Every = Annotated[bool, typer.Option("--all", help="One line for each tensor; layers are folded without it.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        app(standalone_mode=True)
    except ConfigError as error:
        _end(error, 2)
    except TensorferryError as error:
        _end(error, 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("tensorferry: interrupted\n")
        sys.exit(130)


@app.command("inspect")
def inspect_command(
    path: PathArgument,
    as_json: AsJson = False,
    load_format: LoadFormat = "auto",
    subfolder: Subfolder = None,
    variant: Variant = None,
    names: Annotated[
        str | None, typer.Option("--tensors", help="Only tensors whose names match, such as '*.norm.*'.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="One line for each tensor; layers are folded without it.")
    ] = False,
) -> None:
    """Show what a checkpoint holds, from its headers alone."""
    from tensorferry.checkpoint import open_checkpoint

    with open_checkpoint(path, load_format=load_format, subfolder=subfolder, variant=variant) as checkpoint:
        if as_json:
            _print_json(inspection(checkpoint, names))
        else:
            inspection_table(checkpoint, names, every=every)


@app.command("plan")
def plan_command(
    path: PathArgument,
    as_json: AsJson = False,
    load_format: LoadFormat = "auto",
    subfolder: Subfolder = None,
    variant: Variant = None,
    dtype: Dtype = None,
    strict: Strict = False,
) -> None:
    """Show what loading would read and where it would go, for the transformers class that config.json names.

    Reads headers only. Fails where checkpoint and model do not fit, with every problem.
    """
    from tensorferry.compat.transformers import plan_model

    opening = {"load_format": load_format, "subfolder": subfolder, "variant": variant}
    plan = plan_model(path, dtype=dtype, strict=_strictness(strict), **opening)
    typer.echo(plan.to_json() if as_json else plan.explain())
    if plan.fatal:
        sys.exit(1)


@app.command("load")
def load_command(
    path: PathArgument,
    as_json: AsJson = False,
    load_format: LoadFormat = "auto",
    subfolder: Subfolder = None,
    variant: Variant = None,
    device: Annotated[str, typer.Option(help="Where parameters go, such as cpu or cuda:0.")] = "cpu",
    dtype: Dtype = None,
    strict: Strict = False,
    quiet: Quiet = False,
) -> None:
    """Load the transformers class that config.json names, and print the report."""
    from tensorferry.compat.transformers import load_model_with_report

    opening = {"load_format": load_format, "subfolder": subfolder, "variant": variant}
    _, report = load_model_with_report(
        path, device=device, dtype=dtype, strict=_strictness(strict), progress=_progress(quiet), **opening
    )
    typer.echo(report.to_json() if as_json else str(report))


@app.command("verify")
def verify_command(
    path: PathArgument,
    as_json: AsJson = False,
    load_format: LoadFormat = "auto",
    subfolder: Subfolder = None,
    variant: Variant = None,
    manifest: Annotated[Path | None, typer.Option(help="A file as sha256sum writes it.", exists=True)] = None,
    quiet: Quiet = False,
) -> None:
    """Check headers and index, read every byte, and compare digests where there are some."""
    from tensorferry.verify import verify

    opening = {"load_format": load_format, "subfolder": subfolder, "variant": variant}
    verified = verify(path, manifest=manifest, progress=_progress(quiet), **opening)
    if as_json:
        _print_json(verified.to_dict())
    else:
        typer.echo(str(verified))


def _strictness(strict: bool) -> Strictness:
    return Strictness.strict() if strict else Strictness()


def _progress(quiet: bool) -> Progress:
    return SILENT if quiet else for_stream()


def _print_json(data: dict[str, Any]) -> None:
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _end(error: TensorferryError, status: int) -> None:
    touched = "; parts of the model had been written" if error.touched else ""
    sys.stderr.write(f"tensorferry: {error}{touched}\n")
    sys.exit(status)
