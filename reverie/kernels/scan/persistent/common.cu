// What both directions of the persistent scan share: sizes, exchanges, products.
//
// 128 thread blocks stay on the chip for the whole sequence and keep their share of
// the weights in registers. They talk through device memory without barriers: every
// exchanged word is preset to EMPTY, and a reader spins until the words it wants have
// arrived. No rounding of a number ever gives EMPTY, so no flags are needed, and most
// of the buffers are the very tensors that the backward pass wants to find.
//
// A block (of threads) has two places. In the core, it is slice `slice` (16 columns) of
// block `group` of the recurrent layers, for all rows. Around it, it is one of the eight
// helpers (`part`) of one row of the batch. A product multiplies 16 rows at once; each
// of the eight warps takes 32 of its 256 inputs, and the warps' sums meet in shared
// memory.

constexpr int ROWS = 16, CTAS = 128, WARPS = 8, THREADS = 256;
constexpr int DETER = 2048, UNITS = 256, GROUPS = 8, WIDTH = DETER / GROUPS;
constexpr int CHOICES = 32, CLASSES = 16, LOGITS = CHOICES * CLASSES;
constexpr int SLICES = CTAS / GROUPS, COLUMNS = WIDTH / SLICES;  // of a core block
constexpr int PARTS = CTAS / ROWS, OWN = LOGITS / PARTS;         // logits per helper
constexpr int SHARED = 3 * UNITS;  // deter's, choices' and action's inputs to the core
constexpr int BOTH = 2 * UNITS;
static_assert(THREADS == UNITS && WIDTH == UNITS && COLUMNS == 16 && OWN == 64, "");

constexpr u32 EMPTY = 0xFFFFFFFFu;
constexpr int PATIENCE = 1 << 22;  // polls before giving up, about a second

// ---- device memory, past the first-level cache

DEVICE uint4 load4(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE u32 load1(const void* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store1(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void store2(void* p, float a, float b) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};" ::"l"(p), "f"(a), "f"(b)
               : "memory");
}
DEVICE void prefetch(const void* p) {  // from memory to the second-level cache
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
DEVICE bool empty(uint4 v) {
  return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY;
}

struct Spin {  // a wait that ends the kernel rather than never
  int polls = 0;
  DEVICE void operator()() {
    if (++polls > PATIENCE) __trap();
  }
};

// ---- fragments and numbers that others send

// Spin until 8 inputs of both rows have arrived.
DEVICE Fragment await(const u16* p, int lower) {
  uint4 a = load4(p), b = load4(p + lower);
  Spin spin;
  while (true) {
    bool x = empty(a), y = empty(b);
    if (!(x || y)) break;
    spin();
    if (x) a = load4(p);
    if (y) b = load4(p + lower);
  }
  __syncwarp();
  return fragment(a, b);
}
// Spin until 8 numbers, `stride` apart, have arrived; `v` holds what was seen so far.
DEVICE void await8(u32* v, const float* p, int stride) {
  Spin spin;
  while (true) {
    bool waiting = false;
    UNROLL for (int m = 0; m < 8; m++) waiting |= v[m] == EMPTY;
    if (!waiting) break;
    spin();
    UNROLL for (int m = 0; m < 8; m++)
      if (v[m] == EMPTY) v[m] = load1(p + m * stride);
  }
  __syncwarp();
}
DEVICE void look8(u32* v, const float* p, int stride) {
  UNROLL for (int m = 0; m < 8; m++) v[m] = load1(p + m * stride);
}
DEVICE float total8(const u32* v) {
  float total = 0;
  UNROLL for (int m = 0; m < 8; m++) total += __uint_as_float(v[m]);
  return total;
}
// A sum over the whole grid that does not depend on the order of arrival: fixed-point
// shares, moved up to be positive, are added to one word per row with atomics; its top
// byte counts them. Shares beyond the range of the fixed point are cut off; within it,
// the error is far below that of a bfloat16. The word starts as EMPTY, which is -1.

constexpr int LINE =
    16;  // words from one row's to the next's, a cache line of their own
constexpr u64 COUNTED = 1ull << 56, MOVED = 1ull << 48;

template <int BITS>
DEVICE void add_share(u64* total, float share) {
  constexpr float scale = 1ull << BITS, limit = 1ull << (48 - BITS);
  share = fminf(fmaxf(share, -.99f * limit), .99f * limit);  // and no NaN gets through
  u64 add = COUNTED + MOVED + (u64)(long long)(share * scale);
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(total), "l"(add)
               : "memory");
}
template <int BITS>
DEVICE float await_total(const u64* total) {
  u64 v;
  Spin spin;
  while (true) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                 : "=l"(v)
                 : "l"(total)
                 : "memory");
    v += 1;
    if (v >> 56 == CTAS) break;
    spin();
  }
  return (float)((long long)(v % COUNTED) - (long long)(CTAS * MOVED)) *
         (1.f / (1ull << BITS));
}

// The warps' sums, side by side in shared memory: [warp][row][column], padded rows.
template <int N, int PITCH>
DEVICE void deposit(float* sums, int warp, int lane, float (*c)[4], int at = 0) {
  float* upper = sums + (warp * ROWS + lane / 4) * PITCH + at + 2 * (lane % 4);
  float* lower = upper + 8 * PITCH;
  UNROLL for (int n = 0; n < N; n++) {
    *(float2*)(upper + 8 * n) = make_float2(c[n][0], c[n][1]);
    *(float2*)(lower + 8 * n) = make_float2(c[n][2], c[n][3]);
  }
}
template <int PITCH>
DEVICE float collect(const float* sums, int row, int column) {
  float total = 0;
  UNROLL for (int m = 0; m < WARPS; m++)
    total += sums[(m * ROWS + row) * PITCH + column];
  return total;
}
template <int PITCH>
DEVICE float2 collect2(const float* sums, int row, int column) {
  float2 total = make_float2(0, 0);
  UNROLL for (int m = 0; m < WARPS; m++) {
    float2 v = *(const float2*)(sums + (m * ROWS + row) * PITCH + column);
    total.x += v.x;
    total.y += v.y;
  }
  return total;
}
// Two neighbouring columns' numbers as one word, stored by the even one.
DEVICE void publish(u16* p, int column, float x) {
  float next = __shfl_down_sync(~0u, x, 1);
  if (!(column & 1)) store1(p, pack(x, next));
}
