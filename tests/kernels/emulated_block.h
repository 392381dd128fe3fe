// Both `device.cu` of the fused residual block for a CPU. The threads of a block are
// fibers that switch at barriers and warp exchanges; blocks run one after another.
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

typedef unsigned short bf16;
typedef unsigned int u32;
struct alignas(16) uint4 {
  u32 x, y, z, w;
};

#define KERNEL extern "C" void
#define DEVICE inline
#define UNROLL
#define SHARED_MEMORY(type)                 \
  type& scratch = *(type*)scratches.data(); \
  uint4* const data = shared.data()

constexpr int STACK = 1 << 16, GUARD = 4096;
static std::vector<uint4> scratches, shared;
static ucontext_t scheduler, fibers[THREADS];
static char stacks[THREADS][STACK];
static bool finished[THREADS];
static u32 current;
static struct { u32 x; } blockIdx;
static struct { struct { operator u32() const { return current; } } x; } threadIdx;

static int errors;
DEVICE void check(bool fine) { errors += !fine; }

struct Barrier { u32 count = 0, round = 0; };
static Barrier block, warps[THREADS / 32];
DEVICE void wait_at(Barrier& barrier, u32 all) {
  const u32 round = barrier.round;
  if (++barrier.count == all) {
    barrier.count = 0;
    barrier.round++;
  } else {
    while (barrier.round == round) swapcontext(&fibers[current], &scheduler);
  }
}
DEVICE void sync_block() { wait_at(block, THREADS); }
DEVICE void sync_warp() { wait_at(warps[current / 32], 32); }

DEVICE float from_bits(u32 w) { float x; std::memcpy(&x, &w, 4); return x; }
DEVICE u32 bits(float x) { u32 w; std::memcpy(&w, &x, 4); return w; }
DEVICE float low(u32 w) { return from_bits(w << 16); }
DEVICE float high(u32 w) { return from_bits(w & 0xFFFF0000u); }
DEVICE float to_float(bf16 x) { return from_bits((u32)x << 16); }
DEVICE u32 round_bfloat16(float x) {
  const u32 w = bits(x);
  return x != x ? 0x7FFF : (w + 0x7FFF + (w >> 16 & 1)) >> 16;
}
DEVICE u32 pack(float a, float b) { return round_bfloat16(a) | round_bfloat16(b) << 16; }
DEVICE void sigmoids(float a, float b, float& at_a, float& at_b) {
  at_a = 1.f / (1.f + std::exp(-a));
  at_b = 1.f / (1.f + std::exp(-b));
}
DEVICE float inverse_sqrt(float x) { return 1.f / std::sqrt(x); }

static u32 table[THREADS][6];
static const uint4* addresses[THREADS];
DEVICE float add_lane_xor(float x, int mask) {
  table[current][0] = bits(x);
  sync_warp();
  x += from_bits(table[current ^ mask][0]);
  sync_warp();
  return x;
}

DEVICE bool aligned(const void* p) { return (size_t)p % 16 == 0; }
DEVICE uint4 load4(const bf16* p) { check(aligned(p)); return *(const uint4*)p; }
DEVICE void store4(bf16* p, uint4 v) { check(aligned(p)); *(uint4*)p = v; }

static std::vector<std::pair<uint4*, const bf16*>> pending[THREADS];
DEVICE bool within(const uint4* p, const std::vector<uint4>& memory) {
  return p >= memory.data() && p < memory.data() + memory.size() - GUARD;
}
DEVICE void copy_async16(uint4* to, const bf16* from) {  // performed as late as possible
  check(within(to, shared));
  pending[current].emplace_back(to, from);
}
DEVICE void wait_copies() {
  for (auto [to, from] : pending[current]) *to = load4(from);
  pending[current].clear();
}

DEVICE void load_matrices(u32 (&to)[4], const uint4* row) {
  check(within(row, shared));
  addresses[current] = row;
  sync_warp();
  for (int m = 0; m < 4; m++) {
    const u32* from = (const u32*)addresses[current / 32 * 32 + m * 8 + current % 32 / 4];
    to[m] = from[current % 4];
  }
  for (int m = 0; m < 4; m++) {  // the rows of a matrix must be in different banks
    u32 banks = 0;
    for (int i = 0; i < 8; i++)
      banks |= 1u << (size_t)(addresses[current / 32 * 32 + m * 8 + i] - shared.data()) % 8;
    check(banks == 0xFF);
  }
  sync_warp();
}
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 own[] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(table[current], own, sizeof own);
  sync_warp();
  auto warp = table + current / 32 * 32;
  const u32 row = current % 32 / 4, pair = current % 4;
  for (int e = 0; e < 4; e++)
    for (int k = 0; k < 4; k++)
      for (int half = 0; half < 2; half++) {
        const u32 p = warp[row * 4 + k][half * 2 + e / 2];
        const u32 q = warp[(2 * pair + e % 2) * 4 + k][4 + half];
        c[e] += low(p) * low(q) + high(p) * high(q);
      }
  sync_warp();
}

static void (*body)();
static void fiber() {
  body();
  finished[current] = true;
  swapcontext(&fibers[current], &scheduler);
}
DEVICE void fill_with_nan(std::vector<uint4>& memory, size_t bytes) {
  memory.assign(bytes / 16 + GUARD, uint4{~0u, ~0u, ~0u, ~0u});
}
// Runs all blocks with `bytes` of dynamic shared memory and `scratch_bytes` of static
// memory; threads run in order or backwards. Returns the number of invalid accesses.
static int launch(void (*kernel)(), int grid, int scratch_bytes, int bytes,
                  bool backwards) {
  body = kernel;
  errors = 0;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
    fill_with_nan(scratches, scratch_bytes);
    fill_with_nan(shared, bytes);
    for (int i = 0; i < THREADS; i++) {
      finished[i] = false;
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = stacks[i];
      fibers[i].uc_stack.ss_size = STACK;
      makecontext(&fibers[i], fiber, 0);
    }
    for (int left = THREADS; left;) {
      left = 0;
      for (int i = 0; i < THREADS; i++) {
        current = backwards ? THREADS - 1 - i : i;
        if (finished[current]) continue;
        swapcontext(&scheduler, &fibers[current]);
        left += !finished[current];
      }
    }
    for (int i = 0; i < GUARD; i++) {
      check(shared[bytes / 16 + i].x == ~0u);
      check(scratches[scratch_bytes / 16 + i].x == ~0u);
    }
  }
  return errors;
}
