"""Packing, sharding and resuming of local_text."""

import dataclasses
import json
from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_titan.training.data import LocalTextDataLoader, LocalTextDataset
from monarch_titan.training.text_files import Corpus
from monarch_titan.training.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
BOS, EOS = TOKENIZER.bos_id, TOKENIZER.eos_id


@pytest.fixture
def write(tmp_path):
    """Write documents to a file and get its path."""

    def write(documents):
        file = tmp_path / "documents.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        return str(file)

    return write


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory):
    """Twelve documents of 1 to 12 letters, each its own letter."""
    file = tmp_path_factory.mktemp("corpus") / "alphabet.jsonl"
    file.write_text("".join(json.dumps({"text": chr(97 + n) * (n + 1)}) + "\n" for n in range(12)))
    return str(file)


def dataset(path, *, seq_len=4, **options):
    return LocalTextDataset(Corpus(path), TOKENIZER, seq_len=seq_len, **options)


def loader(path, *, dp_rank=0, dp_world_size=1, seq_len=4, local_batch_size=1, snapshot_every_n_steps=1, **options):
    """As TorchTitan's trainer builds it."""
    return LocalTextDataLoader.Config(dataset_path=path, **options).build(
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        tokenizer=TOKENIZER,
        seq_len=seq_len,
        local_batch_size=local_batch_size,
        snapshot_every_n_steps=snapshot_every_n_steps,
    )


def lists(samples):
    """Samples or batches as plain lists, which compare by value."""
    return [(inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist()) for inputs, labels in samples]


def pairs(samples):
    """(input, label) of every position."""
    return [pair for inputs, _, labels in lists(samples) for pair in zip(inputs, labels, strict=True)]


def pairs_of(text):
    ids = TOKENIZER.encode(text)
    return list(pairwise(ids))


# Packing


def test_documents_are_packed_end_to_end(write):
    path = write(["abc", "d"])
    assert lists(dataset(path, seq_len=3)) == [
        ([BOS, 97, 98], [0, 1, 2], [97, 98, 99]),
        ([99, BOS, 100], [0, 0, 1], [EOS, 100, EOS]),
    ]


def test_samples_are_int64_of_seq_len(alphabet):
    inputs, labels = next(iter(dataset(alphabet, seq_len=7)))
    assert inputs.keys() == {"input", "positions"}
    assert all(tensor.dtype == torch.int64 and tensor.shape == (7,) for tensor in (*inputs.values(), labels))


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8), seq_len=st.integers(1, 12))
@settings(deadline=None)
def test_every_position_learns_the_next_token_of_its_document(tmp_path_factory, lengths, seq_len):
    documents = [chr(97 + n) * length for n, length in enumerate(lengths)]
    file = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    expected = [pair for text in documents for pair in pairs_of(text)]
    # What does not fill the last sample of an epoch is left out.
    assert pairs(dataset(str(file), seq_len=seq_len)) == expected[: len(expected) // seq_len * seq_len]


@given(seq_len=st.integers(1, 40))
@settings(deadline=None, max_examples=20)
def test_positions_restart_with_documents_and_samples(alphabet, seq_len):
    for inputs, positions, _ in lists(dataset(alphabet, seq_len=seq_len)):
        for index, position in enumerate(positions):
            assert position == (0 if index == 0 or inputs[index] == BOS else positions[index - 1] + 1)


def test_epochs_are_joined_without_a_gap(write):
    path = write(["abcdef"])  # 7 positions: two epochs fill 3 samples of 4 and leave 2 positions
    samples = list(islice(dataset(path, infinite=True), 7))
    assert pairs(samples) == 4 * pairs_of("abcdef")


def test_each_epoch_has_all_documents_in_a_new_order(alphabet):
    positions = sum(n + 2 for n in range(12))
    seen = pairs(islice(dataset(alphabet, seq_len=1, infinite=True), 3 * positions))
    epochs = [seen[start : start + positions] for start in range(0, 3 * positions, positions)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_second_iteration_of_finite_data_is_the_next_epoch(alphabet):
    data = dataset(alphabet, seq_len=1)
    first, second = pairs(data), pairs(data)
    assert sorted(first) == sorted(second) and first != second


def test_endless_data_without_a_position_is_refused(write):
    class NoTokens(ByteTokenizer):
        def encode(self, text, add_bos=True, add_eos=True):
            return []

    data = LocalTextDataset(Corpus(write(["abc"])), NoTokens(), seq_len=4, infinite=True)
    with pytest.raises(ValueError, match=r"^dataloader\.dataset_path must hold documents of two tokens or more"):
        next(iter(data))


# Sharding


@pytest.mark.parametrize("num_shards", [1, 2, 5, 12])
def test_shards_share_out_the_documents(alphabet, num_shards):
    shards = [pairs(dataset(alphabet, seq_len=1, shard=shard, num_shards=num_shards)) for shard in range(num_shards)]
    for shard, seen in enumerate(shards):
        own = [chr(97 + n) * (n + 1) for n in range(shard, 12, num_shards)]
        assert seen == [pair for text in own for pair in pairs_of(text)]


def test_fewer_documents_than_shards_share_out_the_samples(write):
    path = write(["a" * 20 + "b" * 20])
    whole = lists(dataset(path))
    shards = [lists(dataset(path, shard=shard, num_shards=3)) for shard in range(3)]
    assert [whole[shard::3] for shard in range(3)] == shards
    assert all(shards)


def test_less_than_a_sample_an_epoch_feeds_all_shards(write):
    path = write(["abc"])
    shards = [
        list(islice(dataset(path, seq_len=16, shard=shard, num_shards=8, infinite=True), 2)) for shard in range(8)
    ]
    assert all(pairs(shard) == 8 * pairs_of("abc") for shard in shards)


def test_sharing_out_samples_is_logged_by_the_first_rank_alone(write, caplog):
    for rank in range(4):
        loader(write(["abc", "def", "ghi"]), dp_rank=rank, dp_world_size=4)
    assert [record.getMessage() for record in caplog.records] == [
        "dataloader.dataset_path holds 3 documents for 4 ranks with 0 workers: each tokenizes all of them and takes "
        "its share of the samples."
    ]


# Resuming


@given(
    stop=st.integers(0, 40),
    seq_len=st.integers(1, 30),
    batch=st.integers(1, 3),
    num_shards=st.sampled_from([1, 5, 13]),  # 13 is more than there are documents
)
@settings(deadline=None)
def test_resumed_run_equals_the_uninterrupted_one(alphabet, stop, seq_len, batch, num_shards):
    options = {"dp_rank": num_shards - 1, "dp_world_size": num_shards, "seq_len": seq_len, "local_batch_size": batch}
    uninterrupted = loader(alphabet, **options)
    batches = iter(uninterrupted)
    list(islice(batches, stop))
    resumed = loader(alphabet, **options)
    resumed.load_state_dict(uninterrupted.state_dict())
    assert lists(islice(resumed, 5)) == lists(islice(batches, 5))


def test_resuming_tokenizes_one_document_again(alphabet):
    encoded = []

    class Counting(ByteTokenizer):
        def encode(self, text, add_bos=True, add_eos=True):
            encoded.append(text)
            return super().encode(text, add_bos, add_eos)

    first = dataset(alphabet)
    list(islice(first, 15))
    resumed = LocalTextDataset(Corpus(alphabet), Counting(), seq_len=4)
    resumed.load_state_dict(first.state_dict())
    next(iter(resumed))
    assert encoded == ["j" * 10]


def test_state_is_a_few_integers(write):
    data = dataset(write(["a" * 100_000]))
    list(islice(data, 1000))
    assert data.state_dict() == {"epoch": 0, "document": 0, "token": 4000, "samples": 1000, "documents": 1}


def test_seq_len_may_change_at_a_checkpoint(alphabet):
    first = dataset(alphabet, seq_len=4)
    before = pairs(islice(first, 5))
    second = dataset(alphabet, seq_len=1)
    second.load_state_dict(first.state_dict())
    assert before + pairs(second) == pairs(dataset(alphabet, seq_len=1))


def test_state_of_finished_data_stays_finished_once(alphabet):
    finished, resumed = loader(alphabet, infinite=False), loader(alphabet, infinite=False)
    list(finished)
    resumed.load_state_dict(finished.state_dict())
    assert lists(resumed) == lists(finished)  # both are now in their second epoch


def test_other_data_than_at_the_checkpoint_is_refused(alphabet, write):
    data = dataset(write(["abc"]))
    with pytest.raises(ValueError) as refused:
        data.load_state_dict(dataset(alphabet).state_dict())
    assert str(refused.value) == (
        "dataloader.dataset_path must hold the 12 documents of the checkpoint, got 1 "
        "(to change data, set checkpoint.exclude_from_loading to ['dataloader'])."
    )


# Worker processes


def test_workers_share_out_the_documents_of_their_rank(alphabet):
    def documents(**options):
        batches = loader(alphabet, dp_rank=1, dp_world_size=3, seq_len=1, infinite=False, **options)
        return sorted(pairs((inputs | {"input": inputs["input"][0]}, labels[0]) for inputs, labels in batches))

    assert documents(num_workers=2) == documents()


@pytest.mark.parametrize("stop", [3, 20, 21, 22])  # one worker has 10 batches, the other one 12
def test_resumed_workers_equal_uninterrupted_ones(alphabet, stop):
    options = {"num_workers": 2, "infinite": False}
    uninterrupted, resumed = loader(alphabet, **options), loader(alphabet, **options)
    batches = iter(uninterrupted)
    list(islice(batches, stop))
    resumed.load_state_dict(uninterrupted.state_dict())
    assert lists(resumed) == lists(batches)


# As TorchTitan uses it


def test_batches_have_the_local_batch_size(alphabet):
    inputs, labels = next(iter(loader(alphabet, local_batch_size=3, seq_len=5)))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (3, 5)


def test_state_is_kept_by_rank(alphabet):
    state = loader(alphabet, dp_rank=2, dp_world_size=3).state_dict()
    assert state.keys() == {"dp_rank_2", "world_size"}


def test_validator_gets_one_epoch(alphabet):
    # The validator sets `infinite`, passes no `snapshot_every_n_steps` and builds a loader for each validation.
    config = dataclasses.replace(LocalTextDataLoader.Config(dataset_path=alphabet), infinite=False)
    build = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": TOKENIZER, "seq_len": 4, "local_batch_size": 2}
    validations = [lists(config.build(**build)) for _ in range(2)]
    assert validations[0] == validations[1]
    assert sum(len(inputs) for inputs, _, _ in validations[0]) == sum(n + 2 for n in range(12)) // 4


def test_nothing_configured_reads_the_standard_library():
    data = LocalTextDataLoader.Config().build(
        dp_world_size=32, dp_rank=31, tokenizer=TOKENIZER, seq_len=64, local_batch_size=2
    )
    inputs, _ = next(iter(data))
    assert inputs["input"].shape == (2, 64)


def test_other_dataset_is_refused(alphabet):
    with pytest.raises(ValueError, match=r"^dataloader\.dataset must be 'local_text' for local files, got 'c4'\.$"):
        loader(alphabet, dataset="c4")


def test_unreadable_path_is_refused():
    with pytest.raises(ValueError, match=r"^dataloader\.dataset_path must name a file or a folder that exists, got "):
        loader("/no/such/folder")
