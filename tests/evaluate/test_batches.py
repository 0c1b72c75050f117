"""What a batch is: every way of giving data comes to the same rows, streamed; outputs and kinds of models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import strati
from strati.evaluate import batches as module
from strati.evaluate.batches import (
    Batch,
    as_batches,
    call,
    device_of,
    on_device,
    output_tensor,
    takes_tokens,
)

X = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
Y = np.arange(11)


class Rows(Dataset):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int):
        return X[i], int(Y[i])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(torch.from_numpy(X), torch.from_numpy(Y), strict=True))


class Columns:
    """Rows as dicts, as the `datasets` package has them."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int):
        return {"x": X[i].tolist(), "y": int(Y[i]), "text": "a word"}


class Again:
    """A re-iterable that makes its batches anew in every pass."""

    def __iter__(self):
        return ((X[i : i + 4], Y[i : i + 4]) for i in range(0, 11, 4))


WAYS = {
    "pair": lambda _: (X, Y),
    "tensors": lambda _: (torch.from_numpy(X), torch.from_numpy(Y)),
    "lists": lambda _: (X.tolist(), Y.tolist()),
    "named": lambda _: {"x": X, "y": Y},
    "loader": lambda _: DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=4),
    "batches": lambda _: [(X[:4], Y[:4]), (X[4:], Y[4:])],
    "list batches": lambda _: [[X[:4], Y[:4]], [X[4:5], Y[4:5]], [X[5:], Y[5:]]],
    "re-iterable": lambda _: Again(),
    "dataset": lambda _: Rows(),
    "tensor dataset": lambda _: TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "iterable dataset": lambda _: Stream(),
    "columns": lambda _: Columns(),
    "npz": lambda folder: saved(folder),
    "npz file": lambda folder: np.load(saved(folder)),
}


def saved(folder):
    np.savez(folder / "data.npz", x=X, y=Y)
    return folder / "data.npz"


@pytest.mark.parametrize("way", WAYS)
def test_every_way_comes_to_the_same_rows(way, tmp_path):
    data = as_batches(WAYS[way](tmp_path), rows=4)
    for _ in range(2):  # as often as one likes
        found = list(data)
        np.testing.assert_array_equal(torch.cat([b.x for b in found]).numpy(), X)
        np.testing.assert_array_equal(torch.cat([b.y for b in found]).numpy(), Y)
    whole = data.whole()
    np.testing.assert_array_equal(whole.x.numpy(), X)
    assert whole.rows == 11
    assert data.rows in (11, None)
    assert data.head(5).rows == 5
    assert as_batches(data) is data


@given(st.integers(1, 30), st.integers(1, 9))
def test_cut_and_joined_again(count, rows):
    x = torch.arange(count)[:, None].float()
    data = as_batches(x, rows=rows)
    assert [b.rows for b in data] == [min(rows, count - start) for start in range(0, count, rows)]
    assert torch.equal(data.whole().x, x)


def test_a_list_of_two_alike_arrays_is_two_batches_and_a_tuple_is_inputs_and_targets():
    first, second = torch.rand(4, 3), torch.rand(4, 3)
    assert [b.rows for b in as_batches([first, second])] == [4, 4]
    assert as_batches((first, second)).whole("a test").y is not None
    assert as_batches([first, torch.arange(4)]).whole("a test").y is not None  # labels are no batch of inputs


def test_dicts_as_tokenizers_return_them():
    from transformers import BatchEncoding

    ids = torch.arange(12).reshape(3, 4)
    encoded = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0]})
    (batch,) = as_batches(encoded)
    assert set(batch.x) == {"input_ids", "attention_mask"}
    assert torch.equal(batch.y, ids[:, 0])
    several = as_batches([encoded, encoded])
    assert several.whole().x["input_ids"].shape == (6, 4)


def test_streams_are_not_read_whole():
    class Endless:
        def __iter__(self):
            while True:
                yield torch.ones(2, 3)

    data = as_batches(Endless())
    assert data.first().rows == 2
    assert data.head(5).rows == 5


def test_whole_streams_say_so_before_the_memory_is_taken(monkeypatch):
    read = []

    class Loader:
        def __iter__(self):
            for i in range(3):
                read.append(i)
                yield torch.ones(1024, 1024)

    monkeypatch.setattr(module, "_WORTH_SAYING", 6 * 2**20)
    with pytest.warns(UserWarning, match="counting needs all data at once"):
        assert as_batches(Loader()).whole("counting").rows == 3072
    assert as_batches(torch.ones(3072, 1024)).whole("counting").rows == 3072  # given whole: nothing to say
    monkeypatch.setattr(module, "_free_memory", lambda: 5 * 2**20)
    read.clear()
    with pytest.raises(strati.StratiError, match="give fewer rows"):
        as_batches(Loader()).whole("counting")
    assert read == [0]


def test_whole_numbers_are_tokens_to_a_model_that_takes_them():
    ids = np.arange(20).reshape(4, 5)
    tokens = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 20))
    assert as_batches(ids, tokens).whole().x.dtype == torch.int64
    assert as_batches(ids.astype(float), tokens).whole().x.dtype == torch.int64  # as CSV has them
    assert as_batches(ids, nn.Linear(5, 2)).whole().x.dtype == torch.float32
    assert (
        as_batches(ids.reshape(-1), tokens, context=6).whole().x.tolist()
        == ids.reshape(-1)[:18].reshape(3, 6).tolist()
    )
    assert as_batches(ids.reshape(-1), tokens).whole().x.shape == (1, 20)  # a short text is one window
    with pytest.raises(strati.StratiError, match="has 1 tokens, not one window of 2; give more tokens"):
        as_batches(ids.reshape(-1)[:1], tokens)


def test_text_goes_through_the_models_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "model")
    small = GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=3, n_positions=8)
    GPT2LMHeadModel(small).save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("a b c a " * 5)
    batch = as_batches(tmp_path / "a.txt", strati.as_module(tmp_path / "model"), context=8).whole()
    assert batch.x.tolist() == [[0, 1, 2, 0] * 2] * 2
    with pytest.raises(strati.StratiError, match="tokenizer"):
        as_batches(tmp_path / "a.txt", nn.Linear(2, 2))


def test_folders_of_images(tmp_path):
    from PIL import Image

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, size=(5, 6, 7, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        place = tmp_path / ("cat" if number < 2 else "dog")
        place.mkdir(exist_ok=True)
        Image.fromarray(image).save(place / f"{number}.png")
    data = as_batches(tmp_path, rows=2)
    whole = data.whole()
    assert data.rows == 5
    np.testing.assert_allclose(whole.x.numpy(), pixels.transpose(0, 3, 1, 2) / 255, atol=1e-6)
    assert whole.y.tolist() == [0, 0, 1, 1, 1]
    (tmp_path / "cat" / "bad.png").write_bytes(b"not an image")
    with pytest.raises(strati.StratiError, match=r"bad\.png: is not a readable image"):
        data = as_batches(tmp_path).whole()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "is empty"),
        (np.ones((0, 3)), "at least one row"),
        (np.array([[1.0, np.nan]]), "not finite"),
        (np.array([[1e200]]), "overflow"),
        ((X, Y[:5]), "11 inputs and 5 targets"),
        (iter([X]), "read only once"),
        (3, "is a int; give arrays"),
        (None, "is a NoneType; give arrays"),
        (["a", "b"], "yields a str"),
        (np.array(["a"]), "not an array of numbers"),
        (np.ones((2, 2), complex), "complex"),
        ("absent.npz", "no such file"),
        ({"input_ids": "text"}, "without tensors"),
        ([{"a": X[:2]}, {"b": X[:2]}], "without a"),
    ],
)
def test_what_is_no_data(data, says):
    with pytest.raises(strati.StratiError, match=says) as caught:
        as_batches(data).whole()
    assert "\n" not in str(caught.value)


def test_batches_go_where_the_model_is():
    model = nn.Linear(3, 2).double()
    batch = as_batches((X, Y), model, dtype=torch.float64).first()
    assert (batch.x.dtype, batch.y.dtype) == (torch.float64, torch.int64)
    assert batch.x.device == device_of(model) == torch.device("cpu")
    meta = as_batches(X, device="meta").first()  # the one other device that is here
    assert meta.x.is_meta
    assert on_device(model, "meta").weight.is_meta
    assert on_device(model, None) is on_device(model, "cpu") is model
    with pytest.raises(strati.StratiError, match="device: nonsense cannot be used"):
        device_of(model, "nonsense")


def test_the_tensor_in_an_output():
    from transformers.modeling_outputs import CausalLMOutput

    t = torch.ones(2, 3)
    for output in (
        t,
        (t, None),
        [t],
        ((t, t), t),
        {"out": t, "aux": torch.zeros(1)},
        {"loss": torch.zeros(()), "scores": t},
        (torch.zeros(()), t),
        CausalLMOutput(loss=torch.zeros(()), logits=t),
    ):
        assert output_tensor(output) is t
    for none in ("text", None, (), {"a": "b"}, 3.0):
        with pytest.raises(strati.StratiError, match="without a tensor"):
            output_tensor(none)
    assert call(lambda a, b: (a + b,), {"a": t, "b": t}).sum() == 12
    assert call(nn.Identity(), t) is t


def test_what_takes_tokens_and_what_is_a_transformer():
    from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel, ViTConfig, ViTModel

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bert = BertModel(BertConfig(**small, vocab_size=20))
    vit = ViTModel(ViTConfig(**small, image_size=8, patch_size=4))
    resnet = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    assert [takes_tokens(m) for m in (bert, vit, resnet)] == [True, False, False]


def test_batch_rows_and_bytes():
    batch = Batch({"a": torch.ones(4, 2), "b": torch.ones(4)}, torch.arange(4))
    assert (batch.rows, batch.nbytes) == (4, 4 * 8 + 4 * 4 + 4 * 8)
    assert batch.take(torch.tensor([3, 0])).y.tolist() == [3, 0]
