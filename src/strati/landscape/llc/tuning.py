"""Every tuned constant of the sampler and its estimates, with the script that checks it.

============================  =======================================================================================
constants                     where they come from, and what shows that they still hold
============================  =======================================================================================
sizes, cost model             ``benchmarks/bench_llc.py`` times the moves that the cost model counts
ladder, extrapolation         ``tools/calibrate_llc_limit.py``: fitted on ``--half development``, held against the exact
                              values of ``--half final`` and ``--half held-out``
rank and geometry             the same script: certain ranges must hold the exact value
HMC above ``DENSE_LIMIT``     ``tools/calibrate_llc_large.py``: default budgets against runs 15 times as long
SGLD                          ``benchmarks/bench_devinterp.py`` (bias over the step, gradients per effective sample)
============================  =======================================================================================
"""

from __future__ import annotations

import math

# Sizes of problems.

DENSE_LIMIT = 2500
"""Up to so many parameters the curvature is diagonalised to precondition the moves, in double precision."""
LOCALISED_FROM = 2500
"""From so many parameters on the default localisation lets each weight move about its own size."""
VIRIAL_LIMIT = 8
"""Up to so many parameters each direction has a control variate of its own, and replicas exchange places along the
whole ladder from the localisation down, where that is affordable."""

# Cost model: seconds on a machine of 2020, the same on every machine.

BUDGET = 8.0
"""Seconds that unset numbers of chains and draws are cut to."""
LARGE_BUDGET = 4 * BUDGET
"""The same per temperature, for networks too large to know their curvature exactly."""
SECONDS_PER_MOVE, SECONDS_PER_CALL = 4e-4, 2e-5
SECONDS_PER_NUMBER, SECONDS_PER_PRODUCT = 2e-9, 0.8e-10
SECONDS_PER_CUBE = 2e-10  # multiply-add of a factorisation
SECONDS_PER_RANK = 1e-9  # cubed side of a Jacobian, for its rank here and nearby
FULL_PASS_LIMIT, LEAST_GRADIENTS = 60.0, 1200  # ``auto`` samples by SGLD where so many gradients take longer
GEOMETRY_SHARE = 0.25  # of the time, for derivatives at the given parameters

# How much HMC samples.

RUNGS_ABOUT, EXCHANGED_ABOUT = 7, 30  # temperatures of a ladder, without and with exchange
LADDER_WORTH = 3.0  # budgets that a ladder with exchange may cost
FEWEST_CHAINS = 4
HMC_WARMUP_SHARE = 1 / 3  # of the time that chains may take before their first draw, as planned
LENGTHENED = 2.0  # trajectories of draws are about so many times as long as those of the warm-up
MOST_DRAWS = 50  # times the usual number, however many seconds there are
HMC_MOST_TIMES, GIBBS_MOST_TIMES = 8, 4  # the usual number of draws, for chains that have not mixed
FEWEST_DRAWS_TIMED = 4  # however little time there is
FEWEST_DRAWS, FEWEST_LONG = 80, 50  # the second: of long trajectories, above DENSE_LIMIT
HOPELESS, HOPELESS_DRAWS = (
    6,
    20,
)  # trajectories so many times too short do not mix: few draws are enough to say so

# Ladder of temperatures with exchange.

EXCHANGE_WARMUP = 60  # rounds before the first draw
ANNEAL = 4  # rounds per temperature on the way down, and at one halfway to the next
CROWD = 32  # replicas per chain on that way: their numbers tell the shares of a valley's parts
LADDER_SPACING = 1.2  # neighbouring temperatures differ by so many standard deviations of the energy
LEAST_FACTOR = 1.5  # between neighbours, or chains in several places would ask for no step at all
LOST_VALLEYS = 1.0  # nbeta (L - L*) over the number of parameters: such chains have lost the valleys
LEFT_BEHIND = 5.0  # half-widths of the energy above the middle at which an annealed chain is replaced
SHIFT_DECADES, STRETCH_DECADES = (
    (-5.0, 0.3),
    (-2.0, 0.6),
)  # of collapsed moves: widths of gamma, log of a factor

# HMC from the minimum.

AIM_EXCHANGE, AIM_LOCAL, AIM_LARGE = 0.8, 0.9, 0.7
"""Acceptance that the step is steered to. Chains that start at the minimum of a small problem have no other move that
frees them where the curvature varies along a valley; with thousands of directions no single one holds a chain up."""
LOCAL_RUNGS = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)  # of the requested temperature
STAGE_ROUNDS = 15  # of a stage of the warm-up
STAGES, MOST_STAGES = 3, 12
STAGES_LARGE, MOST_STAGES_LARGE = 9, 18  # above DENSE_LIMIT
ARRIVED = 0.01  # relative change of the distance over a stage of the warm-up
WARMUP_END = 0.45  # of the time that is left: then draws are kept, wherever the chains are
SETTLE = 20  # rounds at a temperature before its draws
STIFFER_LARGE = 2.0  # above DENSE_LIMIT some directions are stiffer at any one place than on average
LONGEST_STEP = math.pi / 2  # a quarter turn: more is no farther
REACH = 3.0  # longest trajectory, in spreads of a direction
CURVATURE_PLACES, CURVATURE_WORK = (
    8,
    5e9,
)  # over which the curvature is averaged; multiply-adds that it may take
PER_EIGENVECTORS = 20  # multiply-adds per cubed size of a matrix
KRONECKER_OUTPUTS, KRONECKER_ROWS = 64, 2048  # beyond, random combinations of outputs, and the first rows
KRONECKER_SHARE = 0.9  # of the parameters in linear layers, for Kronecker factors to pay

# Losses that are quadratic in blocks (Gibbs and collapsed moves) or affine in their inputs.

STRUCTURE_PROBES = 3
QUADRATIC_TOLERANCE, AFFINE_TOLERANCE = 1e-8, 1e-10  # of the spread of values on a line
MOST_BLOCKS = 12
GIBBS_RUNGS = (
    10.0,
    1e2,
    1e3,
    1e4,
    1e5,
    1e6,
)  # of the temperature asked for; cold ones cost no more than hot ones
ONE_BLOCK_RUNGS = (1e7, 1e8)  # further ones for one block, which any temperature draws outright
MISFIT_ROUNDINGS, LARGEST_MISFIT = 1e3, 1e-2  # in nbeta L: beyond, a conditional is not quadratic
CONDITIONAL_NUMBERS = 4_000_000  # held at once

# SGLD.

SHARE_OF_STABLE = 0.375
"""Of the largest stable step, 4/k. The step alone does not heat a quadratic loss, and noise of minibatches heats the
stiffest direction 1.6 times as much as to first order."""
SHARE_OF_TRACK = 0.25  # the same for checkpoints, whose step is not shortened where the chains arrive
MOST_CONTROLS, CONTROL_NUMBERS = 64, 1 << 24  # minibatches with control variates, and numbers in all of these
TOGETHER = 50_000  # parameters up to which chains share one batched pass
PIECE = 1 << 16  # parameters moved at a time: what a step reads and writes of them stays in the cache
RUNAWAY = 10.0  # times the squared distance of the localisation alone: the chains diverge
RESTARTS = 8  # of chains that diverge in the warm-up, each with a quarter of the step
DAMPING = 0.1  # of the mean curvature, in the preconditioner
LEAST_PREDICTIONS = 1024  # in a minibatch of sequences
FIRST_DRAWS, LEAST_STEPS = 500, 600  # draws per chain to begin with; steps however expensive they are
SGLD_WARMUP, LEAST_WARMUP = (
    100,
    10,
)  # steps before the first that is recorded, in which the step is calibrated
SGLD_WARMUP_SHARE = 0.2  # of the time
CALIBRATION_GRADIENTS = 13  # of a power iteration
SGLD_BLOCK = 30  # steps of one group of chains before it is the next one's turn
TIMED_BLOCK = 6  # the same between two looks at the clock; divisible by three
POSITION_STRIDE, POSITION_BLOCKS = 5, 4  # of steps whose positions are added up; blocks of such sums
SGLD_RHAT, SGLD_SPREAD_RHAT, SGLD_ESS = 1.02, 1.1, 200.0  # of loss and distance: long enough

# Estimates.

LEAST_ESS = 30.0
ABOVE_HALF = 1.05  # of N/2: a quartic wall can lift a value at a finite temperature a little above
OFF_MINIMUM = 0.02  # of one, in nbeta (L* - L_min): below, the given parameters are the minimum
HELD_BACK = 0.02  # share of the value that the localisation may add where it is centred beside the minimum
SMALL_CORRECTION = 0.05  # of the value, by which it is corrected where the minimum itself was not looked for
FEWEST_TIMED = 10  # draws that say nothing about mixing
UNCERTAIN_LIMIT = 0.3  # a limit with a larger relative error is none
SLOW_RHAT = 1.03  # of the distance, up to which control variates are used
MOST_GAIN = 12.0  # of control variates: they know nothing of regions that no chain visited
SLOWEST_LARGE = 25.0
"""Least number of draws per independent draw that is assumed with thousands of parameters: chains that start together
and are a few hundred draws long do not show their autocorrelation time. Measured over 1,500 draws: 19."""
DRIFT_ERRORS = (
    3.0  # by which the halves of the draws must differ to count as drift; 0.3 % of stationary chains do
)
TRACE_POINTS = 500  # of each chain in JSON
MOST_BYTES = 2 << 30  # of kept positions

# Extrapolation over a ladder.

QUICK_RATE = 0.3  # fading that is quicker than any logarithm
MULTIPLICITIES = (1, 2, 3, 4)
ERROR_FLOOR = 2e-3  # no value is trusted to better than this share
CORRELATED_RUNGS = 1.5  # neighbours share their chains: their noise does not average out as if alone
LEAST_FIT = 0.01  # probability of the best form's misfit
LEAST_SPAN, FEWEST_RUNGS = 6.0, 4  # e-foldings and temperatures that are fitted
BRIDGED_SHARE = 0.15  # of the way from the coldest value to the limit: better than that no law is known
COST_PER_CUT = 0.3  # logarithm of weight that each temperature left out costs
BLOWN_ERROR = 3.0  # times the largest error before: from there on the chains no longer agree where they are
LIMIT_WIDENING = 1.25  # of the error, so that nine of ten limits cover
COLD_END, STEEPEST_END = (
    3.0,
    0.02,
)  # over the last e-foldings, values that change by more in each do not settle
FARTHEST_LIMIT = 0.2  # of the limit: farther from the coldest value no extrapolation is believed
DISAGREEMENT_ERRORS = 5.0  # between neighbouring temperatures; it is looked at after every one
DISAGREEMENT_SHARE = 0.01  # of the value: smaller differences do not matter
SPREAD_RHAT = 1.2  # beyond, the places that the chains are at are those of their way down alone
STARTED_RHAT = 1.05  # the same for chains that started at the minimum: they get there by their own moves

# Rank and geometry at the given parameters.

MOST_DESCENTS = 40
VALLEY_DISTANCES = (0.05, 0.2, 0.5)  # along flat directions, in sizes of the parameters
ASIDE_DISTANCE = 0.03  # farthest, in these sizes, of places that rounding does not tell from the minimum
NEARBY_DISTANCE = 0.01  # the same, at which the Jacobian's rank is that of almost every point
SAME_MINIMUM = 1e-9  # of the loss farther away: a minimum lower by less is no other than the given parameters
GEOMETRY_TRIALS = 3
KINK_DISTANCES = (1e-3, 1e-3 / 64)  # in sizes of the parameters
CHEAP_HESSIAN = 60  # parameters up to which a Hessian per step is cheap
ROUNDING_UNITS = 4.0  # in the last place, by which parameters are moved to measure rounding
RANK_SAFETY = 8.0
RANK_GAP, RANK_GAP_SINGLE = (
    1e4,
    1e3,
)  # between singular values that count and those that do not; in single precision
SAME_EIGENVALUE = 1.5  # factor within which an eigenvalue stays between places that cannot be told apart
RANK_WORK, RANK_CHUNK = (
    1.5e9,
    4_000_000,
)  # multiply-adds of a decomposition; numbers of a Jacobian held at once
JACOBIAN_NUMBERS = 100_000_000  # in a Jacobian that is held whole

# Density of states.

DENSITY_SAMPLES, DENSITY_SOLVED = (
    150_000,
    30_000,
)  # the second: samples that the free energies are solved with
DENSITY_ROUNDS, DENSITY_GROUPS = 50, 8
DENSITY_STEP = 2.0  # lambda(eps) is the slope of ln V between eps/step and eps*step
