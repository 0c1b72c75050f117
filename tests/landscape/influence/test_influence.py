"""Covariances of losses against closed forms: linear regression, ridge regression, a product by quadrature."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from command import run_strati
from safetensors.torch import save_file
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.landscape.influence.covariances import Covariances

NBETA, GAMMA, ROWS = 30.0, 2.0, 12


class Gaussian:
    """Linear regression with one output: the posterior is a Gaussian and each loss a quadratic form.

    ``l_i = (x_i . delta - r_i)^2`` with ``delta`` normal. ``u_i = x_i . delta - r_i`` are jointly normal with means
    ``m_i`` and covariances ``k_ij``, so ``Cov(u_i^2, u_j^2) = 2 k_ij^2 + 4 m_i m_j k_ij``.
    """

    def __init__(self, moving: np.ndarray | None = None, extra: int = 0) -> None:
        rng = np.random.default_rng(3)
        self.x, self.y = rng.normal(size=(ROWS + extra, 3)), rng.normal(size=ROWS + extra)
        self.model = nn.Linear(3, 1, bias=False)
        torch.nn.init.normal_(self.model.weight, generator=torch.Generator().manual_seed(0))
        weight = self.model.weight.detach().double().numpy()[0]
        inputs = self.x * (np.ones(3) if moving is None else moving)
        residual = self.y - self.x @ weight
        train = slice(0, ROWS)
        precision = NBETA * 2 / ROWS * inputs[train].T @ inputs[train] + GAMMA * np.eye(3)
        mean = np.linalg.solve(precision, NBETA * 2 / ROWS * inputs[train].T @ residual[train])
        self.m = inputs @ mean - residual
        self.k = inputs @ np.linalg.inv(precision) @ inputs.T
        self.losses = residual**2

    @property
    def covariance(self) -> np.ndarray:
        return 2 * self.k**2 + 4 * np.outer(self.m, self.m) * self.k

    def data(self, rows: slice = slice(0, ROWS)) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(self.x[rows]), torch.tensor(self.y[rows])[:, None]


OPTIONS = {"nbeta": NBETA, "gamma": GAMMA, "seed": 1}


def pulls(result: strati.Influence, exact: np.ndarray) -> np.ndarray:
    """Distances from the truth in standard errors."""
    return (np.asarray(result.values) - exact) / np.asarray(result.stderr)


@pytest.mark.parametrize("sampler", ["auto", "hmc"])
def test_covariances_of_linear_regression_are_exact_within_errors(sampler):
    """144 entries, about 40 of them independent: the largest distance is below 5 and their mean square near 1."""
    case = Gaussian()
    result = strati.influence(case.model, "mse", case.data(), sampler=sampler, **OPTIONS)
    distance = pulls(result, case.covariance)
    assert np.abs(distance).max() < 5 and 0.2 < (distance**2).mean() < 3
    assert result.values.shape == result.stderr.shape == (ROWS, ROWS) and result.reason is None
    assert (np.asarray(result.stderr) < 0.1 * case.covariance.max()).all()


def test_the_kernel_is_the_matrix_of_correlations():
    case = Gaussian()
    result = strati.influence(case.model, "mse", case.data(), kind="kernel", **OPTIONS)
    scale = np.sqrt(np.diag(case.covariance))
    exact = case.covariance / np.outer(scale, scale)
    np.testing.assert_allclose(np.diag(result.values), 1, atol=1e-9)
    off = ~np.eye(ROWS, dtype=bool)
    distance = (result.values - exact)[off] / result.stderr[off]
    assert np.abs(distance).max() < 5 and 0.2 < (distance**2).mean() < 3
    assert np.diag(result.stderr).max() < 1e-3 * result.stderr.max() + 1e-4


def test_waic_and_fluctuation_against_the_closed_form():
    """``<exp(-u^2)>`` of a normal ``u`` is ``exp(-m^2 / (1 + 2 k)) / sqrt(1 + 2 k)``."""
    case = Gaussian()
    result = strati.influence(case.model, "mse", case.data(), **OPTIONS)
    variance = np.diag(case.covariance).mean()
    k = np.diag(case.k)
    training = (case.m**2 / (1 + 2 * k) + np.log1p(2 * k) / 2).mean()
    assert result.waic_stderr < 0.05 * abs(result.waic)
    assert abs(result.fluctuation - NBETA / 2 * variance) < 4 * result.fluctuation_stderr
    assert abs(result.waic - (training + NBETA / ROWS * variance)) < 4 * result.waic_stderr


def test_queries_are_rows_that_were_not_trained_on():
    case = Gaussian(extra=5)
    queries = case.data(slice(ROWS, ROWS + 5))
    result = strati.influence(case.model, "mse", case.data(), queries=queries, **OPTIONS)
    exact = case.covariance[ROWS:, :ROWS]
    assert np.shape(result.values) == (5, ROWS) and np.abs(pulls(result, exact)).max() < 5
    some = strati.influence(case.model, "mse", case.data(), queries=[7, 2], **OPTIONS)
    assert some.labels == (7, 2)
    assert np.abs(pulls(some, case.covariance[[7, 2], :ROWS])).max() < 5


def test_groups_are_means_of_rows():
    case = Gaussian()
    labels = ["a", "b", "a", "c"] * 3
    result = strati.influence(case.model, "mse", case.data(), groups=labels, **OPTIONS)
    mean = np.array([[name == label for label in labels] for name in "abc"], dtype=float)
    mean /= mean.sum(1, keepdims=True)
    assert result.rows == ("a", "b", "c")
    assert np.abs(pulls(result, mean @ case.covariance @ mean.T)).max() < 5


def test_susceptibilities_vary_one_part_alone():
    mask = torch.tensor([[True, False, True]])
    parts = {"all": "weight", "two": {"weight": mask}}
    result = strati.influence(
        Gaussian().model, "mse", Gaussian().data(), kind="susceptibility", parts=parts, **OPTIONS
    )
    for line, moving in enumerate((np.ones(3), np.array([1.0, 0.0, 1.0]))):
        exact = Gaussian(moving).covariance.mean(0)
        assert np.abs((result.values[line] - exact) / result.stderr[line]).max() < 5
    assert result.labels == ("all", "two") and np.shape(result.values) == (2, ROWS)
    assert result.waic is None and result.fluctuation is None


def test_influence_predicts_the_change_from_upweighting_a_row_in_ridge_regression():
    """``d<l_i>/d(weight of row j) = -nbeta/n Cov(l_i, l_j)``, beside the mean loss retrained with that weight.

    The posterior of the reweighted problem is Gaussian again, so its mean loss is known in closed form.
    """
    case = Gaussian()
    result = strati.influence(case.model, "mse", case.data(), **OPTIONS)
    weight = case.model.weight.detach().double().numpy()[0]
    residual = case.y - case.x @ weight

    def mean_losses(weights: np.ndarray) -> np.ndarray:
        scaled = (NBETA * 2 / ROWS) * weights[:, None] * case.x
        precision = scaled.T @ case.x + GAMMA * np.eye(3)
        centre = np.linalg.solve(precision, scaled.T @ residual)
        spread = np.einsum("id,de,ie->i", case.x, np.linalg.inv(precision), case.x)
        return (case.x @ centre - residual) ** 2 + spread

    step = 1e-4
    exact = np.stack([(mean_losses(1 + step * row) - mean_losses(1 - step * row)) for row in np.eye(ROWS)], 1)
    exact /= 2 * step
    predicted, error = -NBETA / ROWS * result.values, NBETA / ROWS * result.stderr
    assert np.abs((predicted - exact) / error).max() < 5


def test_a_deep_linear_network_against_quadrature():
    """``f = a b x`` with two weights: the covariance of two rows by summation over a fine grid."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    for layer, value in zip(model, (0.8, 0.5), strict=True):
        layer.weight.data.fill_(value)
    x = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)
    y = torch.tensor([[0.3], [0.2], [1.1]], dtype=torch.float64)
    result = strati.influence(model, "mse", (x, y), nbeta=8.0, gamma=1.0, seed=4)
    grid = np.linspace(-6, 6, 1201)
    a, b = np.meshgrid(grid, grid)
    losses = np.stack([(a * b * float(u) - float(v)) ** 2 for u, v in zip(x, y, strict=True)])
    energy = 8.0 * losses.mean(0) + ((a - 0.8) ** 2 + (b - 0.5) ** 2) / 2
    weight = np.exp(-energy + energy.min())
    weight /= weight.sum()
    means = (weight * losses).sum((1, 2))
    exact = np.einsum("iab,jab,ab->ij", losses, losses, weight) - np.outer(means, means)
    assert np.abs(pulls(result, exact)).max() < 5
    assert (np.asarray(result.stderr) < 0.2 * np.abs(exact).max()).all()


@pytest.mark.slow
def test_sgld_agrees_with_the_exact_values_up_to_its_step():
    case = Gaussian()
    result = strati.influence(
        case.model,
        "mse",
        case.data(),
        sampler="sgld",
        batch=ROWS,
        step=0.005,
        chains=8,
        draws=8000,
        **OPTIONS,
    )
    assert [flag.code for flag in result.warnings] == ["step-bias"]
    exact = case.covariance
    assert np.abs(result.values - exact).max() < 0.1 * exact.max() + 5 * result.stderr.max()


def test_errors_cover_the_truth_also_for_autocorrelated_draws():
    """Chains with autocorrelation 0.9 and batches of 20 draws: the mean square distance is below 2."""
    rng = np.random.default_rng(0)
    distances = []
    for _ in range(30):
        sums = Covariances(20, kernel=False)
        state = rng.normal(size=(8, 3))
        for _ in range(400):
            state = 0.9 * state + np.sqrt(1 - 0.81) * rng.normal(size=state.shape)
            sums.add(0, torch.tensor(state), torch.tensor(state))
        entries = sums.covariances()
        distances.append((entries.values - np.eye(3)) / entries.stderr)
    assert 0.4 < (np.array(distances) ** 2).mean() < 2


def test_the_same_seed_gives_the_same_values_and_another_seed_others():
    case = Gaussian()
    options = OPTIONS | {"chains": 8, "draws": 40}
    first, again = (strati.influence(case.model, "mse", case.data(), **options) for _ in range(2))
    other = strati.influence(case.model, "mse", case.data(), **(options | {"seed": 2}))
    assert first.to_json() == again.to_json() and first.to_json() != other.to_json()


@pytest.mark.slow
def test_tokens_and_heads_of_a_language_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 11, (6, 8))
    options = {"nbeta": 20.0, "gamma": 50.0, "chains": 4, "draws": 40, "sampler": "hmc", "max_rhat": 2.0}
    rows = strati.influence(model, "cross_entropy", ids, kind="susceptibility", parts="heads", **options)
    tokens = strati.influence(
        model, "cross_entropy", ids, kind="susceptibility", parts="heads", by="token", **options
    )
    assert rows.labels == ("head 0.0", "head 0.1") and np.shape(tokens.values) == (2, 6 * 7)
    means = np.asarray(tokens.values).reshape(2, 6, 7).mean(2)
    np.testing.assert_allclose(means, rows.values, rtol=1e-6)


def test_chains_that_have_not_mixed_give_no_value_and_a_reason():
    case = Gaussian()
    result = strati.influence(case.model, "mse", case.data(), draws=4, chains=2, **OPTIONS)
    assert result.reason and np.isnan(result.values).all() and result.waic is None
    assert json.loads(result.to_json())["values"][0][0] is None
    assert result.plot() is not None


@pytest.mark.parametrize(("sampler", "draws"), [("hmc", 80), ("sgld", 400)])
def test_losses_on_disk_give_the_same_covariances(tmp_path, sampler, draws):
    """Every observed draw is in the file, with the losses themselves; nothing else is left in its folder."""
    parquet = pytest.importorskip("pyarrow.parquet")
    case = Gaussian()
    place = tmp_path / "losses.parquet"
    options = {**OPTIONS, "chains": 4, "draws": draws, "sampler": sampler}
    result = strati.influence(case.model, "mse", case.data(), losses_file=place, **options)
    table = parquet.read_table(place)
    losses = np.stack(table["losses"].to_pylist())
    assert losses.shape == (4 * 80, ROWS) and (losses >= 0).all()
    assert sorted(set(zip(table["chain"].to_pylist(), table["draw"].to_pylist(), strict=True))) == [
        (chain, draw) for chain in range(4) for draw in range(80)
    ]
    assert table.schema.metadata[b"rows"].decode().split("\n") == [str(row) for row in range(ROWS)]
    # The estimate corrects for the error of the means, which is a part of the standard error.
    assert (np.abs(np.cov(losses.T, bias=True) - result.values) <= 0.5 * np.asarray(result.stderr)).all()
    assert [file.name for file in tmp_path.iterdir()] == ["losses.parquet"]


def test_losses_of_a_run_that_fails_leave_nothing(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    from strati.landscape.influence import influence as module

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Recorder, "observe", fail)
    case = Gaussian()
    with pytest.raises(KeyboardInterrupt):
        strati.influence(case.model, "mse", case.data(), losses_file=tmp_path / "l.parquet", **OPTIONS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "bif"}, "kind"),
        ({"losses_file": "losses.csv"}, "parquet"),
        ({"losses_file": "nowhere/losses.parquet"}, "does not exist"),
        ({"losses_file": "l.parquet", "kind": "susceptibility"}, "influence and kernel"),
        ({"kind": "susceptibility", "parts": "nothing*"}, "nothing"),
        ({"kind": "susceptibility", "parts": {"none": {"weight": torch.zeros(1, 3)}}}, "selects nothing"),
        ({"kind": "susceptibility", "parts": {"odd": {"weight": torch.ones(2, 2)}}}, "shape"),
        ({"kind": "susceptibility", "queries": [1]}, "queries"),
        ({"parts": "layers"}, "parts"),
        ({"queries": [99]}, "no row 99"),
        ({"groups": ["a"]}, "labels"),
        ({"loss": lambda o, t: ((o - t) ** 2).sum()}, "mean"),
        ({"loss": lambda o, t: ((o - t) ** 2).mean().detach()}, "differentiated"),
        ({"data": (torch.zeros(4, 7), torch.zeros(4, 1))}, "shape"),
        ({"data": (torch.zeros(4, 3), torch.zeros(5, 1))}, "targets"),
    ],
)
def test_bad_input_is_one_clear_line(change, message):
    case = Gaussian()
    options = {"loss": "mse", "data": case.data(), **change}
    with pytest.raises(BadInputError) as error:
        strati.influence(case.model, options.pop("loss"), options.pop("data"), **options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def files(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(10, 3)).astype(np.float32), y=np.arange(10) % 2)
    np.savez(tmp_path / "other.npz", x=rng.normal(size=(4, 3)).astype(np.float32), y=np.arange(4) % 2)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ((), (10, 10)),
        (("--kind", "kernel"), (10, 10)),
        (("--kind", "susceptibility", "--parts", "layers"), (2, 10)),
        (("--queries", "other.npz"), (4, 10)),
    ],
)
def test_the_command(files, words, shape):
    base = ["influence", str(files / "model.safetensors"), "--data", str(files / "data.npz")]
    words = [str(files / word) if word.endswith(".npz") else word for word in words]
    quick = ["--chains", "8", "--draws", "60", "--json", str(files / "out.json")]
    done = run_strati(*base, *words, *quick, env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines[0]) <= 100 and lines[-1].startswith("next: strati ")
    assert max(map(len, lines[:-1])) <= 80
    fields = json.loads((files / "out.json").read_text())
    assert {"kind", "rows", "values", "stderr", "reason", "waic", "fluctuation"} <= set(fields)
    assert np.shape(fields["values"]) == np.shape(fields["stderr"]) == shape and len(fields["rows"]) == 10
    schema = Path(strati.__file__).parent / "schemas" / "influence-1.json"
    jsonschema.validate(fields, json.loads(schema.read_text()))


@pytest.mark.parametrize(
    "words",
    [
        ("--kind", "susceptibility", "--parts", "nothing*"),
        ("--parts", "layers"),
        ("--inputs", "y"),
        ("--kind", "bif"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(files, words):
    done = run_strati(
        "influence", str(files / "model.safetensors"), "--data", str(files / "data.npz"), *words
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(("strati: error:", "Error:"))


def test_memory_does_not_grow_with_the_number_of_draws() -> None:
    """Joined batches give the covariance and R-hat of all draws, and a bounded number of means is kept."""
    from strati.landscape.influence.covariances import BatchMoments, split_rhat

    draws = torch.randn(4000, 2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    joined, plain = BatchMoments(5, most=1000), BatchMoments(5)
    sizes = []
    for number, values in enumerate(draws):
        joined.add(0, values)
        plain.add(0, values)
        if number in (999, 3999):
            sizes.append(sum(mean.numel() for batch in joined._batches[0] for mean in batch))
    assert max(sizes) <= 2 * 1000
    for few, many in zip(joined.stacked(), plain.stacked(), strict=True):
        used = len(few) * (joined.length // 5)
        np.testing.assert_allclose(few.mean(0), many[:used].mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(split_rhat(joined), split_rhat(plain), atol=0.01)
