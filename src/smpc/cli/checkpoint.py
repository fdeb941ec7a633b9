"""`smpc checkpoint inspect|verify|convert|prune`: look at checkpoints, check every byte, change their form, remove old ones.

Exit status: 0; 1 of `verify` if something is damaged; 2 if what the user gave is wrong. Nothing that exists is written over. On a terminal
long work shows a bar on stderr.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smpc.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from smpc.checkpoint.folder.folders import Root
    from smpc.checkpoint.reader import Checkpoint
    from smpc.checkpoint.sources.conversion_sources import Source
    from smpc.report.tables import TextTable

checkpoint_app = typer.Typer(
    help="Look at checkpoints, verify them, convert them between forms, and remove old ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_CONTENT = "user_content_"  # beside full models
_MAX_TEXT = 64 << 20
_PATH = typer.Argument(metavar="PATH", help="A checkpoint, or the folder of a run's checkpoints.", show_default=False)


class Form(enum.StrEnum):
    """What `convert` writes."""

    PARTIAL = "partial"
    FULL = "full"
    TORCH = "torch"
    HF = "hf"
    DCP = "dcp"


@checkpoint_app.command("inspect")
def inspect_command(
    path: Annotated[str, _PATH],
    tensors: Annotated[bool, typer.Option("--tensors", "-t", help="List every tensor.")] = False,
    json_only: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show what a checkpoint holds, or which checkpoints a folder holds.

    Reads checkpoints, Hugging Face folders, .safetensors files, torch.distributed.checkpoint folders and .pt files.
    """
    from smpc.checkpoint.convert import open_source
    from smpc.checkpoint.folder.folders import Root

    if _is_root(path):
        root = Root(path)
        if json_only:
            sys.stdout.write(json.dumps(_root_json(root), indent=2) + "\n")
        else:
            _show_root(root)
        return
    with open_source(path, any_name=True) as source:
        if json_only:
            sys.stdout.write(json.dumps(_source_json(source), indent=2) + "\n")
        else:
            _show_source(path, source, tensors)


@checkpoint_app.command("verify")
def verify_command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A checkpoint, the folder of a run's, a .safetensors file or a folder of them.",
            show_default=False,
        ),
    ],
) -> None:
    """Check every byte against its checksum.

    Exit status 0 if all is well; 1 if anything is damaged or incomplete, one line each; 2 if there is nothing to check. Of
    safetensors files that others have written, which have no checksums, the structure is checked, and a line says so.
    """
    from smpc.checkpoint.folder.folders import Root, read_manifest
    from smpc.checkpoint.format.manifest import NAME

    problems: list[str] = []
    if _is_root(path):
        root = Root(path)
        problems += root.damaged()
        for tag in root.tags():
            problems += _verify_folder(root.find(tag))
        for tag in _full_models(root.path):
            problems += _verify_full(root.path, tag)
    elif os.path.lexists(os.path.join(path, NAME)):
        read_manifest(Root(path).path)  # bad input, not damage
        problems += _verify_folder(Root(path).path)
    else:
        problems += _verify_files(path)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)


@checkpoint_app.command("convert")
def convert_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint, Hugging Face folder, .safetensors or .pt file, or torch.distributed.checkpoint folder.",
            show_default=False,
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="What to write; must not exist.", show_default=False)],
    to: Annotated[
        Form,
        typer.Option(
            help="partial: a checkpoint that loads on any topology; full: one .safetensors file of the model; torch: one file of it for "
            "torch.load; hf: a folder for from_pretrained; dcp: torch.distributed.checkpoint."
        ),
    ],
    dtype: Annotated[str | None, typer.Option(help="Cast the model: float32, bfloat16, float16, ...")] = None,
    max_file_size: Annotated[float, typer.Option(metavar="GB", help="hf: largest file, in 10^9 bytes.")] = 5.0,
    copy: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="hf: copy a text file beside the tensors, e.g. config.json."),
    ] = None,
    model_type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="hf: the layers were distributed by smp.tensor_parallelism; give them the names of this type of model: gpt2, bert, ...",
        ),
    ] = None,
) -> None:
    """Convert a checkpoint. One tensor is in memory at a time; nothing is ever overwritten."""
    from smpc.checkpoint.convert import open_source, write_checkpoint
    from smpc.checkpoint.distributed import write_distributed
    from smpc.checkpoint.sources.conversion_sources import tied_names, with_tied
    from smpc.checkpoint.sources.export import write_archive_of, write_file_of, write_folder

    as_dtype = _dtype_option(dtype)
    _check_form(to, {"--copy": copy, "--model-type": model_type}, as_dtype)
    if not 1e-9 <= max_file_size < math.inf:
        raise ConfigError(f"--max-file-size: expected a number of GB above 0, found {max_file_size:g}")
    most = int(max_file_size * 1e9)
    files = _copied_texts(copy or [])
    with open_source(source) as opened:
        total = sum(item.num_bytes for item in opened.items if to in (Form.PARTIAL, Form.DCP) or item.kind == "model")
        with _plain_warnings(), _progress_bar(f"Writing {target}", total) as advance:
            if to is Form.PARTIAL:
                write_checkpoint(opened, target, dtype=as_dtype, advance=advance)
            elif to is Form.FULL:
                write_file_of(with_tied(opened), target, dtype=as_dtype, advance=advance)
            elif to is Form.TORCH:
                write_archive_of(opened, target, aliases=tied_names(opened), dtype=as_dtype, advance=advance)
            elif to is Form.HF:
                named = opened if model_type is None else _as_hugging_face(opened, model_type)
                write_folder(named, target, files=files, dtype=as_dtype, max_file_bytes=most, advance=advance)
            else:
                write_distributed(opened, target, advance=advance)
    typer.echo(f"{target}: written")


def _check_form(to: Form, for_hugging_face: Mapping[str, object], dtype: object) -> None:
    """Raise ConfigError for options, by name, that the form does not have."""
    for name, given in for_hugging_face.items():
        if to is not Form.HF and given:
            raise ConfigError(f"{name}: has no effect with --to {to}; only --to hf is for Hugging Face")
    if to is Form.DCP and dtype is not None:
        raise ConfigError("--dtype: not possible with --to dcp; convert with --to partial first")


@checkpoint_app.command("prune")
def prune_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The folder of a run's checkpoints.", show_default=False)],
    keep: Annotated[int, typer.Option(metavar="N", help="How many of the newest checkpoints to keep.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove all but the newest checkpoints, and what saves that did not end have left."""
    from smpc.checkpoint.folder.folders import Root, check_keep
    from smpc.checkpoint.format.manifest import NAME

    check_keep(keep)
    if not _is_root(path):
        is_one = os.path.lexists(os.path.join(path, NAME))
        found = "a checkpoint; name the folder it is in" if is_one else "none in it"
        raise CheckpointError(f"{path}: expected a folder of checkpoints, found {found}")
    root = Root(path)
    if dry_run:
        for tag in root.tags()[:-keep]:
            typer.echo(f"would remove {os.path.join(root.path, tag)}")
        return
    with _plain_warnings():
        for line in root.clean():
            typer.echo(line)
        for tag in root.prune(keep):
            typer.echo(f"removed {os.path.join(root.path, tag)}")


def _is_root(path: str) -> bool:
    """Whether a path is a folder of checkpoints. Raises CheckpointError if there is nothing at all."""
    from smpc.checkpoint.folder.folders import MARKER
    from smpc.checkpoint.format.manifest import NAME

    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: no such file or folder")
    if not os.path.isdir(path):
        return False
    try:
        names = os.listdir(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return NAME not in names and (
        MARKER in names
        or bool(_full_models(path))
        or any(os.path.lexists(os.path.join(path, name, NAME)) for name in names)
    )


def _verify_folder(folder: str) -> list[str]:
    """Verifies a checkpoint folder; returns what is damaged."""
    from smpc.checkpoint.reader import Checkpoint, verify
    from smpc.report.format import format_bytes

    try:
        with Checkpoint.open(folder) as checkpoint:
            with _progress_bar(f"Verifying {folder}", checkpoint.manifest.num_bytes) as advance:
                damaged = verify(checkpoint, advance)
            size = format_bytes(checkpoint.manifest.num_bytes)
            if not damaged:
                typer.echo(f"{folder}: {len(checkpoint.entries)} tensors, {size}, all as written")
            return damaged
    except CheckpointError as error:
        return str(error).splitlines()


def _verify_full(folder: str, tag: str) -> list[str]:
    """A full model, and what was saved beside it."""
    from smpc.checkpoint.folder.folders import Root
    from smpc.checkpoint.sources.export import standing

    beside = Root(os.path.join(folder, f"{_CONTENT}{tag}"))
    problems = _verify_files(standing(os.path.join(folder, tag)) or os.path.join(folder, tag))
    if os.path.isdir(beside.path):
        problems += beside.damaged()
        for name in beside.tags():
            problems += _verify_folder(beside.find(name))
    return problems


def _verify_files(path: str) -> list[str]:
    """Safetensors files without a manifest."""
    from smpc.checkpoint.sources.verify_files import safetensors_files, verify_file, wrong_set
    from smpc.report.format import format_bytes

    try:
        files = safetensors_files(path)
    except CheckpointError as error:
        return str(error).splitlines()
    if not files:
        raise CheckpointError(
            f"{path}: expected a checkpoint, a folder of them, or safetensors; other forms have no checksums to check, convert it to one "
            "first"
        )
    problems: list[str] = []
    for file in files:
        try:
            with _progress_bar(f"Verifying {file}", os.path.getsize(file)) as advance:
                found = verify_file(file, advance)
        except CheckpointError as error:
            problems += str(error).splitlines()
            continue
        problems += found.damaged
        how = (
            "all as written"
            if found.has_checksums
            else "in order; it has no checksums, so its values cannot be checked"
        )
        if not found.damaged:
            typer.echo(f"{file}: {found.num_tensors} tensors, {format_bytes(found.num_bytes)}, {how}")
    return list(dict.fromkeys([*problems, *wrong_set(path)]))


def _show_root(root: Root) -> None:
    from smpc.checkpoint.folder.folders import check_whole
    from smpc.report.format import format_bytes, printable
    from smpc.report.tables import TextTable

    rows = []
    for tag in root.tags():
        manifest = check_whole(root.find(tag))
        rows.append(
            (
                tag,
                ", ".join(manifest.kinds),
                str(len(manifest.entries)),
                format_bytes(manifest.num_bytes),
                str(manifest.world_size),
            )
        )
    headers = ("Checkpoint", "Kinds", "Tensors", "Size", "Ranks")
    _print_table(root.path, TextTable(headers, tuple(rows), left=headers[:2]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, problems = root.newest() or "none", []
        except CheckpointError as error:  # there are some, and none is whole
            found, problems = "none", str(error).splitlines()
    typer.echo(f"newest: {found}")
    for line in [
        *problems,
        *(str(warning.message) for warning in caught),
    ]:  # what is ignored, and a marker that names something else
        typer.echo(printable(line))
    full = _full_models(root.path)
    if full:
        typer.echo(f"full models, of smp.save_checkpoint(partial=False): {', '.join(map(printable, full))}")


def _show_source(path: str, source: Source, tensors: bool) -> None:
    from smpc.report.format import format_bytes, printable
    from smpc.report.tables import TextTable

    if tensors:
        rows = [
            (
                printable(i.kind),
                printable(i.name),
                _dtype_text(i.dtype),
                _shape_of_checkpoint_tensor(i.shape),
                format_bytes(i.num_bytes),
            )
            for i in source.items
        ]
        headers: tuple[str, ...] = ("Kind", "Name", "Dtype", "Shape", "Size")
        _print_table(path, TextTable(headers, tuple(rows), left=headers[:4]))
    else:
        kinds = sorted({item.kind for item in source.items})
        summary = []
        for kind in kinds:
            items = [item for item in source.items if item.kind == kind]
            dtypes = ", ".join(sorted({_dtype_text(item.dtype) for item in items}))
            summary.append(
                (printable(kind), str(len(items)), dtypes, format_bytes(sum(item.num_bytes for item in items)))
            )
        headers = ("Kind", "Tensors", "Dtypes", "Size")
        _print_table(path, TextTable(headers, tuple(summary), left=("Kind", "Dtypes")))
    for line in _notes_of_checkpoint(source):
        typer.echo(line)


def _notes_of_checkpoint(source: Source) -> list[str]:
    """The contents beside tensors."""
    from smpc.checkpoint.folder.folders import same_name
    from smpc.checkpoint.format.plain_json import rebuild
    from smpc.report.format import printable

    lines = [f"metadata: {printable(str(source.metadata))[:1000]}"] if source.metadata else []
    checkpoint = _checkpoint_of(source)
    if checkpoint is not None:
        manifest = checkpoint.manifest
        ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
        lines.append(f"saved by {ranks} as number {manifest.sequence}")
        renamed = same_name(checkpoint.folder, manifest.tag)
        lines += [renamed] if renamed is not None else []
        lines += ["with a plan"] if manifest.plan is not None else []
        user = rebuild(manifest.user, lambda name: _Described(checkpoint, f"user{name}"))
        lines += [f"user content: {printable(str(user))[:1000]}"] if user is not None else []
        lines += [f"pickled content, read only if asked for: {', '.join(manifest.pickled)}"] if manifest.pickled else []
    return lines


class _Described:
    """The placeholder for a tensor of a tree, which is not read only to be shown."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        from smpc.checkpoint.format.draft_content import VALUES

        entry = checkpoint.entries.get((VALUES, name))
        self._text = (
            "a tensor that is missing"
            if entry is None
            else f"{_dtype_text(entry.dtype)} {_shape_of_checkpoint_tensor(entry.shape)}"
        )

    def __repr__(self) -> str:
        return f"<{self._text}>"


def _full_models(path: str) -> list[str]:
    """The full models in a folder: what has content beside it."""
    from smpc.checkpoint.sources.export import standing

    tags = [name.removeprefix(_CONTENT) for name in sorted(os.listdir(path)) if name.startswith(_CONTENT)]
    return [tag for tag in tags if standing(os.path.join(path, tag)) is not None]


def _root_json(root: Root) -> dict[str, Any]:
    found = {"path": root.path, "checkpoints": root.tags(), "incomplete": root.incomplete()}
    return found | {"full": _full_models(root.path)}


def _source_json(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tensors": [
            {
                "kind": i.kind,
                "name": i.name,
                "dtype": _dtype_text(i.dtype),
                "shape": list(i.shape),
                "bytes": i.num_bytes,
            }
            for i in source.items
        ]
    }
    checkpoint = _checkpoint_of(source)
    if checkpoint is not None:
        manifest = checkpoint.manifest
        found |= {"tag": manifest.tag, "sequence": manifest.sequence, "ranks": manifest.world_size}
        found |= {"metadata": manifest.metadata, "plan": manifest.plan is not None, "pickled": list(manifest.pickled)}
    return found


def _checkpoint_of(source: Source) -> Checkpoint | None:
    from smpc.checkpoint.sources.conversion_sources import CheckpointSource

    return source.checkpoint if isinstance(source, CheckpointSource) else None


def _print_table(path: str, table: TextTable) -> None:
    """Prints a table under the name of a checkpoint."""
    from rich.text import Text

    from smpc.report.format import printable
    from smpc.report.terminal import stdout_console, text_table

    console = stdout_console()
    console.print(Text(printable(path), style="bold"))
    console.print(text_table(table, console.width))


def _as_hugging_face(source: Source, model_type: str) -> Source:
    """The tensors of distributed layers under Hugging Face's names. Raises ConfigError for a type that is not known."""
    from smpc.nn.huggingface.families import FAMILIES
    from smpc.v1.saving.hugging_face import Theirs

    types = {name.split(".")[2]: family.installed for name, family in FAMILIES.items()}  # transformers.models.TYPE....
    if model_type not in types:
        raise ConfigError(f"--model-type: expected one of {', '.join(types)}, found {model_type}")
    theirs = Theirs(source, types[model_type])
    if {item.name for item in theirs.items} == {item.name for item in source.items if item.kind == "model"}:
        raise ConfigError(f"--model-type: there are no distributed layers of {model_type}; leave it out")
    return theirs


def _copied_texts(paths: list[str]) -> dict[str, str]:
    """The texts of the files of `--copy`, by name."""
    from smpc.checkpoint.format.regular_file import is_file

    texts = {}
    for path in paths:
        try:
            if os.path.lexists(path) and not is_file(path):
                raise ConfigError(f"--copy: cannot read {path}: not a regular file")
            with open(path, encoding="utf-8") as file:
                texts[os.path.basename(path)] = file.read(_MAX_TEXT + 1)
            if len(texts[os.path.basename(path)]) > _MAX_TEXT:
                raise ConfigError(f"--copy: {path} has more than {_MAX_TEXT} characters; copy it yourself")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--copy: cannot read {path}: {getattr(error, 'strerror', None) or 'not a text'}"
            ) from error
    return texts


def _dtype_option(name: str | None) -> Any:
    """The dtype of `--dtype`."""
    import torch

    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"--dtype: expected a floating-point dtype such as float32 or bfloat16, found {name}")
    return found


def _dtype_text(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_of_checkpoint_tensor(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Shows warnings as lines, without the place in this library where they come from."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning, module="smpc")
        warnings.showwarning = lambda message, *rest, **more: typer.echo(f"smpc: warning: {message}", err=True)
        yield


@contextlib.contextmanager
def _progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that takes the bytes done; draws a bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as display:
        task = display.add_task(what, total=total)
        yield lambda count: display.advance(task, count)
