"""The tracker inside real training loops: Lightning's Trainer, its share of the time, GPUs' tensors."""

from __future__ import annotations

import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.tracking.track import _copied


@pytest.mark.slow
def test_the_callback_in_lightnings_trainer(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from strati.integrations.lightning import StratiCallback

    class Learner(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    rows = torch.utils.data.TensorDataset(torch.randn(48, 12), torch.randint(2, (48,)))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback = StratiCallback(every=2, out=tmp_path, share=1, log=lambda values, step: seen.append(step))
        model = Learner()
        trainer = lightning.Trainer(
            max_steps=6,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
            default_root_dir=str(tmp_path),
        )
        trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=8))
    lines = [json.loads(line) for line in (tmp_path / "track.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps[0] == 0
    assert steps == seen
    assert set(steps) <= {0, 2, 4, 6}
    assert len(steps) + callback.tracker.skipped == 4
    assert {name.rpartition("/")[0] for name in lines[0]["values"]} == {"net.0.weight", "net.2.weight"}


def test_a_used_up_share_skips_scans() -> None:
    """After a scan of some milliseconds no other fits into a millionth of the time."""
    with strati.Tracker(nn.Linear(40, 40), every=1, log=lambda v, s: None, share=1e-6) as tracker:
        for step in range(5):
            tracker.step(step)
            tracker.close()
    assert tracker.done == 1
    assert tracker.skipped == 4


def test_the_share_bounds_what_a_loop_pays() -> None:
    """What the tracker counts for itself stays near its share: one scan may exceed it, no second starts."""
    model = nn.Linear(120, 120)
    with strati.Tracker(model, every=1, log=lambda v, s: None, share=0.2) as tracker:
        began = time.perf_counter()
        each = []
        while time.perf_counter() - began < 1.0:
            before = tracker._cost
            tracker.step(0)
            tracker.close()
            each.append(tracker._cost - before)
            time.sleep(0.002)
        elapsed = time.perf_counter() - tracker._began
    assert tracker.skipped > 0
    assert tracker._cost <= 0.2 * elapsed + max(each)


def test_copies_are_the_trackers_own() -> None:
    """No tensor of the model is kept: later steps do not change what is scanned, and nothing stays on its device."""
    model = nn.Linear(5, 4).to(torch.bfloat16)
    copied = _copied(model)
    before = copied["weight"].copy()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert isinstance(copied["weight"], np.ndarray)
    np.testing.assert_array_equal(copied["weight"], before)


def test_errors_in_the_model_do_not_stop_the_loop() -> None:
    class Broken(nn.Module):
        def state_dict(self, *args: Any, **keywords: Any) -> Any:
            raise RuntimeError("no weights")

    tracker = strati.Tracker(Broken(), every=1, log=lambda v, s: None)
    with pytest.warns(RuntimeWarning, match="no weights") as seen:
        for step in range(3):
            tracker.step(step)
    assert len(seen) == 1
