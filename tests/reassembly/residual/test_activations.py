import numpy as np
import pytest

from strati.core.errors import BadInputError
from strati.reassembly.residual.network import ACTIVATIONS, activation

torch = pytest.importorskip("torch")
TORCH = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu-tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_value_and_slope_are_torchs(name):
    u = np.linspace(-30, 30, 401).astype(np.float32)
    z = torch.tensor(u, requires_grad=True)
    value = TORCH[name](z)
    value.sum().backward()
    act = activation(name)
    assert act.value(u).dtype == act.slope(u).dtype == np.float32
    np.testing.assert_allclose(act.value(u), value.detach().numpy(), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(act.slope(u), z.grad.numpy(), rtol=2e-5, atol=5e-6)


def test_unknown_name_lists_the_known():
    with pytest.raises(BadInputError, match="relu, gelu, gelu-tanh, tanh, silu"):
        activation("swish")
