// Holds multiprocessors, one for each CTA, until the host lets go or the time is over: fewer.py.
//
// told: words of the host's memory: whether to go, how many CTAs went because the time was over, and one for each CTA,
// 1 once it runs.

extern "C" __global__ void hold(volatile unsigned* told, unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  told[2 + blockIdx.x] = 1;
  __threadfence_system();
  do {
    __nanosleep(1000000);  // more looks at the host's memory would be in the way of launches
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - begin > nanoseconds) {
      told[1] = 1;
      __threadfence_system();
      return;
    }
  } while (!told[0]);
}
