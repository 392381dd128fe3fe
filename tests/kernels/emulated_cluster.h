// `machine.cu` for a CPU: a thread for each thread, barriers, and rooms side by side.
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
struct uint4 {
  u32 x, y, z, w;
};
struct Index {
  u32 x;
};

#define KERNEL extern "C" void
#define DEVICE inline
#define UNROLL
#define ROOM(type)                        \
  type& room = *(type*)rooms[own].data(); \
  uint4* const data = (uint4*)fetched[own].data()

typedef std::barrier<> Barrier;
typedef std::atomic<unsigned long long> Gate;  // bytes yet to come
static std::vector<char> rooms[SPLIT], fetched[SPLIT];
static std::unique_ptr<Barrier> cluster, blocks[SPLIT], warps[SPLIT][THREADS / 32];
static float lanes[SPLIT][THREADS];
static thread_local Index threadIdx, blockIdx;
static thread_local u32 own;
static thread_local std::unique_ptr<Barrier::arrival_token> token;

DEVICE float from_bits(u32 w) {
  float x;
  std::memcpy(&x, &w, 4);
  return x;
}
DEVICE float low(u32 w) { return from_bits(w << 16); }
DEVICE float high(u32 w) { return from_bits(w & 0xFFFF0000u); }
DEVICE float number(const u16* p) { return from_bits((u32)*p << 16); }
DEVICE u32 rounded(float x) {
  u32 w;
  std::memcpy(&w, &x, 4);
  return (w + 0x7FFF + (w >> 16 & 1)) >> 16;
}
DEVICE u32 pack(float a, float b) { return rounded(a) | rounded(b) << 16; }
DEVICE void sigmoids(float a, float b, float& at_a, float& at_b) {
  at_a = 1.f / (1.f + std::exp(-a));
  at_b = 1.f / (1.f + std::exp(-b));
}
DEVICE float one_by_root(float x) { return 1.f / std::sqrt(x); }
DEVICE float plus_lane(float x, int mask) {
  Barrier& warp = *warps[own][threadIdx.x / 32];
  lanes[own][threadIdx.x] = x;
  warp.arrive_and_wait();
  x += lanes[own][threadIdx.x ^ mask];
  warp.arrive_and_wait();
  return x;
}
DEVICE uint4 load4(const u16* p) { return *(const uint4*)p; }
DEVICE void store4(u16* p, uint4 v) { *(uint4*)p = v; }
DEVICE void open_gates(Gate* gates, int count) {
  for (int i = 0; i < count; i++) gates[i] = 0;
}
DEVICE void announce(Gate* gate, u32 bytes) { *gate += bytes; }
DEVICE void fetch(uint4* to, const u16* from, u32 bytes, Gate* gate) {
  std::memcpy(to, from, bytes);
  *gate -= bytes;
  gate->notify_all();
}
DEVICE void await(Gate* gate) {
  while (auto left = gate->load()) gate->wait(left);
}
DEVICE void meet_block() { blocks[own]->arrive_and_wait(); }
DEVICE u32 rank() { return own; }
DEVICE void arrive() { token.reset(new Barrier::arrival_token(cluster->arrive())); }
DEVICE void wait() { cluster->wait(std::move(*token)); }
DEVICE void tell(float* mine, u32 other, float value) {
  *(float*)(rooms[other].data() + ((char*)mine - rooms[own].data())) = value;
}

template <class Arguments>
void launch(void (*kernel)(Arguments), const Arguments& arguments, int grid) {
  for (int first = 0; first < grid; first += SPLIT) {
    std::vector<std::thread> threads;
    cluster.reset(new Barrier(SPLIT * THREADS));
    for (int r = 0; r < SPLIT; r++) {
      rooms[r].assign(1 << 18, (char)0xFF);  // not a number, until somebody writes
      fetched[r].assign(1 << 18, (char)0xFF);
      blocks[r].reset(new Barrier(THREADS));
      for (auto& warp : warps[r]) warp.reset(new Barrier(32));
    }
    for (int t = 0; t < SPLIT * THREADS; t++)
      threads.emplace_back([=] {
        own = t / THREADS;
        threadIdx.x = t % THREADS;
        blockIdx.x = first + own;
        kernel(arguments);
      });
    for (auto& thread : threads) thread.join();
  }
}
