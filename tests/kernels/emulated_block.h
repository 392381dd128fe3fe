// Both `machine.cu` of tiles for a CPU: the threads of a block are fibers that take turns
// at barriers and exchanges, and blocks follow one another.
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
struct alignas(16) uint4 {
  u32 x, y, z, w;
};

#define KERNEL extern "C" void
#define DEVICE inline
#define UNROLL
#define ROOM(type)                 \
  type& room = *(type*)rooms.data(); \
  uint4* const data = shared.data()

constexpr int STACK = 1 << 16, GUARD = 4096;
static std::vector<uint4> rooms, shared;
static ucontext_t scheduler, fibers[THREADS];
static char stacks[THREADS][STACK];
static bool finished[THREADS];
static u32 current;
static struct { u32 x; } blockIdx;
static struct { struct { operator u32() const { return current; } } x; } threadIdx;

static int wrong;
DEVICE void check(bool fine) { wrong += !fine; }

struct Barrier { u32 count = 0, round = 0; };
static Barrier block, warps[THREADS / 32];
DEVICE void meet(Barrier& barrier, u32 all) {
  const u32 round = barrier.round;
  if (++barrier.count == all) {
    barrier.count = 0;
    barrier.round++;
  } else {
    while (barrier.round == round) swapcontext(&fibers[current], &scheduler);
  }
}
DEVICE void meet_block() { meet(block, THREADS); }
DEVICE void meet_warp() { meet(warps[current / 32], 32); }

DEVICE float from_bits(u32 w) { float x; std::memcpy(&x, &w, 4); return x; }
DEVICE u32 bits(float x) { u32 w; std::memcpy(&w, &x, 4); return w; }
DEVICE float low(u32 w) { return from_bits(w << 16); }
DEVICE float high(u32 w) { return from_bits(w & 0xFFFF0000u); }
DEVICE float number(const u16* p) { return from_bits((u32)*p << 16); }
DEVICE u32 rounded(float x) {
  const u32 w = bits(x);
  return x != x ? 0x7FFF : (w + 0x7FFF + (w >> 16 & 1)) >> 16;
}
DEVICE u32 pack(float a, float b) { return rounded(a) | rounded(b) << 16; }
DEVICE void sigmoids(float a, float b, float& at_a, float& at_b) {
  at_a = 1.f / (1.f + std::exp(-a));
  at_b = 1.f / (1.f + std::exp(-b));
}
DEVICE float one_by_root(float x) { return 1.f / std::sqrt(x); }

static u32 table[THREADS][6];
static const uint4* asked[THREADS];
DEVICE float plus_lane(float x, int mask) {
  table[current][0] = bits(x);
  meet_warp();
  x += from_bits(table[current ^ mask][0]);
  meet_warp();
  return x;
}

DEVICE bool aligned(const void* p) { return (size_t)p % 16 == 0; }
DEVICE uint4 load4(const u16* p) { check(aligned(p)); return *(const uint4*)p; }
DEVICE void store4(u16* p, uint4 v) { check(aligned(p)); *(uint4*)p = v; }

static std::vector<std::pair<uint4*, const u16*>> sent[THREADS];
DEVICE bool within(const uint4* p, const std::vector<uint4>& memory) {
  return p >= memory.data() && p < memory.data() + memory.size() - GUARD;
}
DEVICE void send(uint4* to, const u16* from) {  // comes as late as it may
  check(within(to, shared));
  sent[current].emplace_back(to, from);
}
DEVICE void await_sent() {
  for (auto [to, from] : sent[current]) *to = load4(from);
  sent[current].clear();
}

DEVICE void collect(u32 (&to)[4], const uint4* row) {
  check(within(row, shared));
  asked[current] = row;
  meet_warp();
  for (int m = 0; m < 4; m++) {
    const u32* from = (const u32*)asked[current / 32 * 32 + m * 8 + current % 32 / 4];
    to[m] = from[current % 4];
  }
  for (int m = 0; m < 4; m++) {  // the rows of a matrix are to be in different banks
    u32 banks = 0;
    for (int i = 0; i < 8; i++)
      banks |= 1u << (size_t)(asked[current / 32 * 32 + m * 8 + i] - shared.data()) % 8;
    check(banks == 0xFF);
  }
  meet_warp();
}
DEVICE void add_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 mine[] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(table[current], mine, sizeof mine);
  meet_warp();
  auto warp = table + current / 32 * 32;
  const u32 row = current % 32 / 4, pair = current % 4;
  for (int e = 0; e < 4; e++)
    for (int k = 0; k < 4; k++)
      for (int half = 0; half < 2; half++) {
        const u32 p = warp[row * 4 + k][half * 2 + e / 2];
        const u32 q = warp[(2 * pair + e % 2) * 4 + k][4 + half];
        c[e] += low(p) * low(q) + high(p) * high(q);
      }
  meet_warp();
}

static void (*body)();
static void fiber() {
  body();
  finished[current] = true;
  swapcontext(&fibers[current], &scheduler);
}
DEVICE void blank(std::vector<uint4>& memory, size_t bytes) {  // not a number, at first
  memory.assign(bytes / 16 + GUARD, uint4{~0u, ~0u, ~0u, ~0u});
}
// `bytes` of shared memory besides the `room`; threads take turns in order, or the other
// way round. Says how often something was where it must not be.
static int launch(void (*kernel)(), int grid, int room, int bytes, bool backwards) {
  body = kernel;
  wrong = 0;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
    blank(rooms, room);
    blank(shared, bytes);
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
      check(rooms[room / 16 + i].x == ~0u);
    }
  }
  return wrong;
}
