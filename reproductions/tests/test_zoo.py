"""The zoo gives real files, checked by numbers known of them; it skips where its registry is not to be had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strati.core.errors import BadInputError
from strati_reproductions import zoo
from strati_reproductions.zoo import convert, fetch, llama2c
from strati_reproductions.zoo.catalogue import Package


def fetched(name: str) -> Path:
    try:
        return zoo.path(name)
    except BadInputError as error:
        pytest.skip(f"the zoo's {name} cannot be fetched here: {error}")


def test_mnist_is_mnist() -> None:
    with np.load(fetched("mnist")) as data:
        assert data["x_train"].shape == (60000, 28, 28)
        assert data["x_test"].shape == (10000, 28, 28)
        assert data["y_train"][:5].tolist() == [5, 0, 4, 1, 9]
        assert abs(data["x_train"].mean() / 255 - 0.1307) < 1e-4
        assert abs(data["x_train"].std() / 255 - 0.3081) < 1e-4


@pytest.mark.parametrize("name", [n for n, item in zoo.CATALOGUE.items() if item.small])
def test_small_items_are_there(name: str) -> None:
    assert fetched(name).exists()


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(BadInputError, match="mnist"):
        zoo.path("no-such-network")


def test_wrong_bytes_are_not_used(tmp_path: Path) -> None:
    fetched("textgenrnn")  # skips where the registry is absent
    good = zoo.CATALOGUE["textgenrnn"].package
    with pytest.raises(BadInputError, match="SHA-256"):
        fetch._archive(Package(good.registry, good.name, good.version, "0" * 64), tmp_path)


def test_idx_reader_reads_what_the_format_says(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    raw = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.tobytes()
    (tmp_path / "a").write_bytes(raw)
    np.testing.assert_array_equal(convert._idx(tmp_path / "a"), values)


def test_rotary_rows_pair_up() -> None:
    # llama2.c rotates rows (0, 1), (2, 3), ... of a head; Hugging Face rotates (0, d/2), (1, d/2 + 1), ...
    weight = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert llama2c._halves(weight, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_tokenizer_prefers_pieces_over_bytes_and_merges_by_score(tmp_path: Path) -> None:
    pieces = [(0.0, b"<unk>"), (0.0, b"<s>"), (0.0, b"</s>"), *((0.0, bytes([i])) for i in range(256))]
    pieces += [(-1.0, b"a"), (-2.0, b"b"), (-9.0, b" a"), (-3.0, b"ab"), (-5.0, b" ")]
    raw = (8).to_bytes(4, "little")
    for score, piece in pieces:
        raw += np.float32(score).tobytes() + len(piece).to_bytes(4, "little") + piece
    (tmp_path / "tokenizer.bin").write_bytes(raw)
    tokenizer = llama2c.Tokenizer(tmp_path / "tokenizer.bin")
    number = {piece: i for i, (_, piece) in enumerate(pieces)}
    assert tokenizer.encode("ab") == [1, number[b" "], number[b"ab"]]
    assert tokenizer.encode("c") == [1, number[b" "], ord("c") + 3]
