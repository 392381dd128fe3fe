// What both directions of the persistent scan share: sizes, exchanges, products.
//
// 128 thread blocks stay on the chip for the whole sequence and keep their share of
// the weights in registers. They talk through device memory without barriers: every
// exchanged word is preset to EMPTY, and a reader spins until the words it wants have
// arrived. No rounding of a number ever gives EMPTY, so no flags are needed, and most of
// the buffers are the very tensors that the backward pass wants to find.
//
// A block (of threads) has two places. In the core, it is slice `slice` (16 columns) of
// block `group` of the recurrent layers, for all rows. Around it, it is one of the eight
// helpers (`part`) of one row of the batch. A product multiplies 16 rows at once; each
// of the eight warps takes 32 of its 256 inputs, and the warps' sums meet in shared
// memory.

typedef unsigned char u8;
typedef unsigned short u16;  // a bfloat16
typedef unsigned int u32;    // two of them, the first in the low half
typedef unsigned long long u64;

constexpr int ROWS = 16, CTAS = 128, WARPS = 8, THREADS = 256;
constexpr int DETER = 2048, UNITS = 256, GROUPS = 8, WIDTH = DETER / GROUPS;
constexpr int CHOICES = 32, CLASSES = 16, LOGITS = CHOICES * CLASSES;
constexpr int SLICES = CTAS / GROUPS, COLUMNS = WIDTH / SLICES;  // of a core block
constexpr int PARTS = CTAS / ROWS, OWN = LOGITS / PARTS;         // logits per helper
constexpr int SHARED = 3 * UNITS;  // deter's, choices' and action's inputs to the core
constexpr int BOTH = 2 * UNITS;
static_assert(THREADS == UNITS && WIDTH == UNITS && COLUMNS == 16 && OWN == 64, "");

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

constexpr u32 EMPTY = 0xFFFFFFFFu;
constexpr int PATIENCE = 1 << 22;  // polls before giving up, about a second

// ---- device memory, past the first-level cache

DEVICE uint4 load4(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
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
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};"
               ::"l"(p), "f"(a), "f"(b) : "memory");
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

// ---- numbers

DEVICE float low(u32 w) { return __uint_as_float(w << 16); }
DEVICE float high(u32 w) { return __uint_as_float(w & 0xFFFF0000u); }
DEVICE float wide(u16 x) { return __uint_as_float((u32)x << 16); }
DEVICE u32 pack(float a, float b) {
  u32 w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a));
  return w;
}
DEVICE u16 narrow(float a) {
  u16 x;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x) : "f"(a));
  return x;
}
DEVICE float rounded(float a) { return wide(narrow(a)); }
DEVICE u32 pair(const u16* p, int stride) {  // two weights of one column
  return (u32)p[0] | (u32)p[stride] << 16;
}
DEVICE u32 word(const u16* p) { return *(const u32*)p; }

DEVICE float tanh_(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float sigmoid(float x) { return .5f + .5f * tanh_(.5f * x); }
DEVICE float silu(float x) {
  float half = .5f * x;
  return half + half * tanh_(half);
}
DEVICE float silu_slope(float x) {
  float gate = sigmoid(x);
  return gate * (1.f + x * (1.f - gate));
}

template <int LANES>
DEVICE float lane_sum(float x) {
  UNROLL for (int m = 1; m < LANES; m <<= 1) x += __shfl_xor_sync(~0u, x, m);
  return x;
}
// The largest of 16 lanes' numbers, none of them NaN.
DEVICE float half_max(float x) {
  const u32 half = threadIdx.x & 16 ? 0xFFFF0000u : 0xFFFFu;
  int i = __float_as_int(x);
  i ^= i >> 31 & 0x7FFFFFFF;  // integers in the order of the numbers
  i = __reduce_max_sync(half, i);
  return __int_as_float(i ^ (i >> 31 & 0x7FFFFFFF));
}
DEVICE float sum8(const float* x) {
  float total = 0;
  UNROLL for (int m = 0; m < 8; m++) total += x[m];
  return total;
}

// ---- products of 16 rows: fragments of 8 neighbouring inputs per thread
//
// A thread's 16-byte load holds 8 inputs of row `lane / 4`, another those of the row 8
// further down. Which input is which does not matter to a sum as long as the weights are
// taken in the same order, so both halves of a load serve as they come.

struct Fragment {
  u32 w[8];  // four words of the upper row, four of the lower
};

DEVICE void multiply(float* c, const Fragment& a, int half, const u32* b) {
  int s = 2 * half;
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.w[s]), "r"(a.w[4 + s]), "r"(a.w[s + 1]), "r"(a.w[5 + s]),
        "r"(b[0]), "r"(b[1]));
}
template <int N>
DEVICE void multiply(float (*c)[4], const Fragment& a, const u32 (*weight)[N][2]) {
  UNROLL for (int half = 0; half < 2; half++)
    UNROLL for (int n = 0; n < N; n++) multiply(c[n], a, half, weight[half][n]);
}
// One row only: every row of the fragment is the same.
DEVICE void multiply_row(float* c, uint4 v, const u32 (*weight)[2]) {
  Fragment a = {{v.x, v.y, v.z, v.w, v.x, v.y, v.z, v.w}};
  multiply(c, a, 0, weight[0]);
  multiply(c, a, 1, weight[1]);
}

DEVICE Fragment fragment(uint4 upper, uint4 lower) {
  return {{upper.x, upper.y, upper.z, upper.w, lower.x, lower.y, lower.z, lower.w}};
}
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

constexpr int LINE = 16;  // words from one row's to the next's, a cache line of their own
constexpr u64 COUNTED = 1ull << 56, MOVED = 1ull << 48;

template <int BITS>
DEVICE void add_share(u64* total, float share) {
  constexpr float scale = 1ull << BITS, limit = 1ull << (48 - BITS);
  share = fminf(fmaxf(share, -.99f * limit), .99f * limit);  // and no NaN gets through
  u64 add = COUNTED + MOVED + (u64)(long long)(share * scale);
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(total), "l"(add) : "memory");
}
template <int BITS>
DEVICE float await_total(const u64* total) {
  u64 v;
  Spin spin;
  while (true) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(total) : "memory");
    v += 1;
    if (v >> 56 == CTAS) break;
    spin();
  }
  return (float)((long long)(v % COUNTED) - (long long)(CTAS * MOVED)) * (1.f / (1ull << BITS));
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
