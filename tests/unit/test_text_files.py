"""Finding and reading text: every kind of file, every mistake, and the order of documents."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_titan.training.text_files import Corpus, JsonLines, check_dataset_path, find_files


def texts(path, **where):
    return [text for _, text in Corpus(str(path)).read(**where)]


def write_jsonl(file, documents):
    file.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in documents))
    return file


def write_parquet(file, documents, **options):
    pq.write_table(pa.table({"text": documents, "id": [1] * len(documents)}), file, **options)
    return file


@pytest.fixture
def mixed(tmp_path):
    """A folder with nine documents of every kind; blocks of 1, 4, 1, 2 and 1."""
    (tmp_path / "a.md").write_text("0")
    write_jsonl(tmp_path / "b.jsonl", ["1", "2", "3", "4"])
    (tmp_path / "c.py").write_text("5")
    (tmp_path / "d").mkdir()
    write_parquet(tmp_path / "d" / "e.parquet", ["6", "7", "8"], row_group_size=2)
    return tmp_path


def test_checking_a_path_loads_neither_torch_nor_monarch():
    code = (
        "import sys, monarch_titan.training.text_files; assert not {'torch', 'monarch', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Kinds of files


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "A.TXT"])
def test_text_file_is_one_document(tmp_path, name):
    (tmp_path / name).write_bytes(b"one\r\ntwo\n")
    assert texts(tmp_path / name) == ["one\r\ntwo\n"]


def test_bytes_that_are_not_utf8_are_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9")
    assert texts(tmp_path / "a.txt") == ["caf\ufffd"]


def test_jsonl_line_is_a_document_and_blank_lines_are_not(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\n\n  \n{"id": 2, "text": ""}\r\n{"text": "\\ud800\xff"}'
    )
    assert texts(tmp_path / "a.jsonl") == ["one", "", "?\ufffd"]


def test_long_jsonl_is_read_in_blocks(tmp_path):
    documents = [f"document {number}" for number in range(2 * JsonLines.SIZE + 3)]
    file = write_jsonl(tmp_path / "a.jsonl", documents)
    file.write_text(file.read_text().replace("\n", "\n\n"))
    assert texts(file) == documents
    assert [block.documents for block in JsonLines.blocks(file)] == [1024, 1024, 3]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_row_is_a_document(tmp_path, type_):
    file = write_parquet(tmp_path / "a.parquet", pa.array(["one", "", "two"]).cast(type_), row_group_size=2)
    assert texts(file) == ["one", "", "two"]


def test_only_row_groups_of_the_shard_are_read(tmp_path, monkeypatch):
    file = write_parquet(tmp_path / "a.parquet", list("abcdef"), row_group_size=1)
    corpus, read = Corpus(str(file)), []
    read_row_group = pq.ParquetFile.read_row_group

    def spy(self, index, **options):
        read.append(index)
        return read_row_group(self, index, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    assert list(corpus.read(start=1, shard=1, num_shards=3)) == [(1, "b"), (4, "e")]
    assert read == [1, 4]


# Finding files


def test_folder_is_searched_in_sorted_order(mixed):
    assert texts(mixed) == list("012345678")


def test_hidden_empty_and_unknown_files_are_left_out(tmp_path):
    (tmp_path / ".git").mkdir()
    for name in (".git/a.txt", ".b.txt", "c.txt", "d.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / "e.txt").touch()
    assert [file.name for file in find_files(str(tmp_path))] == ["c.txt"]


def test_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("home")
    assert texts("~/a.txt") == ["home"]


def test_without_a_path_the_standard_library_is_read():
    files = find_files(None)
    assert {"argparse.py", "json/decoder.py"} <= {os.path.relpath(file, os.path.dirname(os.__file__)) for file in files}
    assert all(file.suffix == ".py" for file in files)
    assert not {"test", "tests", "site-packages", "dist-packages"} & {part for file in files for part in file.parts}
    assert files == find_files(None)


# Order


def test_later_epochs_have_the_same_documents_in_another_order(mixed):
    epochs = [texts(mixed, epoch=epoch) for epoch in range(3)]
    assert all(sorted(epoch) == epochs[0] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_order_of_an_epoch_is_the_same_in_every_process(mixed):
    code = "from monarch_titan.training.text_files import Corpus; print(list(Corpus(sys.argv[1]).read(epoch=7)))"
    command = [sys.executable, "-c", f"import sys; {code}", str(mixed)]
    outputs = [
        subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in "12"
    ]
    assert outputs[0].stdout == outputs[1].stdout == f"{list(Corpus(str(mixed)).read(epoch=7))}\n"


@given(epoch=st.integers(0, 3), start=st.integers(0, 9), num_shards=st.integers(1, 11))
def test_shards_are_disjoint_and_complete(tmp_path_factory, epoch, start, num_shards):
    file = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    corpus = Corpus(str(write_jsonl(file, "abcdefghi")))
    shards = [
        list(corpus.read(epoch=epoch, start=start, shard=shard, num_shards=num_shards)) for shard in range(num_shards)
    ]
    assert all(place % num_shards == shard for shard in range(num_shards) for place, _ in shards[shard])
    assert sorted(document for shard in shards for document in shard) == list(corpus.read(epoch=epoch))[start:]


# Mistakes


def assert_refused(path, message):
    with pytest.raises(ValueError) as refused:
        check_dataset_path(path)
    assert str(refused.value) == message
    with pytest.raises(ValueError) as refused:
        list(Corpus(path).read())
    assert str(refused.value) == message


def test_readable_paths_are_accepted(mixed):
    check_dataset_path(None)
    check_dataset_path(str(mixed))
    check_dataset_path(str(mixed / "a.md"))


@pytest.mark.parametrize("path", ["", " "])
def test_empty_path_is_refused(path):
    assert_refused(
        path,
        "dataloader.dataset_path must name a file or a folder (without it, the standard library is read), "
        f"got {path!r}.",
    )


def test_missing_path_is_refused():
    assert_refused(
        "/no/such/a.txt", "dataloader.dataset_path must name a file or a folder that exists, got '/no/such/a.txt'."
    )


def test_unknown_kind_of_file_is_refused(tmp_path):
    (tmp_path / "a.bin").write_text("a")
    assert_refused(
        f"{tmp_path}/a.bin",
        "dataloader.dataset_path must name a folder or a file that ends in one of .jsonl, .md, .parquet, .py, .txt, "
        f"got '{tmp_path}/a.bin'.",
    )


@pytest.mark.parametrize("path", ["", "/b.txt"], ids=["folder", "file"])
def test_nothing_to_read_is_refused(tmp_path, path):
    (tmp_path / "a.bin").write_text("a")
    (tmp_path / "b.txt").touch()
    assert_refused(
        f"{tmp_path}{path}",
        "dataloader.dataset_path must hold a file that is not empty and ends in one of .jsonl, .md, .parquet, .py, "
        f".txt, got '{tmp_path}{path}'.",
    )


def test_files_without_a_document_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n \n")
    write_parquet(tmp_path / "b.parquet", pa.array([], pa.string()))
    assert_refused(str(tmp_path), f"dataloader.dataset_path must hold at least one document, got '{tmp_path}'.")


@pytest.mark.parametrize("line", ['{"txt": "a"}', '{"text": null}', '["text"]', "{text}"])
def test_jsonl_line_without_text_is_refused(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f"\n{line}\n")
    assert_refused(
        str(tmp_path),
        'dataloader.dataset_path must hold a JSON object with a string field "text" on every line, '
        f"got '{tmp_path}/a.jsonl' line 2: {line!r}.",
    )


def test_later_jsonl_line_is_refused_when_it_is_read(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ["a"] * 1500)
    file.write_text(file.read_text() + "\n7\n")
    check_dataset_path(str(file))
    with pytest.raises(ValueError, match=r"on every line, got '.*/a\.jsonl' line 1502: '7'\.$"):
        texts(file)


def test_parquet_without_a_text_column_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a readable file does not hide the other one")
    pq.write_table(pa.table({"id": [1], "body": ["a"]}), tmp_path / "b.parquet")
    assert_refused(
        str(tmp_path),
        'dataloader.dataset_path must hold a column "text" in every .parquet file, '
        f"got '{tmp_path}/b.parquet' with columns: id, body.",
    )


def test_file_that_is_not_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("not Parquet, but long enough")
    with pytest.raises(ValueError, match=r"^dataloader\.dataset_path must hold Parquet data .*/a\.parquet': \w.*\w\.$"):
        check_dataset_path(str(tmp_path))


@pytest.mark.parametrize("values", [["a", "b", None], [["a"], ["b"], []]], ids=["null", "list"])
def test_parquet_row_without_text_is_refused_when_it_is_read(tmp_path, values):
    file = write_parquet(tmp_path / "a.parquet", values, row_group_size=2)
    rule = 'hold a string in every row of the column "text"'
    with pytest.raises(ValueError, match=rf"^dataloader\.dataset_path must {rule}, got '.*/a\.parquet' row \d: .+\.$"):
        texts(file)
