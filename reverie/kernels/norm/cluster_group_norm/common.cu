// Group norm and SiLU for bfloat16 feature maps (batch, pixels, channels).
//
// A cluster of CLUSTER_SIZE thread blocks handles one feature map. Each block keeps its
// share of the map (SHARE numbers) in shared memory between summing and normalizing, so
// device memory is read once and written once. A thread handles eight adjacent channels
// of LOADS pixels. Sums are reduced within a warp, then within a block, and exchanged
// between the blocks of the cluster. KINDS is the number of different sums per channel.
//
// The host defines PIXELS, CHANNELS, GROUPS, CLUSTER_SIZE, THREADS, and BLOCKS_PER_SM.

constexpr int COLUMNS = CHANNELS / 8, WARPS = THREADS / 32;  // COLUMNS threads per pixel
constexpr int PER_GROUP = CHANNELS / GROUPS;  // channels of a group
constexpr int SHARE = PIXELS / CLUSTER_SIZE * CHANNELS;
constexpr int LOADS = SHARE / 8 / THREADS;
constexpr int STAGES = LOADS < 4 ? LOADS : 4;  // asynchronous copies, with a barrier each
static_assert(LOADS * 8 * THREADS == SHARE && LOADS % STAGES == 0, "");
static_assert(SHARE * CLUSTER_SIZE == PIXELS * CHANNELS && 32 % COLUMNS == 0, "");

// Static shared memory.
template <int KINDS>
struct Scratch {
  float warps[WARPS][KINDS * CHANNELS];          // sums of each warp
  float blocks[CLUSTER_SIZE][KINDS * CHANNELS];  // sums of each block of the cluster
  float channels[3][CHANNELS];  // values per channel, exchanged between threads
  Barrier barriers[STAGES];
};

// Indices of this thread: block in the cluster, feature map in the batch, and the first
// of its channels. `at` returns the offset of its channels in one of its pixels.
struct Position {
  u32 rank, image, channel;
  size_t map, share;  // offsets of the map and of this block's share
  DEVICE Position() {
    rank = cluster_rank();
    image = blockIdx.x / CLUSTER_SIZE;
    channel = threadIdx.x % COLUMNS * 8;
    map = (size_t)image * PIXELS * CHANNELS;
    share = map + rank * SHARE;
  }
  DEVICE size_t at(int load) const { return share + (load * THREADS + threadIdx.x) * 8; }
};

// Starts to copy this block's share of each of the maps to shared memory, in STAGES
// asynchronous copies.
template <int MAPS>
DEVICE void start_copies(const bf16* const (&maps)[MAPS], uint4* data, Barrier* barriers,
                         const Position& position) {
  constexpr u32 BYTES = SHARE * 2 / STAGES;
  if (threadIdx.x == 0) {
    init_barriers(barriers, STAGES);
    for (int i = 0; i < STAGES; i++) {
      expect_bytes(barriers + i, MAPS * BYTES);
      UNROLL for (int m = 0; m < MAPS; m++)
        copy_async(data + (m * SHARE / 8 + i * (SHARE / STAGES / 8)),
                   maps[m] + position.share + i * (SHARE / STAGES), BYTES, barriers + i);
    }
  }
  sync_block();
  // `sum_blocks` waits for this, because a block must not write to the shared memory of a
  // block that has not started yet
  if (CLUSTER_SIZE > 1) cluster_arrive();
}

// Sums over the threads of each block. The sums of all blocks, for each kind and channel,
// are stored in `scratch.blocks` of every block, or only of the first block if not
// `everywhere`. Before this call, a block must call `cluster_arrive` as soon as it no
// longer needs the previous sums.
template <int KINDS, int MAX_KINDS>
DEVICE void sum_blocks(float (&values)[KINDS][8], Scratch<MAX_KINDS>& scratch,
                       const Position& position, bool everywhere) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  UNROLL for (int kind = 0; kind < KINDS; kind++) {
    UNROLL for (int j = 0; j < 8; j++) {
      float x = values[kind][j];
      UNROLL for (int m = 16; m >= COLUMNS; m >>= 1) x = add_lane_xor(x, m);
      if (lane < COLUMNS) scratch.warps[warp][kind * CHANNELS + lane * 8 + j] = x;
    }
  }
  sync_block();
  if (CLUSTER_SIZE > 1) cluster_wait();
  for (u32 t = threadIdx.x; t < KINDS * CHANNELS; t += THREADS) {
    float x = 0;
    UNROLL for (int w = 0; w < WARPS; w++) x += scratch.warps[w][t];
    float* local = scratch.blocks[0] + position.rank * KINDS * CHANNELS + t;
    if (CLUSTER_SIZE == 1)
      *local = x;
    else
      for (int r = 0; r < (everywhere ? CLUSTER_SIZE : 1); r++) store_remote(local, r, x);
  }
  if (CLUSTER_SIZE > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    sync_block();
  }
}

// Returns the sum of one kind and channel over the blocks of the cluster.
template <int KINDS>
DEVICE float total(const float* blocks, int kind, u32 channel) {
  float x = 0;
  UNROLL for (int r = 0; r < CLUSTER_SIZE; r++)
    x += blocks[(r * KINDS + kind) * CHANNELS + channel];
  return x;
}

// Returns the sum of `x` over the channels in the same group as `channel`.
DEVICE float sum_group(const float* x, u32 channel) {
  const u32 first = channel / PER_GROUP * PER_GROUP;
  float sum = 0;
  UNROLL for (int i = 0; i < PER_GROUP; i++) sum += x[first + i];
  return sum;
}

#define FOR_EACH_CHANNEL for (u32 c = threadIdx.x; c < CHANNELS; c += THREADS)
