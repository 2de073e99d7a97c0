// Of experts: what those of a token give is added up in the launch that makes it, where Config::combines.
//
// Pairs leave their results in a workspace (device/partials.cuh). When a CTA has none left to make, it adds up a share
// of all tokens', and looks at what others make until it is there: all CTAs of a launch run at once.

#include "routes.cuh"

// Results of four rows of W by a pair.
template <class Arguments> __device__ __forceinline__ void give(const Arguments& a, u32 pair, u32 row, float4 v) {
  store_partial(a.sums + (u64(pair) * a.expert_rows + row) / 4, v);
}
// A share of the results, four rows of W of one token a lane.
template <class Arguments> __device__ __forceinline__ void combine(const Arguments& a, u32 lane) {
  const u32 fours = a.expert_rows / 4, all = a.pairs / TOP_K * fours;
#pragma unroll 1
  for (u32 i = blockIdx.x * 32 + lane; i < all; i += gridDim.x * 32) {
    const u32 token = i / fours, four = i % fours, first = token * TOP_K;
    bool known[TOP_K];
    float share[TOP_K];
    float4 part[TOP_K];
#pragma unroll
    for (u32 j = 0; j < TOP_K; j++) {
      const u64 id = a.wide_ids ? load_id(static_cast<const u64*>(a.ids) + first + j)
                                : load_id(static_cast<const u32*>(a.ids) + first + j);
      known[j] = id < a.experts;
      share[j] = a.narrow ? unpack(static_cast<const unsigned short*>(a.shares)[first + j])
                          : static_cast<const float*>(a.shares)[first + j];
      part[j] = make_float4(0, 0, 0, 0);
    }
    const u64 at = u64(token) * a.expert_rows + 4 * four;
    ushort4 added = make_ushort4(0, 0, 0, 0);
    if (a.added) added = *reinterpret_cast<const ushort4*>(a.added + at);
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (u32 j = 0; j < TOP_K; j++)
        if (known[j]) part[j] = load_partial(a.sums + u64(first + j) * fours + four);
#pragma unroll
      for (u32 j = 0; j < TOP_K; j++) missing |= is_missing(part[j]);
    } while (missing);
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
    for (u32 j = 0; j < TOP_K; j++)
      if (known[j]) {
        total.x = fmaf(part[j].x, share[j], total.x), total.y = fmaf(part[j].y, share[j], total.y);
        total.z = fmaf(part[j].z, share[j], total.z), total.w = fmaf(part[j].w, share[j], total.w);
      }
    if (a.added) {
      total.x = fmaf(a.factor, total.x, unpack(added.x)), total.y = fmaf(a.factor, total.y, unpack(added.y));
      total.z = fmaf(a.factor, total.z, unpack(added.z)), total.w = fmaf(a.factor, total.w, unpack(added.w));
    }
    store_four(a.out + at, total);
  }
}
