// Eight neighbouring channels, as memory and as numbers.

DEVICE void spread(uint4 v, float (&x)[8]) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  UNROLL for (int j = 0; j < 4; j++) x[2 * j] = low(w[j]), x[2 * j + 1] = high(w[j]);
}
DEVICE uint4 gather(const float (&x)[8]) {
  uint4 v;
  v.x = pack(x[0], x[1]);
  v.y = pack(x[2], x[3]);
  v.z = pack(x[4], x[5]);
  v.w = pack(x[6], x[7]);
  return v;
}
DEVICE void recall(const float* shared, float (&x)[8]) {
  UNROLL for (int j = 0; j < 8; j++) x[j] = shared[j];
}
