// Sizes of the persistent scan, data exchange between thread blocks, and sums over warps.
//
// 128 thread blocks run for the whole sequence and keep their part of the weights in
// registers. They exchange results through device memory without barriers: every
// exchanged word is initialized to UNSET, and a reader polls until the words it needs
// have changed. No computed number has the bits of UNSET, so no flags are needed. Most of
// these buffers are activations that are saved for the backward pass anyway.
//
// Each thread block has two tasks. In the block-diagonal layers (hid, gru), it computes
// 16 columns (numbered by `slice`) of block `gru_block` for all rows. In the other
// layers, eight thread blocks (numbered by `row_block`) share one row of the batch
// (`own_row`). A matrix product has 16 rows; each of the eight warps multiplies 32 of the
// 256 inputs, and the sums of the warps are added in shared memory.

constexpr int ROWS = 16, THREAD_BLOCKS = 128, WARPS = 8, THREADS = 256;
constexpr int DETER = 2048, UNITS = 256, GRU_BLOCKS = 8, WIDTH = DETER / GRU_BLOCKS;
constexpr int STOCH = 32, CLASSES = 16, LOGITS = STOCH * CLASSES;
constexpr int SLICES = THREAD_BLOCKS / GRU_BLOCKS, COLUMNS = WIDTH / SLICES;
constexpr int ROW_BLOCKS = THREAD_BLOCKS / ROWS, OWN_LOGITS = LOGITS / ROW_BLOCKS;
constexpr int SHARED_INPUT = 3 * UNITS;  // width of SavedActivations::shared_input
constexpr int TWO_UNITS = 2 * UNITS;
static_assert(THREADS == UNITS && WIDTH == UNITS, "");
static_assert(COLUMNS == 16 && OWN_LOGITS == 64, "");

// Indices of a thread in both kernels. A thread reads 8 inputs of a layer: the first one
// is column `input_column` of the GRU block, or of a layer with UNITS inputs, and column
// `block_input` of deter. A thread computes one output of the GRU block: `row` is its
// row, `column` its column among those of the slice, `block_column` its column in the GRU
// block, and `out_column` its column in deter. `own_logit` is the logit that a thread
// computes, if its `tid` is less than OWN_LOGITS. `upper` and `lower` are the rows of the
// thread's fragments, and `quad` is the index of its lane among the four lanes with the
// same rows. `hid_row` is the first row of the GRU block in hid_weight.
#define THREAD_INDICES                                                                 \
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, block = blockIdx.x;   \
  const int gru_block = block / SLICES, slice = block % SLICES;                        \
  const int own_row = block / ROW_BLOCKS, row_block = block % ROW_BLOCKS;              \
  const int upper = lane / 4, quad = lane % 4, lower = upper + 8;                      \
  const int input_column = 32 * warp + 8 * quad;                                       \
  const int row = tid / COLUMNS, column = tid % COLUMNS;                               \
  const int block_column = slice * COLUMNS + column;                                   \
  const int out_column = gru_block * WIDTH + block_column;                             \
  const int block_input = gru_block * WIDTH + input_column;                            \
  const int own_logit = row_block * OWN_LOGITS + tid;                                  \
  const int length = p.length;                                                         \
  const int hid_row = gru_block * (WIDTH + SHARED_INPUT)

constexpr u32 UNSET = 0xFFFFFFFFu;
constexpr int MAX_POLLS = 1 << 22;  // about a second

// ---- loads and stores of device memory that bypass the L1 cache

DEFINE_LOADS(load, "ld.relaxed.gpu.global")
DEVICE void store1(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void store2(void* p, float a, float b) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};" ::"l"(p), "f"(a), "f"(b)
               : "memory");
}
DEVICE void prefetch(const void* p) {  // from memory to the L2 cache
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
DEVICE bool is_unset(uint4 v) {
  return v.x == UNSET || v.y == UNSET || v.z == UNSET || v.w == UNSET;
}

struct PollLimit {  // aborts the kernel after too many polls, so that it cannot hang
  int polls = 0;
  DEVICE void count() {
    if (++polls > MAX_POLLS) __trap();
  }
};

// ---- fragments and numbers written by other thread blocks

// Polls until the 8 inputs of upper and lower row are set; `lower` is the offset between
// the rows.
DEVICE Fragment wait_fragment(const bf16* p, int lower) {
  uint4 a = load4(p), b = load4(p + lower);
  PollLimit limit;
  while (true) {
    bool x = is_unset(a), y = is_unset(b);
    if (!(x || y)) break;
    limit.count();
    if (x) a = load4(p);
    if (y) b = load4(p + lower);
  }
  __syncwarp();
  return fragment(a, b);
}
// Polls until 8 numbers, `stride` apart, are set; `v` contains the result of `load8`.
DEVICE void wait8(u32* v, const float* p, int stride) {
  PollLimit limit;
  while (true) {
    bool waiting = false;
    UNROLL for (int m = 0; m < 8; m++) waiting |= v[m] == UNSET;
    if (!waiting) break;
    limit.count();
    UNROLL for (int m = 0; m < 8; m++)
      if (v[m] == UNSET) v[m] = load1(p + m * stride);
  }
  __syncwarp();
}
DEVICE void load8(u32* v, const float* p, int stride) {
  UNROLL for (int m = 0; m < 8; m++) v[m] = load1(p + m * stride);
}
DEVICE float sum_loaded8(const u32* v) {
  float total = 0;
  UNROLL for (int m = 0; m < 8; m++) total += __uint_as_float(v[m]);
  return total;
}
// Sums over all thread blocks whose result does not depend on the order of additions:
// each block adds its partial sum to one 8-byte word per row with an atomic operation, as
// a fixed-point number with BITS fractional bits and an offset that makes it positive.
// The top byte of the word counts the additions. Partial sums outside of the range are
// clamped; the rounding error is far below that of a bfloat16. The word starts as UNSET,
// which is -1.

constexpr int ROW_SUM_STRIDE = 16;  // in words of 8 bytes: one cache line per row
constexpr u64 COUNT_ONE = 1ull << 56, OFFSET = 1ull << 48;

template <int BITS>
DEVICE void add_to_row_sum(u64* total, float partial) {
  constexpr float scale = 1ull << BITS, limit = 1ull << (48 - BITS);
  partial = fminf(fmaxf(partial, -.99f * limit), .99f * limit);  // also removes NaN
  u64 add = COUNT_ONE + OFFSET + (u64)(long long)(partial * scale);
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(total), "l"(add)
               : "memory");
}
template <int BITS>
DEVICE float wait_row_sum(const u64* total) {
  u64 v;
  PollLimit limit;
  while (true) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                 : "=l"(v)
                 : "l"(total)
                 : "memory");
    v += 1;
    if (v >> 56 == THREAD_BLOCKS) break;
    limit.count();
  }
  return (float)((long long)(v % COUNT_ONE) - (long long)(THREAD_BLOCKS * OFFSET)) *
         (1.f / (1ull << BITS));
}

// Sums of the warps in shared memory: [warp][row][column]. PITCH is the row stride, which
// is larger than the number of columns to avoid bank conflicts.
template <int N, int PITCH>
DEVICE void store_warp_sums(float* sums, int warp, int lane, float (*c)[4], int at = 0) {
  float* upper = sums + (warp * ROWS + lane / 4) * PITCH + at + 2 * (lane % 4);
  float* lower = upper + 8 * PITCH;
  UNROLL for (int n = 0; n < N; n++) {
    *(float2*)(upper + 8 * n) = make_float2(c[n][0], c[n][1]);
    *(float2*)(lower + 8 * n) = make_float2(c[n][2], c[n][3]);
  }
}
template <int PITCH>
DEVICE float sum_warps(const float* sums, int row, int column) {
  float total = 0;
  UNROLL for (int m = 0; m < WARPS; m++)
    total += sums[(m * ROWS + row) * PITCH + column];
  return total;
}
template <int PITCH>
DEVICE float2 sum_warps2(const float* sums, int row, int column) {
  float2 total = make_float2(0, 0);
  UNROLL for (int m = 0; m < WARPS; m++) {
    float2 v = *(const float2*)(sums + (m * ROWS + row) * PITCH + column);
    total.x += v.x;
    total.y += v.y;
  }
  return total;
}
// Stores the numbers of two adjacent columns as one word; the even thread stores.
DEVICE void store_pair(bf16* p, int column, float x) {
  float next = __shfl_down_sync(~0u, x, 1);
  if (!(column & 1)) store1(p, pack(x, next));
}
