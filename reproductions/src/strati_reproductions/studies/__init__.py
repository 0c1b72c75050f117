"""Studies by name: TOML files that strati finds through the entry points ``strati.specs``."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent

fcn_digits = _FOLDER / "fcn-digits.toml"
fcn_mnist = _FOLDER / "fcn-mnist.toml"
fcn_mnist_adam = _FOLDER / "fcn-mnist-adam.toml"
fcn_mnist_degeneracy = _FOLDER / "fcn-mnist-degeneracy.toml"
fcn_mnist_sgd = _FOLDER / "fcn-mnist-sgd.toml"
