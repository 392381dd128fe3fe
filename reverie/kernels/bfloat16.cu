// Conversion of bfloat16 numbers, and macros that all CUDA kernels use. `low` and
// `high` convert the first and the second of two packed numbers to float, `to_float` a
// single one. `pack` rounds two floats to bfloat16.

typedef unsigned short bf16;  // the bits of a bfloat16
typedef unsigned int u32;     // often two bfloat16 numbers, the first in the low half

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

DEVICE float low(u32 w) { return __uint_as_float(w << 16); }
DEVICE float high(u32 w) { return __uint_as_float(w & 0xFFFF0000u); }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x << 16); }
DEVICE u32 pack(float a, float b) {
  u32 w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a));
  return w;
}
