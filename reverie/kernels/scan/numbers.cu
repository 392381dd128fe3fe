// Arithmetic on bfloat16 numbers, warp sums and small matrix products.

typedef unsigned char u8;
typedef unsigned long long u64;

// Defines NAME4 and NAME1, which load 16 and 4 bytes with the given instruction.
#define DEFINE_LOADS(NAME, INSTRUCTION)                               \
  DEVICE uint4 NAME##4(const void* p) {                               \
    uint4 v;                                                          \
    asm volatile(INSTRUCTION ".v4.u32 {%0,%1,%2,%3}, [%4];"           \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)         \
                 : "l"(p)                                             \
                 : "memory");                                         \
    return v;                                                         \
  }                                                                   \
  DEVICE u32 NAME##1(const void* p) {                                 \
    u32 v;                                                            \
    asm volatile(INSTRUCTION ".u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); \
    return v;                                                         \
  }

DEVICE bf16 to_bf16(float a) {
  bf16 x;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x) : "f"(a));
  return x;
}
// Returns the nearest bfloat16 number.
DEVICE float rounded(float a) { return to_float(to_bf16(a)); }
// Loads two consecutive weights of one column; rows are `stride` apart.
DEVICE u32 load_column_pair(const bf16* p, int stride) {
  return (u32)p[0] | (u32)p[stride] << 16;
}
// Loads two adjacent weights of one row.
DEVICE u32 load_row_pair(const bf16* p) { return *(const u32*)p; }

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
DEVICE float silu_grad(float x) {
  float gate = sigmoid(x);
  return gate * (1.f + x * (1.f - gate));
}

// Returns the sum over groups of LANES adjacent lanes of a warp.
template <int LANES>
DEVICE float lane_sum(float x) {
  UNROLL for (int m = 1; m < LANES; m <<= 1) x += __shfl_xor_sync(~0u, x, m);
  return x;
}
// Returns the maximum over 16 lanes; no number may be NaN.
DEVICE float lane_max16(float x) {
  const u32 lanes = threadIdx.x & 16 ? 0xFFFF0000u : 0xFFFFu;
  int i = __float_as_int(x);
  i ^= i >> 31 & 0x7FFFFFFF;  // map floats to integers with the same order
  i = __reduce_max_sync(lanes, i);
  return __int_as_float(i ^ (i >> 31 & 0x7FFFFFFF));
}
DEVICE float sum8(const float* x) {
  float total = 0;
  UNROLL for (int m = 0; m < 8; m++) total += x[m];
  return total;
}

// ---- matrix products of 16 rows: a fragment has 8 adjacent inputs of two rows
//
// With one 16-byte load, a thread loads 8 inputs of row `lane / 4` (the upper row), with
// a second one 8 inputs of row `lane / 4 + 8` (the lower row). The instruction expects
// another order of inputs, but the order does not change the sum if the weights are in
// the same order, so the loaded words are used without reordering.

struct Fragment {
  u32 w[8];  // four words of the upper row, four of the lower
};

// Adds the product with weights `b` to `c`, for one half of the fragment: 16 of the 32
// inputs of four lanes (a quad).
DEVICE void multiply(float* c, const Fragment& a, int half, const u32* b) {
  int s = 2 * half;
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.w[s]), "r"(a.w[4 + s]), "r"(a.w[s + 1]), "r"(a.w[5 + s]), "r"(b[0]),
        "r"(b[1]));
}
// Adds the product of both halves of a fragment with N groups of 8 columns to `c`.
template <int N>
DEVICE void multiply(float (*c)[4], const Fragment& a, const u32 (*weight)[N][2]) {
  UNROLL for (int half = 0; half < 2; half++)
    UNROLL for (int n = 0; n < N; n++) multiply(c[n], a, half, weight[half][n]);
}
// Multiplies a single row: every row of the fragment is the same.
DEVICE void multiply_row(float* c, uint4 v, const u32 (*weight)[2]) {
  Fragment a = {{v.x, v.y, v.z, v.w, v.x, v.y, v.z, v.w}};
  multiply(c, a, 0, weight[0]);
  multiply(c, a, 1, weight[1]);
}

DEVICE Fragment fragment(uint4 upper, uint4 lower) {
  return {{upper.x, upper.y, upper.z, upper.w, lower.x, lower.y, lower.z, lower.w}};
}
// Store the upper, or the lower row of a fragment.
DEVICE void store_upper(bf16* p, const Fragment& x) {
  *(uint4*)p = make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
}
DEVICE void store_lower(bf16* p, const Fragment& x) {
  *(uint4*)p = make_uint4(x.w[4], x.w[5], x.w[6], x.w[7]);
}
// Set rows of a fragment to zero.
DEVICE void clear_rows(Fragment& x, bool upper, bool lower) {
  UNROLL for (int i = 0; i < 4; i++) {
    if (upper) x.w[i] = 0;
    if (lower) x.w[4 + i] = 0;
  }
}
// RMS norm and SiLU of 8 numbers of one row.
DEVICE void norm_silu(u32* w, float inv_rms, const float* scale) {
  UNROLL for (int i = 0; i < 4; i++)
    w[i] = pack(silu(rounded(low(w[i]) * inv_rms * scale[2 * i])),
                silu(rounded(high(w[i]) * inv_rms * scale[2 * i + 1])));
}
