// Device functions: sigmoids, asynchronous copies, thread block clusters.

typedef unsigned long long Barrier;  // an mbarrier object

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) CLUSTER
#define SHARED_MEMORY(type)      \
  __shared__ type scratch;       \
  extern __shared__ uint4 data[] // dynamic shared memory
#if CLUSTER_SIZE > 1
#define CLUSTER __cluster_dims__(CLUSTER_SIZE, 1, 1)
#else
#define CLUSTER
#endif

// Approximate 2^x and 1 / x.
DEVICE float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Computes the sigmoids of two numbers with one division.
DEVICE void sigmoids(float a, float b, float& at_a, float& at_b) {
  const float e = -1.44269504f;  // -log2(e); exponents up to 60 keep p * q finite
  const float p = 1.f + exp2_(fminf(a * e, 60.f)), q = 1.f + exp2_(fminf(b * e, 60.f));
  const float both = reciprocal(p * q);
  at_a = both * q;
  at_b = both * p;
}
DEVICE float inverse_sqrt(float x) { return rsqrtf(x); }
// Adds the values of this lane of a warp and of lane `lane ^ mask`.
DEVICE float add_lane_xor(float x, int mask) {
  return x + __shfl_xor_sync(~0u, x, mask);
}

// Load and store eight bfloat16 numbers, which are four words of 32 bits.
DEVICE uint4 load4(const bf16* p) { return *(const uint4*)p; }
DEVICE void store4(bf16* p, uint4 v) { *(uint4*)p = v; }

// ---- asynchronous copies to shared memory; an mbarrier signals their completion

// Returns an address in shared memory as PTX instructions need it.
DEVICE u32 address(const void* shared) {
  return (u32)__cvta_generic_to_shared(shared);
}
DEVICE void init_barriers(Barrier* barriers, int count) {
  for (int i = 0; i < count; i++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(barriers + i))
                 : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Sets the number of bytes that copies must write before the barrier is complete.
DEVICE void expect_bytes(Barrier* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   address(barrier)),
               "r"(bytes)
               : "memory");
}
DEVICE void copy_async(uint4* to, const bf16* from, u32 bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(address(to)),
      "l"(from), "r"(bytes), "r"(address(barrier))
      : "memory");
}
DEVICE void wait_barrier(Barrier* barrier) {
  u32 done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address(barrier))
        : "memory");
}

DEVICE void sync_block() { __syncthreads(); }

// ---- the blocks of a cluster, which can access each other's shared memory

DEVICE u32 cluster_rank() {
  u32 r = 0;
  if (CLUSTER_SIZE > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores a value in the shared memory of block `rank`, at the address of `local`.
DEVICE void store_remote(float* local, u32 rank, float value) {
  u32 here = address(local), there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
