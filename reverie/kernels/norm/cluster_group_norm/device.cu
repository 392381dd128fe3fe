// What the kernels ask of the machine: numbers, memory, and the blocks of a cluster.

typedef unsigned short u16;  // a bfloat16
typedef unsigned int u32;    // two of them, the first in the low half
typedef unsigned long long Gate;

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) CLUSTER
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROOM(type)               \
  __shared__ type room;          \
  extern __shared__ uint4 data[] // what was fetched
#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

DEVICE float low(u32 w) { return __uint_as_float(w << 16); }
DEVICE float high(u32 w) { return __uint_as_float(w & 0xFFFF0000u); }
DEVICE float number(const u16* p) { return __uint_as_float((u32)*p << 16); }
DEVICE u32 pack(float a, float b) {
  u32 w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a));
  return w;
}
DEVICE float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float one_by(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Of two numbers at once, as one division does for both.
DEVICE void sigmoids(float a, float b, float& at_a, float& at_b) {
  const float e = -1.44269504f;  // powers of two up to 60, whose product is finite
  const float p = 1.f + exp2_(fminf(a * e, 60.f)), q = 1.f + exp2_(fminf(b * e, 60.f));
  const float both = one_by(p * q);
  at_a = both * q;
  at_b = both * p;
}
DEVICE float one_by_root(float x) { return rsqrtf(x); }
DEVICE float plus_lane(float x, int mask) {
  return x + __shfl_xor_sync(~0u, x, mask);
}

DEVICE uint4 load4(const u16* p) { return *(const uint4*)p; }
DEVICE void store4(u16* p, uint4 v) { *(uint4*)p = v; }

// ---- memory that comes by itself while threads do other things

DEVICE u32 address(const void* shared) {
  return (u32)__cvta_generic_to_shared(shared);
}
DEVICE void open_gates(Gate* gates, int count) {
  for (int i = 0; i < count; i++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(gates + i))
                 : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void announce(Gate* gate, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   address(gate)),
               "r"(bytes)
               : "memory");
}
DEVICE void fetch(uint4* to, const u16* from, u32 bytes, Gate* gate) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(address(to)),
      "l"(from), "r"(bytes), "r"(address(gate))
      : "memory");
}
DEVICE void await(Gate* gate) {
  u32 open = 0;
  while (!open)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(open)
        : "r"(address(gate))
        : "memory");
}

DEVICE void meet_block() { __syncthreads(); }

// ---- the blocks of a cluster, which see each other's shared memory

DEVICE u32 rank() {
  u32 r = 0;
  if (SPLIT > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes where another block has what is at `mine` here.
DEVICE void tell(float* mine, u32 other, float value) {
  u32 here = address(mine), there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(here), "r"(other));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
