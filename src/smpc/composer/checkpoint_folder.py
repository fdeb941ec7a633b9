"""The checkpoints of a run in its folder: their names, the link to the newest one, and how many are kept."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from smpc import dist
from smpc.checkpoint.torch_format.file_systems import is_url
from smpc.composer import checkpoint, storage
from smpc.composer.checkpoint import State
from smpc.composer.checkpoint_readers import check_is_whole, progress_of
from smpc.composer.duration import Duration, Timestamp
from smpc.dist.rank_and_size import known_local_size
from smpc.errors import CheckpointError, ConfigError, UsageError

_DIGITS = re.compile(r"(0?[0-9]{1,2}d?|d)?")


def named(template: str, known: Mapping[str, object]) -> str:
    """The name that a template makes of a run's fields; those that are not known are 0. Raises ConfigError for other fields."""
    fields = {
        "rank": 0,
        "local_rank": 0,
        "world_size": dist.get_world_size(),
        "local_world_size": known_local_size(),
        "node_rank": 0,
        **dict.fromkeys(("run_name", *Timestamp().fields()), 0),
        **known,
    }
    try:
        wrong = [
            f"{name}:{how}" for _, name, how, kind in Formatter().parse(template) if _is_wrong_to_save(name, how, kind)
        ]
        if wrong:
            raise ValueError(f"expected a plain field, as {{batch}} or {{batch:06d}}, found {wrong[0]}")
        return template.format(**fields)
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"{template!r}: expected the fields {', '.join(fields)}: {error}") from None


def _is_wrong_to_save(name: str | None, how: str | None, kind: str | None) -> bool:
    """Whether a field of a template says more than a name, and how many digits."""
    return name is not None and not (name.isidentifier() and kind is None and _DIGITS.fullmatch(how or ""))


class SaveSettings:
    """`names`: of files, of the link to the newest one, of the folders of sharded checkpoints (None where they are files), of the best one.

    `keep`: how many stay, -1 for all. `planner`: of sharded checkpoints. `newest_batch`: the run's when it last saved, None before.
    """

    def __init__(
        self,
        folder: str | None,
        names: tuple[str, str | None, str | None, str | None],
        overwrite: bool,
        weights_only: bool,
        keep: int,
        planner: SavePlanner | None = None,
    ) -> None:
        self.folder = folder
        self._filename, self._latest, self._prefix, self._best = names
        self._overwrite, self._weights_only, self._keep = overwrite, weights_only, keep
        self._planner = planner
        self.newest_batch: int | None = None

    def _named(self, template: str, state: State) -> str:
        return named(template, {"run_name": state.run_name, **state.timestamp.fields()})

    def latest(self, state: State) -> str | None:
        """The link to the newest checkpoint."""
        return os.path.join(self.folder, self._named(self._latest, state)) if self.folder and self._latest else None

    def newest(self, state: State) -> str | None:
        """The newest checkpoint of the run in the folder, the same for all ranks; None if there is none. Collective.

        That is the one that the link leads to, but for one that a job has published since, and died before it moved the link. Without a
        link that leads to one: the newest whole one, with a warning. Raises CheckpointError if there are some, and none is whole.
        """
        found: list[Any] = [None]

        def find() -> None:
            found[0] = self._newest_in_folder(state)

        storage.on_rank_0(find)
        dist.broadcast_object_list(found)
        return None if found[0] is None else str(found[0])

    def _newest_in_folder(self, state: State) -> str | None:
        latest = self.latest(state)
        if latest is None:
            return None
        others = self._checkpoints(state)  # first: it puts back what the link may lead to
        linked = _linked(latest)
        if linked is not None:
            since = storage.written_at(latest)
            others = [path for path in others if storage.written_at(path) >= since and storage.followed(path) != linked]
        ranked, problems = _by_progress(others)
        reached = 0
        if linked is not None and ranked:
            reached = progress_of(linked).batch
        for batch, path in reversed(ranked):
            if linked is not None and batch <= reached:
                break
            try:
                check_is_whole(path)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            leads = "no checkpoint" if linked is None else linked
            self._warn([*problems, f"{latest} leads to {leads}: the run goes on from {path}, the newest whole one"])
            return path
        if linked is None and problems:
            lines = [
                f"{self.folder}: none of the checkpoints there is whole; mend one, or move them away to start anew"
            ]
            raise CheckpointError("\n".join([*lines, *problems]))
        if linked is None and storage.is_link(latest):
            raise CheckpointError(
                f"no checkpoint at {storage.followed(latest)}, where {latest} leads, and none beside it; bring it back, or remove the link "
                "to start anew"
            )
        self._warn(problems)
        return latest if linked is not None else None

    @staticmethod
    def _warn(lines: Sequence[str]) -> None:
        for line in lines:
            warnings.warn(f"autoresume: {line}", stacklevel=6)

    def _checkpoints(self, state: State) -> list[str]:
        """The paths in the folder that checkpoints of this run may have, but for the best one."""
        assert self.folder is not None, "checked by those who call"
        depth = os.path.normpath(self._prefix or self._filename).count("/") + 1
        pattern = self._pattern(state)
        paths = storage.entries(self.folder, depth)
        return [path for path in paths if re.fullmatch(pattern, os.path.relpath(path, self.folder))]

    def _pattern(self, state: State) -> str:
        """What the names in the folder match that checkpoints of this run may have."""
        pattern = ""
        for text, field, how, _ in Formatter().parse(os.path.normpath(self._prefix or self._filename)):
            pattern += re.escape(text)
            if field in ("run_name", "rank", "local_rank", "node_rank"):
                pattern += re.escape(self._named(f"{{{field}{f':{how}' if how else ''}}}", state))
            elif field is not None:
                pattern += " *[0-9]+"
        return pattern

    def save_best(self, state: State, loss: float) -> None:
        """After an evaluation: if its loss is the least so far, write the checkpoint that is kept for it; NaN never is. Collective."""
        if self.folder is None or self._best is None or math.isnan(loss):
            return
        if state.best is not None and not loss < state.best:
            return
        state.best = loss
        target = os.path.join(self.folder, self._named(self._best, state))
        self._write()(state, target, weights_only=self._weights_only, overwrite=True)

    def _write(self) -> Callable[..., str]:
        if self._prefix is None:
            return checkpoint.save_full
        return functools.partial(checkpoint.save_sharded, planner=self._planner)

    def check_kind(self, state: State) -> None:
        """Raise ConfigError for whole checkpoints of units that have other values in each group."""
        if state.numbered and self._prefix is None:
            names = list(state.numbered)
            raise ConfigError(
                f"state_dict_type: expected sharded, as units in process groups of their own have other values in each, found full; "
                f"{names[0]} and {len(names) - 1} more are of such units"
            )

    def check_first(self, state: State, interval: Duration, end: Duration, batches: int | None) -> None:
        """Before training: CheckpointError if nothing can be written or the next checkpoint exists, ConfigError if two share a name.

        Collective. `batches`: of an epoch; None where that is not known, and then no name is looked for.
        """
        folder = self.folder
        if folder is None:
            return
        storage.on_rank_0(lambda: storage.check_writable(folder))
        template = self._prefix or self._filename
        fields = {field for _, field, _, _ in Formatter().parse(template)}
        if self._overwrite or not batches or interval.unit not in ("ba", "ep") or fields & {"sample", "token"}:
            return
        times = _next_saves(state.timestamp, interval, end, batches)
        names = [self._named(template, dataclasses.replace(state, timestamp=each)) for each in times]
        if len(names) > len(set(names)):
            argument = "save_filename" if self._prefix is None else "sharded_ckpt_prefix_dir"
            raise ConfigError(
                f"{argument}: expected a name for each checkpoint, found {template!r}, which names those of batch "
                f"{' and '.join(str(each.batch) for each in times)} alike; give {{batch}} in it, or save_overwrite=True"
            )
        if names:
            storage.on_rank_0(lambda: storage.check_free(os.path.join(folder, names[0]), overwrite=False))

    def save(self, state: State, path: str | None) -> str:
        """Write a checkpoint; one of the run itself (`path` None) gets the link, and old ones are removed."""
        self.check_kind(state)
        if path is None and self.folder is None:
            raise UsageError("save_checkpoint: expected a path, or save_folder in the Trainer")
        folder = self.folder if self.folder is not None else os.path.dirname(path or "")
        target = "" if path is None else self._named(os.fspath(path), state)
        name = os.path.normpath(self._named(self._prefix or self._filename, state))
        target = target or os.path.join(folder, name)
        latest = self.latest(state) if path is None else None
        if latest is not None and os.path.normpath(latest) == os.path.normpath(target):
            raise ConfigError(f"save_latest_filename: expected another name than a checkpoint's, found {latest!r}")
        is_again = path is None and self.newest_batch == state.timestamp.batch
        before = state.kept
        if path is None and self._keep >= 0:  # one written over counts once, one that the script asks for stays
            state.kept = [kept for kept in before if kept != name] + [name]
        try:
            self._write()(state, target, weights_only=self._weights_only, overwrite=self._overwrite or is_again)
        except BaseException:
            state.kept = before
            raise
        if path is None:
            self.newest_batch = state.timestamp.batch

        def finish() -> None:
            if latest is not None:
                storage.link(target, latest)
            for old in state.kept[: -self._keep] if self._keep > 0 else ():
                storage.remove_from_storage(os.path.join(folder, old))

        storage.on_rank_0(finish)
        state.kept = state.kept[-self._keep :] if self._keep > 0 else state.kept
        return target

    def go_on(self, state: State, path: str) -> None:
        """The run has been loaded from a checkpoint: those that it has kept count if they are in this folder, too."""
        inside = self.folder is not None and _normal(path).startswith(os.path.join(_normal(self.folder), ""))
        pattern = self._pattern(state)
        state.kept = [name for name in state.kept if inside and re.fullmatch(pattern, name)]


def _next_saves(now: Timestamp, interval: Duration, end: Duration, batches: int) -> list[Timestamp]:
    """When a run saves next: twice, or once if it ends then, or if its end is no number of epochs or batches. `batches`: of an epoch."""
    begun = now.batch - now.batch_in_epoch  # where this epoch began

    def batch_at(count: int, unit: str) -> int:
        return count if unit == "ba" else begun + (count - now.epoch) * batches

    last = batch_at(end.count, end.unit) if end.unit in ("ba", "ep") else None
    reached = now.batch if interval.unit == "ba" else now.epoch
    at = [batch_at((reached // interval.count + more) * interval.count, interval.unit) for more in (1, 2)]
    at = at[:1] if last is None else sorted({min(batch, last) for batch in at if min(batch, last) > now.batch})
    return [
        dataclasses.replace(
            now, epoch=now.epoch + (batch - begun) // batches, batch=batch, batch_in_epoch=(batch - begun) % batches
        )
        for batch in at
    ]


def _linked(latest: str) -> str | None:
    """The checkpoint that a link leads to; None if there is none."""
    try:
        target = storage.followed(latest)
    except CheckpointError:  # it contains no name
        return None
    return target if storage.exists(target) else None


def _by_progress(paths: Sequence[str]) -> tuple[list[tuple[int, str]], list[str]]:
    """Checkpoints with the batch that each was saved at, oldest first; what is wrong with those that do not say it."""
    found, problems = [], []
    for path in paths:
        try:
            found.append((progress_of(path).batch, path))
        except CheckpointError as error:
            problems.append(str(error))
    return sorted(found), problems


def _normal(path: str) -> str:
    """The form of a path that is equal for all paths of one place."""
    return path if is_url(path) else os.path.abspath(path)
