import numpy as np
import pytest
from dropped import drop

from strati.core.errors import BadInputError
from strati.reassembly.residual.pieces import as_pieces, assign_roles_by_shape, read_pieces, sort_all


def write(folder, pieces, start=0):
    for number, (weight, bias) in enumerate(pieces, start=start):
        np.savez(folder / f"piece_{number}.npz", weight=weight, bias=bias)


@pytest.fixture
def pieces():
    return drop(3, 4, 6, rows=5)[0]


def test_roles_from_shapes(pieces):
    found = assign_roles_by_shape(as_pieces(pieces))
    assert (found.blocks, found.width, found.hidden, found.square) == (3, 4, 6, False)
    assert {p.weight.shape for p in found.inner} == {(6, 4)} and {p.weight.shape for p in found.outer} == {
        (4, 6)
    }


def test_square_pieces_are_candidates_for_both_roles():
    found = assign_roles_by_shape(as_pieces(drop(3, 4, 4, rows=5)[0]))
    assert found.square and found.blocks == 3 and len(found.inner) == len(found.outer) == 6


def test_narrow_hidden_layer():
    found = assign_roles_by_shape(as_pieces(drop(3, 6, 2, rows=5)[0]))
    assert (found.width, found.hidden) == (6, 2)


def test_single_block_is_read_by_the_width_of_the_data():
    pieces = drop(1, 3, 5, outputs=5, rows=5)[0]
    with pytest.raises(BadInputError):
        assign_roles_by_shape(as_pieces(pieces))  # the last layer has the shape of the input projection
    assert len(sort_all(as_pieces(pieces), width=3, outputs=5)) == 2
    with pytest.raises(BadInputError):
        sort_all(as_pieces(pieces), width=3, outputs=1)  # one output: then a piece is too many
    pieces = drop(1, 3, 5, outputs=1, rows=5)[0]
    assert assign_roles_by_shape(as_pieces(pieces), width=3).width == 3


def test_all_formats_give_the_same_pieces(tmp_path, pieces):
    torch = pytest.importorskip("torch")
    from safetensors.numpy import save_file

    for kind in ("npz", "pth", "safetensors"):
        (tmp_path / kind).mkdir()
    write(tmp_path / "npz", pieces)
    for number, (weight, bias) in enumerate(pieces):
        save_file({"weight": weight, "bias": bias}, tmp_path / "safetensors" / f"piece_{number}.safetensors")
        state = {"layer.weight": torch.tensor(weight), "layer.bias": torch.tensor(bias)}
        torch.save(state, tmp_path / "pth" / f"piece_{number}.pth")
    read = [read_pieces(tmp_path / kind) for kind in ("npz", "pth", "safetensors")]
    for a, b, c in zip(*read, strict=True):
        assert a.number == b.number == c.number
        assert np.array_equal(a.weight, b.weight) and np.array_equal(b.weight, c.weight)
        assert np.array_equal(a.bias, b.bias) and np.array_equal(b.bias, c.bias)


def test_numbers_are_read_as_numbers_and_other_files_left_alone(tmp_path, pieces):
    write(tmp_path, pieces * 2)
    (tmp_path / "README.md").write_text("hello")
    assert [p.number for p in read_pieces(tmp_path)] == list(range(14))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda f: (f / "piece_3.npz").unlink(), "missing piece 3"),
        (lambda f: (f / "piece_03.npz").write_bytes((f / "piece_3.npz").read_bytes()), "duplicate piece 3"),
        (lambda f: np.savez(f / "piece_3.npz", weight=np.full((6, 4), np.nan), bias=np.zeros(6)), "NaN"),
        (
            lambda f: np.savez(f / "piece_3.npz", weight=np.ones((6, 4)), bias=np.zeros(5)),
            "bias has 5 entries",
        ),
        (lambda f: np.savez(f / "piece_3.npz", a=np.ones((6, 4)), b=np.ones((6, 4))), "not one linear layer"),
    ],
)
def test_damaged_folder(tmp_path, pieces, damage, why):
    write(tmp_path, pieces)
    damage(tmp_path)
    with pytest.raises(BadInputError, match=why):
        read_pieces(tmp_path)


def without(pieces, shape):
    cut = next(k for k, (w, _) in enumerate(pieces) if w.shape == shape)
    return [p for k, p in enumerate(pieces) if k != cut]


def test_sets_that_make_no_network(pieces):
    rng = np.random.default_rng(9)

    def extra(*shape):
        return rng.standard_normal(shape), np.zeros(shape[0])

    cases = [
        (without(pieces, (6, 4)), "2 of 6x4|missing or one too many"),
        ([*pieces, extra(6, 4)], "missing or one too many"),
        (without(pieces, (1, 4)), "no last layer"),
        ([*pieces, extra(7, 5)], "wrong shape 7x5"),
        ([*without(pieces, (6, 4)), extra(5, 4)], "5x4"),
        ([*pieces, pieces[0]], "duplicate"),
        (without(drop(3, 4, 4, rows=5)[0], (4, 4)), "odd number of 4x4"),
    ]
    for broken, why in cases:
        with pytest.raises(BadInputError, match=why):
            assign_roles_by_shape(as_pieces(broken))


def test_not_a_folder(tmp_path):
    with pytest.raises(BadInputError, match="no such folder"):
        read_pieces(tmp_path / "nowhere")
    with pytest.raises(BadInputError, match="holds no pieces"):
        read_pieces(tmp_path)
