"""The commands: a thin skin over the library. What they print is made elsewhere; how they end is in `ending`.

Results go to standard output, progress and errors to standard error. With ``--json``, standard output is one JSON
document, whose keys are documented and stay. What a command needs is imported when it runs.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tensorferry import __version__
from tensorferry.cli.ending import ending_well, printable
from tensorferry.cli.places import PLACE
from tensorferry.core.amounts import counted
from tensorferry.core.plan import Strictness
from tensorferry.errors import ConfigError, PlanError, shown
from tensorferry.formats.file_names import LOAD_FORMATS
from tensorferry.progress import SILENT, Progress, for_stream

__all__ = ["app", "main"]

_FILE = click.Path(path_type=Path, dir_okay=False)

_CHOOSING = (
    click.argument("path", type=PLACE),
    click.option("--json", "as_json", is_flag=True, help="Print JSON for programs."),
    click.option(
        "--load-format",
        metavar="NAME",
        default="auto",
        show_default=True,
        help=f"One of {', '.join(LOAD_FORMATS)}.",
    ),
    click.option("--subfolder", metavar="FOLDER", help="Where below PATH the weights are."),
    click.option("--variant", metavar="WORD", help="Such as fp16 in model.fp16.safetensors."),
    click.option("--allow", metavar="PATTERN", multiple=True, help="Take these files, whatever else is there."),
    click.option("--ignore", metavar="PATTERN", multiple=True, help="Do not look at these files."),
    click.option("--links-to", metavar="FOLDER", multiple=True, help="Links in PATH may lead into this folder, too."),
    click.option("--encryption-keyfile", metavar="FILE", type=_FILE, help="The key of encrypted Tensorizer files."),
)
_DTYPE = click.option("--dtype", metavar="TYPE", help="Such as bfloat16; without it, what config.json says.")
_CLASS = click.option("--auto-class", metavar="CLASS", help="Of transformers, instead of what config.json names.")
_REVISION = click.option("--revision", metavar="NAME", help="Branch, tag or commit, where PATH is a name on the Hub.")
_STRICT = click.option("--strict", is_flag=True, help="Refuse tensors that the model does not want, too.")
_QUIET = click.option("--quiet", "-q", is_flag=True, help="No progress.")


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


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 good, 1 the checkpoint or the model is at fault, 2 the call is.",
)
@click.version_option(__version__, message="tensorferry %(version)s")
def app() -> None:
    """Inspect, plan, load, run, convert and verify the weights of language models.

    PATH is a folder that holds a checkpoint, a weight file, or a shard index, or the address of one, such as
    s3://bucket/model; for plan, load and convert, also a name on the Hub, such as owner/model.
    """


def _on_a_checkpoint(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` a path, `as_json`, and as `opening` the options that choose files; let it end well."""

    @functools.wraps(command)
    def run(
        load_format: str,
        subfolder: str | None,
        variant: str | None,
        allow: Sequence[str],
        ignore: Sequence[str],
        links_to: Sequence[str],
        encryption_keyfile: Path | None,
        **rest: Any,
    ) -> None:
        opening = {
            "load_format": load_format,
            "subfolder": subfolder,
            "variant": variant,
            "allow_patterns": allow or None,
            "ignore_patterns": ignore,
            "links_to": links_to,
            "encryption_keyfile": encryption_keyfile,
        }
        with ending_well():
            command(opening=opening, **rest)

    for decorate in reversed(_CHOOSING):
        run = decorate(run)
    return run


@app.command("inspect")
@_on_a_checkpoint
@click.option("--tensors", "names", metavar="PATTERN", help="Only tensors with such names.")
@click.option("--all", "every", is_flag=True, help="A line for each tensor, instead of folding layers.")
def inspect_command(
    path: str | Path, as_json: bool, names: str | None, every: bool, opening: Mapping[str, Any]
) -> None:
    """Show what a checkpoint holds, from its headers alone."""
    from tensorferry.checkpoint import open_checkpoint
    from tensorferry.cli.inspecting import inspection, inspection_text

    with open_checkpoint(path, **opening) as checkpoint:
        if as_json:
            _print_json(inspection(checkpoint, names))
        else:
            _print(inspection_text(checkpoint, names, every=every))


@app.command("plan")
@_on_a_checkpoint
@_DTYPE
@_CLASS
@_REVISION
@_STRICT
@click.option("--tp", metavar="N", type=click.IntRange(1), default=1, help="Divide it among N tensor-parallel ranks.")
@click.option("--ep", metavar="N", type=click.IntRange(1), default=1, help="Deal experts to N expert-parallel ranks.")
@click.option("--pp", metavar="N", type=click.IntRange(1), default=1, help="Deal layers to N pipeline stages.")
@click.option("--rank", metavar="N", default="all", help="The plan of one rank, instead of the sizes of all.")
def plan_command(
    path: str | Path,
    as_json: bool,
    dtype: str | None,
    auto_class: str | None,
    revision: str | None,
    strict: bool,
    tp: int,
    ep: int,
    pp: int,
    rank: str,
    opening: Mapping[str, Any],
) -> None:
    """Show what loading would read and where it would go.

    Into the transformers model that config.json names, which is built without memory. Fails where checkpoint and
    model do not fit, with every problem. With --tp, --ep or --pp, for every rank of a cluster: what it would read,
    hold and stage.
    """
    from tensorferry.cli.loading import WantedModel, plan_checkpoint, plan_ranks

    wanted = WantedModel(path, dtype, auto_class, revision, _strictness(strict), opening)
    if (tp, ep, pp) != (1, 1, 1):
        planned = plan_ranks(wanted, tp=tp, ep=ep, pp=pp, rank=rank)
        one = None if rank == "all" else planned.ranks[0].plan
        if as_json and one is not None:
            click.echo(one.to_json())
        elif as_json:
            _print_json(planned.to_dict())
        else:
            _print(str(planned) if one is None else f"{one.explain()}\n\n{planned}")
        return
    plan = plan_checkpoint(wanted)
    if as_json:
        click.echo(plan.to_json())
    else:
        _print(plan.explain())
    if plan.fatal:
        count = counted(len(plan.fatal), "problem")
        raise PlanError(
            f"{shown(str(path), 300)}: checkpoint and model do not fit: {count}, told with the plan", plan.fatal
        )


@app.command("load")
@_on_a_checkpoint
@click.option("--device", metavar="DEVICE", default="cpu", help="Where parameters go, such as cuda:0.")
@_DTYPE
@_CLASS
@_REVISION
@_STRICT
@click.option("--verify", "check", is_flag=True, help="Read the files whole and compare digests first.")
@click.option("--html", "page", metavar="FILE", type=_FILE, help="Write the report as a page, too.")
@_QUIET
def load_command(
    path: str | Path,
    as_json: bool,
    device: str,
    dtype: str | None,
    auto_class: str | None,
    revision: str | None,
    strict: bool,
    check: bool,
    page: Path | None,
    quiet: bool,
    opening: Mapping[str, Any],
) -> None:
    """Load the transformers model that config.json names, and print the report."""
    _refuse_without_folder(page)
    from tensorferry.cli.loading import WantedModel, load_checkpoint

    wanted = WantedModel(path, dtype, auto_class, revision, _strictness(strict), opening)
    report = load_checkpoint(wanted, device=device, verify=check, progress=_progress(quiet))
    if as_json:
        click.echo(report.to_json())
    else:
        _print(str(report))
    if page is not None:
        page.write_text(report.to_html(), encoding="utf-8")


@app.command("run")
@_on_a_checkpoint
@click.option("--prompt", metavar="TEXT", default="1, 2, 3, 4,", show_default=True, help="What to go on from.")
@click.option("--max-new-tokens", metavar="N", type=click.IntRange(1), default=24, show_default=True)
@click.option("--tokenizer", metavar="FOLDER", type=click.Path(path_type=Path), help="Where transformers finds one.")
@click.option("--device", metavar="DEVICE", default="cpu", help="Where the model goes, such as cuda:0.")
@_DTYPE
@_QUIET
def run_command(
    path: str | Path,
    as_json: bool,
    prompt: str,
    max_new_tokens: int,
    tokenizer: Path | None,
    device: str,
    dtype: str | None,
    quiet: bool,
    opening: Mapping[str, Any],
) -> None:
    """Load a language model, and let it go on from a prompt: report first, then the text.

    Always by the likeliest token. PATH may be a GGUF file, whose configuration and tokenizer are inside.
    """
    from tensorferry.cli.running import run_model

    ran = run_model(
        path,
        prompt,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        progress=_progress(quiet),
        **opening,
    )
    if as_json:
        report = json.loads(ran.report.to_json())
        _print_json({"prompt": ran.prompt, "text": ran.text, "tokens": ran.tokens, "report": report})
    else:
        _print(f"{ran.report}\n\n{ran.prompt}{ran.text}")


@app.command("convert")
@_on_a_checkpoint
@click.argument("destination", type=PLACE)
@click.option(
    "--to", metavar="FORMAT", default="safetensors", show_default=True, help="Or npcache, sharded_state, tensorizer."
)
@click.option("--dtype", metavar="TYPE", help="What floating-point tensors become, such as bfloat16.")
@click.option("--max-shard-size", metavar="SIZE", default="5GB", show_default=True, help="Or 500MiB, or bytes.")
@click.option("--names", metavar="WHICH", default="auto", show_default=True, help="Or hf, or keep for its own.")
@_REVISION
@click.option("--overwrite", is_flag=True, help="Replace what is at DESTINATION, at the end.")
@click.option("--allow-lossy", is_flag=True, help="Let values overflow in a cast; they are counted.")
@click.option("--allow-unknown", is_flag=True, help="Leave out tensors that no rule names.")
@click.option("--no-verify", "verify", is_flag=True, flag_value=False, default=True, help="Do not read back.")
@click.option("--sha256sums", is_flag=True, help="Write the digests of all files beside them.")
@click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@_QUIET
def convert_command(
    path: str | Path,
    destination: str | Path,
    as_json: bool,
    allow_lossy: bool,
    allow_unknown: bool,
    quiet: bool,
    opening: Mapping[str, Any],
    **options: Any,
) -> None:
    """Write a checkpoint in another format, type or naming, to a folder or a file.

    DESTINATION gets all of it or nothing, also where this is killed. GGUF and Mistral's own layout get the names of
    transformers. Configuration, tokenizer and code go along.
    """
    from tensorferry.cli.converting import Asked, converted

    asked = Asked(path, destination, allow_lossy, allow_unknown, options, opening)
    account = converted(asked, _progress(quiet))
    if as_json:
        click.echo(account.to_json())
    else:
        _print(str(account))


@app.command("verify")
@_on_a_checkpoint
@click.option("--manifest", metavar="FILE", type=_FILE, help="Digests, as sha256sum writes them.")
@_QUIET
def verify_command(
    path: str | Path, as_json: bool, manifest: Path | None, quiet: bool, opening: Mapping[str, Any]
) -> None:
    """Check headers and index, read every byte, and compare digests where there are some."""
    from tensorferry.verify import verify

    verified = verify(path, manifest=manifest, progress=_progress(quiet), **opening)
    if as_json:
        _print_json(verified.to_dict())
    else:
        _print(str(verified))


def _refuse_without_folder(page: Path | None) -> None:
    """Raise ConfigError for a page that could not be written, before the minutes that a load may take."""
    if page is not None and not page.absolute().parent.is_dir():
        raise ConfigError(f"--html {page}: there is no folder {page.absolute().parent}")


def _strictness(strict: bool) -> Strictness:
    return Strictness.strict() if strict else Strictness()


def _progress(quiet: bool) -> Progress:
    return SILENT if quiet else for_stream()


def _print(text: str) -> None:
    click.echo(printable(text))


def _print_json(data: Mapping[str, Any]) -> None:
    # Indenting takes ten times as long, which shows for 90,000 tensors; programs do not need it.
    click.echo(json.dumps(data, indent=2 if sys.stdout.isatty() else None))
