// Which CTAs share a head of keys of a text.
//
// With a static cache that is known ahead. Of a cache in pages only the device knows how long texts are. There each
// head of a text has a cluster, and before all clusters come helpers, so that a long text is begun at once. Where the
// warps of a cluster would have more blocks than warps have in the mean, and enough of them to be worth it, helpers
// take a part. They are dealt out to texts in order, as many to each of a text's heads. Lengths alone decide, so
// everybody finds the same.

#include "work.cuh"

constexpr u32 CLUSTERS_OF_HELPERS = HELPERS / CLUSTER;
constexpr u32 ENOUGH = TOKEN_WARPS * Config::turns;  // blocks, which are not too many for a CTA

// Of the CTA whose number is `rank` among `ctas`.
struct Part {
  u32 which, head, rank, ctas = CTAS;
  u32 first_helper = 0;  // of the text
  bool exists = true;

  __device__ Part(const Arguments& a, u32 lane) {
    const u32 of_all = EXCHANGES ? blockIdx.x / CTAS : blockIdx.x - CLUSTERS_OF_HELPERS;
    which = of_all / a.heads, head = of_all % a.heads;
    rank = EXCHANGES ? blockIdx.x % CTAS : Config::ctas == 1 ? 0 : blockIdx.y;
    if constexpr (HELPERS > 0) find(a, (gridDim.x - CLUSTERS_OF_HELPERS) / a.heads, lane);
  }

  __device__ bool meets_in_memory() const { return HELPERS > 0 ? ctas > CLUSTER : IN_MEMORY; }

 private:
  __device__ void find(const Arguments& a, u32 texts, u32 lane) {
    const bool helps = blockIdx.x < CLUSTERS_OF_HELPERS;
    ctas = CLUSTER;
    if (!helps && Seen(a, which).blocks() <= CLUSTER * ENOUGH) return;
    u32 all = 0;
    for (u32 text = lane; text < texts; text += 32) all += Seen(a, text).blocks();
    all = __reduce_add_sync(~0u, all);
    // A quarter more than in the mean, so that there are helpers enough.
    const u32 share = max(u64(ENOUGH), u64(all) * a.heads * 5 / (4 * Config::at_once) + 1);
    const u32 number = blockIdx.x * CLUSTER + rank;  // of a helper
    exists = !helps;
    u32 ahead = 0;  // helpers of texts before, of each head
    for (u32 from = 0; from < texts; from += 32) {
      const u32 text = from + lane, wanted = text < texts ? (Seen(a, text).blocks() + share - 1) / share : 0;
      const u32 helpers = max(min(wanted, CTAS), CLUSTER) - CLUSTER;
      u32 behind = helpers;
#pragma unroll
      for (u32 by = 1; by < 32; by *= 2) {
        const u32 other = __shfl_up_sync(~0u, behind, by);
        if (lane >= by) behind += other;
      }
      behind += ahead;
      const u32 found = __ballot_sync(~0u, helps ? number < behind * a.heads : text == which);
      if (found) {
        const u32 at = __ffs(found) - 1;
        ctas += __shfl_sync(~0u, helpers, at);
        first_helper = __shfl_sync(~0u, behind - helpers, at) * a.heads;
        if (!helps) return;
        exists = true, which = from + at;
        rank = CLUSTER + (number - first_helper) / a.heads, head = (number - first_helper) % a.heads;
        return;
      }
      ahead = __shfl_sync(~0u, behind, 31);
    }
  }
};
