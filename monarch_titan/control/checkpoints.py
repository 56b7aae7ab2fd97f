"""Which checkpoint a whole run goes on from: the newest whose every file is as it was written.

Each replica has a folder of its own, with one folder a step, and each rank seals its files there once they are on the
disk::

    replica_1/checkpoint/step-40/.metadata  __0_0.distcp  __1_0.distcp     TorchTitan's
                                 seal-0.json  seal-1.json                  ours, each written under another name first

A step that lacks a rank's seal was being written when the run was killed, and is never loaded. A seal has the size and
the SHA-256 of each file, and a hash of the global parameters, which are the same for a rank of all replicas: parts
of different runs are told apart by it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STEP = re.compile(r"step-(\d+)")


class Damaged(Exception):
    """A checkpoint that cannot be loaded; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """What one rank says of its part of a checkpoint."""

    rank: int
    ranks: int
    """Ranks of the replica, each of which writes a seal."""
    replicas: int
    """``monarch.num_replicas``, among whom the data was divided."""
    outer_step: int
    state: str
    """Hash of the rank's global parameters."""
    files: dict[str, tuple[int, str]]
    """Name -> size in bytes and SHA-256."""

    @classmethod
    def of(cls, folder: Path, names: Sequence[str], **values: int | str) -> Seal:
        """Read the files back and hash them."""
        files = {name: ((folder / name).stat().st_size, _sha256(folder / name)) for name in names}
        return cls(files=files, **values)  # type: ignore[arg-type]

    def write(self, folder: Path) -> None:
        """Put it on the disk, whole or not at all."""
        path = seal_path(folder, self.rank)
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The checkpoint to go on from."""

    step: int = 0
    """0: there is none, and training begins anew."""
    outer_step: int = 0
    replicas: list[int] = field(default_factory=list)
    """Those whose part is whole. The others heal from them."""
    saved_replicas: int = 0
    """``monarch.num_replicas`` when it was written."""
    saved_ranks: int = 0
    ignored: list[str] = field(default_factory=list)
    """What newer ones lack, a line each."""


def seal_path(folder: Path, rank: int) -> Path:
    """Where a rank's seal is in a step's folder."""
    return folder / f"seal-{rank}.json"


def step_folder(folder: Path, step: int) -> Path:
    """Where TorchTitan puts a step of a replica's folder."""
    return folder / f"step-{step}"


def newest(folders: Sequence[Path], step: int | None = None) -> Found:
    """The newest step that is whole in every replica's folder, else the newest that is whole in any, else step 0.

    Args:
        folders: of all replicas, in order; they need not exist.
        step: the only one to look at, if given.
    """
    steps = sorted(set().union(*map(_steps, folders)), reverse=True)
    if step is not None:
        steps = [known for known in steps if known == step]
    ignored: list[str] = []
    partial: Found | None = None
    for candidate in steps:
        found = _whole(folders, candidate, ignored)
        if found is None:
            continue
        if len(found.replicas) == len(folders):
            return found
        # Of the newest that some have, only what was wrong with it and with those newer is worth a line.
        partial = partial or dataclasses.replace(found, ignored=list(ignored))
    return partial or Found(ignored=ignored)


def _whole(folders: Sequence[Path], step: int, ignored: list[str]) -> Found | None:
    """What is whole of one step; adds a line to ``ignored`` for each part that is there and is not."""
    groups: dict[tuple[tuple[int, str], ...], dict[int, Seal]] = {}
    for replica, folder in enumerate(folders):
        part = step_folder(folder, step)
        if not part.is_dir():
            continue
        try:
            seals = _verified(part)
        except Damaged as damage:
            ignored.append(f"{folder.parent.name}/{folder.name}/{part.name}: {damage}")
            continue
        groups.setdefault(tuple((seal.outer_step, seal.state) for seal in seals), {})[replica] = seals[0]
    if not groups:
        return None
    # Parts of one run are equal; of two, those of more replicas count.
    agreed = max(groups.values(), key=len)
    for replica in sorted(set().union(*groups.values()) - set(agreed)):
        folder = folders[replica]
        ignored.append(f"{folder.parent.name}/{folder.name}/step-{step}: not of the same run as the others")
    seal = next(iter(agreed.values()))
    return Found(
        step=step,
        outer_step=seal.outer_step,
        replicas=sorted(agreed),
        saved_replicas=seal.replicas,
        saved_ranks=seal.ranks,
        ignored=list(ignored),
    )


def _verified(folder: Path) -> list[Seal]:
    """The seals of all ranks, every file of theirs compared. Raises Damaged."""
    first = read_seal(folder, 0)
    seals = [first, *(read_seal(folder, rank) for rank in range(1, first.ranks))]
    for seal in seals:
        for name, (size, sha256) in seal.files.items():
            path = folder / name
            try:
                same = path.stat().st_size == size and _sha256(path) == sha256
            except OSError as error:
                raise Damaged(f"{name} cannot be read ({error.strerror})") from error
            if not same:
                raise Damaged(f"{name} is not as it was written")
    return seals


def read_seal(folder: Path, rank: int) -> Seal:
    """A rank's seal of a step's folder. Raises Damaged."""
    path = seal_path(folder, rank)
    try:
        return Seal(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise Damaged(f"rank {rank} had not finished writing a full state") from None
    except (OSError, ValueError, TypeError) as error:
        raise Damaged(f"{path.name} cannot be read") from error


def _steps(folder: Path) -> set[int]:
    if not folder.is_dir():
        return set()
    return {int(match[1]) for entry in folder.iterdir() if (match := STEP.fullmatch(entry.name))}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
