// Vectors of eight adjacent channels: packed as bfloat16, or as floats.

DEVICE void unpack8(uint4 v, float (&x)[8]) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  UNROLL for (int j = 0; j < 4; j++) x[2 * j] = low(w[j]), x[2 * j + 1] = high(w[j]);
}
DEVICE uint4 pack8(const float (&x)[8]) {
  uint4 v;
  v.x = pack(x[0], x[1]);
  v.y = pack(x[2], x[3]);
  v.z = pack(x[4], x[5]);
  v.w = pack(x[6], x[7]);
  return v;
}
DEVICE void load8(const float* shared, float (&x)[8]) {
  UNROLL for (int j = 0; j < 8; j++) x[j] = shared[j];
}
// Replaces x by silu(x * factor + offset).
DEVICE void affine_silu8(float (&x)[8], const float (&factor)[8],
                         const float (&offset)[8]) {
  UNROLL for (int j = 0; j < 8; j += 2) {
    const float a = x[j] * factor[j] + offset[j];
    const float b = x[j + 1] * factor[j + 1] + offset[j + 1];
    float gate_a, gate_b;
    sigmoids(a, b, gate_a, gate_b);
    x[j] = a * gate_a;
    x[j + 1] = b * gate_b;
  }
}
