"""Options that ``llc``, ``influence``, ``degeneracy``, ``curvature`` and ``track`` share: loss and sampler."""

from __future__ import annotations

import click

from strati.cli.common import POSITIVE, option, options
from strati.landscape.llc.config import LLCConfig, Sampler

LOSSES = ("behavioural-mse", "behavioural-kl", "mse", "cross_entropy")

loss_option = option(
    "--loss",
    "Loss of the network.  [default: cross_entropy for classes and tokens, mse for other targets, "
    "behavioural-mse without targets]",
    LOSSES,
)


_GAMMA = "Strength of the pull towards the parameters.  [default: max(1, min(1, N/2500) N / |theta*|^2)]"
sampling_options = options(
    option("--sampler", "How the posterior is sampled.", [str(s) for s in Sampler], LLCConfig),
    option(
        "--chains", "Independent chains.  [default: 4 to 64, by the size of the problem]", click.IntRange(2)
    ),
    option(
        "--draws",
        "Draws kept per chain.  [default: as many as mixing takes, up to a limit]",
        click.IntRange(4),
    ),
    option(
        "--warmup",
        "Rounds before the first kept draw.  [default: until the chains arrive]",
        click.IntRange(1),
    ),
    option("--nbeta", "Inverse temperature of the sampler.  [default: n / ln n]", POSITIVE),
    option("--gamma", _GAMMA, POSITIVE),
    option("--seconds", "Time budget, calibration included.  [default: a fixed amount of work]", POSITIVE),
    option(
        "--batch",
        "Rows per minibatch of SGLD.  [default: 256; fewer of long sequences]",
        click.IntRange(1),
    ),
    option("--step", "Step size of SGLD.  [default: calibrated]", POSITIVE),
    option("--max-rhat", "Refuse estimates whose R-hat exceeds X.", POSITIVE, LLCConfig),
)
"""The options of the sampler; names and defaults are those of ``LLCConfig``."""
