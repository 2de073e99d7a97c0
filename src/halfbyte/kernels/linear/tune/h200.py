"""Every measured constant of the planners and of the choice among kernels, from an H200 (docs/notebook.md).

Estimated times are in µs and say which plan is faster, not how long it takes; `sm90_decode` counts in blocks of 64
weights instead, and `sm80` in cycles. Sizes are N * K, numbers in W. Other GPUs go by the same constants.
"""

from __future__ import annotations

# -- Which kernel ------------------------------------------------------------------------------------------------------

# The most rows of x for which decoding W anew for each tile of them beats making the dense weight once. `sm80`'s is a
# guess.
STREAMK_ROWS, SM80_ROWS, SIMT_ROWS = 384, 64, 8
# On GPUs after Hopper, which have no `sm90_streamk`, `sm90_decode` takes up to so many rows and `sm80` more. A guess.
DECODE_ROWS_AFTER_HOPPER = 32

# Where `sm90_decode`, which starts earlier, beats `sm90_streamk`, which then reads faster. By rows of x:
# up to 8, K or N * K up to these, or any weight with many bytes of scales (a byte and more for each 16 weights)
DECODE_K_8, DECODE_SIZE_8 = 1 << 15, 3 << 25
# up to 16, few bytes of scales: N * K below the first on one CTA along K; up to the second on a pair of CTAs with all
# their warps; up to the third on other clusters
DECODE_SIZE_16, DECODE_SIZE_16_PAIR, DECODE_SIZE_16_CLUSTER = 1 << 27, 1 << 26, 1 << 25
# up to 16, many bytes of scales: N * K below DECODE_SIZE_16 where K is up to the first; else K and N * K up to the
# others
DECODE_SHORT_K_16, DECODE_K_16, DECODE_LONG_SIZE_16 = 4096, 1 << 14, 1 << 26
# above, N * K where a CTA takes 32 rows: with eight warps for up to 32 rows of x, and otherwise
DECODE_SIZE_WIDE_8_WARPS, DECODE_SIZE_WIDE = 64 << 20, 16 << 20
# above, N * K where CTAs share K: up to 48 rows, and more
DECODE_SIZE_CLUSTER_48, DECODE_SIZE_CLUSTER = 12 << 20, 6 << 20
# above, N * K elsewhere: more than 48 rows; fewer with nested scales; fewer with flat ones
DECODE_SIZE_64, DECODE_SIZE_48_NESTED, DECODE_SIZE_48 = 13 << 20, 15 << 20, 16 << 20
# Several weights in one launch of `sm90_decode` against a launch of `sm90_streamk` for each, the sum of their N * K:
# up to 16 rows of x, and more. Up to 8 rows one launch always wins.
GROUP_SIZE_16, GROUP_SIZE = 5 << 25, 3 << 25

# -- sm90_decode -------------------------------------------------------------------------------------------------------

# Columns (groups of eight rows of x) to blocks of K that a warp holds x for, and the most warps of a CTA.
DECODE_SLICES = {1: (8, 16), 2: (4, 16), 4: (4, 8)}
# Columns to the most warps of each of two CTAs that share a multiprocessor.
DECODE_PAIR_WARPS = {1: 5, 2: 6, 4: 0}
# From the first K to the last a CTA is better off with eight rows of x, if there are multiprocessors for all.
DECODE_FEWER_ROWS_K = (4096, 8192)
# K up to which a CTA that takes 32 rows of x has registers for them; and the multiple of K where it gains nothing.
DECODE_SHORT_K, DECODE_EVEN_K = 2048, 1024
# Of a tile, in blocks: how much longer a block takes for each warp that a CTA lacks; what a tile costs besides; what
# each CTA of a cluster does, and being one at all.
DECODE_LACKING_WARP, DECODE_TILE, DECODE_NEIGHBOUR, DECODE_CLUSTER = 0.045, 8, 8, 32
# Warps from which on, with one group of columns: a tile comes in halves though it is the CTA's only one; a second stage
# waits for the first in a pair of CTAs with one tile; it does so with nested scales, or one tile.
DECODE_HALVES_WARPS, DECODE_PATIENT_PAIR_WARPS, DECODE_PATIENT_WARPS = 5, 6, 12
# Registers of a multiplying thread: of sixteen warps, and of eight that hold 32 rows of x.
DECODE_REGISTERS_16_WARPS, DECODE_REGISTERS_8_WARPS = 112, 232
# Warps from which on blocks that share a scale are summed up before they are scaled; and the one number that is
# slower so.
DECODE_TOGETHER_WARPS, DECODE_ALONE_WARPS = 5, 6

# -- sm90_streamk ------------------------------------------------------------------------------------------------------

# Width (rows of x a tile) and groups (64 rows of W each) to stages, and µs a unit (256 of K).
STREAMK_TILES = {
    (8, 4): (3, 1.15), (8, 3): (3, 1.29), (16, 4): (3, 1.45), (16, 3): (3, 1.42), (32, 4): (3, 1.78),
    (32, 3): (3, 1.135), (64, 3): (2, 1.72), (64, 2): (3, 1.22),
}  # fmt: skip
# By width, µs: where every tile is cut into equal parts; where all units are dealt out in equal runs; and for each
# part of a tile and group.
STREAMK_CUT = {8: 4.5, 16: 2.6, 32: 1.3, 64: 3.0}
STREAMK_RUN = {8: 2.5, 16: 1.35, 32: 1.0, 64: 2.5}
STREAMK_PART = {8: 0.093, 16: 0.096, 32: 0.095, 64: 0.3}
# Where a plan must not depend on the rows of x: groups; parts that a tile's first CTA adds up one by one; and µs of a
# unit, of a cut and of a part, which stand for all widths.
INVARIANT_GROUPS, INVARIANT_DIRECT = 3, 8
INVARIANT_UNIT, INVARIANT_CUT, INVARIANT_PART = 1.0, 2.0, 0.3
# N * K up to which there are multiprocessors left for tiles of half the width.
STREAMK_NARROW_SIZE = 1 << 23
# Where each CTA keeps its x in shared memory: groups to µs a unit, and how many times that by width.
RESIDENT_UNIT = {2: 0.91, 3: 1.09}
RESIDENT_WIDTH = {8: 1.0, 16: 1.0, 32: 1.2, 64: 2.25}
# How many times that, with three groups, where K is no multiple of the second: scales are then loaded one by one.
RESIDENT_SCATTERED, RESIDENT_SCALES_K = 1.13, 1024
# µs: a group besides; a fix-up in memory, and each of its parts and groups; each part of a cluster reduce.
RESIDENT_GROUP, FIX_UP, FIX_UP_PART, CLUSTER_PART = 0.47, 0.7, 0.075, 0.19
# Stages: with fewer than the first, or than the CTA has units, x laid out ahead is faster; more than the last gain
# nothing.
RESIDENT_STAGES, RESIDENT_MOST_STAGES = 3, 4

# -- sm80: a model in cycles, not measured -----------------------------------------------------------------------------

# On a SM, by columns: warps beyond which registers do not hold the sums; and the most CTAs that share K.
SM80_WARPS = {1: 16, 2: 16, 4: 12, 8: 8}
SM80_SPLITS = 8
# A warp's span: what its loads of W take of the L1 pipe, those of x for each group of columns, and each row of x of L2.
SM80_SPAN, SM80_SPAN_COLUMNS, SM80_SPAN_X = 50, 16, 3
# A lone warp's span; filling the pipeline and adding up, for each turn; a second launch.
SM80_LONE_SPAN, SM80_TURN, SM80_LAUNCH = 400, 800, 6000

# -- simt --------------------------------------------------------------------------------------------------------------

# Warps a multiprocessor wants before a warp takes more than one row of W.
SIMT_WARPS_WANTED = 8
