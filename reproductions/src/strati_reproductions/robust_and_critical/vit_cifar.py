"""A vision transformer on CIFAR-10, trained here because the ImageNet ViT of the paper's table 2 is not available.

Six blocks of width 128 on patches of 4 x 4, by AdamW with a cosine over 16 epochs; as in masked training, most epochs
see a random half of the patches, which halves their cost, and the last ones all of them. About 75 minutes of
one core. Named as timm names its ViTs, kept after every epoch, resumed. Needs torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.results import Tick, silent
from strati.core.rng import derive
from strati_reproductions import zoo

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH, DEPTH, HEADS, PATCH, SIDE = 128, 6, 4, 4, 32
EPOCHS, WHOLE = 16, 2
"""Epochs in all, and how many of the last see every patch."""
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_RATE, _DECAY, _BATCH, _WARM = 1e-3, 0.05, 128, 2


def shapes(width: int = WIDTH, depth: int = DEPTH, classes: int = 10) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors, as timm has them.

    Examples:
        >>> shapes()["patch_embed.proj.weight"], len(shapes(depth=1))
        ((128, 3, 4, 4), 20)
    """
    sizes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + (SIDE // PATCH) ** 2, width),
        "patch_embed.proj.weight": (width, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (width,),
    }
    for i in range(depth):
        block = f"blocks.{i}"
        for name, rows, columns in (("attn.qkv", 3 * width, width), ("attn.proj", width, width),
                                    ("mlp.fc1", 4 * width, width), ("mlp.fc2", width, 4 * width)):  # fmt: skip
            sizes |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
        for name in ("norm1", "norm2"):
            sizes |= {f"{block}.{name}.weight": (width,), f"{block}.{name}.bias": (width,)}
    for name in ("norm",):
        sizes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return sizes | {"head.weight": (classes, width), "head.bias": (classes,)}


def images() -> dict[str, np.ndarray[Any, Any]]:
    """CIFAR-10 with the channels first: ``x_train``, ``y_train``, ``x_test``, ``y_test``, pixels as bytes."""
    with np.load(zoo.path("cifar10")) as file:
        arrays = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    return {k: np.ascontiguousarray(np.moveaxis(v, -1, 1)) if v.ndim == 4 else v for k, v in arrays.items()}


def trained_vit(
    file: Path, *, seed: int, epochs: int = EPOCHS, rows: int | None = None, tick: Tick = silent
) -> nn.Module:
    """Return the trained network; a training that was stopped continues from its file.

    Args:
        file: Where it is kept (``.pt``).
        seed: Random seed.
        epochs: How many; the last :data:`WHOLE` see all patches.
        rows: Use only the first images.
        tick: Called after each epoch.
    """
    import torch

    from strati.io.vision_models import vit

    model = vit(shapes(), HEADS)
    _start(model, seed)
    weights = [
        p for n, p in model.named_parameters() if p.ndim > 1 and "pos_embed" not in n and "cls_token" not in n
    ]
    others = [p for p in model.parameters() if not any(p is w for w in weights)]
    groups = [{"params": weights, "weight_decay": _DECAY}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=_RATE, betas=(0.9, 0.95))
    done = 0
    if file.is_file():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        done = int(state["epoch"])
    if done < epochs:
        arrays = images()
        x, y = (torch.from_numpy(arrays[k][:rows]) for k in ("x_train", "y_train"))
        for epoch in range(done, epochs):
            loss = _epoch(model, optimiser, x, y.long(), epoch, epochs, seed)
            file.parent.mkdir(parents=True, exist_ok=True)
            held = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "epoch": epoch + 1}
            torch.save(held, file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
            tick(f"ViT, epoch {epoch + 1} of {epochs}: loss {loss:.3f}")
    return model.eval()


def _start(model: nn.Module, seed: int) -> None:
    """Initial values as timm draws them: a truncated normal of deviation 0.02, no biases."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(derive(seed, "vit"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.trunc_normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


def _epoch(model: Any, optimiser: Any, x: Tensor, y: Tensor, epoch: int, epochs: int, seed: int) -> float:
    """One pass over the images, shifted and mirrored at random; the mean loss."""
    import torch

    chance = torch.Generator().manual_seed(derive(seed, "vit epoch", epoch))
    order = torch.randperm(len(x), generator=chance)
    steps = -(-len(x) // _BATCH)
    mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
    model.train()
    total = 0.0
    for step, picked in enumerate(order.split(_BATCH)):
        at = epoch + step / steps
        rate = _RATE * min(1.0, (at + 1e-3) / _WARM) * 0.5 * (1 + math.cos(math.pi * at / epochs))
        for group in optimiser.param_groups:
            group["lr"] = rate
        batch = (_jittered(x[picked], chance).float() / 255 - mean) / std
        logits = _seen(model, batch, None if epoch >= epochs - WHOLE else chance)
        loss = torch.nn.functional.cross_entropy(logits, y[picked], label_smoothing=0.1)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        total += float(loss.detach()) * len(picked)
    return total / len(x)


def _jittered(x: Tensor, chance: Any) -> Tensor:
    """Every image moved by up to four pixels and mirrored half of the time."""
    import torch

    n, side = len(x), x.shape[-1]
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    rows = torch.randint(0, 9, (n, 1), generator=chance) + torch.arange(side)
    columns = torch.randint(0, 9, (n, 1), generator=chance) + torch.arange(side)
    flip = torch.rand(n, 1, generator=chance) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    return padded[torch.arange(n)[:, None, None, None], torch.arange(3)[:, None, None], rows[:, None, :, None],
                  columns[:, None, None, :]]  # fmt: skip


def _seen(model: Any, x: Tensor, chance: Any) -> Tensor:
    """Logits from all patches, or from a random half of each image's."""
    import torch

    if chance is None:
        outputs: Tensor = model(x)
        return outputs
    patches = model.patch_embed(x) + model.pos_embed[:, 1:]
    places = torch.rand(patches.shape[:2], generator=chance).argsort(dim=1)[:, : patches.shape[1] // 2]
    patches = patches.gather(1, places[..., None].expand(-1, -1, patches.shape[2]))
    first = (model.cls_token + model.pos_embed[:, :1]).expand(len(x), -1, -1)
    logits: Tensor = model.head(model.norm(model.blocks(torch.cat([first, patches], dim=1)))[:, 0])
    return logits
