"""Every measured constant of the planners and of the estimates that kernels compete with, from an H200.

Estimates are in µs. Each is the sum of what does not overlap, and of the root of the sum of the squares of what does:
reading W from memory, and the busiest CTA's work. They were fitted to benchmarks/results/h200/estimates.csv, but where
another source is named, and benchmarks/estimates.py says how well (docs/notebook.md). Other GPUs go by the same
constants, scaled: what comes from memory by their bandwidth, what a multiprocessor does by their clock, the dense
product by their tensor cores, each over that of an H200 (`rates` in common/device.py). None of that has been measured;
docs/predictions.md says what follows.
"""

from __future__ import annotations

from typing import NamedTuple

# -- The dense weight --------------------------------------------------------------------------------------------------

# µs: two launches; per million weights writing them, and reading them from L2 and memory; and the product's TFLOP/s.
DENSE_START, DENSE_WRITE, DENSE_READ, DENSE_TERAFLOPS = 6.875, 0.398, 0.816, 787.028
# Where y has few tiles of so many rows and columns for the multiprocessors, up to such a part of them, cuBLAS leaves
# most of them idle or adds up parts of tiles, and multiplies so many times more slowly.
DENSE_TILE, DENSE_IDLE, DENSE_FEW_TILES = 128, 0.4, 1.35
# How many times slower cuBLAS is where N is odd, and where it is even but no multiple of 8.
DENSE_ODD, DENSE_EVEN = 7.5, 2.8
# How many times as fast as a kernel the dense way has to be, which takes two bytes of memory for a weight.
DENSE_GAIN = 1.03
# The most rows of x for which these kernels beat that on GPUs which have no other. Guesses.
SM75_ROWS, SIMT_ROWS = 64, 8

# MB a µs: no estimate of an H200 has W come faster. Estimates of other GPUs are kept to the same share of their
# bandwidth, those of sm75 and simt for the nibbles alone.
MOST_BANDWIDTH = 4.4

# µs of a small kernel between two products of a captured step, its start included: what fusing it is worth.
POINTWISE = 2.0

# -- sm90_decode -------------------------------------------------------------------------------------------------------


class DecodeTimes(NamedTuple):
    """µs, but for the bandwidth. start: a launch. x: for each block of K whose x a CTA loads. bandwidth: MB a µs.
    block, tile: of the busiest CTA, for each of its blocks of K and tiles. scales: a MB of them, for each CTA that
    takes other rows of x. cluster: adding up among CTAs, and neighbour: for each of them beyond the first."""

    start: float
    x: float
    bandwidth: float
    block: float
    tile: float
    scales: float
    cluster: float
    neighbour: float


# By groups of eight rows of x.
DECODE_TIMES = {
    1: DecodeTimes(1.054, 0.02086, 5.588, 0.0075, 0.367, 0.0704, 0.505, 0.805),
    2: DecodeTimes(1.265, 0.02492, 9.0, 0.0175, 0.225, 0.0425, 0.0, 1.629),
    4: DecodeTimes(2.799, 0.0, 7.897, 0.0242, 0.254, 0.0746, 3.0, 1.013),
}

# Of experts: blocks of K that a warp holds x for, twice, and those that it holds once where K has more than so many
# blocks; the most warps of a CTA; CTAs of a multiprocessor, and their warps, together; the most stages, and the fewest
# that are worth more than another CTA.
ROUTED_SLICE, ROUTED_LONG_SLICE, ROUTED_LONG = 4, 8, 31
ROUTED_WARPS, ROUTED_RESIDENT, ROUTED_SM_WARPS = 16, 3, 20
ROUTED_STAGES, ROUTED_FEWEST_STAGES = 4, 3
# CTAs that take the tiles of a run in turn, and how many do where an expert has so few tiles at most.
ROUTED_NEIGHBOURS, ROUTED_FEW_NEIGHBOURS, ROUTED_FEW_TILES = 12, 2, 128
ROUTED_EARLY = True  # whether down asks for W before gate and up have ended
ROUTED_COMBINES = 8  # up to so many experts of a token are added up where they are made, if there are no more tokens
# Groups of eight rows of x to blocks of K that a warp holds x for, and the most warps of a CTA.
DECODE_SLICES = {1: (8, 16), 2: (4, 16), 4: (4, 8)}
# The same to the most warps of each of two CTAs that share a multiprocessor.
DECODE_PAIR_WARPS = {1: 5, 2: 6, 4: 0}
# From the first K to the last a CTA is better off with eight rows of x, if there are multiprocessors for all.
DECODE_FEWER_ROWS_K = (4096, 8192)
# K up to which a CTA that takes 32 rows of x has registers for them; and the multiple of K where it gains nothing.
DECODE_SHORT_K, DECODE_EVEN_K = 2048, 1024
# Of a tile, in blocks: how much longer a block takes for each warp that a CTA lacks; what a tile costs besides; what
# each CTA of a cluster does, and being one at all.
DECODE_LACKING_WARP, DECODE_TILE, DECODE_NEIGHBOUR, DECODE_CLUSTER = 0.045, 8, 8, 32
# Warps from which on, with one group of rows: a tile comes in halves though it is the CTA's only one; a second stage
# waits for the first in a pair of CTAs with one tile; it does so with nested scales, or one tile.
DECODE_HALVES_WARPS, DECODE_PATIENT_PAIR_WARPS, DECODE_PATIENT_WARPS = 5, 6, 12
# Registers of a multiplying thread: of sixteen warps, and of eight that hold 32 rows of x.
DECODE_REGISTERS_16_WARPS, DECODE_REGISTERS_8_WARPS = 112, 232
# Warps from which on blocks that share a scale are summed up before they are scaled; and the one number that is
# slower so.
DECODE_JOINED_WARPS, DECODE_ALONE_WARPS = 5, 6

# -- sm90_streamk ------------------------------------------------------------------------------------------------------


class StreamKTimes(NamedTuple):
    """µs of a launch; MB a µs that W comes with; µs of a MB of scales, for each tile of x; of a MB of y; and of a MB of
    x, where it is laid out."""

    start: float
    bandwidth: float
    scales: float
    result: float
    x: float = 0.0


# By tile_m, and whether CTAs keep their x. This table, and all numbers that benchmarks/streamk_plans.py prints, are
# fitted by it to its record.
STREAMK_TIMES = {
    (8, False): StreamKTimes(3.611, 6.0, 0.199, 0.738, 0.713),
    (8, True): StreamKTimes(1.203, 4.078, 0.0, 2.661),
    (16, False): StreamKTimes(3.828, 6.0, 0.129, 0.0, 0.647),
    (16, True): StreamKTimes(1.176, 4.078, 0.0, 1.855),
    (24, False): StreamKTimes(3.859, 6.0, 0.43, 0.0, 0.645),
    (24, True): StreamKTimes(1.347, 4.078, 0.0, 1.623),
    (32, False): StreamKTimes(4.093, 6.0, 0.891, 0.0, 0.47),
    (32, True): StreamKTimes(1.562, 4.078, 0.0, 1.73),
    (48, False): StreamKTimes(4.357, 6.0, 0.875, 0.071, 0.579),
    (48, True): StreamKTimes(2.041, 4.078, 0.0, 1.614),
    (64, False): StreamKTimes(4.238, 6.0, 1.0, 0.071, 0.763),
    (64, True): StreamKTimes(2.43, 4.078, 0.0, 2.336),
    (80, False): StreamKTimes(3.046, 5.792, 1.0, 0.071, 0.794),
    (96, False): StreamKTimes(2.906, 5.702, 1.0, 0.071, 0.977),
    (112, False): StreamKTimes(4.951, 6.0, 1.0, 0.071, 0.792),
    (128, False): StreamKTimes(4.494, 6.0, 1.0, 0.071, 0.79),
}  # fmt: skip
# What a product saves whose x is laid out already, beside the time of x itself.
STREAMK_LAYING_OUT = 1.5
# Rows of x up to which one tile has them all, unless there are multiprocessors for more.
STREAMK_ONE_TILE = 32

# tile_m (rows of x) and warpgroups (64 rows of W each) to stages, and µs a unit (256 of K).
STREAMK_TILES = {
    (8, 4): (3, 1.029), (8, 3): (3, 0.825), (8, 2): (3, 0.62), (16, 4): (3, 1.182), (16, 3): (3, 0.927),
    (16, 2): (3, 0.672), (24, 4): (3, 1.258), (24, 3): (3, 1.002), (24, 2): (3, 0.714), (32, 4): (3, 1.313),
    (32, 3): (3, 1.02), (32, 2): (3, 0.722), (48, 3): (3, 1.184), (48, 2): (3, 0.844), (64, 3): (2, 1.434),
    (64, 2): (3, 0.907), (80, 3): (2, 1.676), (80, 2): (2, 1.147), (96, 3): (2, 1.922), (96, 2): (2, 1.248),
    (112, 2): (2, 1.384), (128, 2): (2, 1.491),
}  # fmt: skip
# By tile_m, µs: where every tile is cut into equal parts; where all units are dealt out in equal runs; and for each
# part of a tile and warpgroup.
STREAMK_CUT = {
    8: 0.308, 16: 0.279, 24: 0.395, 32: 0.451, 48: 0.655, 64: 1.214, 80: 2.013, 96: 2.459,
    112: 1.218, 128: 1.61,
}  # fmt: skip
STREAMK_RUN = {
    8: 1.006, 16: 1.027, 24: 1.065, 32: 1.287, 48: 1.723, 64: 2.257, 80: 3.002, 96: 3.337,
    112: 3.291, 128: 3.82,
}  # fmt: skip
STREAMK_PART = {
    8: 0.042, 16: 0.056, 24: 0.067, 32: 0.072, 48: 0.055, 64: 0.058, 80: 0.162, 96: 0.188,
    112: 0.073, 128: 0.104,
}  # fmt: skip
# Where a plan must not depend on the rows of x: warpgroups; parts that a tile's first CTA adds up one by one; and µs of
# a unit, of a cut and of a part, which stand for every tile_m.
INVARIANT_WARPGROUPS, INVARIANT_DIRECT = 3, 8
INVARIANT_UNIT, INVARIANT_CUT, INVARIANT_PART = 1.0, 2.0, 0.3
# Where each CTA keeps its x in shared memory: warpgroups to µs a unit, and how many times that by tile_m.
RESIDENT_UNIT = {2: 0.913, 3: 1.135}
RESIDENT_TILE_M = {8: 0.742, 16: 0.899, 24: 1.068, 32: 1.115, 48: 1.365, 64: 1.475}
# µs: a warpgroup besides; a fix-up in memory, and each of its parts and warpgroups; a cluster reduce, and each of its
# parts.
RESIDENT_WARPGROUP, FIX_UP, FIX_UP_PART, CLUSTER_REDUCE, CLUSTER_PART = 0.308, 0.622, 0.039, 0.412, 0.166
# Stages: with fewer than the first, or than the CTA has units, x laid out ahead is faster; more than the last gain
# nothing.
RESIDENT_STAGES, RESIDENT_MOST_STAGES = 3, 4

# -- sm75: a model in cycles ------------------------------------------------------------------------------------------

# µs of a launch, and of a cycle.
SM75_START, SM75_CYCLE = 2.76, 1 / 1980
# On a SM, by groups of eight rows of x: warps beyond which registers do not hold the sums. The most CTAs that share K.
SM75_WARPS = {1: 16, 2: 16, 4: 12, 8: 8}
SM75_SPLITS = 8
# Cycles, reckoned and not fitted. Of a warp's span: what its loads of W take of the L1 pipe, those of x for each group
# of rows, and each row of x of L2. Filling the pipeline and adding up, for each turn; a second launch.
SM75_SPAN, SM75_SPAN_M_TILE, SM75_SPAN_X = 50, 16, 3
SM75_TURN, SM75_LAUNCH = 800, 6000
# What a warp by itself takes for a span of 64 or of 32 weights, and how much of that again for each group of rows.
SM75_LONE_SPAN, SM75_LONE_M_TILE = {64: 1075, 32: 861}, 0.11
# What bf16 x as fp16 takes beside the product (halves.py): nine small launches, which were not measured.
HALVES = 30.0

# -- sm80: a model in cycles ------------------------------------------------------------------------------------------

# Groups of eight rows of x that a warp multiplies; and for each of them shapes to choose from: row_groups, n_warps,
# k_warps, tile_k and CTAs that share a multiprocessor. The first ones are the fastest of 500 on an H200, or of 60 on an
# H100, where with many rows two CTAs of four warps do better than one of eight: while one waits for a stage, tensor
# cores work for the other.
SM80_COLUMNS = (1, 2, 4, 6, 8)
SM80_SHAPES = {
    1: (
        (2, 2, 2, 256, 3), (2, 2, 2, 256, 2), (1, 2, 2, 256, 3), (1, 2, 2, 256, 2), (1, 4, 1, 128, 2),
        (2, 4, 2, 128, 1), (1, 4, 2, 256, 1), (1, 8, 1, 128, 1),
    ),
    2: (
        (2, 2, 2, 256, 3), (2, 2, 2, 256, 2), (2, 4, 1, 256, 3), (1, 4, 1, 128, 2),
        (2, 4, 2, 128, 1), (1, 4, 2, 256, 1),
    ),
    4: (
        (1, 4, 1, 256, 2), (1, 4, 1, 256, 3), (2, 4, 1, 256, 2), (2, 2, 2, 256, 2), (1, 2, 2, 256, 2),
        (1, 4, 1, 128, 3), (2, 4, 1, 128, 2), (1, 4, 1, 128, 2), (2, 4, 1, 128, 3),
        (2, 4, 2, 128, 1), (2, 8, 1, 64, 1),
    ),
    6: (
        (1, 4, 1, 256, 2), (1, 8, 1, 256, 1), (2, 8, 1, 256, 1), (1, 2, 2, 256, 2),
        (2, 4, 1, 128, 2), (1, 4, 1, 128, 2), (2, 4, 1, 128, 3),
    ),
    8: ((2, 8, 1, 256, 1), (1, 8, 1, 256, 1), (1, 2, 2, 256, 2), (2, 4, 1, 128, 2), (1, 4, 1, 128, 2)),
}  # fmt: skip
# Where none of these fits into shared memory.
SM80_SMALL_SHAPES = {
    6: ((2, 4, 2, 128, 1), (2, 8, 1, 64, 1)),
    8: ((2, 8, 1, 128, 1), (2, 4, 2, 128, 1), (2, 8, 1, 64, 1)),
}
SM80_STAGES = 6  # more gain nothing
# Instructions for a pair of weights: looked up, computed, computed where nibbles are four apart; and what a stage takes
# besides.
SM80_LOOK_UP, SM80_ARITHMETIC, SM80_CROSSED, SM80_STAGE = 4.93, 2.29, 1.29, 54.7
# Cycles of a multiprocessor: an instruction of a warp, an MMA. Of a CTA by itself: a stage, and an instruction of each
# of its warps. And how the two add up: the exponent of their norm.
SM80_ISSUE, SM80_MMA, SM80_LATENCY, SM80_SERIAL, SM80_OVERLAP = 0.157, 3.17, 281.0, 1.8, 1.54
# The share of a GPU's own rate that MMAs reach where that is what is waited for, as on GeForce cards: a guess.
SM80_MMA_SHARE = 0.75
# µs: a launch, a cycle, a fix-up and each part of a tile. MB a µs that W comes with, and that y goes with.
SM80_START, SM80_CYCLE, SM80_FIX_UP, SM80_PART = 5.79, 0.00055, 0.63, 0.49
SM80_BANDWIDTH, SM80_STORES = 5.2, 4.0
# With batch_invariant: cycles until a CTA that begins when another has ended multiplies, a guess; the rows of x whose
# times count alike; the most CTAs that share a tile, and partial sums that they leave.
SM80_LATER, SM80_INVARIANT_ROWS = 2500.0, (8, 32, 256)
SM80_SHARES, SM80_INVARIANT_SUMS = 8, 1 << 23

# -- sm80_back ---------------------------------------------------------------------------------------------------------

# Groups of eight rows of a gradient that a warp multiplies, to the CTAs that share a multiprocessor; and stages.
SM80_BACK_SHAPES, SM80_BACK_STAGES = {2: 4, 4: 4, 8: 3, 12: 2}, 4
# Of a warp and 32 rows of W, in cycles: looking them up, and the MMAs of eight rows of a gradient. Of a part of a tile:
# each row of a gradient. And µs of a launch.
SM80_BACK_LOOK_UPS, SM80_BACK_COLUMN, SM80_BACK_PART, SM80_BACK_START = 77.0, 9.95, 20.7, 6.37

# -- sm80_gemm ---------------------------------------------------------------------------------------------------------

# Warps along what is produced and along rows of x, and groups of eight rows of x of a warp, to the most CTAs that share
# a multiprocessor; and stages, more of which gain nothing.
MANY_SHAPES, MANY_STAGES = {(2, 4, 8): 1, (2, 2, 8): 2, (2, 4, 4): 1, (2, 2, 4): 2}, 3
# A shape, and whether weights are computed instead of looked up, to what a multiprocessor takes for a stage, in µs: of
# one CTA by itself, and of two that share it. Fitted on an H100, whose clock is the H200's, to 600 products.
MANY_STAGE = {
    ((2, 4, 8), True): (1.287, 1.287), ((2, 4, 8), False): (1.470, 1.470),
    ((2, 2, 8), True): (0.825, 0.712), ((2, 2, 8), False): (1.146, 0.864),
    ((2, 4, 4), True): (0.805, 0.805), ((2, 4, 4), False): (1.057, 1.057),
    ((2, 2, 4), True): (0.586, 0.496), ((2, 2, 4), False): (0.908, 0.652),
}  # fmt: skip
# µs: a launch, not fitted but taken for that of sm80; and a million partial sums.
MANY_START, MANY_SUMS = 6.0, 4.28
# With stacks of experts: what a stage takes over that of a weight, and µs of a tile besides. Of an H100.
MANY_GROUPED, MANY_TILE = 1.12, 0.25

# -- simt --------------------------------------------------------------------------------------------------------------

# Warps a multiprocessor wants before a warp takes more than one row of W.
SIMT_WARPS_WANTED = 8
# µs: a launch; per million weights, decoding them for each tile of x, and multiplying them with each row of x.
SIMT_START, SIMT_DECODE, SIMT_MULTIPLY = 5.0, 0.221, 0.078

# -- sm90_gemm ---------------------------------------------------------------------------------------------------------

# tile_m (rows of x) to µs a unit (256 of K), of weights that are looked up and of such as are computed. These tables,
# and all numbers that benchmarks/gemm_plans.py prints, are fitted by it to its record.
GEMM_UNIT = {96: 1.406, 128: 1.623, 160: 1.811, 192: 1.995, 224: 2.161, 256: 2.466, 320: 3.319, 384: 3.841}
GEMM_COMPUTED_UNIT = {96: 1.208, 128: 1.346, 160: 1.618, 192: 1.811, 224: 2.077, 256: 2.386, 320: 3.001, 384: 3.577}
# The same where x keeps the order of K.
IN_ORDER_UNIT = {96: 1.613, 128: 1.811, 160: 1.995, 192: 2.198, 224: 2.457, 256: 2.633, 320: 3.464, 384: 3.964}
IN_ORDER_COMPUTED_UNIT = {96: 1.33, 128: 1.513, 160: 1.733, 192: 1.902, 224: 2.142, 256: 2.411, 320: 3.007, 384: 3.608}
# µs: a launch with x as it is; two, and what a million numbers of x that are laid out add to them; a part of a tile of
# 256 rows, and a tile. How much longer units take where CTAs are at different places along K, and MB a µs that W comes
# with.
GEMM_COPIED_START, GEMM_START, GEMM_LAYING = 3.726, 4.224, 1.092
GEMM_PART, GEMM_TILE, GEMM_APART, GEMM_BANDWIDTH = 2.351, 2.3, 1.115, 4.667
# Of twins: µs of being two, and the same factor; the rows of x of their tiles, and bytes of x a launch, as below.
GEMM_TWINS_START, GEMM_TWINS_APART, GEMM_TWINS_M, GEMM_TWINS_X_BYTES = 1.666, 1.125, 256, 1 << 25
# The most rows of x of a tile that is cut wherever a CTA's run ends: adding up parts of wider ones costs what these
# save. Equal shares of them pay.
GEMM_MOST_CUT = 320
# Between how many µs the GPU comes to its limit of power, and how much longer all takes beyond.
GEMM_LASTING = (1200.0, 1400.0), 0.1
# µs of adding up 256 rows of a tile that others have equal shares of.
GEMM_SHARED = 11.355
# CTAs that add up as a cluster, where some do; µs of being one, and of adding up 256 rows.
GEMM_CLUSTER, GEMM_CLUSTER_START, GEMM_REDUCE = 2, 0.728, 4.483
# Threads that lay x of experts out, where units suffice.
LAYING_THREADS = 1 << 16
# µs that one launch of `lay_out` for several weights saves with each: what it takes beside its work.
GEMM_LAYING_OUT = 1.5
# Rows of x a tile from which on shared memory is what W waits for.
GEMM_PERMUTES_M = 160
# Bytes of x a launch, all of which stays in L2, where CTAs are at different places along K: laid out, as it is, and
# those of dy.
GEMM_X_BYTES, IN_ORDER_X_BYTES, BACK_X_BYTES = 1 << 24, 3 << 23, 1 << 25
# Plans are as good as the fastest up to so many times its time, and then what counts is the room that they take.
GEMM_ALIKE = 1.02
# The most bytes of x a launch elsewhere, as long as a tile has no more: laid out, they are a second x in memory.
GEMM_ROOM = 1 << 26

# The same on the way back, and µs of a launch with x as it is.
BACK_UNIT = {32: 1.59, 64: 1.797, 96: 2.026, 128: 2.211, 160: 2.373, 192: 2.682, 224: 2.912, 256: 3.148}
BACK_COMPUTED_UNIT = {32: 1.093, 64: 1.32, 96: 1.549, 128: 1.791, 160: 1.992, 192: 2.244, 224: 2.458, 256: 2.706}
BACK_COPIED_START, BACK_TWINS_APART = 4.282, 1.102
# Of mates; narrower tiles take as long.
BACK_MATES_UNIT = {192: 2.371, 224: 2.567, 256: 2.794}
BACK_MATES_APART = 1.06
# Of producers that decode.
BACK_DECODERS_UNIT = {32: 1.541, 64: 1.686, 96: 1.799, 128: 1.885, 160: 2.116, 192: 2.323, 256: 2.832}

# -- experts -----------------------------------------------------------------------------------------------------------


class GroupedTimes(NamedTuple):
    """µs of a unit (256 of K), and of a tile besides."""

    unit: float
    tile: float


class GroupedCommon(NamedTuple):
    """laying: µs for each million numbers of x that are laid out. bandwidth: MB a µs that experts come with. saved:
    of a unit's time, by a tile that leaves all columns out, and by others in proportion. of_32: how many times all
    that, where 32 weights share a scale."""

    laying: float
    bandwidth: float
    saved: float
    of_32: float


# By whether it is the way back. All but the stages is what benchmarks/grouped_plans.py prints, which fits it to its
# record.
GROUPED_COMMON = {False: GroupedCommon(0.50, 3.10, 0.49, 1.09), True: GroupedCommon(1.16, 4.59, 0.38, 0.99)}
# Of pairs that are sorted by expert, by tile_m.
GROUPED_TIMES = {
    128: GroupedTimes(2.17, 1.33), 160: GroupedTimes(2.27, 1.27),
    192: GroupedTimes(2.33, 1.53), 224: GroupedTimes(2.52, 1.57),
    256: GroupedTimes(2.65, 1.73),
}  # fmt: skip
# The same times of sm90_streamk, by tile_m and warpgroups; and the most stages.
GROUPED_STAGES = {
    (8, 4): 3, (8, 3): 3, (16, 4): 3, (16, 3): 3, (24, 4): 3, (24, 3): 4, (32, 4): 3, (32, 3): 3,
    (48, 3): 3, (64, 2): 3, (64, 3): 2, (80, 2): 2, (80, 3): 2, (96, 2): 2, (96, 3): 2, (112, 2): 2,
}  # fmt: skip
GROUPED_STREAMK = {
    (8, 4): GroupedTimes(1.19, 0.00), (8, 3): GroupedTimes(0.97, 0.05),
    (16, 4): GroupedTimes(1.27, 0.15), (16, 3): GroupedTimes(0.99, 0.40),
    (24, 4): GroupedTimes(1.31, 0.76), (24, 3): GroupedTimes(1.08, 0.47),
    (32, 4): GroupedTimes(1.47, 0.74), (32, 3): GroupedTimes(1.18, 0.45),
    (48, 3): GroupedTimes(1.35, 0.56), (64, 2): GroupedTimes(1.16, 0.68),
    (64, 3): GroupedTimes(1.57, 0.71), (80, 2): GroupedTimes(1.27, 0.78),
    (80, 3): GroupedTimes(1.75, 1.02), (96, 2): GroupedTimes(1.40, 1.18),
    (96, 3): GroupedTimes(1.93, 1.38), (112, 2): GroupedTimes(1.55, 1.01),
}  # fmt: skip
# The times on the way back.
GROUPED_BACK_TIMES = {
    32: GroupedTimes(2.31, 0.10), 64: GroupedTimes(2.39, 0.65),
    96: GroupedTimes(2.38, 1.14), 128: GroupedTimes(2.64, 0.25),
    160: GroupedTimes(2.81, 0.06), 192: GroupedTimes(2.95, 0.20),
    224: GroupedTimes(3.15, 0.19), 256: GroupedTimes(3.29, 0.00),
}  # fmt: skip
# The same where producers decode.
GROUPED_BACK_DECODERS_TIMES = {
    32: GroupedTimes(1.73, 1.29), 64: GroupedTimes(1.87, 1.70), 96: GroupedTimes(1.95, 1.83),
    128: GroupedTimes(2.06, 1.68), 160: GroupedTimes(2.18, 1.61), 192: GroupedTimes(2.33, 1.54),
    256: GroupedTimes(3.03, 1.68),
}  # fmt: skip
# µs of the sort, and of a thousand pairs in it.
SORT_START, SORT_PAIRS = 9.0, 0.6
# µs of a launch for pairs that are not, and MB a µs that experts come with, once for every eight rows of x; by weights
# that share a scale.
ROUTED_START, ROUTED_BANDWIDTH = 5.3, {64: 3.9, 32: 3.5}
