// y[m, n] = sum over k of x[m, k] * W[n, k] for up to 8 * COLUMNS rows of x, W in 4 bits.
//
// Bytes moved: W's nibbles and scales once, K/2 + K/64 a row for nested blocks of 64; x and y are small beside it. Flops:
// 2 M N K.
//
// W is the A operand of mma.m16n8k16 and needs no repacking: one register of A is two neighbouring k of one row, which
// is one packed byte. K may be permuted as long as x is permuted alike, so a thread takes 8 neighbouring bytes of a
// 64-weight block, a quad the block's 32, and 4 MMAs eat them. A byte becomes two 16-bit numbers by one look-up in a
// table of 256 words with a copy for every lane: no bank conflicts, and the address is one byte permutation. The
// codebook comes multiplied by a factor that makes its rounding to 16 bits harmless; one over that factor (`unit`) goes
// into the scale, which is applied in fp32 to the sums of each block.
//
// A CTA owns WARPS * SLICE blocks of K and strides over tiles of 16 rows of W. A warp keeps its slice of x in registers
// throughout. One warp more feeds the tiles into shared memory by bulk copies, STAGES of them; another adds up what the
// warps leave there. Nobody waits for a barrier of the whole CTA. Where K is longer than a CTA's share, CLUSTER CTAs
// side by side along K hand their sums to the first of them through distributed shared memory. Sums are always added in
// the same order, so the same input gives the same bits.
//
// A tile may come in STEPS, all warps going through K side by side, and a stage is then a step: the room of two tiles is
// refilled half by half, while memory would else wait for the slowest warp. And a CTA may be of several TEAMS that share
// the table only: where K needs few warps, a second team multiplies while the first waits.
//
// One launch may take several weights of the same K and format: their tiles lie one behind the other, rows of a tile are
// of one weight, and all read the same x. So q, k and v of an attention start from cold once.
//
// The kernel may begin while the one ahead of it in the stream still runs: it builds its table, asks for its first tiles to
// come into L2, and then waits, for x and for W, which may have been written just now. Only then it lets the next one begin
// in the same way, so that whatever comes after finds all that was written before this kernel.
//
// Bulk copies move multiples of 16 bytes. Where the scales of a row are no such multiple and a CTA has all of K, those of
// a whole tile come in one piece (WHOLE): 16 rows always are one, and so are the 4, 8 or 12 of a last tile. Where it has
// a part of K, each row's come with what lies around them up to multiples of 16 bytes (OFFSET); all rows together are one.
//
// Needs barriers.cuh and decode_work.cuh ahead of it, sm_90, N % 4 == 0, packed and scales aligned to 16 bytes; SHARED_BY
// blocks of 64 weights share a scale, and the first weight of a byte is in its low half with LOW_FIRST; for K see decode.py.
// With REGISTERS, which needs sm_90a and a multiple of four warps, that many are a multiplying thread's: the others have 32.
// Macros: COLUMNS, TEAMS, WARPS, SLICE, STEPS, STAGES, SUMS, CLUSTER, REGISTERS, WHOLE, OFFSET, PARTS, NESTED, SCALE_BYTES,
// SCALE_FP16, SHARED_BY, LOW_FIRST, FP16, BIAS and SHARED_BYTES.

// A team's first tile into L2, on its way while the kernel ahead still runs. W may not be read before that has ended, which
// may be what writes it; to bring it nearer does no harm. Tiles of 64 KB gain nothing by it.
__device__ __forceinline__ void prefetch_first(const Arguments& a, const Team& team, u32 first_block, u32 lane) {
  if (BLOCKS >= 128 || team.first >= a.tiles) return;
  const Tile tile(a, team.first);
  const u32 row_blocks = a.k / 64, bytes = min(BLOCKS, row_blocks - first_block) * BLOCK_BYTES;
  const unsigned char* from = a.weight[tile.part].packed + (u64(tile.row + lane) * row_blocks + first_block) * BLOCK_BYTES;
  if (lane < min(ROWS, a.n[tile.part] - tile.row))
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void feed(const Arguments& a, const Team& team, u32 first_block, u32 lane) {
  const u32 row_blocks = a.k / 64, blocks = min(BLOCKS, row_blocks - first_block);
  const u32 scale_bytes = (blocks + SHARED_BY - 1) / SHARED_BY * SCALE_BYTES;
  Ring ring(1), scales(0);
  for (u32 number = team.first; number < a.tiles; number += team.stride, scales.next(SCALE_STAGES)) {
    const Tile tile(a, number);
    const Weight& w = a.weight[tile.part];
    const u32 rows = min(ROWS, a.n[tile.part] - tile.row);
    const u64 block = u64(tile.row + lane) * row_blocks + first_block;
    const u64 scale = block / SHARED_BY * SCALE_BYTES, from = OFFSET ? scale & ~15ull : scale;
    const u32 around = OFFSET ? u32((scale + scale_bytes + 15 & ~15ull) - from) : scale_bytes;
    const u32 all_scales = OFFSET ? __reduce_add_sync(~0u, lane < rows ? around : 0) : rows * scale_bytes;
#pragma unroll
    for (int step = 0; step < STEPS; step++, ring.next(STAGES)) {
      const u32 full = team.shared + FULL + 8 * ring.at, to = team.shared + TILES + ring.at * STAGE + lane * W_ROW;
      const u32 some = min(STEP_BLOCKS, max(int(blocks) - step * STEP_BLOCKS, 0));
      wait(team.shared + EMPTY + 8 * ring.at, ring.parity);
      if (lane == 0) expect(full, rows * some * BLOCK_BYTES + (step == 0 ? all_scales : 0));
      __syncwarp();
      if (lane >= rows) continue;
      if (step == 0) {
        const u32 at = team.shared + SCALES + scales.at * SCALE_STAGE;
        if (!WHOLE) copy(at + lane * SCALE_ROW, w.scale + from, around, full);
        if (WHOLE && lane == 0) copy(at, w.scale + from, all_scales, full);
      }
      if (some) copy(to, w.packed + (block + step * STEP_BLOCKS) * BLOCK_BYTES, some * BLOCK_BYTES, full);
    }
  }
}

__device__ __forceinline__ void multiply(const Arguments& a, u32 shared, const Team& team, u32 first_block, u32 warp,
                                         u32 lane) {
  const u32 group = lane / 4, member = lane % 4, row_blocks = a.k / 64;
  const u32 column = lane * 4 | (shared & 0xff000000u);
  uint2 x[COLUMNS][SLICE][4];
#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
#pragma unroll
    for (int b = 0; b < SLICE; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 row = 8 * c + group, block = first_block + place(warp, b);
        const bool exists = row < a.m && block < row_blocks;
        const u64 at = u64(row) * a.k + block * 64 + member * 16 + half * 8;
        const uint4 both = exists ? *reinterpret_cast<const uint4*>(a.x + at) : make_uint4(0, 0, 0, 0);
        x[c][b][2 * half] = make_uint2(both.x, both.y), x[c][b][2 * half + 1] = make_uint2(both.z, both.w);
      }
#if NESTED
  float offsets[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; i++) offsets[i] = *a.weight[i].offset;
  // Scales of scales come from L2, which takes long: those of a tile are asked for while the one ahead is multiplied.
  float absmax[2][SLICE / 4];
  const auto fetch = [&](u32 number) {
    const Tile tile(a, number);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int q = 0; q < SLICE / 4; q++) {
        const u32 row = min(tile.row + group + 8 * half, a.n[tile.part] - 1);
        const u32 block = min(first_block + place(warp, 4 * q) + member, row_blocks - 1);
        absmax[half][q] = __ldg(a.weight[tile.part].absmax + (row * row_blocks + block) / SHARED_BY / 256);
      }
  };
  if (AHEAD && team.first < a.tiles) fetch(team.first);
#endif
  Ring ring(0), sums(1), scales(0);
  for (u32 number = team.first; number < a.tiles; number += team.stride, sums.next(SUMS), scales.next(SCALE_STAGES)) {
    const Tile tile(a, number);
    // Each lane of a quad decodes the scales of every fourth block, for its rows `group` and `group + 8`.
    float scale[2][SLICE / 4];
#if NESTED
    float offset = offsets[0];
#pragma unroll
    for (int i = 1; i < PARTS; i++) offset = tile.part == i ? offsets[i] : offset;
    if (!AHEAD) fetch(number);
#endif
    wait(team.shared + FULL + 8 * ring.at, ring.parity);
    const u32 pitch = WHOLE ? row_blocks / SHARED_BY * SCALE_BYTES : SCALE_ROW;
    const u32 mine = team.shared + SCALES + (STEPS == 1 ? ring.at : scales.at) * SCALE_STAGE + group * pitch +
                     (OFFSET ? ((tile.row + group) * row_blocks + first_block) / SHARED_BY * SCALE_BYTES & 15 : 0);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int q = 0; q < SLICE / 4; q++) {
        const u32 block = place(warp, 4 * q) + member, at = mine + 8 * half * pitch + block / SHARED_BY * SCALE_BYTES;
#if NESTED
        const float value = load_float(shared + CODE + 1024 * tile.part + 4 * load_byte(at));
        const float decoded = __fadd_rn(__fmul_rn(value, absmax[half][q]), offset);
#else
        const float decoded = load_scale(at);
#endif
        scale[half][q] = first_block + block < row_blocks ? decoded * a.unit : 0.0f;  // what lies beyond K is nothing
      }
#if NESTED
    if (AHEAD && number + team.stride < a.tiles) fetch(number + team.stride);
#endif
    float total[COLUMNS][4] = {};
#pragma unroll
    for (int b = 0; b < SLICE; b++) {
      if (b > 0 && b % STEP_SLICE == 0) wait(team.shared + FULL + 8 * ring.at, ring.parity);
      const u32 inside = (warp * STEP_SLICE + b % STEP_SLICE) * BLOCK_BYTES + member * 8;
      const u32 upper = team.shared + TILES + ring.at * STAGE + group * W_ROW + inside, lower = upper + 8 * W_ROW;
      const uint2 w = load_pair(upper), v = load_pair(lower);
      float sum[COLUMNS][4] = {};
#pragma unroll
      for (int step = 0; step < 4; step++) {
        const u32 over = step < 2 ? w.x : w.y, under = step < 2 ? v.x : v.y;
        const u32 a0 = step % 2 ? look_up<2>(over, column) : look_up<0>(over, column);
        const u32 a2 = step % 2 ? look_up<3>(over, column) : look_up<1>(over, column);
        const u32 a1 = step % 2 ? look_up<2>(under, column) : look_up<0>(under, column);
        const u32 a3 = step % 2 ? look_up<3>(under, column) : look_up<1>(under, column);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) mma(sum[c], a0, a1, a2, a3, x[c][b][step]);
      }
      const u32 owner = (lane & 28) | (b & 3);
      const float s = __shfl_sync(~0u, scale[0][b / 4], owner), t = __shfl_sync(~0u, scale[1][b / 4], owner);
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        total[c][0] += sum[c][0] * s;
        total[c][1] += sum[c][1] * s;
        total[c][2] += sum[c][2] * t;
        total[c][3] += sum[c][3] * t;
      }
      if (b % STEP_SLICE == STEP_SLICE - 1) {
        arrive(team.shared + EMPTY + 8 * ring.at);
        ring.next(STAGES);
      }
    }
    wait(team.shared + SUM_EMPTY + 8 * sums.at, sums.parity);
    const u32 to = team.shared + SUM + (sums.at * WARPS + warp) * SUM_WARP;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      if (8 * c + 2 * member < a.m) {
        const u32 at = to + (8 * c + 2 * member) * SUM_COLUMN + 4 * group;
        store_float(at, total[c][0]);
        store_float(at + SUM_COLUMN, total[c][1]);
        store_float(at + 32, total[c][2]);
        store_float(at + SUM_COLUMN + 32, total[c][3]);
      }
    arrive(team.shared + SUM_FULL + 8 * sums.at);
  }
}

__device__ __forceinline__ void reduce(const Arguments& a, const Team& team, u32 lane) {
  const u32 rank = blockIdx.y, column = lane / 4, four = lane % 4;
  Ring sums(0), slot(0);
  for (u32 number = team.first; number < a.tiles; number += team.stride, sums.next(SUMS), slot.next(SLOTS)) {
    wait(team.shared + SUM_FULL + 8 * sums.at, sums.parity);
    float4 total[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      total[c] = make_float4(0, 0, 0, 0);
      const u32 from = team.shared + SUM + sums.at * WARPS * SUM_WARP + (8 * c + column) * SUM_COLUMN + 16 * four;
      if (8 * c + column < a.m)
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          const float4 v = load_sums(from + w * SUM_WARP);
          total[c].x += v.x, total[c].y += v.y, total[c].z += v.z, total[c].w += v.w;
        }
    }
    arrive(team.shared + SUM_EMPTY + 8 * sums.at);

#if CLUSTER > 1
    const u32 full = team.shared + SLOT_FULL + 8 * slot.at, empty = team.shared + SLOT_EMPTY + 8 * slot.at;
    const u32 place = team.shared + SLOT + slot.at * (CLUSTER - 1) * SENT + 16 * lane;
    if (rank > 0) {
      wait(empty, slot.parity ^ 1);
      const u32 to = address_in(place + (rank - 1) * SENT, 0), barrier = address_in(full, 0);
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        if (8 * c + column < a.m)
          asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                       ::"r"(to + c * 512), "f"(total[c].x), "f"(total[c].y), "f"(total[c].z), "f"(total[c].w), "r"(barrier)
                       : "memory");
      continue;
    }
    if (lane == 0) expect(full, min(a.m, 8 * COLUMNS) * ROWS * 4 * (CLUSTER - 1));
    wait(full, slot.parity);
#pragma unroll
    for (int other = 0; other < CLUSTER - 1; other++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        if (8 * c + column < a.m) {
          const float4 v = load_sums(place + other * SENT + c * 512);
          total[c].x += v.x, total[c].y += v.y, total[c].z += v.z, total[c].w += v.w;
        }
    __syncwarp();
    if (lane > 0 && lane < CLUSTER)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(empty, lane)) : "memory");
#endif

    const Tile tile(a, number);
    const Result& to = a.result[tile.part];
    const u32 row = tile.row + 4 * four, n = a.n[tile.part];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      if (8 * c + column < a.m && row < n) {
        if (BIAS && to.bias) {
          const ushort4 b = *reinterpret_cast<const ushort4*>(to.bias + row);
          total[c].x += unpack(b.x), total[c].y += unpack(b.y), total[c].z += unpack(b.z), total[c].w += unpack(b.w);
        }
        const uint2 words = make_uint2(pack(total[c].x, total[c].y), pack(total[c].z, total[c].w));
        *reinterpret_cast<uint2*>(to.y + u64(8 * c + column) * n + row) = words;
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = u32(__cvta_generic_to_shared(memory)), lane = threadIdx.x % 32;
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, which the compiler could not know
  if ((shared & 0xffffffu) != BASE) __trap();  // in a cluster the top byte is the CTA's rank
  const u32 first_block = blockIdx.y * BLOCKS;
  const u32 which = TEAMS == 1 ? 0 : warp / (WARPS + 2), role = warp - which * (WARPS + 2);
  const Team team = {shared + TEAM + which * TEAM_BYTES, blockIdx.x + which * gridDim.x, gridDim.x * TEAMS};
  if (role == 0 && lane == 0) {
    const u32 at = team.shared;
    for (int s = 0; s < STAGES; s++) init(at + FULL + 8 * s, 1), init(at + EMPTY + 8 * s, WARPS * 32);
    for (int s = 0; s < SUMS; s++) init(at + SUM_FULL + 8 * s, WARPS * 32), init(at + SUM_EMPTY + 8 * s, 32);
    for (int s = 0; s < SLOTS; s++) init(at + SLOT_FULL + 8 * s, 1), init(at + SLOT_EMPTY + 8 * s, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (CLUSTER > 1) sync_cluster(); else __syncthreads();

  const auto prepare = [&] {  // by all but the feeders
    const u32 threads = TEAMS * (WARPS + 1) * 32, thread = threadIdx.x - 32 * (which + (role > WARPS));
    for (u32 i = thread; i < 256 * 32; i += threads) {
      const u32 byte = i / 32;
      const u32 first = LOW_FIRST ? byte & 15 : byte >> 4, second = LOW_FIRST ? byte >> 4 : byte & 15;
      store_word(shared + byte * TABLE_ROW + i % 32 * 4, pack(a.codebook[first], a.codebook[second]));
    }
    wait_for_the_one_ahead();
    if (threadIdx.x == 0) let_the_next_begin();
#if NESTED
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      for (u32 i = thread; i < 256; i += threads) store_float(shared + CODE + 1024 * part + 4 * i, a.weight[part].code[i]);
#endif
    asm volatile("bar.sync 1, %0;" ::"n"(TEAMS * (WARPS + 1) * 32) : "memory");
  };
  if (role < WARPS) {
#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    prepare();
    multiply(a, shared, team, first_block, role, lane);
  } else {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");  // by four warps, two of which have nothing else to do
#endif
    if (role == WARPS) {
      prefetch_first(a, team, first_block, lane);
      wait_for_the_one_ahead();
      feed(a, team, first_block, lane);
    } else if (role == WARPS + 1) {
      prepare();
      reduce(a, team, lane);
    }
  }
  if (CLUSTER > 1) {  // nobody leaves while a neighbour may still write to its barriers
    __syncwarp();
    sync_cluster();
  }
}
