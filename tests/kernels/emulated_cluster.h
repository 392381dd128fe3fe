// `device.cu` of the cluster group norm for a CPU, with one CPU thread per GPU thread.
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned short bf16;
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
#define SHARED_MEMORY(type)                             \
  type& scratch = *(type*)scratches[block_rank].data(); \
  uint4* const data = (uint4*)dynamic[block_rank].data()

typedef std::barrier<> HostBarrier;
typedef std::atomic<unsigned long long> Barrier;  // bytes that are still missing
static std::vector<char> scratches[CLUSTER_SIZE], dynamic[CLUSTER_SIZE];
static std::unique_ptr<HostBarrier> cluster, blocks[CLUSTER_SIZE];
static std::unique_ptr<HostBarrier> warps[CLUSTER_SIZE][THREADS / 32];
static float lanes[CLUSTER_SIZE][THREADS];
static thread_local Index threadIdx, blockIdx;
static thread_local u32 block_rank;
static thread_local std::unique_ptr<HostBarrier::arrival_token> token;

DEVICE float from_bits(u32 w) {
  float x;
  std::memcpy(&x, &w, 4);
  return x;
}
DEVICE float low(u32 w) { return from_bits(w << 16); }
DEVICE float high(u32 w) { return from_bits(w & 0xFFFF0000u); }
DEVICE float to_float(bf16 x) { return from_bits((u32)x << 16); }
DEVICE u32 round_bfloat16(float x) {
  u32 w;
  std::memcpy(&w, &x, 4);
  return (w + 0x7FFF + (w >> 16 & 1)) >> 16;
}
DEVICE u32 pack(float a, float b) { return round_bfloat16(a) | round_bfloat16(b) << 16; }
DEVICE void sigmoids(float a, float b, float& at_a, float& at_b) {
  at_a = 1.f / (1.f + std::exp(-a));
  at_b = 1.f / (1.f + std::exp(-b));
}
DEVICE float inverse_sqrt(float x) { return 1.f / std::sqrt(x); }
DEVICE float add_lane_xor(float x, int mask) {
  HostBarrier& warp = *warps[block_rank][threadIdx.x / 32];
  lanes[block_rank][threadIdx.x] = x;
  warp.arrive_and_wait();
  x += lanes[block_rank][threadIdx.x ^ mask];
  warp.arrive_and_wait();
  return x;
}
DEVICE uint4 load4(const bf16* p) { return *(const uint4*)p; }
DEVICE void store4(bf16* p, uint4 v) { *(uint4*)p = v; }
DEVICE void init_barriers(Barrier* barriers, int count) {
  for (int i = 0; i < count; i++) barriers[i] = 0;
}
DEVICE void expect_bytes(Barrier* barrier, u32 bytes) { *barrier += bytes; }
DEVICE void copy_async(uint4* to, const bf16* from, u32 bytes, Barrier* barrier) {
  std::memcpy(to, from, bytes);
  *barrier -= bytes;
  barrier->notify_all();
}
DEVICE void wait_barrier(Barrier* barrier) {
  while (auto left = barrier->load()) barrier->wait(left);
}
DEVICE void sync_block() { blocks[block_rank]->arrive_and_wait(); }
DEVICE u32 cluster_rank() { return block_rank; }
DEVICE void cluster_arrive() {
  token.reset(new HostBarrier::arrival_token(cluster->arrive()));
}
DEVICE void cluster_wait() { cluster->wait(std::move(*token)); }
DEVICE void store_remote(float* local, u32 rank, float value) {
  const auto offset = (char*)local - scratches[block_rank].data();
  *(float*)(scratches[rank].data() + offset) = value;
}

template <class Arguments>
void launch(void (*kernel)(Arguments), const Arguments& arguments, int grid) {
  for (int first = 0; first < grid; first += CLUSTER_SIZE) {
    std::vector<std::thread> threads;
    cluster.reset(new HostBarrier(CLUSTER_SIZE * THREADS));
    for (int r = 0; r < CLUSTER_SIZE; r++) {
      scratches[r].assign(1 << 18, (char)0xFF);  // NaN until it is written
      dynamic[r].assign(1 << 18, (char)0xFF);
      blocks[r].reset(new HostBarrier(THREADS));
      for (auto& warp : warps[r]) warp.reset(new HostBarrier(32));
    }
    for (int t = 0; t < CLUSTER_SIZE * THREADS; t++)
      threads.emplace_back([=] {
        block_rank = t / THREADS;
        threadIdx.x = t % THREADS;
        blockIdx.x = first + block_rank;
        kernel(arguments);
      });
    for (auto& thread : threads) thread.join();
  }
}
