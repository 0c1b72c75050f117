"""Make ``flax.msgpack`` and ``lambda.keras`` with flax and Keras themselves, and their weights as ``npz``.

Run by hand in an environment with jax, flax and keras:  ``python tests/io/oracle/make_flax_keras.py``
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import flax.serialization as serialization
import jax.numpy as jnp
import keras
import numpy as np

HERE = Path(__file__).parent


def flax_file() -> None:
    rng = np.random.default_rng(0)
    params = {
        "embed": {"embedding": jnp.asarray(rng.normal(size=(11, 6)), jnp.float32)},
        "dense": {"kernel": jnp.asarray(rng.normal(size=(6, 8)), jnp.bfloat16), "bias": jnp.zeros(8)},
        "conv": {"kernel": jnp.asarray(rng.normal(size=(3, 3, 4, 5)), jnp.float32)},
        "big": {"kernel": jnp.asarray(rng.normal(size=(40, 30)), jnp.float32)},
    }
    serialization.MAX_CHUNK_SIZE = (
        1500  # so that the last one is cut into chunks, as arrays beyond a gigabyte are
    )
    state = {"params": params, "opt_state": {"mu": {"dense": {"kernel": jnp.ones((6, 8))}}}, "step": 3}
    (HERE / "flax.msgpack").write_bytes(serialization.msgpack_serialize(serialization.to_state_dict(state)))
    flat = {f"{a}.{b}": np.asarray(v, np.float32) for a, parts in params.items() for b, v in parts.items()}
    np.savez_compressed(HERE / "flax.npz", **flat)


def keras_file() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            keras.layers.Conv2D(4, 3, name="stem"),
            keras.layers.Lambda(lambda x: x * 2.0, name="twice"),
            keras.layers.Flatten(),
            keras.layers.Dense(5, name="head"),
        ]
    )
    model.save(HERE / "lambda.keras")
    np.savez_compressed(
        HERE / "keras.npz",
        stem=model.get_layer("stem").get_weights()[0],
        head=model.get_layer("head").get_weights()[0],
    )


if __name__ == "__main__":
    flax_file()
    keras_file()
