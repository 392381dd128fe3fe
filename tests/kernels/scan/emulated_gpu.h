// The part of CUDA that is needed to run the thread blocks of a kernel on a CPU, one after
// another.
//
// The 256 threads of a block are fibers that switch at barriers and warp exchanges.
// Kernels whose blocks wait for each other cannot be run this way.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __expf emulated_expf
using std::min;

struct uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }

// ---- fibers

constexpr int FIBERS = 256, STACK = 1 << 17;
static ucontext_t scheduler, fibers[FIBERS];
static char stacks[FIBERS][STACK];
static bool finished[FIBERS];
static int current;
static struct { int x; } blockIdx;
static struct { struct { operator int() const { return current; } } x; } threadIdx;
static float* dynamic_shared;

struct Barrier { int count = 0, round = 0; };
static Barrier block_barrier, warp_barriers[FIBERS / 32];
static void arrive(Barrier& barrier, int all) {
  int round = barrier.round;
  if (++barrier.count == all) {
    barrier.count = 0;
    barrier.round++;
  } else {
    while (barrier.round == round) swapcontext(&fibers[current], &scheduler);
  }
}
static void sync_warp() { arrive(warp_barriers[current / 32], 32); }
static void __syncthreads() { arrive(block_barrier, FIBERS); }

// ---- numbers and warp exchanges

static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static int __float_as_int(float x) { return (int)__float_as_uint(x); }
static float __int_as_float(int i) { return __uint_as_float((unsigned)i); }
static float emulated_expf(float x) { return expf(x); }
static float __fdividef(float x, float y) { return x / y; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }

static unsigned exchanged[FIBERS][6];
static unsigned from_lane(unsigned value, int lane) {
  exchanged[current][0] = value;
  sync_warp();
  value = exchanged[current / 32 * 32 + lane][0];
  sync_warp();
  return value;
}
static float __shfl_xor_sync(unsigned, float x, int mask) {
  return __uint_as_float(from_lane(__float_as_uint(x), current % 32 ^ mask));
}
static int __shfl_xor_sync(unsigned, int x, int mask) {
  return (int)from_lane((unsigned)x, current % 32 ^ mask);
}
static float __shfl_down_sync(unsigned, float x, int by) {
  return __uint_as_float(from_lane(__float_as_uint(x), min(current % 32 + by, 31)));
}
static int __reduce_max_sync(unsigned, int) { abort(); }  // not used by these kernels

// ---- replacements of assembly

typedef unsigned short bf16_bits;
static float upper_half(unsigned w) { return __uint_as_float(w & 0xFFFF0000u); }
static float lower_half(unsigned w) { return __uint_as_float(w << 16); }
static bf16_bits to_bf16(float x) {
  unsigned u = __float_as_uint(x);
  return x != x ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
static unsigned pack(float x, float y) { return to_bf16(x) | (unsigned)to_bf16(y) << 16; }
static float tanh_(float x) { return tanhf(x); }
static uint4 load_l2_4(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
static uint4 load_weights4(const bf16_bits* p) { return load_l2_4(p); }
static unsigned load_l2_1(const void* p) { unsigned u; memcpy(&u, p, 4); return u; }
static void allow_next_kernel() {}
static void wait_previous_kernel() {}

// mma.m16n8k16: a warp's 16 x 16 by 16 x 8 product, spread over its lanes
static void matrix_product(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                           unsigned b0, unsigned b1) {
  const unsigned own[] = {a0, a1, a2, a3, b0, b1};
  std::copy(own, own + 6, exchanged[current]);
  sync_warp();
  auto warp = exchanged + current / 32 * 32;
  const int row = current % 32 / 4, pair = current % 4;
  for (int e = 0; e < 4; e++)
    for (int k = 0; k < 4; k++)
      for (int half = 0; half < 2; half++) {
        unsigned a = warp[row * 4 + k][half * 2 + e / 2];
        unsigned b = warp[(2 * pair + e % 2) * 4 + k][4 + half];
        c[e] += lower_half(a) * lower_half(b) + upper_half(a) * upper_half(b);
      }
  sync_warp();
}

// ---- launches

static void (*body)();
static void fiber() {
  const int self = current;
  body();
  finished[self] = true;
  swapcontext(&fibers[self], &scheduler);
}
static void run_blocks(void (*kernel)(), int blocks, int shared) {
  body = kernel;
  dynamic_shared = (float*)aligned_alloc(64, (shared + 63) / 64 * 64);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    for (int i = 0; i < FIBERS; i++) {
      finished[i] = false;
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = stacks[i];
      fibers[i].uc_stack.ss_size = STACK;
      makecontext(&fibers[i], fiber, 0);
    }
    for (int left = FIBERS; left;) {
      left = 0;
      for (current = 0; current < FIBERS; current++)
        if (!finished[current]) {
          swapcontext(&scheduler, &fibers[current]);
          left += !finished[current];
        }
    }
  }
  free(dynamic_shared);
}
