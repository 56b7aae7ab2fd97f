"""Documents from text files on disk, in an order that every rank can work out for itself.

A *document* is a whole ``.txt``, ``.md`` or ``.py`` file, a line of a ``.jsonl`` file or a row of a ``.parquet`` file.
Documents are found and read a *block* at a time: a file, 1024 lines or one row group. Epoch 0 takes them in the order
of the sorted files. Later epochs visit the blocks in random order and shuffle the documents inside each one, seeded by
the epoch alone: no rank has to tell another, and no more than one block of a file is ever in memory.

Nothing here needs torch, so that a path can be checked before a process starts.
"""

from __future__ import annotations

import json
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from monarch_titan.config.errors import ConfigError

NOT_STANDARD_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)


def _config_error(rule: str, value: object) -> ConfigError:
    return ConfigError(f"dataloader.dataset_path must {rule}, got {value}.")


def _no_document(path: str | None) -> ConfigError:
    return _config_error("hold at least one document", repr(path))


class Block(Protocol):
    """Documents of one file that are read together."""

    @property
    def documents(self) -> int:
        """How many there are."""

    @classmethod
    def check(cls, file: Path) -> bool:
        """Whether a file holds a document, from reading as little of it as shows a mistake (ConfigError)."""

    @classmethod
    def blocks(cls, file: Path) -> Iterator[Block]:
        """The blocks of a file, in order."""

    def read(self, indices: Sequence[int]) -> Iterator[str]:
        """The documents at these places in the block, in the order asked for."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """A file that is one document."""

    file: Path
    documents: int = 1

    @classmethod
    def check(cls, file: Path) -> bool:
        return True

    @classmethod
    def blocks(cls, file: Path) -> Iterator[PlainText]:
        yield cls(file)

    def read(self, indices: Sequence[int]) -> Iterator[str]:
        for _ in indices:
            # "utf-8-sig" also drops the byte order mark that some Windows editors write.
            yield self.file.read_bytes().decode("utf-8-sig", errors="replace")


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Up to ``SIZE`` consecutive lines of a ``.jsonl`` file; blank lines are no documents."""

    SIZE: ClassVar[int] = 1024

    file: Path
    offset: int
    """Byte at which the first line of the block starts."""
    line: int
    """Number of that line in the file, from 1."""
    documents: int

    @classmethod
    def check(cls, file: Path) -> bool:
        first = list(cls(file, offset=0, line=1, documents=1)._lines())
        for line, content in first:
            _text_of_line(file, line, content)
        return bool(first)

    @classmethod
    def blocks(cls, file: Path) -> Iterator[JsonLines]:
        offset, first, count, end = 0, 1, 0, 0
        with file.open("rb") as stream:
            for line, content in enumerate(stream, start=1):
                end += len(content)
                count += not content.isspace()
                if count == cls.SIZE:
                    yield cls(file, offset, first, count)
                    offset, first, count = end, line + 1, 0
        if count:
            yield cls(file, offset, first, count)

    def read(self, indices: Sequence[int]) -> Iterator[str]:
        lines = list(self._lines())
        for index in indices:
            yield _text_of_line(self.file, *lines[index])

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of each line of the block that holds a document."""
        left = self.documents
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            for line, content in enumerate(stream, start=self.line):
                if not left:
                    return
                if not content.isspace():
                    left -= 1
                    yield line, content


def _text_of_line(file: Path, line: int, content: bytes) -> str:
    """The field "text" of one line of JSON."""
    try:
        document = json.loads(content.decode("utf-8-sig", errors="replace"))
    except json.JSONDecodeError:
        document = None
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str):
        rule = 'hold a JSON object with a string field "text" on every line'
        raise _config_error(rule, f"{str(file)!r} line {line}: {content[:80].decode(errors='replace').strip()!r}")
    # JSON can escape half of a surrogate pair, which no tokenizer can encode.
    return text.encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group of a ``.parquet`` file."""

    file: Path
    index: int
    row: int
    """Number of its first row in the file, from 1."""
    documents: int

    @classmethod
    def check(cls, file: Path) -> bool:
        return any(group.documents for group in cls.blocks(file))

    @classmethod
    def blocks(cls, file: Path) -> Iterator[RowGroup]:
        # pyarrow takes a quarter of a second to import; the other kinds of file do without.
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(file) as parquet:
                columns, metadata = parquet.schema_arrow.names, parquet.metadata
        except (ArrowException, OSError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise _config_error("hold Parquet data in every .parquet file", f"{str(file)!r}: {reason}") from error
        if "text" not in columns:
            found = ", ".join(columns) or "none"
            raise _config_error('hold a column "text" in every .parquet file', f"{str(file)!r} with columns: {found}")
        row = 1
        for index in range(metadata.num_row_groups):
            documents = metadata.row_group(index).num_rows
            yield cls(file, index, row, documents)
            row += documents

    def read(self, indices: Sequence[int]) -> Iterator[str]:
        from pyarrow.parquet import ParquetFile

        with ParquetFile(self.file) as parquet:
            column = parquet.read_row_group(self.index, columns=["text"]).column("text")
        for index in indices:
            text = column[index].as_py()
            if not isinstance(text, str):
                rule = 'hold a string in every row of the column "text"'
                raise _config_error(rule, f"{str(self.file)!r} row {self.row + index}: {text!r}")
            yield text


KINDS: dict[str, type[Block]] = {
    ".jsonl": JsonLines,
    ".md": PlainText,
    ".parquet": RowGroup,
    ".py": PlainText,
    ".txt": PlainText,
}
"""What each kind of file is read as, by the end of its name in lower case."""


def _walk(folder: Path, *, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Every file below a folder, but for hidden files and folders and those named in ``skip``."""

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = (name for name in folders if not name.startswith(".") and name not in skip)
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def find_files(path: str | None) -> list[Path]:
    """The files that ``dataloader.dataset_path`` stands for, sorted, so that every rank has the same list.

    A folder is searched for files of the known kinds, without hidden and empty files and without following links to
    other folders. None stands for the sources of the running interpreter's standard library, without its tests.

    Raises:
        ConfigError: a ValueError, when there is nothing to read.
    """
    kinds = ", ".join(KINDS)
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(library, skip=NOT_STANDARD_LIBRARY) if file.suffix == ".py"]
        where = f"None and the standard library in {str(library)!r} has no sources"
    elif not path.strip():
        raise _config_error("name a file or a folder (without it, the standard library is read)", repr(path))
    elif (root := Path(path).expanduser()).is_dir():
        files = [file for file in _walk(root) if file.suffix.lower() in KINDS]
        where = repr(path)
    elif not root.exists():
        raise _config_error("name a file or a folder that exists", repr(path))
    elif root.suffix.lower() not in KINDS:
        raise _config_error(f"name a folder or a file that ends in one of {kinds}", repr(path))
    else:
        files, where = [root], repr(path)
    files = sorted(file for file in files if file.stat().st_size)
    if not files:
        raise _config_error(f"hold a file that is not empty and ends in one of {kinds}", where)
    return files


def check_dataset_path(path: str | None) -> None:
    """Find out in milliseconds whether ``dataloader.dataset_path`` can be read, before any process starts.

    Looks at the names of all files, the first line of each ``.jsonl`` and the schema of each ``.parquet``.

    Raises:
        ConfigError: a ValueError that names the option, the rule and the value.
    """
    filled = [KINDS[file.suffix.lower()].check(file) for file in find_files(path)]
    if not any(filled):
        raise _no_document(path)


class Corpus:
    """All documents under a path, addressed by their place in an epoch.

    ``len()`` is the number of documents. Counting those of ``.jsonl`` files reads the files once.
    """

    def __init__(self, path: str | None) -> None:
        self._blocks = [block for file in find_files(path) for block in KINDS[file.suffix.lower()].blocks(file)]
        self._documents = sum(block.documents for block in self._blocks)
        if not self._documents:
            raise _no_document(path)

    def __len__(self) -> int:
        return self._documents

    def read(self, *, epoch: int = 0, start: int = 0, shard: int = 0, num_shards: int = 1) -> Iterator[tuple[int, str]]:
        """Place and text of every document of one epoch from place ``start`` on whose place is ``shard`` modulo
        ``num_shards``. Blocks without such a document are not read."""
        blocks = list(self._blocks)
        if epoch:
            random.Random(epoch).shuffle(blocks)
        first = 0
        for block in blocks:
            next_block = first + block.documents
            lowest = max(first, start)
            places = range(lowest + (shard - lowest) % num_shards, next_block, num_shards)
            if places:
                order = list(range(block.documents))
                if epoch:
                    # Seeded by place, so that a resumed epoch need not draw for the blocks before it.
                    random.Random(f"{epoch} {first}").shuffle(order)
                yield from zip(places, block.read([order[place - first] for place in places]), strict=True)
            first = next_block
