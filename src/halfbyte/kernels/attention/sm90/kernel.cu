// Attention of one to eight new tokens of each text to the keys and values of a static cache, for GPUs with clusters:
// softmax(query keysᵀ · scale) values, and on the way new keys and values are normed, rotated and put into the cache.
//
// Bytes moved: the keys and values of a text's span (spans.py), once for every ROW_TILES. Flops: 4 rows · SIZE a token
// and head of keys.
//
// Operands. A warp takes 16 tokens at a time, and the heads that share keys, times the new tokens, are the columns of
// its products: scores.T = keys @ queries.T and out.T = values.T @ weights.T, by mma.m16n8k16 (device/mma.cuh). Nothing
// goes through shared memory. A product's K may be permuted if both of its operands are, and so may its rows: so a lane
// loads 16 bytes of a key, which are its part of two MMAs, and 16 bytes of a value, which are its row of eight. Only
// pairs of tokens, which a register of values.T holds, are put together by instructions, and the weights turned by
// movmatrix.
//
//   of a block of 16 tokens       lane (group, member)
//   keys of tokens                group, group + 8; numbers 32 j + 8 member + (0 .. 7)
//   values of tokens              2 member + (0, 1, 8, 9); numbers 64 j + 8 group + (0 .. 7)
//   queries of row                group;  numbers 32 j + 8 member + (0 .. 7), normed and rotated
//   scores, weights               tokens group, group + 8; rows 2 member, + 1
//   sums                          numbers 64 j + 8 group + (0 .. 7); rows 2 member, + 1
//
// Work. Some CTAs have one head of keys of one text. Their warps take blocks in turn, each with sums, a highest score
// and the sum of weights of its own, as in flash decoding (arXiv:2311.01282). The warps of a CTA meet in its shared
// memory. CTAs then send what their warps have together to each other, and each adds up a share of the result: through
// the shared memory of a cluster (meet.cuh), or through memory, where any number finds room (in_memory.cuh). The order
// is always the same: so the same input gives the same bits. The next block is on its way while one is computed.
//
// The tokens of a text may lie in pages, as servers keep them; the last one is new. How many there are only the device
// knows. So texts that are longer than others have helpers (share.cuh), whom their clusters meet in memory.
//
// A new token takes the place of what its slot of the cache holds, in the registers of the warp whose block has the
// slot, which also writes it. Nobody reads a slot that is written.
//
// Heads of 256 numbers: registers hold the keys or the values of one block, and those of the next ones are on their way
// to shared memory (waiting.cuh). Their rows have one column.
//
// Needs sm_90 (with a cluster of one, sm_80), SIZE 64, 128 or 256, and pointers and strides that are multiples of 16
// bytes.
//
// Config:
//   x                      the type of all numbers of 16 bits
//   size, group, fresh     numbers of a head; heads that share keys, new tokens of a text
//   columns                groups of eight rows of queries that a warp has
//   token_warps, ctas      warps of a CTA that share rows; CTAs that share a head of keys of a text
//   in_memory              whether those meet in memory, and are no cluster
//   page                   tokens of a page, a multiple of 16; 0: a text's tokens lie one behind the other
//   helpers                CTAs of the launch that help long texts in pages, a multiple of ctas
//   turns, at_once         blocks of a warp that are not too many for one; CTAs that the GPU has room for
//   mask                   0 none, 1 bytes, 2 numbers of 16 bits that are added
//   spans, sinks, capped   whether there are any; sinks: 0 none, 1 of 16 bits, 2 of 32
//   puts, rotary, halves   new tokens are as in fresh.py: numbers of a head that turn; whether angles are of a half
//   query_norm, key_norm   whether they are normed
//   early                  only the query and what is new are written by the kernel ahead
//   overlaps               the kernel may begin before the one ahead has ended
//   mma_k                  16

#include "fresh.cuh"
#include "in_memory.cuh"
#include "waiting.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) attend(const __grid_constant__ Arguments a) {
  const u32 lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that all lanes have the same
  const u32 row_tile = warp % ROW_TILES;
  //: begins
  if constexpr (Config::overlaps && !Config::early) wait_for_prior_kernel(), launch_dependents();

  const Part own_part(a, lane);
  if (HELPERS > 0 && !own_part.exists) return;
  const u32 which = own_part.which, head = own_part.head, rank = own_part.rank;
  const u32 part = rank * TOKEN_WARPS + warp / ROW_TILES;
  const Text text(a, which, head, own_part.ctas);
  const u32 first_row = row_tile * 8 * COLUMNS;
  u32 turn = part, next = text.token_at(turn), page = text.page_at(turn);
  Keys keys;
  Values values;
  Shifts shifts;
  const Waiting waiting(warp, lane);
  u32 slot = 0;
  if constexpr (WAITS) {
    waiting.ask<Keys>(text, turn, 0);
    waiting.ask<Values>(text, turn, 1);
    waiting.ask<Keys>(text, turn + text.parts, 2);
  } else {
    load(keys, text, next, page, group, member);
    if constexpr (AHEAD) load(values, text, next, page, group, member);
  }
  u32 page_ahead = text.page_at(turn + text.parts);  // so that it is there when the block's turn is near
  shifts.load(a, text, next, group, first_row + 2 * member);
  if constexpr (!WAITS) fetch_block(a, text, turn + text.parts, lane);
  Angles angles[COLUMNS];
  if constexpr (Config::puts)
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column++)
      angles[column].load(a, which, (first_row + 8 * column + group) % NEW, member);
  if constexpr (Config::query_norm) fetch(a.query_norm, lane);
  if constexpr (Config::key_norm) fetch(a.key_norm, lane);
  if constexpr (Config::overlaps && Config::early) wait_for_prior_kernel(), launch_dependents();
  //: the kernel ahead is done
  if (CLUSTER > 1 && !own_part.meets_in_memory()) {
    if (warp == WARPS - 1) ToCluster{rank}.await(lane);
    arrive_cluster();
  }

  // All that is new is on its way before any of it is used.
  Head heads[COLUMNS];
#pragma unroll
  for (u32 column = 0; column < COLUMNS; column++) {
    const u32 row = first_row + 8 * column + group;
    const bool exists = row < ROWS;
    const u32 of = head * Config::group + (exists ? row / NEW : 0);
    heads[column].load(a.query + which * a.query_text + of * a.query_head + row % NEW * a.query_new, exists, member);
  }
  u16* own = reinterpret_cast<u16*>(memory + 4 * row_tile * NEW * SIZE);  // keys, and behind them values
  Fresh fresh;
  const bool has_own = Config::puts && text.has_own(part);
  if constexpr (EXCHANGES) clear_stale<THREADS>(a);
  if (has_own) fresh.load(a, text, part, which, head, group, member);
  uint4 query[COLUMNS][KEY_PARTS];
#pragma unroll
  for (u32 column = 0; column < COLUMNS; column++) {
    if constexpr (Config::puts)
      heads[column].turn<Config::query_norm>(angles[column], a.query_norm, a.query_epsilon, a.offset, member,
                                             [&](u32 j, uint4 turned) { query[column][j] = turned; });
    else
#pragma unroll
      for (u32 j = 0; j < KEY_PARTS; j++) query[column][j] = heads[column].of[j];
  }
  if (has_own) {
    // The same once more, of large heads: registers cannot keep them.
    if constexpr (NEW > 1 || WAITS) angles[0].load(a, which, fresh.number, member);
    fresh.put(a, text, angles[0], own, row_tile == 0, member);
  }

  //: what is new is turned
  Sums sums;
  while (turn < text.blocks) {
    const u32 base = next, of_base = page;
    turn += text.parts, next = text.token_at(turn), page = page_ahead;
    page_ahead = text.page_at(turn + text.parts);
    if constexpr (WAITS) waiting.take(keys, slot);
    else if constexpr (!AHEAD) load(values, text, base, of_base, group, member);
    const bool replaces = has_own && base < text.behind_own && base + BLOCK > text.own;
    if (replaces) {
      replace(text, keys, own, base, group, member);
      if constexpr (!WAITS) replace(text, values, own, base, group, member);
    }
    float score[COLUMNS][4];
    multiply(score, keys, query);
    if constexpr (WAITS) waiting.ask<Values>(text, turn, slot), slot = Waiting::behind(slot);
    else if constexpr (AHEAD) load(keys, text, next, page, group, member);
    u32 operand[COLUMNS][2];
    sums.weigh(operand, score, shifts, a);
    shifts.load(a, text, next, group, first_row + 2 * member);
    if constexpr (WAITS) {
      waiting.take(values, slot);
      if (replaces) replace(text, values, own, base, group, member);
    }
    sums.add(values, operand);
    if constexpr (WAITS) {
      waiting.ask<Keys>(text, turn + text.parts, slot), slot = Waiting::behind(slot);
    } else if constexpr (AHEAD) {
      load(values, text, next, page, group, member);
    } else {
      load(keys, text, next, page, group, member);
    }
  }

  //: the last block is multiplied
  const Part here = HELPERS > 0 ? Part(a, lane) : own_part;  // found anew, as registers were for the loop
  const u32 of_tile = warp / ROW_TILES;
  const Sinks sinks(a, here, row_tile, lane);
  if constexpr (WAITS) waiting.close();
  leave(sums, row_tile, of_tile, lane);
  __syncthreads();
  if (IN_MEMORY && here.meets_in_memory()) {
    const InMemory there(a, here);
    pass_on(there, row_tile, of_tile, lane);
    if constexpr (EXCHANGES) add_up_shared(a, there, here);
    else if (is_last(a, here)) add_up_alone(a, there, here);
  } else if constexpr (CLUSTER == 1) {
    add_up(a, OfWarps(), row_tile, of_tile, 0, here, sinks, lane);
  } else {
    wait_for_cluster();  // every CTA has begun, and so has shared memory
    pass_on(ToCluster{here.rank}, row_tile, of_tile, lane);
    wait(address_of(SENT), 0);
    add_up(a, OfCluster(), row_tile, of_tile, here.rank, here, sinks, lane);
  }
  //: ends
}
